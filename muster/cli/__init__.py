"""The ``muster`` command: one small module a command, imported without what the command itself needs."""

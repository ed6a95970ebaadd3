"""The ``muster`` command: one small module for each command, cheap to import."""

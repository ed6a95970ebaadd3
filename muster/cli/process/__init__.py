"""The process of a command: exit codes, output, logs, signals."""

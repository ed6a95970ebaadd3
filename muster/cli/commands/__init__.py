"""The commands of ``muster``, one module each."""

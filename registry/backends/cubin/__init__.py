"""Compiled code: the ELF file, its entry points and their resource use."""

"""Modules of torch on the kernels of a registry, with the state dicts of the modules that they replace."""

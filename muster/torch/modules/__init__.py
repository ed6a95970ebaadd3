"""Modules of torch on the kernels of a registry, with the state dicts of the replaced modules."""

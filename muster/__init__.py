"""kernel_muster: a registry of GPU kernels built from plugins, and a roll call at boot."""

from kernel_muster._version import __version__

__all__ = ["__version__"]

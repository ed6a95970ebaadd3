"""File descriptors that plugins do not meet by accident."""

import os
import secrets


def out_of_sight(descriptor: int) -> int:
    """Return a copy that loops over the first descriptors do not meet and that no program inherits."""
    try:
        import fcntl
        import resource
    except ImportError:  # Windows has no numbers to choose from
        return os.dup(descriptor)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, most // 2 + secrets.randbelow(max(1, most // 4)))

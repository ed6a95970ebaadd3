"""Files of other people's, read without waiting for anybody: a pipe, a device or a huge file is an error at once."""

import errno
import os
import stat
from pathlib import Path

_BLOCK = 1 << 20


def open_regular(path: Path) -> int:
    """Return a handle that reads a regular file, behind any links; OSError for whatever else there is."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # some devices act when they are opened
        raise _no_file(path)
    # Another may stand there by now: it is not waited for, and looked at again.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _no_file(path)
    return handle


def read_regular(path: Path, most_bytes: int | None = None) -> bytes:
    """Return the bytes of a regular file, behind any links; OSError for whatever else there is, or for more bytes."""
    handle = open_regular(path)
    try:
        parts, size = [], 0
        while part := os.read(handle, _BLOCK):
            size += len(part)
            if most_bytes is not None and size > most_bytes:
                raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", str(path))
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(handle)


def archive_of(path: Path) -> Path | None:
    """Return the archive in which a path would lie, such as a wheel on PYTHONPATH; None where only folders hold it."""
    return next((parent for parent in path.parents if os.path.isfile(parent)), None)


def install_archive(archive: Path) -> str:
    """Say what makes files of what an archive holds."""
    return f"install it, and take it off sys.path: pip install {archive}"


def _no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file", str(path))

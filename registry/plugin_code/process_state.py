"""What of this process a plugin may not change while it loads: it is the program's that boots.

Put back and reported: the working directory, the umask, the standard streams, the locale, a lower recursion limit, the
functions that show uncaught exceptions and end the process, and the environment variables that decide what a boot is
about. Left alone: other variables, ``sys.path``, filters of warnings, handlers at exit, threads. Libraries use those
as they are imported, and no verdict is read from them.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from kernel_muster.registry.values import frozen

_VARIABLES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HOME", "PYTHONHOME", "PYTHONPATH", "XDG_CACHE_HOME")
_PREFIX = "MUSTER_"
#: What the names of our own threads begin with.
THREAD = "muster"
_OBJECTS = (
    ("os.environ", os, "environ"),
    ("sys.stdin", sys, "stdin"),
    ("sys.stdout", sys, "stdout"),
    ("sys.stderr", sys, "stderr"),
    ("sys.excepthook", sys, "excepthook"),
    ("threading.excepthook", threading, "excepthook"),
    ("sys.exit", sys, "exit"),
    ("os._exit", os, "_exit"),
    ("os.abort", os, "abort"),
)


@frozen
class ProcessState:
    """One moment of the process. What cannot be asked for is None, or the empty text."""

    folder: str | None
    umask: int | None
    locale: str
    recursion_limit: int
    variables: dict[str, str]
    objects: tuple[Any, ...]
    has_other_threads: bool


def process_state() -> ProcessState:
    """Return the state of this process now."""
    return ProcessState(
        _folder(),
        _umask(),
        _locale(),
        sys.getrecursionlimit(),
        _variables(),
        tuple(getattr(place, name, None) for _, place, name in _OBJECTS),
        any(not one.name.startswith(THREAD) for one in threading.enumerate() if one is not threading.current_thread()),
    )


def put_back(before: ProcessState) -> list[str]:
    """Put the process into an earlier state, and return what had changed."""
    # A thread of the program's own may have redirected a stream meanwhile, and means to take it back.
    objects = () if before.has_other_threads else _changed_objects(before.objects)
    return [*objects, *_changed_folder(before), *_changed_settings(before), *_changed_variables(before.variables)]


def _changed_objects(before: tuple[Any, ...]) -> Iterator[str]:
    for (label, place, name), kept in zip(_OBJECTS, before, strict=True):
        if getattr(place, name, None) is not kept:
            setattr(place, name, kept)
            yield label


def _changed_folder(before: ProcessState) -> Iterator[str]:
    now = _folder()
    if before.folder is not None and now != before.folder:
        with contextlib.suppress(OSError):  # it may be gone
            os.chdir(before.folder)
        yield f"the working directory to {now}"


def _changed_settings(before: ProcessState) -> Iterator[str]:
    if before.umask is not None and (now := _umask()) != before.umask:
        os.umask(before.umask)
        yield f"the umask from {before.umask:03o} to {now:03o}"
    if (text := _locale()) != before.locale:
        _set_locale(before.locale)
        yield f"the locale to {text}"
    if (limit := sys.getrecursionlimit()) < before.recursion_limit:  # a higher one harms nobody
        sys.setrecursionlimit(before.recursion_limit)
        yield f"the recursion limit from {before.recursion_limit} to {limit}"


def _changed_variables(before: dict[str, str]) -> Iterator[str]:
    now = _variables()
    for name in sorted(before.keys() | now.keys()):
        if now.get(name) == before.get(name):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
        yield f"the environment variable {name}"


def _variables() -> dict[str, str]:
    """Return the variables that decide a boot; of all others no value is decoded."""
    names = [name for name in os.environ if name in _VARIABLES or name.startswith(_PREFIX)]
    return {name: os.environ[name] for name in names}


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _umask() -> int | None:
    """Return the umask without setting it, which would hold for other threads too; None where it cannot be read."""
    try:
        with open("/proc/self/status", "rb") as stream:
            line = next((one for one in stream if one.startswith(b"Umask:")), None)
        return None if line is None else int(line.split()[1], 8)
    except (OSError, ValueError, IndexError):
        return None


def _locale() -> str:
    try:
        import _locale

        return str(_locale.setlocale(_locale.LC_ALL, None))
    except (ImportError, AttributeError, ValueError):
        return ""


def _set_locale(text: str) -> None:
    with contextlib.suppress(Exception):  # the C library may not know its own name of a mixed locale
        import _locale

        _locale.setlocale(_locale.LC_ALL, text)

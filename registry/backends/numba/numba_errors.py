"""What Numba says of a kernel that it does not compile: in which line of its author's, and why.

Many of Numba's errors name no line, although it knows the one that it is at: it stands in the local variables of the
functions of its own that the traceback goes through. Nothing of Numba is imported here.
"""

import linecache
import re
import traceback
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

from kernel_muster.registry.backends.request import BuildFailure

Place = tuple[str, int]
_NAMED = re.compile(r" at (.+?) \((\d+)\)")
_NUMBA = ("numba", "numba_cuda")


def build_failure(error: BaseException, what: str, files: Collection[str], function: Place | None) -> BuildFailure:
    """Return the failure of a build that an exception ended; ``what`` begins what is said of it.

    ``files`` are the author's; ``function`` is where the kernel begins, for want of anything better.
    """
    place = blamed(error, files) or function
    at = f"{place[0]}:{place[1]}" if place else ""
    why = f"{what}: {type(error).__name__}: {_reason(str(error))}{f' (at {at})' if at else ''}"
    remedy = f"correct the source{f' at {at}' if at else ''}: the log says more"
    return BuildFailure("COMPILE_FAILED", why, "".join(_log(error, place)), (remedy,), (at,) if at else ())


def blamed(error: BaseException, files: Collection[str]) -> Place | None:
    """Return the file and line that an error is about: those that it names, or its traceback's, or None."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
    at = [(frame.f_code.co_filename, line) for frame, line in zip(frames, lines, strict=True)]
    own = [place for place in at if place[0] in files]
    if own:
        return own[-1]
    for path, line in _NAMED.findall(str(error)):
        if path in files:
            return path, int(line)
    known = (place for frame in reversed(frames) for place in _places_in(frame))
    return next((place for place in (*_locations(error), *known) if place[0] in files), None)


def _places_in(frame: FrameType) -> Iterator[Place]:
    """Yield the places that Numba's variables name, of one function of its own."""
    if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NUMBA:
        return
    for value in list(frame.f_locals.values()):
        yield from _locations(value)


def _locations(value: Any) -> Iterator[Place]:
    """Yield where one of Numba's objects says that it lies: its ``loc``, or that of an instruction of the bytecode."""
    with suppress(Exception):  # whatever Numba's objects do when they are asked
        loc = getattr(value, "loc", value)
        if isinstance(loc.filename, str) and isinstance(loc.line, int):
            yield loc.filename, loc.line
    with suppress(Exception):
        yield str(value._bytecode.func_id.filename), int(value.get_inst().lineno)  # noqa: SLF001


def _reason(text: str) -> str:
    """Return what Numba says first; which call it finds nothing for stands on a line of its own."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Failed in cuda mode")] or lines
    call = next((line for line in lines[1:3] if line.startswith(">>>")), "")
    return " ".join(filter(None, (*lines[:1], call)))


def _log(error: BaseException, place: Place | None) -> Iterator[str]:
    """Yield the author's line, then what was said; Numba's own functions only where the error is none that it made."""
    if place is not None and (line := linecache.getline(*place).strip()):
        yield f"{place[0]}:{place[1]}: {line}\n\n"
    yield "".join(traceback.format_exception_only(error)).rstrip()
    if type(error).__module__.partition(".")[0] not in _NUMBA:
        yield "\n\nraised in, innermost last:\n"
        yield from traceback.format_tb(error.__traceback__)

"""What the compiler's log says: where the errors are, which header is missing, how much was spilled."""

import re

from kernel_muster.registry.backends.cubin.limits import SMALLER
from kernel_muster.registry.backends.nvrtc.headers import EXTRAS, Toolkit
from kernel_muster.registry.backends.request import BuildFailure
from kernel_muster.registry.hardware.arch import Arch

_ENTRY = re.compile(r"^ptxas info\s*: Compiling entry function '([^']+)'.*$", re.MULTILINE)
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_NO_HEADER = re.compile(r"^(.*?\(\d+\)): catastrophic error: (?:cannot|could not) open source file \"([^\"]+)\"", re.M)
_ERROR = re.compile(
    r"^(?:.*?\(\d+\): (?:catastrophic )?error: .*|ptxas .*(?:error|fatal)\s*: .*|nvrtc: error: .*)$", re.MULTILINE
)
_AT = re.compile(r"([^<(]+)\((\d+)\): ")
# What stands behind a source. An error in its first line means that the source does not end; one in another line is a
# macro of the source.
_BEHIND = re.compile(r"<(?:declared parameters|entry point [^>\n]*)>\(")
_UNENDED = re.compile(r"<declared parameters>\(1\): (?:catastrophic )?error: (.*)")
_AT_END = re.compile(r"^At end of source: (?:catastrophic )?error: (.*)$(?:\n(.*?\(\d+\)): note )?", re.MULTILINE)
_OVER = re.compile(r"^(?:ptxas )?(?:error|fatal)\s*: (.*uses too much (?:shared|global|local|parameter).*)$", re.M)


def clean(log: str) -> str:
    """Return the log without what differs from run to run: padding, and how long the assembler took."""
    lines = log.replace("\0", "").splitlines()
    return "\n".join(line.rstrip() for line in lines if "Compile time =" not in line).strip()


def spills(log: str) -> dict[str, tuple[int, int]]:
    """Return bytes of spill stores and loads by entry point, those of functions that it calls included."""
    starts = list(_ENTRY.finditer(log))
    found: dict[str, tuple[int, int]] = {}
    for position, start in enumerate(starts):
        end = starts[position + 1].start() if position + 1 < len(starts) else len(log)
        figures = [(int(match[1]), int(match[2])) for match in _SPILLS.finditer(log, start.end(), end)]
        if figures:
            found[start[1]] = (sum(stores for stores, _ in figures), sum(loads for _, loads in figures))
    return found


def failure(log: str, arch: Arch, toolkit: Toolkit, source: str) -> BuildFailure:
    """Return what the log of a failed compilation of a source means; paths in it must be readable already."""
    if header := _NO_HEADER.search(log):
        why, remedy = toolkit.missing_header(header[2])
        return BuildFailure("HEADERS_MISSING", f"{header[1]}: {header[2]} was not found: {why}", log, (remedy,))
    if over := over_limit(log, arch):
        return over
    if "invalid value for --gpu-architecture" in log:
        return too_old(arch, toolkit)
    errors = _ERROR.findall(log)
    if unended := _unended(log, errors, source):
        errors = [error for error in errors if not _BEHIND.match(error)] or [unended]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    first = errors[0] if errors else "the compiler failed and gave no reason"
    at = _AT.match(first)
    where = (f"{at[1]}:{at[2]}",) if at else ()
    remedies = ("correct the source: the log is the compiler's own",)
    return BuildFailure("COMPILE_FAILED", f"for {arch}: {first}{more}", log, remedies, where)


def over_limit(log: str, arch: Arch) -> BuildFailure | None:
    """Return the failure of code that the assembler found too large, in decimal; None where it is not."""
    if (over := _OVER.search(log)) is None:
        return None
    why = re.sub(r"\b0x([0-9a-f]+)\b", lambda match: str(int(match[1], 16)), over[1])
    return BuildFailure("OVER_LIMIT", f"for {arch}: {why}", log, (SMALLER,))


def _unended(log: str, errors: list[str], source: str) -> str:
    """Say what a source begins and does not end, and where; nothing if it ends."""
    if at_end := _AT_END.search(log):
        return f"{at_end[2] or source}: error: {at_end[1]} before the end of the source"
    behind = next(filter(None, map(_UNENDED.match, errors)), None)
    return f"{source}: error: {behind[1]} before the end of the source" if behind else ""


def too_old(arch: Arch, toolkit: Toolkit, known: tuple[str, ...] = ()) -> BuildFailure:
    """Return the failure of a compiler that does not know the architecture."""
    knows = f"; it knows {', '.join(known)}" if known else ""
    return BuildFailure(
        "TOOLCHAIN_TOO_OLD",
        f"{toolkit.compiler} does not compile for {arch}{knows}",
        remedies=(f"upgrade the compiler's wheel, or install {EXTRAS[max(EXTRAS)]}",),
    )

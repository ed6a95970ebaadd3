"""Include directives of a CUDA source: each is followed, or the source is refused.

The compiler opens any file that an absolute name, or one with ``..``, leads to. Such a file would be compiled without
being hashed. So a directive has to name its file plainly, on one line, and the file has to belong to the closure.
"""

import re
from collections.abc import Callable, Iterator

from kernel_muster.registry.backends.request import BuildFailure

_NAME = rb'(?:"([^"\n]+)"|<([^>\n]+)>)'
_PLAIN = re.compile(rb"^([ \t]*#[ \t]*include[ \t]*)" + _NAME, re.MULTILINE)
_OURS = re.compile(rb"<\d+>/")
# A backslash at the end of a line, or its trigraph, joins the line to the next one.
_SPLICE = re.compile(rb"(?:\\|\?\?/)[ \t\r]*\n")
_BLANKS = rb"[ \t\v\f\r]*"
_SIGN = rb"(?:#|%:|\?\?=)" + _BLANKS
_DIRECTIVE = re.compile(rb"^" + _BLANKS + _SIGN + rb"(?:include(?:_next)?|import|embed)\b[^\n]*", re.MULTILINE)
_QUESTION = re.compile(rb"\b__has_(?:include(?:_next)?|embed)" + _BLANKS + rb"\([^\n]*")
_PLAIN_QUESTION = re.compile(rb"__has_include" + _BLANKS + rb"\(" + _BLANKS + _NAME)
# Without one of these a source holds neither a directive in another form nor a question.
_SUSPECT = re.compile(_SIGN + rb"(?:include|import|embed|/\*)|__has_(?:include|embed)")
# What may hold the signs of a directive or of a comment, and is none. A string ends in its line at the latest.
_OPAQUE = re.compile(
    rb"""/\*|//[^\n]*|\b(?:u8|[uUL])?R"([^()\\\s]{0,16})\("""
    rb"|" + _SIGN + rb"include" + _BLANKS + rb"""(?:<[^>\n]*+>?|"[^"\n]*+"?)"""
    rb"""|\b\.?\d(?:[\w.]|'\w)*|"(?:[^"\\\n]|\\.)*+"?|'(?:[^'\\\n]|\\.)*+'?"""
)
_REMEDY = 'name the file plainly, on one line of its own: #include "file.cuh"'

#: What becomes of one include: its name, and whether it stands in quotes; the name to write instead, or None.
Rename = Callable[[bytes, bool], bytes | None]


def rename_includes(where: str, text: bytes, rename: Rename) -> bytes:
    """Return a source with other names in its includes; BuildFailure for an include that cannot be followed."""

    def line(match: re.Match[bytes]) -> bytes:
        name = rename(match[2] or match[3], bool(match[2]))
        return match[0] if name is None else match[1] + b'"' + name + b'"'

    renamed = _PLAIN.sub(line, text)
    for directive in _unfollowed(_SPLICE.sub(b"", renamed)):
        shown = directive.decode(errors="replace")
        why = "an include must name a file of the kernel's own folders or a CUDA header, or it would not be hashed"
        raise BuildFailure("COMPILE_FAILED", f"{where}: {shown}: {why}", remedies=(_REMEDY,))
    return renamed


def _unfollowed(joined: bytes) -> Iterator[bytes]:
    """Yield what may ask the compiler for a file that is neither in the closure nor a CUDA header."""
    for plain in _PLAIN.finditer(joined):
        if _leads_anywhere(plain[2] or plain[3]):
            yield plain[0].strip()
    if not _SUSPECT.search(_PLAIN.sub(b"", joined)):
        return
    code = _without_opaque(joined)
    for directive in _DIRECTIVE.finditer(code):
        plain_one = _PLAIN.match(directive[0])
        if plain_one is None or _leads_anywhere(plain_one[2] or plain_one[3]):
            yield directive[0].strip()
    for question in _QUESTION.finditer(code):
        name = _PLAIN_QUESTION.match(question[0])
        if name is None or _leads_anywhere(name[1] or name[2]):
            yield question[0].strip()


def _without_opaque(text: bytes) -> bytes:
    """Return a source with a space for each comment and raw string; other strings stay, and end in their line."""
    kept, at = [], 0
    while found := _OPAQUE.search(text, at):
        start, end = found.span()
        if found[0] == b"/*":
            end = _behind(text, b"*/", end)
        elif found[1] is not None:
            end = _behind(text, b")" + found[1] + b'"', end)
        elif not found[0].startswith(b"//"):
            start = end
        kept += [text[at:start], b" "] if start < end else [text[at:end]]
        at = end
    return b"".join([*kept, text[at:]])


def _behind(text: bytes, what: bytes, start: int) -> int:
    found = text.find(what, start)
    return len(text) if found < 0 else found + len(what)


def _leads_anywhere(name: bytes) -> bool:
    """Whether a name may lead out of the folders that are searched for it; names of the closure's own files do not."""
    parts = name.replace(b"\\", b"/").split(b"/")
    return not _OURS.match(name) and (not parts[0] or b".." in parts)

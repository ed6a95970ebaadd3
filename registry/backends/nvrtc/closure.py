"""The source closure: a kernel's file and every file of its own that it includes.

The compiler gets exactly these bytes, headers in memory, and no folder of ours to look into. So what is hashed is what
is compiled, an include that this scan does not see is an error and never a stale cache entry, and the machine code does
not depend on where the sources lie: each file is named ``<number of its root>/<path below it>``, root 0 being the
source's folder and root n the n-th include folder. Conditions are not evaluated; a header that is included under
some condition only belongs to the closure.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kernel_muster.registry.backends.nvrtc.includes import rename_includes
from kernel_muster.registry.backends.request import BuildFailure
from kernel_muster.registry.plugin_code.regular_files import archive_of, install_archive, read_regular
from kernel_muster.registry.values import frozen

#: What to do about a source that is not there.
SHIP_IT = "let the distribution ship it as package data, and install it again"
#: No source is larger: what is may be anything, and would take the memory.
MOST_BYTES = 16 << 20


@frozen
class SourceFile:
    """One file of a closure: the name that the compiler knows it by, where it lies, and the bytes to compile."""

    name: str
    path: Path
    text: bytes


@frozen
class Closure:
    """The source and the headers of its own, sorted by name."""

    source: SourceFile
    headers: tuple[SourceFile, ...]

    def sha256(self, options: Sequence[str]) -> str:
        """Return the digest of all files and of the kernel's options: another digest is another kernel."""
        digest = hashlib.sha256("\0".join(options).encode())
        for file in (self.source, *self.headers):
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.text).digest())
        return digest.hexdigest()

    def readable(self, log: str) -> str:
        """Return a compiler's log with our names replaced by the paths of the files."""
        paths = {file.name: str(file.path) for file in (self.source, *self.headers)}
        names = "|".join(re.escape(name) for name in sorted(paths, key=len, reverse=True))
        return re.sub(rf"(?<![\w/.<>])({names})(?=[(\"])", lambda match: paths[match[1]], log)


def read_closure(source: Path, include_dirs: Sequence[Path] = ()) -> Closure:
    """Read a source and, recursively, the headers that it includes from its own folders; BuildFailure names what fails.

    ``"x.h"`` is looked for in the folder of the including file, then in ``include_dirs``; ``<x.h>`` in those only.
    What is found in none of them is left to the compiler, which knows the headers of CUDA.
    """
    return _Reader((source.parent, *include_dirs)).read(source)


class _Reader:
    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root).absolute() for root in roots]
        self.files: dict[Path, SourceFile] = {}

    def read(self, source: Path) -> Closure:
        main = Path(source).absolute()  # a plain path, whatever class it has
        waiting = [main]  # a stack of our own: headers may be nested deeper than Python's calls
        while waiting:
            path = waiting.pop()
            place = _resolved(path)
            if place not in self.files:
                included: list[Path] = []
                text = rename_includes(str(path), _read(path), partial(self._renamed, path, included))
                self.files[place] = SourceFile(self._name(path), path, text)
                waiting += reversed(included)
        first = self.files.pop(_resolved(main))
        return Closure(first, tuple(sorted(self.files.values(), key=lambda file: file.name)))

    def _renamed(self, includer: Path, included: list[Path], name: bytes, is_quoted: bool) -> bytes | None:
        """Return the canonical name of the file that an include means, which ``included`` gets; None: a CUDA header."""
        folders = [*([includer.parent] if is_quoted else []), *self.roots[1:]]
        if not is_quoted and name.startswith(b"/"):
            folders.append(includer.parent)
        found = _find(name, folders)
        if found is None:
            return None
        included.append(found)
        return self._name(found).encode()

    def _name(self, path: Path) -> str:
        """Name a file after the first root that holds it; the same file always gets the same name."""
        resolved = _resolved(path)
        for number, root in enumerate(self.roots):
            if resolved.is_relative_to(_resolved(root)):
                return f"<{number}>/{resolved.relative_to(_resolved(root)).as_posix()}"
        common, ups = _resolved(self.roots[0]), 0
        while not resolved.is_relative_to(common):
            common, ups = common.parent, ups + 1
        return f"<0>/{'../' * ups}{resolved.relative_to(common).as_posix()}"


def _find(name: bytes, folders: Sequence[Path]) -> Path | None:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return None
    # Unlike Path.is_file, this takes names of any length.
    return next((path for folder in folders if os.path.isfile(path := folder / text)), None)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a link that leads to itself
        raise _unreadable(path, "its links lead nowhere") from None


def read_source(path: Path) -> bytes:
    """Return the bytes of a plugin's source; BuildFailure for what is no regular file of a source's size."""
    try:
        return read_regular(path, MOST_BYTES)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None


def _unreadable(path: Path, why: str) -> BuildFailure:
    if (archive := archive_of(path)) is not None:
        why = f"{path}: cannot be read: it is in the archive {archive}, and only modules can be imported from there"
        return BuildFailure("COMPILE_FAILED", why, remedies=(install_archive(archive),))
    return BuildFailure("COMPILE_FAILED", f"{path}: cannot be read: {why}", remedies=(SHIP_IT,))


def _read(path: Path) -> bytes:
    text = read_source(path)
    if b"\0" in text:
        # NVRTC takes C strings: everything behind the NUL would silently not be compiled.
        why = f"{path}: holds a NUL byte at offset {text.index(0)}, expected text"
        raise BuildFailure("COMPILE_FAILED", why, remedies=("write it as UTF-8 text",))
    return text

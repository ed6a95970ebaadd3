"""The installed places of a wheel's files, and conflicts with other owners of these places.

The names in the archive decide, not its RECORD, which may omit files. Names are compared without case, as on some file
systems, so every machine gives the same verdict on a wheel.
"""

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import all_suffixes
from importlib.metadata import Distribution, EntryPoint, PathDistribution, distributions
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

from kernel_muster.registry.distributions import HOST_DISTRIBUTION, HOST_MODULE, normal_name
from kernel_muster.registry.messages.message import Message, message
from kernel_muster.registry.values import frozen

#: Modules that Python imports at every start, if present.
_AT_START = frozenset({"sitecustomize", "usercustomize"})
#: Files of site-packages that Python reads at every start (3.15 adds .start): a line of them may be code.
_READ_AT_START = (".pth", ".start")
#: Modules of editable installs, which put themselves before all other finders.
_EDITABLE = "__editable__"
_METADATA = (".dist-info", ".egg-info", ".egg-link", ".egg")
_SITE = frozenset({"site-packages", "dist-packages"})
_SCRIPTS = frozenset({"bin", "scripts"})
_LIBRARIES = frozenset({"lib", "lib32", "lib64"})
_COMMAND_GROUPS = frozenset({"console_scripts", "gui_scripts"})
_HOST_COMMAND = "muster"
_COMMANDS_OF_PYTHON = re.compile(r"(python|pip|pydoc|idle|2to3)w?[\d.]*(-config)?|activate|deactivate")
_LAUNCHER = re.compile(r"(-script)?\.(exe|com|bat|cmd|csh|fish|ps1|pyw?)\Z")
_MODULE_SUFFIXES = tuple(sorted({*all_suffixes(), ".py", ".pyw", ".pyc", ".so", ".pyd"}, key=len, reverse=True))
_CACHED = re.compile(r"(?P<folder>.+/)?__pycache__/(?P<stem>[^/.]+)\.[^/]+")
_DRIVE = re.compile(r"[A-Za-z]:")
_METADATA_OR_DATA = re.compile(r"[^/]*\.(?:dist-info|egg-info|data)(?:/|$)|__pycache__/")


@frozen
class Placed:
    """A file of a wheel: its name in the archive, its kind once installed, and its path in compared form.

    ``kind`` is ``site`` beside other distributions, ``command`` for anything that runs by its name, or ``data``.
    Compiled code has the path of its source.
    """

    member: str
    kind: str
    path: str

    @property
    def top(self) -> str:
        """Its folder beside other distributions, or its own name."""
        return self.path.partition("/")[0]

    @property
    def module(self) -> str:
        """The top-level module, or the one whose package it makes. Empty for any other file."""
        folder, _, name = self.path.rpartition("/")
        suffix = next((one for one in _MODULE_SUFFIXES if name.endswith(one)), "")
        stem = name.removesuffix(suffix).partition(".")[0]
        return "" if not suffix or "/" in folder or (folder and stem != "__init__") else folder or stem

    def belongs_to(self, module: str) -> bool:
        """Whether it is the module or lies in its package, at any depth."""
        return module in (self.module, self.top)


def taken_places(wheel: Path) -> Iterator[Message]:
    """Yield files of a wheel that replace parts of Python, of this package or of a distribution, or run unasked."""
    with ZipFile(wheel) as archive:
        members = sorted(one for one in archive.namelist() if not one.endswith("/"))
        folders = dict.fromkeys(one.partition("/")[0] for one in members)
        metadata = next((f"{folder}/" for folder in folders if folder.endswith(".dist-info")), "")  # pip wants one
        own = PathDistribution(ZipPath(archive, metadata))
        name = normal_name(str(own.metadata["Name"]))
        files = []
        for member in members:
            if _leads_out(member):
                yield message("plugin_load_failed.wheel_leads_out", file=member)
            else:
                files.append(_placed(member))
        is_host = name == HOST_DISTRIBUTION
        yield from filter(None, (_problem(file, metadata, is_host) for file in files))
        others = [one for one in distributions() if normal_name(str(one.metadata["Name"])) != name]
        commands = {f"its command {point.name}": fold(point.name) for point in _commands(own)}
        commands |= {file.member: file.path for file in files if file.kind == "command"}
        yield from _taken_commands(commands, others, is_host)
        yield from _taken_files({file.path: file.member for file in files if file.kind == "site"}, archive, others)


def fold(path: str) -> str:
    """Return a path in compared form: without case, and without differences that Windows and macOS ignore."""
    path = path.lower() if path.isascii() else unicodedata.normalize("NFKC", path).casefold()
    return "/".join(part.rstrip(". ") for part in path.split("/"))


def _leads_out(member: str) -> bool:
    parts = member.split("/")
    return "\\" in member or ".." in parts or parts[0] == "" or _DRIVE.match(member) is not None


def _placed(member: str) -> Placed:
    names = [part for part in fold(member).split("/") if part]
    kind = "site"
    if names and names[0].endswith(".data"):
        kind = {"purelib": "site", "platlib": "site", "scripts": "command"}.get("".join(names[1:2]), "data")
        names = names[2:]
        if kind == "data":
            kind, names = _of_data(names)
    if kind == "command" and len(names) > 1:
        kind = "data"
    path = "/".join(names)
    if cached := _CACHED.fullmatch(path):
        path = f"{cached['folder'] or ''}{cached['stem']}.py"
    return Placed(member, kind, path)


def _of_data(names: list[str]) -> tuple[str, list[str]]:
    """Return the kind of a file of the environment's own folder, and its path there."""
    site = next((at for at, name in enumerate(names[:-1]) if name in _SITE), None)
    if site is not None:
        return "site", names[site + 1 :]
    return ("command", names[1:]) if names[:1] and names[0] in _SCRIPTS else ("data", names)


def _problem(file: Placed, metadata: str, is_host: bool) -> Message | None:
    """Return the reason against a file, independent of other installed packages."""
    if file.kind == "data":
        return message("plugin_load_failed.wheel_python", file=file.member) if _is_pythons(file.path) else None
    if file.kind == "command":
        return None
    is_file = "/" not in file.path
    if (is_file and file.path.endswith(_READ_AT_START)) or file.top.startswith(_EDITABLE):
        return message("plugin_load_failed.wheel_at_start", file=file.member)
    for module in _AT_START:
        if file.belongs_to(module):
            return message("plugin_load_failed.wheel_module", file=file.member, module=module)
    if file.module in sys.stdlib_module_names:
        return message("plugin_load_failed.wheel_module", file=file.member, module=file.module)
    if file.belongs_to(HOST_MODULE) and not is_host:
        return message("plugin_load_failed.wheel_host", file=file.member, host=HOST_MODULE)
    if file.top.endswith(_METADATA) and not file.member.startswith(metadata or "/"):
        return message("plugin_load_failed.wheel_metadata", file=file.member)
    return None


def _is_pythons(path: str) -> bool:
    """Whether a file of the environment's own folder belongs to Python: its library, or its start-up."""
    first, *rest = path.removeprefix("local/").split("/")
    if not rest:
        return first == "pyvenv.cfg" or (first.startswith("python") and first.endswith(("._pth", ".zip", ".dll")))
    is_library = first in _LIBRARIES
    return is_library and (rest[0].startswith("python") or Placed("", "", "/".join(rest)).module in _library())


def _library() -> frozenset[str]:
    return sys.stdlib_module_names | _AT_START


def _taken_commands(commands: Mapping[str, str], others: Iterable[Distribution], is_host: bool) -> Iterator[Message]:
    """Yield commands of the wheel that Python, this package or another distribution already has."""
    owners = {_HOST_COMMAND: HOST_DISTRIBUTION} if not is_host else {}
    for other in others:
        owners |= dict.fromkeys(_commands_of(other), _shown(other))
    for file, path in commands.items():
        name = _LAUNCHER.sub("", path)
        owner = "Python" if _COMMANDS_OF_PYTHON.fullmatch(name) else owners.get(name)
        if owner:
            yield message("plugin_load_failed.wheel_command", file=file, command=name, whose=owner)


def _commands_of(other: Distribution) -> Iterator[str]:
    """Yield the commands of an installed distribution: files beside site-packages, and entry points."""
    for file in re.findall(r'^"?\.\./[^,\n]*?/(?:bin|Scripts)/([^,/\n"]+)"?,', _record(other), re.MULTILINE):
        yield _LAUNCHER.sub("", fold(file))
    yield from (fold(point.name) for point in _commands(other))


def _commands(distribution: Distribution) -> Iterator[EntryPoint]:
    """Yield the entry points that become commands. Most distributions have none, and parsing takes time."""
    if "scripts]" in (distribution.read_text("entry_points.txt") or ""):
        yield from (point for point in distribution.entry_points if point.group in _COMMAND_GROUPS)


def _taken_files(files: Mapping[str, str], archive: ZipFile, others: Iterable[Distribution]) -> Iterator[Message]:
    """Yield files and modules owned by another distribution. ``files`` maps paths to names in the archive."""
    modules = {module: path for path in files if (module := Placed("", "site", path).module)}
    for other in sorted(others, key=lambda one: str(one.metadata["Name"])):
        theirs = {fold(file): file for file in files_of(other)}
        for path in sorted(files.keys() & theirs.keys()):
            if _differs(archive.read(files[path]), other, theirs[path]):
                yield message("plugin_load_failed.wheel_file", file=files[path], whose=_shown(other))
        for module in sorted(modules.keys() & {Placed("", "site", path).module for path in theirs}):
            if modules[module] not in theirs:
                file = files[modules[module]]
                yield message("plugin_load_failed.wheel_hides", file=file, module=module, whose=_shown(other))


def files_of(distribution: Distribution) -> set[str]:
    """Return a distribution's files outside its metadata, from RECORD."""
    listed = re.findall(r'^"?([^,\n]*?)"?,', _record(distribution), re.MULTILINE)
    return {name for name in listed if not name.startswith(("../", "/")) and not _METADATA_OR_DATA.match(name)}


def _record(distribution: Distribution) -> str:
    return distribution.read_text("RECORD") or ""


def _differs(content: bytes, other: Distribution, file: str) -> bool:
    """Whether a file of another distribution has other bytes. Equal files belong to namespace packages."""
    try:
        return Path(str(other.locate_file(file))).read_bytes() != content
    except OSError:
        return True


def _shown(distribution: Distribution) -> str:
    return f"{distribution.metadata['Name']} {distribution.version}"

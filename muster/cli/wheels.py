"""A wheel that is only looked at: installed into a folder of its own, in front of what is installed already."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from kernel_muster.registry.discovery.entry_points import HOST_MODULE
from kernel_muster.registry.distributions import HOST_DISTRIBUTION, normal_name
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hookspecs import ENTRY_POINT_GROUP
from kernel_muster.registry.keys import did_you_mean

#: What Python imports whenever it starts, if it is there.
_AT_START = frozenset({"sitecustomize", "usercustomize"})
_METADATA = re.compile(r"[^/]*\.(?:dist-info|egg-info|data)(?:/|$)|__pycache__/")
_MOST_NAMED = 3
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile")


class WheelRefused(Exception):
    """A wheel that cannot be installed, or must not be: why, what pip said, and what to do."""

    def __init__(
        self, why: str, log: str = "", remedy: str = "build the wheel again: pip wheel --no-deps -w dist ."
    ) -> None:
        super().__init__(why)
        self.why, self.log, self.remedy = why, log, remedy


def install_wheel(wheel: Path, folder: Path) -> Distribution:
    """Install a wheel, and nothing that it depends on, into an empty folder.

    WheelRefused if pip does not, or if it brings what belongs to others.
    """
    command = [sys.executable, *_PIP, "--target", str(folder), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (pip, without a shell)
    if "No module named pip" in done.stderr:
        raise UsageError(f"pip is not installed for {sys.executable}: install the wheel yourself, and name it")
    found = list(distributions(path=[str(folder)])) if done.returncode == 0 else []
    if len(found) != 1:
        raise WheelRefused("pip cannot install this wheel", (done.stderr or done.stdout).strip())
    if taken := list(_taken(found[0])):
        why = "; ".join(taken[:_MOST_NAMED]) + (f"; and {len(taken) - _MOST_NAMED} more" if taken[_MOST_NAMED:] else "")
        remedy = "let the wheel have modules of its own alone: packages, or py_modules, in its pyproject.toml"
        raise WheelRefused(f"it would do damage where it is installed: {why}", remedy=remedy)
    return found[0]


def _taken(wheel: Distribution) -> Iterator[str]:
    """Say what of a wheel takes the place of Python's own modules, of this package, or of another distribution's."""
    own = normal_name(str(wheel.metadata["Name"]))
    files = _files(wheel)
    modules = {module: file for file in sorted(files, reverse=True) if (module := _top_module(file))}
    for module, file in sorted(modules.items()):
        if module in sys.stdlib_module_names or module in _AT_START:
            yield f"{file} would be taken for Python's own module {module}"
        elif module == HOST_MODULE and own != HOST_DISTRIBUTION:
            yield f"{file} would be taken for {HOST_MODULE} itself"
    for other in sorted(distributions(), key=lambda one: str(one.metadata["Name"])):
        if normal_name(str(other.metadata["Name"])) == own:
            continue
        whose, theirs = f"{other.metadata['Name']} {other.version}", _files(other)
        yield from (
            f"{file} is a file of {whose} too" for file in sorted(files & theirs) if _differs(file, wheel, other)
        )
        for module in sorted(modules.keys() & {_top_module(file) for file in theirs}):
            if modules[module] not in theirs:
                yield f"{modules[module]} would hide the module {module} of {whose}"


def _files(distribution: Distribution) -> set[str]:
    """Return the files that a distribution puts beside its metadata, as RECORD names them."""
    listed = re.findall(r'^"?([^,\n]*?)"?,', distribution.read_text("RECORD") or "", re.MULTILINE)
    return {name for name in listed if not name.startswith(("../", "/")) and not _METADATA.match(name)}


def _top_module(file: str) -> str:
    """Return the top-level module that a file is, or whose package it makes; nothing for any other file."""
    folder, _, name = file.rpartition("/")
    suffix = next((one for one in all_suffixes() if name.endswith(one)), "")
    stem = name.removesuffix(suffix)
    return "" if not suffix or "/" in folder or (folder and stem != "__init__") else folder or stem


def _differs(file: str, one: Distribution, other: Distribution) -> bool:
    """Whether two distributions have different bytes in a file: equal ones make namespace packages."""
    try:
        return Path(str(one.locate_file(file))).read_bytes() != Path(str(other.locate_file(file))).read_bytes()
    except OSError:
        return True


def installed(name: str) -> tuple[Distribution, str | None]:
    """Return an installed distribution by its name, or by that of a plugin of it, and then the plugin too.

    UsageError, with near names, if there is none.
    """
    try:
        return distribution(name), None
    except (PackageNotFoundError, ValueError):
        pass
    offers = [(e.name, one) for one in distributions() for e in one.entry_points if e.group == ENTRY_POINT_GROUP]
    of_plugin = {str(one.metadata["Name"]): one for plugin, one in offers if plugin == name}
    if len(of_plugin) == 1:
        return next(iter(of_plugin.values())), name
    if of_plugin:
        raise UsageError(f"plugin {name} is offered by {' and '.join(sorted(of_plugin))}: name one of them")
    if name and Path(name).is_dir():
        first = f"pip install {name}, or pip wheel --no-deps {name} and check the wheel"
        raise UsageError(f"{name} is a folder, and what is checked is installed: {first}")
    names = {*(str(one.metadata["Name"]) for one in distributions()), *(plugin for plugin, _ in offers)}
    raise UsageError(f"{name} is no wheel, installed distribution or plugin{did_you_mean(name, names)}")


def path_with(wheel: Distribution, folder: Path, shadows: Path) -> list[str]:
    """Return ``sys.path`` with a wheel's folder in front, and without another version that is installed.

    A folder that holds the other version's metadata is replaced by one of links to everything else in it.
    """
    name = normal_name(str(wheel.metadata["Name"]))
    path = [str(folder)]
    for position, entry in enumerate(sys.path):
        place = Path(entry)
        others = [
            file
            for file in place.glob("*.dist-info")
            if normal_name(file.name.rpartition("-")[0].rpartition("-")[0]) == name
        ]
        if entry and others:
            shadow = shadows / str(position)
            shadow.mkdir(parents=True)
            for file in place.iterdir():
                if file not in others:
                    (shadow / file.name).symlink_to(file.absolute())
            entry = str(shadow)
        path.append(entry)
    return path

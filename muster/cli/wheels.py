"""A wheel under examination: installed into a temporary folder, in front of installed packages."""

import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from kernel_muster.cli.wheel_files import taken_places
from kernel_muster.registry.distributions import normal_name
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hookspecs import ENTRY_POINT_GROUP
from kernel_muster.registry.keys import did_you_mean
from kernel_muster.registry.messages.message import message

_MOST_NAMED = 3
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile")


class WheelRefused(Exception):
    """A wheel that cannot or must not be installed: the reason, pip's output, and the remedy."""

    def __init__(
        self, why: str, log: str = "", remedy: str = "build the wheel again: pip wheel --no-deps -w dist ."
    ) -> None:
        super().__init__(why)
        self.why, self.log, self.remedy = why, log, remedy


def install_wheel(wheel: Path, folder: Path) -> Distribution:
    """Install a wheel without its dependencies into an empty folder.

    WheelRefused if pip fails, or if the wheel contains files of other owners.
    """
    command = [sys.executable, *_PIP, "--target", str(folder), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (pip, without a shell)
    if "No module named pip" in done.stderr:
        raise UsageError(f"pip is not installed for {sys.executable}: install the wheel yourself, and name it")
    said = (done.stderr or done.stdout).strip()
    if done.returncode != 0:
        raise WheelRefused("pip cannot install this wheel", said)
    if taken := list(taken_places(wheel)):
        more = [message("plugin_load_failed.wheel_more", count=len(taken) - _MOST_NAMED)] if taken[_MOST_NAMED:] else []
        why = message("plugin_load_failed.wheel", problems=(*taken[:_MOST_NAMED], *more))
        raise WheelRefused(why, remedy=message("remedy.own_modules"))
    found = list(distributions(path=[str(folder)]))
    if len(found) != 1:
        raise WheelRefused("pip cannot install this wheel", said)
    return found[0]


def installed(name: str) -> tuple[Distribution, str | None]:
    """Return an installed distribution by its name, or by a plugin's name, then with the plugin.

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
    """Return ``sys.path`` with a wheel's folder in front, and without another installed version.

    A folder with the other version's metadata is replaced by a folder of links to everything else in it.
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

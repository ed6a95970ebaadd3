"""Where a plugin's module came from: the distribution whose metadata names it, or a folder that stands before it."""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import all_suffixes
from importlib.metadata import Distribution
from typing import Any

from kernel_muster.registry.plugin_code.module_sources import module_value

# The first field of each line of a RECORD, with quotes or without.
_RECORDED = re.compile(r'^(?:"([^"\n]*)"|([^,"\n]*)),', re.MULTILINE)


def places_of(distribution: Distribution, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the files that may be each module of a distribution, or its project's folder (with a separator behind it).

    Nothing where the metadata does not say: of what is neither beside them nor in RECORD, nobody knows the place.
    """
    recorded = {quoted or plain for quoted, plain in _RECORDED.findall(distribution.read_text("RECORD") or "")}
    project = tuple(_project_of(distribution))
    places = {}
    for module in modules:
        stem = module.replace(".", "/")
        names = [f"{stem}{inner}{suffix}" for inner in ("/__init__", "") for suffix in all_suffixes()]
        found = [name for name in names if stem and (name in recorded or _is_beside(distribution, name))]
        places[module] = (*(str(distribution.locate_file(name)) for name in found), *project)
    return places


def _is_beside(distribution: Distribution, name: str) -> bool:
    place: Any
    with suppress(Exception):  # a finder of distributions may be anybody's, and need not know files
        place = distribution.locate_file(name)
        return bool(place.exists())
    return False


def _project_of(distribution: Distribution) -> Iterator[str]:
    """Yield the folder of an editable install, whose modules stay there."""
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
        is_editable, text = bool(url["dir_info"]["editable"]), str(url["url"])
    except (ValueError, KeyError, TypeError):
        return
    if is_editable and text.startswith("file:"):
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        yield os.path.join(url2pathname(urlsplit(text).path), "")


def strange_file(module: str, places: Sequence[str]) -> str:
    """Return the file that a module was imported from if it is none of its distribution's places; else nothing."""
    loaded = sys.modules.get(module)
    file = module_value(loaded, "__file__")
    if not places or not isinstance(file, str):
        return ""
    real = os.path.realpath(file)
    return "" if any(_is_there(real, place) for place in places) else file


def _is_there(real: str, place: str) -> bool:
    if place.endswith(os.sep):
        return real.startswith(os.path.join(os.path.realpath(place), ""))
    if real == os.path.realpath(place):
        return True
    try:
        return os.path.samefile(real, place)
    except OSError:
        return False

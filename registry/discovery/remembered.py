"""The keys of plugins as they last loaded, in a folder of the user's own.

They explain the misses of a plugin that fails or is blocked, and nothing else: no rule counts them as registered. What
is not exactly what was written, or what others could have written, is as if it were not there.
"""

import json
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from kernel_muster.registry.distributions import normal_name
from kernel_muster.registry.keys import KernelKey, key_problem, parse_key
from kernel_muster.registry.plugin_code.regular_files import read_regular
from kernel_muster.registry.selection.catalog import PluginRow

#: A family of this project has up to 56 keys, of some 40 letters.
MOST_KEYS = 2_000
_MOST_BYTES = 256 * 1024
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Remembered:
    """One file for each plugin. Without a folder that this user alone can write to, nothing is kept or read."""

    def __init__(self, folder: Path | None = None) -> None:
        self._given = folder

    def keys_of(self, row: PluginRow) -> tuple[KernelKey, ...]:
        """Return the keys that a plugin registered when it last loaded, in whatever version."""
        content = self._read(row)
        keys = content.get("keys") if content.get("plugin") == _name(row) else None
        if not isinstance(keys, list) or len(keys) > MOST_KEYS:
            return ()
        if not all(isinstance(key, str) and not key_problem(key) for key in keys):
            return ()
        return tuple(sorted(map(parse_key, keys)))

    def keep(self, rows: Iterable[PluginRow]) -> None:
        """Write down the keys of plugins that loaded, where they are other ones than before."""
        for row in rows:
            before, content = self._read(row), {"plugin": _name(row), "keys": list(map(str, row.keys))}
            is_news = content != before if row.keys else bool(before)
            if self._folder is not None and is_news and len(row.keys) <= MOST_KEYS:
                with suppress(OSError):
                    self._write(self._folder / _file(row), json.dumps(content, indent=1))

    @cached_property
    def _folder(self) -> Path | None:
        with suppress(OSError, RuntimeError, KeyError):  # a user may have no home, and no name
            folder = _default_folder() if self._given is None else self._given
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return folder if _is_own(folder.stat()) else None
        return None

    def _read(self, row: PluginRow) -> dict[str, object]:
        if self._folder is None:
            return {}
        path = self._folder / _file(row)
        with suppress(OSError, ValueError, RecursionError):
            if _is_own(path.lstat()):
                content = json.loads(read_regular(path, _MOST_BYTES))
                return content if isinstance(content, dict) else {}
        return {}

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Put a whole file in the place of another: a reader sees the one or the other."""
        handle, name = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def _default_folder() -> Path:
    import platformdirs  # not for the boots that have no third-party plugin

    return Path(platformdirs.user_cache_dir("kernel-muster", appauthor=False)) / "plugins"


def _name(row: PluginRow) -> list[str]:
    return [normal_name(row.distribution), row.name]


def _file(row: PluginRow) -> str:
    return f"{sha256(json.dumps(_name(row)).encode()).hexdigest()}.json"


def _is_own(status: os.stat_result) -> bool:
    if stat.S_ISLNK(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS

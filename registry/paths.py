"""Paths of users: read from where a program stood when it named them, and shown without their home."""

import os
from pathlib import Path


def current_folder() -> Path:
    """Return the working directory; a relative path where it is gone, from which nothing can be read anyway."""
    try:
        return Path.cwd()
    except OSError:
        return Path()


def without_home(path: str | Path) -> str:
    """Return a path with ``~`` in the place of the home folder: reports are passed on."""
    text, home = str(path), os.path.expanduser("~")
    if home in ("", "~", os.sep) or not text.startswith(home.rstrip(os.sep) + os.sep):
        return text
    return f"~{text[len(home.rstrip(os.sep)) :]}"

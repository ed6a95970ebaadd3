"""Versions of documents: ``major.minor``, each written in one way."""

import re

#: A number without leading zeros, for JSON Schemas and regular expressions alike.
_NUMBER = "(0|[1-9][0-9]{0,5})"


def version_pattern(major: int | str) -> str:
    """Return the pattern of all versions of one major version."""
    return rf"^{major}\.{_NUMBER}$"


def minor_of(version: object, major: int | str) -> int | None:
    """Return the minor version; None for another major version, and for text that is no version."""
    match = re.fullmatch(rf"{major}\.{_NUMBER}", version) if isinstance(version, str) else None
    return None if match is None else int(match[1])

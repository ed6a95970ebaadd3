"""The keys of the built-in families as data, for reports about a family that did not load.

``python -m kernel_muster.plugins.generate`` writes them next to the discovery of plugins. A test keeps them current.
"""

from collections.abc import Iterator
from pathlib import Path

from kernel_muster.registry.discovery import discover, family_keys
from kernel_muster.registry.discovery.entry_points import scan
from kernel_muster.registry.distributions import HOST_DISTRIBUTION, same_distribution
from kernel_muster.registry.selection.catalog import PluginRow

KEYS_FILE = Path(family_keys.__file__)
_HEAD = '''"""The keys of each built-in family: they are known although it is blocked, or fails.

Written by ``python -m kernel_muster.plugins.generate``.
"""

from collections.abc import Mapping

FAMILY_KEYS: Mapping[str, tuple[str, ...]] = {
'''


def keys_text() -> str:
    """Return the text of the generated module; RuntimeError where a built-in family is not sound."""
    guests = {e.name for e in scan().all_entries if not same_distribution(e.distribution, HOST_DISTRIBUTION)}
    catalog = discover.discover(blocked=guests)
    if catalog.findings:
        raise RuntimeError(f"the built-in families are not sound: {catalog.findings}")
    lines = (line for row in catalog.plugins if row.is_host and row.keys for line in _lines(row))
    return _HEAD + "\n".join((*lines, "}", ""))


def _lines(row: PluginRow) -> Iterator[str]:
    if len(row.keys) == 1:
        yield f'    "{row.name}": ("{row.keys[0]}",),'
    else:
        yield from (f'    "{row.name}": (', *(f'        "{key}",' for key in row.keys), "    ),")


if __name__ == "__main__":
    KEYS_FILE.write_text(keys_text(), encoding="utf-8")

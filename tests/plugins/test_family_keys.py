"""The keys of the built-in families, as the registry knows them without importing a family."""

import pytest
from kernel_muster.plugins.generate import KEYS_FILE, keys_text
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.discovery.family_keys import FAMILY_KEYS
from kernel_muster.registry.keys import parse_key


def test_keys_of_families_are_current() -> None:
    assert KEYS_FILE.read_text(encoding="utf-8") == keys_text(), "run python docs/generate.py"


@pytest.mark.parametrize("family", FAMILY_KEYS)
def test_blocked_family_has_its_keys_although_nothing_is_imported(family: str) -> None:
    (row,) = (row for row in discover(blocked=FAMILY_KEYS).plugins if row.name == family)
    assert row.status == "blocked"
    assert list(map(str, row.keys)) == sorted(FAMILY_KEYS[family])


def test_every_family_with_kernels_is_known() -> None:
    catalog = discover()
    assert {row.name for row in catalog.plugins if row.is_host and row.keys} == set(FAMILY_KEYS)
    assert {parse_key(key) for keys in FAMILY_KEYS.values() for key in keys} == set(catalog.by_key)

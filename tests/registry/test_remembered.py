"""The keys of plugins from their last load: they explain, excuse nothing, and cannot be written by others."""

import json
import os
from pathlib import Path

import pytest
from kernel_muster.registry.discovery import remembered
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.discovery.remembered import MOST_KEYS, Remembered
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.selection.catalog import PluginRow

KEYS = (KernelKey("acme", "mul"), KernelKey("gemm", "tile"))


def row(keys=KEYS, name="acme", distribution="Acme_Kernels", version="1.0", status="loaded"):
    return PluginRow(name, distribution, version, status, keys=keys)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "plugins"


def kept(folder):
    (file,) = folder.iterdir()
    return file


def test_keys_of_a_plugin_that_loaded_are_known_in_the_next_process(folder):
    Remembered(folder).keep([row()])
    assert Remembered(folder).keys_of(row(keys=(), version="2.0", status="failed")) == KEYS
    assert Remembered(folder).keys_of(row(distribution="acme.kernels")) == KEYS
    for other in (row(name="acme2"), row(distribution="acme-kernels-2")):
        assert Remembered(folder).keys_of(other) == ()


def test_keys_are_written_only_where_they_change(folder):
    Remembered(folder).keep([row()])
    os.utime(kept(folder), (1, 1))
    Remembered(folder).keep([row(version="1.1")])
    assert kept(folder).stat().st_mtime == 1
    Remembered(folder).keep([row(keys=KEYS[:1])])
    assert Remembered(folder).keys_of(row()) == KEYS[:1]


def test_plugin_without_keys_is_forgotten_and_never_written_down(folder):
    Remembered(folder).keep([row(keys=())])
    assert list(folder.iterdir()) == []
    Remembered(folder).keep([row()])
    Remembered(folder).keep([row(keys=())])
    assert Remembered(folder).keys_of(row()) == ()


def test_plugin_with_too_many_keys_is_not_kept(folder):
    Remembered(folder).keep([row(tuple(KernelKey("acme", f"k{at}") for at in range(MOST_KEYS + 1)))])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"[" * 100_000, b'{"keys": ["acme::mul"]}',
        json.dumps({"plugin": ["other", "acme"], "keys": ["acme::mul"]}).encode(),
        *(json.dumps({"plugin": ["acme-kernels", "acme"], "keys": keys}).encode() for keys in (
            None, "acme::mul", {"acme::mul": 1}, [1], [None], ["ACME::mul"], ["acme::mul", "\x1b[2J::x"],
            ["acme::k"] * (MOST_KEYS + 1),
        )),
        json.dumps({"plugin": ["acme-kernels", "acme"], "keys": ["acme::mul"], "more": "x" * 300_000}).encode(),
    ],
)  # fmt: skip
def test_content_that_nobody_wrote_like_that_is_no_memory(folder, content):
    Remembered(folder).keep([row()])
    kept(folder).write_bytes(content)
    assert Remembered(folder).keys_of(row()) == ()
    Remembered(folder).keep([row()])
    assert Remembered(folder).keys_of(row()) == KEYS


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_can_write_is_not_read(folder, mode):
    Remembered(folder).keep([row()])
    kept(folder).chmod(mode)
    assert Remembered(folder).keys_of(row()) == ()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_folder_that_others_can_write_is_neither_read_nor_written(folder, mode):
    Remembered(folder).keep([row()])
    folder.chmod(mode)
    assert Remembered(folder).keys_of(row()) == ()
    Remembered(folder).keep([row(keys=KEYS[:1])])
    folder.chmod(0o700)
    assert Remembered(folder).keys_of(row()) == KEYS


def test_link_and_pipe_in_the_place_of_the_file_are_not_read(folder):
    Remembered(folder).keep([row()])
    file = kept(folder)
    target = file.rename(file.with_suffix(".other"))
    file.symlink_to(target)
    assert Remembered(folder).keys_of(row()) == ()
    file.unlink()
    os.mkfifo(file)
    assert Remembered(folder).keys_of(row()) == ()


def test_folder_that_cannot_be_made_keeps_nothing_and_raises_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "plugins", Path("/proc/nothing/plugins")):
        Remembered(folder).keep([row()])
        assert Remembered(folder).keys_of(row()) == ()
    for error in (RuntimeError("no home"), KeyError("getpwuid(): uid not found: 7"), OSError("none")):

        def nowhere(error=error):
            raise error

        monkeypatch.setattr(remembered, "_default_folder", nowhere)
        Remembered().keep([row()])
        assert Remembered().keys_of(row()) == ()


def test_discovery_keeps_third_party_plugins_that_load_and_no_others(install, tmp_path, on_disk, folder):
    path = install(tmp_path / "site", text="[kernel_muster.v1]\nacme = acme_on_disk\nbroken = no_such_module\n")
    catalog = discover(path=[path], local={"mine": object()}, remembered=Remembered(folder))
    assert [(one.name, one.status) for one in catalog.plugins] == [
        ("acme", "loaded"), ("broken", "failed"), ("mine", "failed"),
    ]  # fmt: skip
    assert json.loads(kept(folder).read_text()) == {"plugin": ["acme-kernels", "acme"], "keys": ["acme::mul"]}


@pytest.mark.parametrize("blocked", [("acme",), ()])
def test_plugin_that_does_not_load_has_its_last_keys_and_registers_none(install, tmp_path, on_disk, folder, blocked):
    path = install(tmp_path / "site")
    discover(path=[path], remembered=Remembered(folder))
    text = "[kernel_muster.v1]\nacme = acme_on_disk\n" if blocked else "[kernel_muster.v1]\nacme = no_such_module\n"
    (tmp_path / "site" / "acme_kernels-1.0.dist-info" / "entry_points.txt").write_text(text)
    catalog = discover(path=[path], blocked=blocked, remembered=Remembered(folder))
    (found,) = catalog.plugins
    assert (found.keys, found.last_keys) == ((), (KernelKey("acme", "mul"),))
    assert (catalog.kernels, catalog.by_key) == ((), {})
    assert discover(path=[path], blocked=blocked).plugins[0].last_keys == ()

"""Plugins of installed distributions: their metadata, and its errors."""

import itertools
import os
import sys
from fractions import Fraction
from functools import partial
from importlib.metadata import PathDistribution
from types import ModuleType

import pytest
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.discovery.origins import places_of


def said(catalog):
    return [(f.code, f.subject) for f in catalog.findings]


def test_installed_plugin_is_found_with_its_distribution(install, tmp_path, on_disk):
    catalog = discover(path=[install(tmp_path)])
    assert catalog.findings == ()
    (row,) = catalog.plugins
    assert (row.name, row.distribution, row.version, row.value) == ("acme", "acme-kernels", "1.0", "acme_on_disk")


def test_same_metadata_twice_is_one_plugin_with_a_note(install, tmp_path, on_disk):
    path = [install(tmp_path / "a"), install(tmp_path / "b")]
    catalogs = [discover(path=order) for order in itertools.permutations(path)]
    for catalog in catalogs:
        assert catalog.findings == ()
        assert len(catalog.kernels) == 1
        assert "metadata seen 2 times" in catalog.plugins[0].notes[0]
    assert catalogs[0].plugins == catalogs[1].plugins


def test_two_versions_of_one_distribution_compete(install, tmp_path, on_disk):
    path = [install(tmp_path / "a"), install(tmp_path / "b", version="2.0")]
    catalogs = [discover(path=order) for order in itertools.permutations(path)]
    assert all(said(catalog) == [("PLUGIN_DUPLICATE", "acme")] for catalog in catalogs)
    assert catalogs[0].findings == catalogs[1].findings
    assert catalogs[0].kernels == ()


def test_one_distribution_that_names_a_plugin_twice_is_called_one(install, tmp_path, on_disk):
    catalog = discover(path=[install(tmp_path, text="[kernel_muster.v1]\nacme = acme_on_disk\nacme = acme_other\n")])
    (found,) = catalog.findings
    assert (found.code, found.subject) == ("PLUGIN_DUPLICATE", "acme")
    assert found.why == f"acme-kernels 1.0 at {tmp_path} names 2 plugins acme; none of them is loaded"
    assert found.remedies == ("keep one entry point called acme in its entry_points.txt",)
    assert catalog.kernels == ()


@pytest.mark.parametrize("group", [" kernel_muster.v1 ", "\tkernel_muster.v1", "kernel_muster .v1"])
def test_group_with_stray_blanks_is_a_mismatch_that_shows_them(install, tmp_path, on_disk, group):
    catalog = discover(path=[install(tmp_path, text=f"[{group}]\nacme = acme_on_disk\n")])
    assert said(catalog) == [("API_MISMATCH", "acme")]
    assert f"it is registered for {group!r}, this host speaks" in catalog.findings[0].why


def test_group_without_a_version_is_a_mismatch_that_tells_its_author_what_to_write(install, tmp_path, on_disk):
    (finding,) = discover(path=[install(tmp_path, text="[kernel_muster]\nacme = acme_on_disk\n")]).findings
    assert finding.code == "API_MISMATCH"
    assert '[project.entry-points."kernel_muster.v1"] in pyproject.toml' in finding.remedies[1]


def test_byte_order_mark_that_hides_our_group_is_a_finding(install, tmp_path, on_disk):
    catalog = discover(path=[install(tmp_path, text="\ufeff[kernel_muster.v1]\nacme = acme_on_disk\n")])
    assert said(catalog) == [("PLUGIN_LOAD_FAILED", "acme_kernels-1.0.dist-info")]
    assert "begins with a byte order mark, so that its first group is not seen" in catalog.findings[0].why


@pytest.mark.parametrize("first", ["[console_scripts]\nrun = acme:run\n", "\n", "# ours\n"], ids=repr)
def test_byte_order_mark_that_hides_nothing_of_ours_is_none(install, tmp_path, on_disk, first):
    catalog = discover(path=[install(tmp_path, text=f"\ufeff{first}[kernel_muster.v1]\nacme = acme_on_disk\n")])
    assert (said(catalog), [row.name for row in catalog.plugins]) == ([], ["acme"])


@pytest.mark.parametrize("metadata", ["", "Metadata-Version: 2.1\n", "Name: acme-kernels\n", None])
def test_distribution_without_its_name_and_version_is_a_finding(install, tmp_path, on_disk, metadata):
    path = install(tmp_path, metadata=metadata)
    file = tmp_path / "acme_kernels-1.0.dist-info" / "METADATA"
    file.write_text(metadata) if metadata is not None else file.unlink()
    catalog = discover(path=[path])
    assert said(catalog) == [("PLUGIN_LOAD_FAILED", "acme_kernels-1.0.dist-info")]
    assert "cannot be read: " in catalog.findings[0].why
    assert catalog.plugins == ()


def test_other_api_version_is_not_imported(install, tmp_path):
    catalog = discover(path=[install(tmp_path, text="[kernel_muster.v2]\nacme = never_import_this\n")])
    assert said(catalog) == [("API_MISMATCH", "acme")]
    assert catalog.plugins[0].status == "mismatched"
    assert "never_import_this" not in sys.modules


def test_blocked_plugin_is_not_imported(install, tmp_path):
    catalog = discover(path=[install(tmp_path)], blocked=["acme"])
    assert catalog.findings == ()
    assert catalog.plugins[0].status == "blocked"


def test_demanded_plugin_that_is_there_is_no_finding(install, tmp_path, on_disk):
    assert discover(path=[install(tmp_path)], demanded=["acme"]).findings == ()


@pytest.mark.parametrize("option", ["demanded", "blocked"])
def test_named_plugin_that_is_not_there_is_a_finding_with_a_suggestion(install, tmp_path, on_disk, option):
    catalog = discover(path=[install(tmp_path)], **{option: ["acmee"]})
    assert said(catalog) == [("PLUGIN_NOT_FOUND", "acmee")]
    assert "did you mean acme?" in catalog.findings[0].why


@pytest.mark.parametrize("option", ["demanded", "blocked"])
@pytest.mark.parametrize("name", ["w4a16_gemv", "W4A16-gemv"])
def test_former_built_in_plugin_is_a_finding_with_the_plugins_that_replace_it(option, name):
    catalog = discover(**{option: [name]})
    assert said(catalog) == [("PLUGIN_NOT_FOUND", name)]
    assert catalog.findings[0].why.endswith("; its kernels are in the plugins nvfp4_gemv and dense_gemm")
    assert {"nvfp4_gemv", "dense_gemm"} <= {row.name for row in catalog.plugins}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[kernel_muster.v1]\nacme = no_such_module_at_all\n", "PLUGIN_LOAD_FAILED"),
        ("[kernel_muster.v1]\nacme = acme_on_disk:nothing\n", "PLUGIN_LOAD_FAILED"),
        ("[kernel_muster.v1]\nacme = not a module!\n", "BAD_SPEC"),
        ("[kernel_muster.v1]\nacme\n", "PLUGIN_LOAD_FAILED"),
        (b"[kernel_muster.v1]\n\xff\xfe = x\n", "PLUGIN_LOAD_FAILED"),
    ],
)
def test_broken_metadata_is_a_finding(install, tmp_path, on_disk, text, code):
    catalog = discover(path=[install(tmp_path, text=text)])
    assert [f.code for f in catalog.findings] == [code]
    assert catalog.kernels == ()


@pytest.mark.parametrize(
    ("line", "subject", "why"),
    [
        ("acme =", "acme", "its entry point names no module: nothing stands behind the ="),
        ("acme =   ", "acme", "its entry point names no module: nothing stands behind the ="),
        ("acme = :hooks", "acme", "its entry point names ':hooks', which is no module"),
        ("acme = acme_on_disk:", "acme", "its entry point names 'acme_on_disk:', which is no module"),
        ("acme = acme on disk", "acme", "its entry point names 'acme on disk', which is no module"),
        ("acme = acme-on-disk", "acme", "its entry point names 'acme-on-disk', which is no module"),
        ("= acme_on_disk", "acme-kernels", "its entry point has no name"),
    ],
)
def test_entry_point_without_a_module_or_a_name_is_a_bad_spec(install, tmp_path, line, subject, why):
    catalog = discover(path=[install(tmp_path, text=f"[kernel_muster.v1]\n{line}\n")])
    (finding,) = catalog.findings
    assert (finding.code, finding.subject, finding.why) == ("BAD_SPEC", subject, why)
    assert finding.where[0].startswith("acme-kernels 1.0 (")
    assert '[project.entry-points."kernel_muster.v1"]' in finding.remedies[0]
    assert [row.status for row in catalog.plugins] == ["failed"]
    assert discover(path=[str(tmp_path)], blocked=[catalog.plugins[0].name]).findings == ()


@pytest.mark.parametrize("value", ["acme_on_disk", "acme_on_disk [fast]", " acme_on_disk "])
def test_entry_point_with_blanks_or_extras_is_loaded(install, tmp_path, on_disk, value):
    catalog = discover(path=[install(tmp_path, text=f"[kernel_muster.v1]\nacme = {value}\n")])
    assert (said(catalog), [row.status for row in catalog.plugins]) == ([], ["loaded"])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "None"),
        (0, "a value of type int"),
        (2.5, "a value of type float"),
        (True, "a value of type bool"),
        (Fraction(1, 2), "a value of type Fraction"),
        ("acme", "a value of type str"),
        ((), "a value of type tuple"),
        ({}, "a value of type dict"),
        (object(), "a value of type object"),
        (print, "the function print"),
        (lambda: None, "the function <lambda>"),
        (partial(print, 1), "the function partial"),
        (Fraction, "the class Fraction"),
    ],
)
def test_entry_point_of_what_can_have_no_hooks_is_a_bad_spec(install, tmp_path, monkeypatch, value, what):
    module = ModuleType("acme_on_disk")
    module.value = value
    monkeypatch.setitem(sys.modules, "acme_on_disk", module)
    catalog = discover(path=[install(tmp_path, text="[kernel_muster.v1]\nacme = acme_on_disk:value\n")])
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert catalog.findings[0].why == f"the entry point names {what}, not a module"
    assert [row.status for row in catalog.plugins] == ["failed"]
    assert discover(path=[], local={"acme": value}).findings[0].why == f"the plugin is {what}, not a module"


def test_object_of_a_class_of_its_own_may_have_hooks(install, tmp_path, monkeypatch, on_disk):
    class Plugin:
        muster_kernels = staticmethod(sys.modules["acme_on_disk"].muster_kernels)
        muster_contracts = staticmethod(sys.modules["acme_on_disk"].muster_contracts)

    sys.modules["acme_on_disk"].value = Plugin()
    catalog = discover(path=[install(tmp_path, text="[kernel_muster.v1]\nacme = acme_on_disk:value\n")])
    assert (said(catalog), [row.status for row in catalog.plugins]) == ([], ["loaded"])


def test_record_of_a_distribution_is_read_once_for_all_its_plugins(install, tmp_path):
    reads = []

    class Counting(PathDistribution):
        def read_text(self, filename):
            reads.append(filename)
            return super().read_text(filename)

    path = install(tmp_path)
    record = "".join(f'"acme/m{at}.py",sha256=x,1\nother/n{at}.py,,\n' for at in range(50))
    (tmp_path / "acme_kernels-1.0.dist-info" / "RECORD").write_text(record)
    places = places_of(Counting(tmp_path / "acme_kernels-1.0.dist-info"), [f"acme.m{at}" for at in range(50)])
    assert reads.count("RECORD") == 1
    assert places["acme.m7"] == (os.path.join(path, "acme/m7.py"),)
    assert places_of(PathDistribution(tmp_path / "acme_kernels-1.0.dist-info"), ["other.n7", "acme.nothing", ""]) == {
        "other.n7": (os.path.join(path, "other/n7.py"),), "acme.nothing": (), "": (),
    }  # fmt: skip


def test_metadata_without_a_name_is_no_traceback(install, tmp_path, on_disk):
    catalog = discover(path=[install(tmp_path, metadata="Metadata-Version: 2.1\n")])
    assert len(catalog.plugins) + len(catalog.findings) >= 1


def test_broken_metadata_of_others_is_none_of_our_business(install, tmp_path):
    assert discover(path=[install(tmp_path, text="[console_scripts]\nx")]).findings == ()


@pytest.mark.parametrize("group", ["kernel_muster_v1", "kernel_musters.v1", "kernel_mustre.v1", "kernal_muster.v1"])
def test_slip_in_the_groups_name_is_a_mismatch(install, tmp_path, on_disk, group):
    (finding,) = discover(path=[install(tmp_path, text=f"[{group}]\nacme = acme_on_disk\n")]).findings
    assert (finding.code, finding.subject) == ("API_MISMATCH", "acme")
    assert f"it is registered for {group}, this host speaks kernel_muster.v1" in finding.why


@pytest.mark.parametrize("group", ["kernel_muster_tools.plugins", "kernel_cluster.v1", "kernels.v1", "muster.v1"])
def test_group_of_another_project_is_none_of_our_business(install, tmp_path, group):
    assert discover(path=[install(tmp_path, text=f"[{group}]\nacme = never_import_this\n")]).findings == ()


LOST = [
    "[kernel_muster.v1", "kernel_muster.v1]", "kernel_muster.v1", "[kernel_muster.v1] # ours", "[kernel_mustre.v1",
    "[kernel_muster.v1] acme = acme_on_disk", "\u200b[kernel_muster.v1]",
]  # fmt: skip
OTHERS = "[console_scripts]\nrun = acme:run\n"


@pytest.mark.parametrize(
    "text", [*LOST, *(OTHERS + line for line in LOST), "kernel_muster.v1: acme = acme_on_disk"], ids=repr
)
def test_line_that_means_our_group_and_begins_none_is_a_finding(install, tmp_path, text):
    (finding,) = discover(path=[install(tmp_path, text=f"{text}\nacme = never_import_this\n")]).findings
    assert (finding.code, finding.subject) == ("PLUGIN_LOAD_FAILED", "acme_kernels-1.0.dist-info")
    line = text.splitlines()[-1]
    assert f"its entry_points.txt has the line {line!r}, which begins no group" in finding.why
    assert "expected [kernel_muster.v1]" in finding.why


def test_lines_that_only_name_the_host_are_sound(install, tmp_path, on_disk):
    text = "# for kernel_muster\n[console_scripts]\nmuster = kernel_muster.cli:main\n"
    catalog = discover(path=[install(tmp_path, text=f"{text}[kernel_muster.v1]\nacme = acme_on_disk\n")])
    assert (said(catalog), [row.name for row in catalog.plugins]) == ([], ["acme"])

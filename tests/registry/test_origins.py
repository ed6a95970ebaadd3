"""Modules from their distribution, and modules that only appear to be."""

import json
import sys
import zipfile

import pytest
from kernel_muster.registry.discovery.discover import discover

PLUGIN = """
import kernel_muster as km

@km.hookimpl
def muster_levers():
    return [km.Lever(name="MUSTER_ORIGIN", kind="bool", default=False, doc="Where it comes from.")]
"""
ENTRY = "[kernel_muster.v1]\nacme = {}\n"


@pytest.fixture
def found(monkeypatch):
    """Return a function that discovers the plugins of some folders, in the order of the path, and forgets them."""

    def discovered(*folders):
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_origin"]:
            monkeypatch.delitem(sys.modules, name)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*map(str, folders), *sys.path])
            catalog = discover(path=[str(folder) for folder in folders])
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_origin"]:
            del sys.modules[name]
        return catalog

    return discovered


def write(folder, name="acme_origin.py", text=PLUGIN):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_module_beside_its_metadata_is_sound(found, install, tmp_path):
    install(tmp_path, text=ENTRY.format("acme_origin"))
    write(tmp_path)
    assert found(tmp_path).findings == ()


@pytest.mark.parametrize(
    ("module", "name"), [("acme_origin", "acme_origin.py"), ("acme_origin.inner.plug", "acme_origin/inner/plug.py")]
)
def test_module_that_another_folder_hides_is_a_finding_about_the_distribution(found, install, tmp_path, module, name):
    site, before = tmp_path / "site", tmp_path / "before"
    install(site, text=ENTRY.format(module))
    own, other = write(site, name), write(before, name)
    catalog = found(before, site)
    (finding,) = catalog.findings
    assert (finding.code, finding.subject) == ("PLUGIN_LOAD_FAILED", "acme")
    assert finding.why == f"{module} was imported from {other}, but acme-kernels 1.0 has it at {own}"
    assert finding.where == (f"acme-kernels 1.0 ({module})",)
    assert "or, if that code is meant, install it in the place of acme-kernels 1.0" in finding.remedies
    assert catalog.plugins[0].status == "failed"
    assert found(site, before).findings == ()


def test_module_that_record_lists_and_that_is_gone_is_not_taken_from_elsewhere(found, install, tmp_path):
    site, before = tmp_path / "site", tmp_path / "before"
    install(site, text=ENTRY.format("acme_origin"))
    (site / "acme_kernels-1.0.dist-info" / "RECORD").write_text("acme_origin.py,sha256=00,1\n")
    write(before)
    assert [f.code for f in found(before, site).findings] == ["PLUGIN_LOAD_FAILED"]


def editable(site, project):
    url = {"dir_info": {"editable": True}, "url": project.as_uri()}
    (site / "acme_kernels-1.0.dist-info" / "direct_url.json").write_text(json.dumps(url))


def test_editable_install_is_sound_and_what_hides_it_is_not(found, install, tmp_path):
    site, project, before = tmp_path / "site", tmp_path / "a project", tmp_path / "before"
    install(site, text=ENTRY.format("acme_origin"))
    editable(site, project)
    write(project, "src/acme_origin.py")
    write(before)
    assert found(site, project / "src").findings == ()
    assert [f.code for f in found(before, site, project / "src").findings] == ["PLUGIN_LOAD_FAILED"]


def test_archive_namespace_package_and_links_are_sound(found, install, tmp_path):
    info = "acme_kernels-1.0.dist-info"
    archive = tmp_path / "acme.zip"
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
        wheel.writestr(f"{info}/entry_points.txt", ENTRY.format("acme_origin"))
        wheel.writestr("acme_origin.py", PLUGIN)
    assert found(archive).findings == ()
    install(tmp_path / "site", text=ENTRY.format("acme_origin.plug"))
    write(tmp_path / "site", "acme_origin/plug.py")
    write(tmp_path / "other", "acme_origin/more.py")
    assert found(tmp_path / "other", tmp_path / "site").findings == ()
    (tmp_path / "linked").symlink_to(tmp_path / "site")
    assert found(tmp_path / "linked", tmp_path / "site").findings == ()


def test_metadata_that_does_not_say_where_its_module_lies_is_sound(found, install, tmp_path):
    install(tmp_path / "site", text=ENTRY.format("acme_origin"))
    write(tmp_path / "elsewhere")
    assert found(tmp_path / "site", tmp_path / "elsewhere").findings == ()


def test_metadata_that_stands_twice_may_have_its_module_in_either_folder(found, install, tmp_path):
    for place in "ab":
        install(tmp_path / place, text=ENTRY.format("acme_origin"))
        write(tmp_path / place)
    assert found(tmp_path / "a", tmp_path / "b").findings == found(tmp_path / "b", tmp_path / "a").findings == ()


def test_host_that_another_copy_of_it_hides_is_one_finding(found, install, tmp_path, monkeypatch):
    text = "[kernel_muster.v1]\nrope = kernel_muster.plugins.rope\nsilu = kernel_muster.plugins.silu\n"
    install(tmp_path, "kernel-muster", "9.9", text)
    package = write(tmp_path, "kernel_muster/__init__.py", "")
    (finding,) = found(tmp_path).findings
    assert (finding.code, finding.subject) == ("PLUGIN_LOAD_FAILED", "kernel-muster")
    host = sys.modules["kernel_muster"].__file__
    assert finding.why == f"kernel_muster was imported from {host}, but kernel-muster 9.9 has it at {package}"

"""Files of others in the package of the host, once they are installed."""

from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.distributions import HOST_DISTRIBUTION

HOST = "[kernel_muster.v1]\nacme = acme_on_disk\n"


def found(install, folder, *files, **options):
    site = install(folder, **options)
    (info,) = folder.glob("*.dist-info")
    (info / "RECORD").write_text("".join(f"{file},sha256=0,1\n" for file in files))
    return discover(path=[site]).findings


def test_plugin_with_files_in_the_package_of_the_host_is_refused(install, tmp_path, on_disk):
    files = ("kernel_muster/plugins/evil/__init__.py", "Kernel_Muster/MODEL_toml/evil/MODEL.toml", "acme_on_disk.py")
    (finding,) = found(install, tmp_path, *files)
    assert (finding.code, finding.subject) == ("PLUGIN_LOAD_FAILED", "acme-kernels")
    said = "it has put files into kernel_muster, where they pass for a part of it"
    assert finding.why == f"{said}: Kernel_Muster/MODEL_toml/evil/MODEL.toml, kernel_muster/plugins/evil/__init__.py"
    assert finding.remedies == ("uninstall it: pip uninstall acme-kernels",)


def test_many_files_in_the_package_of_the_host_are_counted(install, tmp_path, on_disk):
    (finding,) = found(install, tmp_path, *(f"kernel_muster/{number}.py" for number in range(9)))
    assert finding.why.endswith("kernel_muster/2.py and 6 more")


def test_files_of_ones_own_are_sound(install, tmp_path, on_disk):
    assert found(install, tmp_path, "acme/kernel_muster/__init__.py", "kernel_muster_acme/__init__.py") == ()


def test_manifest_that_is_no_file_of_the_host_is_refused(install, tmp_path, on_disk):
    for name in ("own", "evil"):
        (tmp_path / "kernel_muster" / "MODEL_toml" / name).mkdir(parents=True)
        (tmp_path / "kernel_muster" / "MODEL_toml" / name / "MODEL.toml").touch()
    own = "kernel_muster/MODEL_toml/own/MODEL.toml"
    findings = found(install, tmp_path, own, name=HOST_DISTRIBUTION, text=HOST)
    (finding,) = [one for one in findings if one.subject == HOST_DISTRIBUTION and "manifests" in one.why]
    said = "manifests lie in kernel_muster that are none of its files: kernel_muster/MODEL_toml/evil/MODEL.toml"
    assert (finding.code, finding.why) == ("PLUGIN_LOAD_FAILED", said)


def test_editable_install_of_the_host_lists_no_files_and_is_sound(install, tmp_path, on_disk):
    (tmp_path / "kernel_muster" / "MODEL_toml" / "mine").mkdir(parents=True)
    (tmp_path / "kernel_muster" / "MODEL_toml" / "mine" / "MODEL.toml").touch()
    findings = found(install, tmp_path, "__editable__.pth", name=HOST_DISTRIBUTION, text=HOST)
    assert not [one for one in findings if "manifests" in one.why]

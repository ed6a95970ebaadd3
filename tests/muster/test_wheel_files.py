"""Where the files of a wheel go when it is installed: no place of Python, of the host or of others is taken."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from kernel_muster.cli.wheel_files import taken_places
from plugin_texts import source, wheel

DATA = "acme-2.0.data"
SITE = "lib/python3.11/site-packages"


def problems(folder: Path, files: Iterable[str], **options: str) -> list[str]:
    """Return the problems of a wheel with these files: one wheel a test, for each is compared with all installed."""
    return list(taken_places(wheel(folder, "", more=dict.fromkeys(files, "raise RuntimeError"), **options)))


def test_file_in_the_package_of_the_host_is_refused_at_any_depth(tmp_path):
    files = (
        "kernel_muster/MODEL_toml/evil/MODEL.toml",
        "kernel_muster/plugins/evil/__init__.py",
        "kernel_muster/registry/errors.py",
        "kernel_muster/data.txt",
        "kernel_muster.py",
        "kernel_muster.pyd",
        "kernel_muster.cpython-311-x86_64-linux-gnu.so",
        "kernel_muster.abi3.so",
        "__pycache__/kernel_muster.cpython-311.pyc",
        "kernel_muster/__pycache__/api.cpython-311.pyc",
        "Kernel_Muster/plugins/evil/__init__.py",
        "KERNEL_MUSTER.PY",
        "\uff4bernel_muster/evil.py",
        "kernel_muster./evil.py",
        "./kernel_muster/evil.py",
        "kernel_muster//evil.py",
        f"{DATA}/purelib/kernel_muster/plugins/evil/__init__.py",
        f"{DATA}/platlib/kernel_muster/MODEL_toml/evil/MODEL.toml",
        "other-1.data/purelib/kernel_muster/evil.py",
        f"{DATA}/purelib/./kernel_muster/evil.py",
        f"{DATA}/data/{SITE}/kernel_muster/evil.py",
        f"{DATA}/data/lib64/python3.13/site-packages/kernel_muster/evil.py",
        f"{DATA}/data/Lib/site-packages/kernel_muster/evil.py",
        f"{DATA}/data/local/lib/python3.12/dist-packages/kernel_muster/evil.py",
    )
    # a normal install lists its files, for which these stand
    found = [one for one in problems(tmp_path, files) if "would be a part of" in one]
    assert found == [f"{file} would be a part of kernel_muster" for file in sorted(files)]


def test_file_that_leads_out_of_its_folder_is_refused(tmp_path):
    files = (
        "../kernel_muster/evil.py",
        "acme/../kernel_muster/evil.py",
        f"{DATA}/scripts/../lib/python3.11/site-packages/evil.pth",
        "/etc/profile.d/evil.sh",
        "C:/evil.py",
        "acme\\..\\kernel_muster\\evil.py",
        "kernel_muster\\evil.py",
    )
    said = [f"{file} leads out of the folder where it is installed" for file in sorted(files)]
    assert problems(tmp_path, files) == said


def test_file_that_python_reads_at_every_start_is_refused(tmp_path):
    files = (
        "acme.pth",
        "ACME.PTH",
        "acme.start",
        f"{DATA}/purelib/acme.pth",
        f"{DATA}/data/{SITE}/acme.pth",
        "__editable___acme_2_0_finder.py",
        "__editable__.acme-2.0.pth",
        "__editable___acme_finder/__init__.py",
    )
    said = [f"Python would read {file} at every start, and run what it holds" for file in sorted(files)]
    assert problems(tmp_path, files) == said


def test_module_of_python_is_refused(tmp_path):
    files = {
        "sitecustomize.py": "sitecustomize",
        "SiteCustomize.py": "sitecustomize",
        "sitecustomize/inner.py": "sitecustomize",
        "usercustomize/__init__.py": "usercustomize",
        "usercustomize.so": "usercustomize",
        f"{DATA}/platlib/sitecustomize.pyc": "sitecustomize",
        f"{DATA}/data/{SITE}/usercustomize.py": "usercustomize",
        "json.py": "json",
        "json/__init__.py": "json",
        "_Json.abi3.so": "_json",
        "__pycache__/json.cpython-311.pyc": "json",
    }
    said = [f"{file} would be taken for Python's own module {module}" for file, module in sorted(files.items())]
    assert problems(tmp_path, files) == said


def test_file_in_the_folder_of_python_is_refused(tmp_path):
    names = ("Lib/json/__init__.py", "lib/python3.11/json/__init__.py", "python311._pth", "pyvenv.cfg")
    files = [f"{DATA}/data/{name}" for name in names]
    assert problems(tmp_path, files) == [f"{file} would take the place of a file of Python" for file in files]


def test_metadata_of_another_distribution_is_refused(tmp_path):
    files = (
        "kernel_muster-9.9.dist-info/entry_points.txt",
        f"{DATA}/purelib/kernel_muster-9.9.dist-info/METADATA",
        f"{DATA}/purelib/acme-2.0.dist-info/entry_points.txt",
        f"{DATA}/data/{SITE}/kernel_muster.egg-info/PKG-INFO",
        "kernel-muster.egg-link",
    )
    said = [f"{file} would be taken for the metadata of a distribution" for file in sorted(files)]
    assert problems(tmp_path, files) == said


def test_command_of_python_or_of_the_host_is_refused(tmp_path):
    files = {
        "scripts/muster": "muster of kernel-muster",
        "scripts/Muster.exe": "muster of kernel-muster",
        "scripts/muster-script.py": "muster of kernel-muster",
        "data/bin/muster": "muster of kernel-muster",
        "data/Scripts/muster.bat": "muster of kernel-muster",
        "scripts/python3.11": "python3.11 of Python",
        "data/bin/pip": "pip of Python",
        "scripts/activate.csh": "activate of Python",
    }
    found = problems(tmp_path, (f"{DATA}/{file}" for file in files))
    said = {f"{DATA}/{file} would take the place of the command {whose}" for file, whose in files.items()}
    assert {one.partition(" 0.")[0] for one in found} == said


def test_command_that_entry_points_make_is_refused(tmp_path):
    points = "[kernel_muster.v1]\nacme = acme_wheel\n[console_scripts]\nmuster = acme_wheel:main\nacme = acme_wheel:m\n"
    (said,) = problems(tmp_path, (), entry_points=points)
    assert said.startswith("its command muster would take the place of the command muster of kernel-muster")


def test_command_of_another_distribution_is_refused(tmp_path, monkeypatch):
    info = tmp_path / "site" / "tools-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tools\nVersion: 1.0\n")
    (info / "RECORD").write_text("../../../bin/tool-one,,\ntools.py,,\n")
    (info / "entry_points.txt").write_text("[console_scripts]\ntool-two = tools:main\n")
    monkeypatch.syspath_prepend(str(info.parent))
    files = [f"{DATA}/scripts/{name}" for name in ("Tool-Two.exe", "tool-one", "tool-three")]
    assert problems(tmp_path, files) == [
        f"{files[0]} would take the place of the command tool-two of tools 1.0",
        f"{files[1]} would take the place of the command tool-one of tools 1.0",
    ]


def test_compiled_code_for_a_module_of_others_is_refused(tmp_path):
    file = "numpy/__pycache__/__init__.cpython-311.pyc"
    (said,) = problems(tmp_path, [file])
    assert said.startswith(f"{file} is a file of numpy ")


def test_files_of_ones_own_are_fine(tmp_path):
    files = (
        "acme/__init__.py",
        "acme/kernel_muster/__init__.py",
        "acme/site.pth",
        "acme/muster",
        "acme.libs/libacme.so.1",
        "acme/__pycache__/__init__.cpython-311.pyc",
        "json/data.txt",
        f"{DATA}/scripts/acme",
        f"{DATA}/scripts/acme-tools/muster",
        f"{DATA}/headers/acme.h",
        f"{DATA}/data/share/kernel_muster/acme.md",
        f"{DATA}/data/lib/libacme.so",
        f"{DATA}/data/etc/acme.pth",
        f"{DATA}/purelib/acme_more.py",
    )
    assert problems(tmp_path, files) == []


def test_wheel_of_the_host_itself_may_hold_its_package(tmp_path):
    points = "[console_scripts]\nmuster = kernel_muster.__main__:main\n"
    assert problems(tmp_path, ["kernel_muster/__init__.py"], name="kernel_muster", entry_points=points) == []


@pytest.mark.install
def test_check_refuses_and_runs_nothing_of_a_wheel(cli, tmp_path):
    note = tmp_path / "ran"
    more = {"acme.pth": f"import pathlib; pathlib.Path({str(note)!r}).touch()\n"}
    more |= {f"kernel_muster/plugins/evil{number}.py": "" for number in range(4)}
    ran = cli("plugin", "check", wheel(tmp_path, source('spec("acme::double")'), more=more), "--format", "json")
    assert (ran.code, note.exists()) == (1, False)
    (found,) = ran.json["findings"]
    assert (found["code"], found["subject"]) == ("PLUGIN_LOAD_FAILED", "acme-2.0-py3-none-any.whl")
    assert found["why"].startswith("it would do damage where it is installed: Python would read acme.pth at every")
    assert found["why"].endswith("; and 2 more")
    remedy = "let the wheel have modules of its own alone: packages, or py_modules, in its pyproject.toml"
    assert found["remedies"] == [remedy]


@pytest.mark.install
def test_wheel_with_metadata_of_the_host_is_refused_for_that(cli, tmp_path):
    more = {f"{DATA}/purelib/kernel_muster-9.9.dist-info/METADATA": "Name: kernel-muster\nVersion: 9.9\n"}
    ran = cli("plugin", "check", wheel(tmp_path, "", more=more), "--format", "json")
    assert ran.code == 1
    assert "would be taken for the metadata of a distribution" in ran.json["findings"][0]["why"]

"""A plugin that changes the working directory on load redirects no path of the caller."""

import json
import os
from pathlib import Path
from typing import Any

import kernel_muster as km
import pytest

# Changes the folder at once, and again from a thread that continues after the import.
LEAVING = """
import os, threading, time
import kernel_muster as km

def leave():
    for _ in range(200):
        os.chdir({elsewhere!r})
        time.sleep(0.001)

os.chdir({elsewhere!r})
{thread}

@km.hookimpl
def muster_audit_finished(report):
    os.chdir({elsewhere!r})
"""
THREADS = ["", "threading.Thread(target=leave).start()"]


@pytest.fixture
def at_home(cli: Any, request: pytest.FixtureRequest) -> Path:
    """Install the leaving plugin, and stand in a folder with a manifest; the folder it goes to holds another one."""
    elsewhere, home = cli.folder / "elsewhere", cli.folder / "home"
    for folder, more in ((elsewhere, '[expected_absent.acme]\nmul = "of another model altogether"'), (home, "")):
        cli.manifest(more).rename(folder.with_suffix(".toml"))
        folder.mkdir()
        folder.with_suffix(".toml").rename(folder / "MODEL.toml")
    cli.install(LEAVING.format(elsewhere=str(elsewhere), thread=request.param), "leaving")
    cli.acme("acme::double")
    cli.monkeypatch.chdir(home)
    return home


def findings(report: Any) -> list[str]:
    return sorted({row["code"] for row in report["findings"]})


@pytest.mark.parametrize("at_home", THREADS, indirect=True)
def test_files_of_the_command_lie_where_it_was_called(cli: Any, at_home: Path) -> None:
    files = ("--manifest", "MODEL.toml", "--output", "report.json", "--trace", "trace.json")
    done = cli.process("audit", *files, "--target", "cpu", "--format", "json", cwd=at_home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in at_home.iterdir()) == ["MODEL.toml", "report.json", "trace.json"]
    assert [path.name for path in (cli.folder / "elsewhere").iterdir()] == ["MODEL.toml"]
    report = json.loads((at_home / "report.json").read_text())
    assert report["manifest"] == str(at_home / "MODEL.toml")
    assert findings(report) == ["PROCESS_CHANGED"]  # no UNUSED_WAIVER: that belongs to the other manifest


@pytest.mark.parametrize("at_home", THREADS, indirect=True)
@pytest.mark.parametrize("command", ["boot", "matrix", "models", "levers", "kernels"])
def test_every_command_reads_what_its_caller_named(cli: Any, at_home: Path, command: str) -> None:
    (at_home / "config.json").write_text('{"model_type": "acme_type", "hidden_size": 64}')
    named = {
        "boot": ("--manifest", "MODEL.toml", "--target", "cpu"),
        "matrix": ("--manifests", ".", "--targets", "cpu"),
        "models": ("--config", "config.json", "--manifests", "."),
        "levers": ("--manifest", "MODEL.toml"),
        "kernels": ("--target", "cpu"),
    }[command]
    done = cli.process(command, *named, "--output", "out.txt", cwd=at_home)
    assert "Traceback" not in done.stderr
    assert (at_home / "out.txt").is_file(), done.stdout + done.stderr
    assert "of another model" not in (at_home / "out.txt").read_text()
    assert [path.name for path in (cli.folder / "elsewhere").iterdir()] == ["MODEL.toml"]


@pytest.mark.parametrize("at_home", THREADS[:1], indirect=True)
def test_boot_reads_what_its_caller_named_and_leaves_the_folder_as_it_was(cli: Any, at_home: Path) -> None:
    with km.boot(manifest="MODEL.toml", target="cpu", levers={}) as boot:
        km.build_model(boot.manifest, boot.kernels)
    assert Path.cwd() == at_home
    assert boot.report.manifest == str(at_home / "MODEL.toml")
    assert boot.manifest.where("model", "name") == "MODEL.toml:2"
    (finding,) = [row for row in boot.report.findings if row.code == "PROCESS_CHANGED" and "observer" not in row.why]
    assert (finding.severity, finding.subject) == ("warn", "leaving")
    assert f"the working directory to {cli.folder / 'elsewhere'}" in finding.why


def test_boot_means_the_folder_of_its_call(cli: Any) -> None:
    home = cli.manifest().parent
    cli.acme("acme::double")
    cli.monkeypatch.chdir(home)
    boot = km.boot(manifest="MODEL.toml", target="cpu", levers={"MUSTER_CACHE_DIR": "cubins"})
    cli.monkeypatch.chdir("/")
    with boot:
        km.build_model(boot.manifest, boot.kernels)
    assert boot.report.manifest == str(home / "MODEL.toml")


def test_report_shows_no_home_folder(cli: Any) -> None:
    home = cli.manifest().parent
    cli.acme("acme::double")
    cli.monkeypatch.setenv("HOME", str(home))
    with km.boot(manifest=home / "MODEL.toml", target="cpu", levers={}) as boot:
        km.build_model(boot.manifest, boot.kernels)
    assert boot.report.manifest == f"~{os.sep}MODEL.toml"


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "MUSTER_DISABLE"])
def test_variables_that_a_plugin_sets_change_no_boot(cli: Any, name: str) -> None:
    cli.monkeypatch.setenv(name, "before")
    cli.monkeypatch.delenv(name)
    cli.acme("acme::double")
    source = f"import os\nos.environ[{name!r}] = 'acme::double'\nimport kernel_muster as km\n"
    cli.install(f"{source}@km.hookimpl\ndef muster_levers():\n    return []\n", "setting")
    for _ in range(2):
        with km.boot(manifest=cli.manifest(), target="cpu") as boot:
            km.build_model(boot.manifest, boot.kernels)
        assert name not in os.environ
    cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")

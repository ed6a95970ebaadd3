"""Without a GPU each command gives its own remedy: an audit may take another target, a measurement may not."""

from dataclasses import replace
from typing import Any

import pytest
from kernel_muster.audit.report import FindingRow
from kernel_muster.cli import remedies
from kernel_muster.registry.hardware import target

ROW = FindingRow(
    code="NO_DEVICE", severity="refuse", allowed=False, subject="cuda", title="", why="", where=(), layers=(),
    remedies=("as an audit has it",), explains=(), log="",
)  # fmt: skip


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> None:
        raise target.NoDriver("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(target, "read_devices", read)
    monkeypatch.setattr(remedies, "find_spec", lambda name: None)


@pytest.mark.parametrize("command", [("bench", "gemv"), ("bench", "--format", "json"), ("tune",)])
def test_measurement_without_a_gpu_names_no_other_target(cli: Any, no_driver: None, command: tuple[str, ...]) -> None:
    ran = cli(*command)
    assert (ran.code, ran.err) == (1, "")
    assert "NO_DEVICE" in ran.out
    for wanted in ("machine with an NVIDIA GPU", "libcuda.so.1", "kernel-muster[cuda13]"):
        assert wanted in ran.out
    assert "--target cpu" not in ran.out
    assert "--target sm_90a" not in ran.out


def test_refused_measurement_as_json_is_the_report_of_its_boot(cli: Any, no_driver: None) -> None:
    for command in ("bench", "tune"):
        report = cli(command, "--format", "json").json
        assert (report["schema"], report["verdict"]) == ("kernel-muster/report", "refused")


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize(("name", "kind"), [("cpu", "the host is none"), ("sm_90a", "an architecture alone is none")])
def test_measurement_on_what_is_no_device_says_what_to_name(cli: Any, command: str, name: str, kind: str) -> None:
    said = f"needs a device, and {kind}: leave --target out, or name a GPU: --target cuda"
    ran = cli(command, "--target", name)
    assert ran.code == 1
    assert said in ran.out
    ran = cli(command, "--target", name, "--format", "json")
    assert (ran.code, ran.out) == (1, "")
    assert said in ran.err


@pytest.mark.parametrize(
    "command", [("boot", "qwen3.6-27b"), ("ab", "qwen3.6-27b"), ("ab", "qwen3.6-27b", "--format", "json")]
)
def test_decode_without_a_gpu_offers_the_host_and_the_audit(
    cli: Any, no_driver: None, command: tuple[str, ...]
) -> None:
    ran = cli(*command)
    assert ran.code == 1
    assert "decode on the host on purpose, at reduced size: --target cpu" in ran.out
    assert "muster audit MODEL --target sm_90a" in ran.out
    assert "name an architecture" not in ran.out


@pytest.mark.parametrize(
    ("template", "parameters", "said"),
    [
        ("no_device.ordinal", {"count": 2}, ["name a GPU that the driver sees"]),
        ("no_device.ordinal", {"count": 0}, ["run it on a machine", "on that machine: make the GPU"]),
        ("no_device.failed", {}, ["run it on a machine", "on that machine: make the GPU"]),
        ("no_device.driver", {}, ["run it on a machine", "on that machine: install NVIDIA's driver"]),
    ],
)
def test_remedy_of_a_measurement_follows_the_cause(
    monkeypatch: pytest.MonkeyPatch, template: str, parameters: dict[str, int], said: list[str]
) -> None:
    monkeypatch.setattr(remedies, "find_spec", lambda name: object())
    found = remedies._fitted(replace(ROW, template=template, parameters=parameters), "measure").remedies
    assert [text[: len(start)] for text, start in zip(found, said, strict=True)] == said


def test_other_findings_keep_their_remedies() -> None:
    row = replace(ROW, code="MISSING")
    assert remedies._fitted(row, "measure") is row


@pytest.mark.parametrize("command", [("ab", "qwen3.6-28b", "--target", "cpu")])
def test_command_without_an_option_for_one_manifest_names_the_one_that_it_has(
    cli: Any, command: tuple[str, ...]
) -> None:
    ran = cli(*command)
    assert ran.code == 1
    assert "--manifests FOLDER" in ran.out
    assert "--manifest FILE" not in ran.out

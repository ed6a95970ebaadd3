"""Architectures and their code: the rules of the CUDA C++ Programming Guide as one table, written by hand."""

import pytest
from kernel_muster.registry.hardware.arch import KNOWN_CAPABILITIES, canonical_arch, parse_arch, parse_code_arch

TARGETS = [
    *("cpu", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100f", "sm_100a"),
    *("sm_103f", "sm_103a", "sm_110a", "sm_120", "sm_120f", "sm_120a", "sm_121", "sm_121a"),
]

#: entry -> every target above that it runs on.
RUNS_ON = {
    "cpu": "cpu",
    # source: compiled for the target, with at least this capability
    "sm_75+": "sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_90a sm_100 sm_100f sm_100a sm_103f sm_103a sm_110a sm_120 "
    "sm_120f sm_120a sm_121 sm_121a",
    "sm_90+": "sm_90 sm_90a sm_100 sm_100f sm_100a sm_103f sm_103a sm_110a sm_120 sm_120f sm_120a sm_121 sm_121a",
    "sm_121+": "sm_121 sm_121a",
    # cubin: the same major, minor at least its own
    "sm_80": "sm_80 sm_86 sm_87 sm_89",
    "sm_86": "sm_86 sm_87 sm_89",
    "sm_89": "sm_89",
    "sm_90": "sm_90 sm_90a",
    "sm_100": "sm_100 sm_100f sm_100a sm_103f sm_103a",
    "sm_120": "sm_120 sm_120f sm_120a sm_121 sm_121a",
    # a: that capability alone, and only if the target has its features
    "sm_90a": "sm_90a",
    "sm_100a": "sm_100a",
    "sm_121a": "sm_121a",
    # f: the family, from its own member on
    "sm_100f": "sm_100f sm_100a sm_103f sm_103a",
    "sm_103f": "sm_103f sm_103a",
    "sm_120f": "sm_120f sm_120a sm_121a",
    # PTX: forward, unless its suffix ties it down
    "compute_75": "sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_90a sm_100 sm_100f sm_100a sm_103f sm_103a sm_110a sm_120 "
    "sm_120f sm_120a sm_121 sm_121a",
    "compute_90": "sm_90 sm_90a sm_100 sm_100f sm_100a sm_103f sm_103a sm_110a sm_120 sm_120f sm_120a sm_121 sm_121a",
    "compute_90a": "sm_90a",
    "compute_120f": "sm_120f sm_120a sm_121a",
}


@pytest.mark.parametrize("entry", RUNS_ON)
def test_code_runs_on_exactly_the_targets_of_the_table(entry):
    code = parse_code_arch(entry)
    targets = {name: None if name == "cpu" else parse_arch(name) for name in TARGETS}
    assert [name for name, arch in targets.items() if code.rejects(arch) is None] == RUNS_ON[entry].split()


def test_rejection_names_what_is_needed_and_what_is_there():
    assert parse_code_arch("sm_90a").rejects(parse_arch("sm_100a")) == "needs sm_90a, the target is sm_100a"
    assert parse_code_arch("sm_90a").rejects(None) == "needs sm_90a, the target is cpu"
    assert "oracle" in str(parse_code_arch("cpu").rejects(parse_arch("sm_90a")))


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), "sm_75"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 1), "sm_121a")],
)
def test_detected_device_has_its_canonical_name(capability, name):
    assert str(canonical_arch(capability)) == name


@pytest.mark.parametrize("capability", KNOWN_CAPABILITIES)
def test_arch_reads_back_what_it_is_called(capability):
    arch = canonical_arch(capability)
    assert parse_arch(str(arch)) == arch


def test_capabilities_compare_as_numbers_not_as_text():
    assert parse_arch("sm_100a").capability == (10, 0)
    assert parse_code_arch("sm_90+").rejects(parse_arch("sm_121a")) is None
    assert parse_code_arch("sm_121+").rejects(parse_arch("sm_90a")) is not None


@pytest.mark.parametrize(
    "text",
    ["", "sm_", "sm_9", "sm_95a", "sm_80a", "sm_90f", "sm_90b", "sm_90aa", "SM_90a", "sm_90a ", "sm_90a\n", "sm_090",
     "sm_\u0669\u0660", "compute_90", "sm_90+", "90", "cuda"],
)  # fmt: skip
def test_text_that_is_no_arch_is_refused(text):
    with pytest.raises(ValueError, match=r"sm_|compute|suffix"):
        parse_arch(text)


@pytest.mark.parametrize(
    "text", ["", "sm_90a+", "compute_90+", "sm_100f+", "sm_1+", "compute_", "gpu", "CPU", "sm_90 ", 90, None, "sm_090+"]
)
def test_text_that_is_no_entry_is_refused(text):
    with pytest.raises(ValueError, match=r"arch entry|'\+' goes|known compute"):
        parse_code_arch(text)


def test_specificity_is_suffix_first_then_the_higher_minimum():
    order = ["compute_75", "sm_80+", "sm_90+", "sm_100", "sm_100f", "sm_120f", "sm_90a", "sm_121a"]
    assert sorted(order, key=lambda text: parse_code_arch(text).specificity) == order

"""The work of reading a manifest grows in proportion to its size, for any kind of entry."""

import pytest
from kernel_muster.MODEL_toml.crosscheck import cross_problems
from kernel_muster.MODEL_toml.loader import load_manifest
from kernel_muster.MODEL_toml.schema import _no_repeats, _one_value_a_lever
from kernel_muster.registry import suggestions
from kernel_muster.registry.levers import CORE_LEVERS
from work import growth, instructions

HEAD = '[model]\nname = "tiny"\nquant = "nvfp4"\n'
REASON = '"the plain tile serves these layers"'
MANIFESTS = {
    "waivers": lambda n: "[expected_absent.m]\n" + "".join(f"f{i:03} = {REASON}\n" for i in range(n)),
    "one key for many architectures": lambda n: "".join(
        f'[target."sm_9{i:03}".expected_absent.m]\nf = {REASON}\n' for i in range(n)
    ),
    "reasons that are none": lambda n: "[expected_absent.m]\n" + "".join(f'f{i:03} = "todo"\n' for i in range(n)),
    "unknown keys": lambda n: "".join(f"zzz{i:03} = 1\n" for i in range(n)),
    "unknown tables": lambda n: "".join(f"[zzz{i:03}]\nx = 1\n" for i in range(n)),
    "levers of nobody": lambda n: "".join(
        f'[expected_absent.m.f{i:03}]\nreason = {REASON}\nlevers = ["MUSTER_ZZZ{i:03}=1"]\n' for i in range(n)
    ),
}


@pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS)
def test_manifest_costs_in_proportion_to_its_size(text, tmp_path, monkeypatch):
    monkeypatch.setattr(suggestions, "MOST_COMPARED", 4)  # the limit is reached at 40 names

    def loading(size):
        file = tmp_path / f"{size}.toml"
        file.write_text(HEAD + text(size))
        return lambda: load_manifest(file, levers=CORE_LEVERS)

    loading(2)()
    assert growth(loading, 40) < 2.1


def test_entries_of_one_key_for_thousands_of_architectures_are_not_compared_pairwise():
    def checking(size):
        targets = {f"sm_{at:04}": {"expected_absent": {"m": {"f": "x"}}} for at in range(size)}
        return lambda: cross_problems({"target": targets})

    assert growth(checking, 40) < 2.01


def test_entry_that_applies_everywhere_clashes_with_each_of_one_architecture():
    data = {
        "expected_absent": {"m": {"f": "x"}},
        "expected_present": {"m": {"f": {"reason": "x", "archs": ["sm_90a", "sm_100a"]}}},
        "target": {"sm_90a": {"expected_absent": {"m": {"f": "x"}}}, "sm_121a": {"expected_absent": {"m": {"f": "x"}}}},
    }
    assert sorted(problem.why.partition(": ")[0] for problem in cross_problems(data)) == [
        "expected_present.m.f",
        "expected_present.m.f",
        "target.sm_121a.expected_absent.m.f",
        "target.sm_90a.expected_absent.m.f",
    ]


@pytest.mark.parametrize("check", [_no_repeats, _one_value_a_lever])
def test_list_is_searched_for_repeats_once(check):
    class Value(str):
        compared = 0

        def __eq__(self, other):
            Value.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    values = tuple(Value(f"MUSTER_A{at}=1") for at in range(2000))
    assert check(values) == values
    assert Value.compared < 4000
    assert instructions(lambda: check(values)) < 2000 * 50
    with pytest.raises(ValueError, match="more than once"):
        check((*values, values[7]))

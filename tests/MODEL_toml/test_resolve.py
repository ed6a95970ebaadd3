import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.errors import UsageError

Make = Callable[..., Catalogue]
INTERLEAVED = {"rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True}


def row(model_type: str, hidden_size: int | None = None) -> str:
    size = "" if hidden_size is None else f"hidden_size = {hidden_size}\n"
    return f'[[model_types]]\nmodel_type = "{model_type}"\n{size}'


def nested(model_type: str, hidden_size: object = 2048, **text: object) -> dict[str, Any]:
    """A config.json as multimodal checkpoints have it; architectures must not matter."""
    inner = {"model_type": f"{model_type}_text", "hidden_size": hidden_size, **text}
    return {
        "architectures": ["Gemma"],
        "model_type": model_type,
        "text_config": inner,
        "vision_config": {"hidden_size": 1},
    }


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return Catalogue.from_folders([manifest_folder()])


def name(catalogue: Catalogue, config: Any, reference: Any = None) -> str:
    """What a config resolves to, or the finding's code."""
    resolution = catalogue.resolve_config(config, reference)
    assert (resolution.manifest is None) != (resolution.finding is None)
    assert resolution.steps
    if resolution.manifest is not None:
        return resolution.manifest.name
    assert resolution.finding is not None
    return resolution.finding.code


SHIPPED_CONFIGS = [
    ("qwen3.6-35b-a3b", nested("qwen3_5_moe", rope_parameters=INTERLEAVED), None),
    ("qwen3.6-35b-a3b", nested("qwen3_6_moe"), None),
    ("qwen3.6-35b-a3b", {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "rope_scaling": INTERLEAVED}, None),
    ("qwen3.6-35b-a3b", nested("qwen3_5_moe", rope_parameters={"full_attention": INTERLEAVED}), None),
    ("qwen3.6-35b-a3b", nested("qwen3_5_moe", rope_parameters=INTERLEAVED), "/models/Ornith-1.0-35B-NVFP4"),
    ("ornith-1.0-35b", nested("qwen3_5_moe", rope_parameters=INTERLEAVED), "ornith-1.0-35b"),
    (
        "qwen3.6-35b-a3b-heretic",
        nested("qwen3_5_moe", rope_parameters=INTERLEAVED),
        "AEON-7/Qwen3.6-35B-A3B-heretic-NVFP4",
    ),
    ("holo-3.1-35b-a3b", nested("qwen3_5_moe"), None),
    ("UNKNOWN_MODEL", nested("qwen3_5_moe", rope_parameters={**INTERLEAVED, "mrope_interleaved": False}), None),
    ("AMBIGUOUS_MODEL", nested("qwen3_5", 5120, rope_parameters=INTERLEAVED), None),
    ("AMBIGUOUS_MODEL", nested("qwen3_5", 5120), "/models/some-27b"),
    ("AMBIGUOUS_MODEL", nested("qwen3_5", 5120), "/qwen3.6-27b/against/Qwen3.8-27B"),
    ("qwen3.6-27b", nested("qwen3_5", 5120, rope_parameters=INTERLEAVED), "/models/unsloth--Qwen3.6-27B-NVFP4/snap"),
    ("qwen3.8-27b", nested("qwen3_5", 5120), Path("/models/QWEN3.8-27B")),
    ("qwen3.8-27b", nested("qwen3_5", 5120), "unsloth/Qwen3.8-27B-NVFP4"),
    ("UNKNOWN_MODEL", nested("qwen3_5", 4096), None),
    ("UNKNOWN_MODEL", nested("qwen3_5_moe", 4096, rope_parameters=INTERLEAVED), None),
    ("UNKNOWN_MODEL", {"model_type": "qwen3", "hidden_size": 2048}, "z-lab/drafter"),
    ("qwen3.6-35b-a3b-dflash", {"model_type": "qwen3", "hidden_size": 2048}, "z-lab/Qwen3.6-35B-A3B-DFlash"),
]


@pytest.mark.parametrize(("expected", "config", "reference"), SHIPPED_CONFIGS)
def test_shipped_models_resolve_from_their_configs(
    shipped: Catalogue, expected: str, config: dict[str, Any], reference: str | None
) -> None:
    assert name(shipped, config, reference) == expected


def test_ambiguous_model_names_the_candidates_and_how_to_say_which(shipped: Catalogue) -> None:
    finding = shipped.resolve_config(nested("qwen3_5", 5120), "/models/x").finding
    assert finding is not None
    assert finding.why == (
        "2 manifests serve (qwen3_5, 5120) equally well: qwen3.6-27b, qwen3.8-27b; "
        "the reference '/models/x' does not decide"
    )
    assert finding.remedies == (
        "name one of them: qwen3.6-27b, qwen3.8-27b",
        "or give a reference (--ref) that holds a text of one of them alone: "
        "qwen3.6-27b by 'qwen3.6-27b'; qwen3.8-27b by 'qwen3.8-27b'",
    )
    assert len(finding.where) == 2


def test_resolve_takes_exact_names_only_and_suggests_near_ones(shipped: Catalogue) -> None:
    for manifest in shipped.manifests:
        assert shipped.resolve(manifest.name).manifest is manifest
        assert manifest.hf_id is not None
        assert shipped.resolve(manifest.hf_id).manifest is manifest
    finding = shipped.resolve("Qwen3.6-27B").finding
    assert finding is not None
    assert finding.code == "UNKNOWN_MODEL"
    assert finding.why == "no manifest is named 'Qwen3.6-27B'; did you mean qwen3.6-27b or qwen3.8-27b?"


@pytest.mark.parametrize("reference", ["", " ", "x" * 100_000, "a\0b", "../..", "\x1b[31m", "nu\ud800ll"])
def test_resolve_of_a_hostile_name_is_unknown(shipped: Catalogue, reference: str) -> None:
    resolution = shipped.resolve(reference)
    assert resolution.manifest is None
    assert resolution.finding is not None
    assert resolution.finding.code == "UNKNOWN_MODEL"
    assert resolution.finding.why.isprintable()
    assert len(resolution.finding.why) < 300


def test_exact_tier_beats_wildcard_rows(catalogue: Make) -> None:
    made = catalogue(exact=row("t", 64), wild=row("t"))
    assert made.findings == ()
    assert name(made, {"model_type": "t", "hidden_size": 64}) == "exact"
    assert name(made, {"model_type": "t", "hidden_size": 65}) == "wild"
    assert name(made, {"model_type": "t"}) == "wild"


def test_an_unresolved_tie_never_falls_to_the_wildcard_tier(catalogue: Make) -> None:
    made = catalogue(a=row("t", 64), b=row("t", 64), wild='match_names = ["wild"]\n' + row("t"))
    assert name(made, {"model_type": "t", "hidden_size": 64}) == "AMBIGUOUS_MODEL"
    assert name(made, {"model_type": "t", "hidden_size": 64}, "this is wild") == "AMBIGUOUS_MODEL"


def test_wildcard_ties_are_broken_by_needles_too(catalogue: Make) -> None:
    made = catalogue(a='match_names = ["Alpha"]\n' + row("t"), b='match_names = ["beta"]\n' + row("t"))
    assert name(made, {"model_type": "t", "hidden_size": 1}) == "AMBIGUOUS_MODEL"
    assert name(made, {"model_type": "t", "hidden_size": 1}, "/m/ALPHA-x") == "a"


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("/m/qwen-9b-pro-x", "pro"),
        ("/m/qwen-9b-x", "plain"),
        ("/m/qwen-9b-pro-and-lite", "AMBIGUOUS_MODEL"),
        ("/m/lite", "lite"),
        ("/m/other", "AMBIGUOUS_MODEL"),
    ],
)
def test_a_longer_needle_beats_the_one_it_contains(catalogue: Make, reference: str, expected: str) -> None:
    made = catalogue(
        plain='match_names = ["qwen-9b"]\n' + row("t", 1),
        pro='match_names = ["qwen-9b-pro", "unrelated"]\n' + row("t", 1),
        lite='match_names = ["lite"]\n' + row("t", 1),
    )
    assert name(made, {"model_type": "t", "hidden_size": 1}, reference) == expected


def test_resolution_does_not_depend_on_the_order_of_folders(tmp_path: Path) -> None:
    folders = []
    for model in ("a", "b", "c"):
        file = tmp_path / model / model / "MODEL.toml"
        file.parent.mkdir(parents=True)
        file.write_text(f'[model]\nname = "{model}"\nquant = "bf16"\nmatch_names = ["{model}{model}"]\n' + row("t", 1))
        folders.append(tmp_path / model)
    outcomes = set()
    for order in permutations(folders):
        made = Catalogue.from_folders(order)
        tie = made.resolve_config({"model_type": "t", "hidden_size": 1}).finding
        outcomes.add(
            (tuple(one.name for one in made.manifests), tie, name(made, {"model_type": "t", "hidden_size": 1}, "bb"))
        )
    assert len(outcomes) == 1


def test_two_manifests_of_one_name_are_duplicate_model_wherever_they_are_met(tmp_path: Path) -> None:
    files = []
    for folder in ("one", "two"):
        file = tmp_path / folder / "m" / "MODEL.toml"
        file.parent.mkdir(parents=True)
        file.write_text('[model]\nname = "m"\nquant = "bf16"\n' + row("t", 1))
        files.append(file)
    made = Catalogue.from_folders([tmp_path / "two", tmp_path / "one"])
    (finding,) = made.findings
    assert (finding.code, finding.subject, finding.why) == (
        "DUPLICATE_MODEL",
        "m",
        "2 manifests describe a model named m",
    )
    assert finding.where == tuple(f"{file}:2" for file in files)
    assert made.resolve("m").finding == finding
    assert made.resolve_config({"model_type": "t", "hidden_size": 1}).finding == finding


def test_one_folder_given_twice_is_no_duplicate(tmp_path: Path, catalogue: Make) -> None:
    catalogue(m="")
    (tmp_path / "link").symlink_to(tmp_path / "m")
    assert Catalogue.from_folders([tmp_path, tmp_path / ".", tmp_path / "m"]).findings == ()


def test_a_broken_manifest_explains_the_miss_of_its_model(catalogue: Make) -> None:
    made = catalogue(good="", bad="surprise = 1\n")
    assert [one.name for one in made.manifests] == ["good"]
    (finding,) = made.findings
    assert finding.code == "BAD_MANIFEST"
    assert made.resolve("bad").finding == finding
    assert made.resolve("good").finding is None


@pytest.mark.parametrize("what", ["none", "empty", "file"])
def test_a_folder_without_manifests_is_a_finding(tmp_path: Path, what: str) -> None:
    folder = tmp_path / what
    if what == "empty":
        folder.mkdir()
    elif what == "file":
        folder.write_text("x")
    (finding,) = Catalogue.from_folders([folder]).findings
    why = "holds no <name>/MODEL.toml" if what == "empty" else "is no folder"
    assert (finding.code, finding.why) == ("BAD_MANIFEST", f"{folder} {why}")


def test_config_of_a_known_type_and_another_size_is_told_the_sizes_that_there_are(shipped: Catalogue) -> None:
    finding = shipped.resolve_config(nested("qwen3_5", 256)).finding
    assert finding is not None
    assert finding.why.startswith("no manifest claims model_type qwen3_5, hidden_size 256; of this type there is ")
    assert "hidden_size 5120 (qwen3.6-27b" in finding.why
    assert "did you mean" not in finding.why
    assert any("--manifest FILE, or boot(manifest=FILE)" in remedy for remedy in finding.remedies)
    misspelt = shipped.resolve_config(nested("qwen3_55", 5120)).finding
    assert misspelt is not None
    assert "did you mean qwen3_5" in misspelt.why


def test_resolve_of_a_checkpoint_folder_reads_its_config(tmp_path: Path, shipped: Catalogue) -> None:
    folder = tmp_path / "Qwen3.8-27B-NVFP4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(nested("qwen3_5", 5120)))
    for reference in (folder, str(folder), folder / "config.json"):
        manifest = shipped.resolve(reference).manifest
        assert manifest is not None
        assert manifest.name == "qwen3.8-27b"
    assert name(shipped, folder / "config.json", "qwen3.6-27b") == "qwen3.6-27b"


def test_steps_say_how_a_model_was_found(shipped: Catalogue) -> None:
    resolution = shipped.resolve_config(nested("qwen3_5_moe", rope_parameters=INTERLEAVED))
    assert resolution.manifest is not None
    assert resolution.steps == (
        "config.json: model_type 'qwen3_5_moe' or 'qwen3_5_moe_text', hidden_size 2048",
        "its rope parameters are interleaved mrope, so it counts as qwen3_6_moe",
        "exact rows: qwen3.6-35b-a3b",
        f"resolved as qwen3.6-35b-a3b ({resolution.manifest.path})",
    )


@pytest.mark.parametrize(
    ("model", "config", "said", "serves"),
    [
        ("qwen3.6-27b", nested("qwen3_5", 4096), "type qwen3_5, hidden_size 4096", "type qwen3_5, hidden_size 5120"),
        ("qwen3.6-27b", nested("llama", 5120), "type llama, hidden_size 5120", "type qwen3_5, hidden_size 5120"),
        ("ornith-1.0-35b", nested("qwen3_5", 2048), "type qwen3_5,", "type qwen3_6_moe, hidden_size 2048"),
        ("ornith-1.0-35b", nested("qwen3_6_moe", 9), "hidden_size 9", "type qwen3_6_moe, hidden_size 2048"),
    ],
)
def test_config_that_contradicts_the_named_model_is_refused_with_both_facts(
    shipped: Catalogue, model: str, config: Any, said: str, serves: str
) -> None:
    finding = shipped.resolve_config(config, model).finding
    assert finding is not None
    assert (finding.code, finding.subject) == ("UNKNOWN_MODEL", model)
    assert f"{model} was named, but the config.json says model_type" in finding.why
    assert said in finding.why
    assert f"; {model} is model_type {serves.removeprefix('type ')}" in finding.why
    assert finding.where[0].rpartition(":")[2].isdigit()


def test_config_without_a_size_or_a_manifest_without_a_type_contradicts_nothing(
    shipped: Catalogue, catalogue: Make
) -> None:
    assert name(shipped, {"model_type": "qwen3_5"}, "qwen3.6-27b") == "qwen3.6-27b"
    assert name(catalogue(bare=""), {"model_type": "t", "hidden_size": 1}, "bare") == "bare"


WHOLE = {"num_hidden_layers": 40}
OF_HOLO = nested("qwen3_5_moe", rope_parameters=INTERLEAVED, mtp_num_hidden_layers=None, **WHOLE)
OF_35B = nested("qwen3_5_moe", rope_parameters=INTERLEAVED, mtp_num_hidden_layers=1, **WHOLE)


@pytest.mark.parametrize(("expected", "config", "reference"), [
    ("holo-3.1-35b-a3b", OF_HOLO, "/models/Holo-3.1-35B-A3B-NVFP4"),
    ("holo-3.1-35b-a3b", OF_HOLO, "holo-3.1-35b-a3b"),
    ("holo-3.1-35b-a3b", OF_HOLO, "Hcompany/Holo-3.1-35B-A3B-NVFP4"),
    ("UNKNOWN_MODEL", OF_HOLO, None),
    ("UNKNOWN_MODEL", OF_HOLO, "/models/Qwen3.6-35B-A3B"),
    ("UNKNOWN_MODEL", nested("qwen3_5_moe", rope_parameters=INTERLEAVED, **WHOLE), "qwen3.6-35b-a3b"),
    ("UNKNOWN_MODEL", nested("qwen3_5_moe", rope_parameters=INTERLEAVED, mtp_num_hidden_layers=None), None),
    ("qwen3.6-35b-a3b", OF_35B, None),
    ("UNKNOWN_MODEL", OF_35B, "/models/Holo-3.1-35B-A3B-NVFP4"),
    ("UNKNOWN_MODEL", OF_35B, "holo-3.1-35b-a3b"),
    ("AMBIGUOUS_MODEL", OF_35B, "/models/Holo-3.1-35B-A3B/from/Qwen3.6-35B-A3B"),
])  # fmt: skip
def test_mtp_head_and_needle_tell_models_of_one_config_apart(
    shipped: Catalogue, expected: str, config: dict[str, Any], reference: str | None
) -> None:
    assert name(shipped, config, reference) == expected


def test_config_without_an_mtp_head_gets_the_manifest_that_agrees_with_it(shipped: Catalogue) -> None:
    finding = shipped.resolve_config(OF_HOLO).finding
    assert finding is not None
    assert (
        "config.json: mtp_num_hidden_layers null; manifest: mtp.layers 1; to accept it write no [model.mtp] table"
        in (finding.why)
    )
    assert finding.remedies[0] == "name holo-3.1-35b-a3b, whose manifest agrees with this config.json"


@pytest.mark.parametrize(("reference", "holds"), [
    ("/models/Ornith-1.0-35B-NVFP4", "'ornith-1.0-35b' of ornith-1.0-35b"),
    ("/models/Qwen3.6-35B-A3B-heretic", "'qwen3.6-35b-a3b-heretic' of qwen3.6-35b-a3b-heretic"),
    ("/models/Qwen3.6-27B-NVFP4", "'qwen3.6-27b' of qwen3.6-27b"),
    ("/models/qwen3.6-27b/qwen3.6-35b-a3b", "'qwen3.6-27b' of qwen3.6-27b"),
    ("/models/Qwen3.6-35B-A3B", None),
    ("/models/whatever", None),
    (None, None),
])  # fmt: skip
def test_needle_of_another_model_is_never_ignored(shipped: Catalogue, reference: str | None, holds: str | None) -> None:
    config = nested("qwen3_5_moe", rope_parameters=INTERLEAVED)
    found = shipped.resolve_config(config, reference)
    assert found.manifest is not None
    assert found.manifest.name == "qwen3.6-35b-a3b"
    assert [doubt.code for doubt in found.doubts] == ["REFERENCE_NAMES_OTHER"] * (holds is not None)
    if holds is not None:
        assert found.doubts[0].why == f"{reference} holds {holds}; the config.json was resolved as qwen3.6-35b-a3b"


def test_folder_of_a_config_that_is_called_like_another_model_is_reported(tmp_path: Path, shipped: Catalogue) -> None:
    folder = tmp_path / "Qwen3.8-27B-NVFP4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(nested("qwen3_5", 5120)))
    for config, model, codes in (
        (folder, "qwen3.6-27b", ["REFERENCE_NAMES_OTHER"]), (folder / "config.json", "qwen3.8-27b", []),
    ):  # fmt: skip
        assert [doubt.code for doubt in shipped.resolve_config(config, model).doubts] == codes


@pytest.mark.parametrize(("config", "expected"), [
    ({"model_type": "foo_text", "hidden_size": 64}, "text"),
    ({"model_type": "foo", "hidden_size": 64}, "bare"),
    ({"model_type": "foo", "text_config": {"model_type": "foo_text", "hidden_size": 64}}, "bare"),
    ({"model_type": "foo_vl", "text_config": {"model_type": "foo_text", "hidden_size": 64}}, "text"),
    ({"model_type": "bar_text", "hidden_size": 64}, "other"),
    ({"model_type": "foo_text", "hidden_size": 65}, "wild"),
])  # fmt: skip
def test_exact_type_wins_over_the_same_without_text(catalogue: Make, config: dict[str, Any], expected: str) -> None:
    made = catalogue(bare=row("foo", 64), text=row("foo_text", 64), other=row("bar", 64), wild=row("foo"))
    assert name(made, config) == expected


@pytest.mark.parametrize(("first", "second", "remedies"), [
    (["shared", "One"], ["Shared", "two"], ["one by 'One'; two by 'two'"]),
    (["shared"], ["shared", "two"], ["two by 'two'", "or add match_names that no other has to the manifest of one"]),
    (["shared"], ["shared"], ["or add match_names that no other has to the manifest of one and of two"]),
])  # fmt: skip
def test_remedy_of_a_tie_lists_only_needles_that_decide(
    catalogue: Make, first: list[str], second: list[str], remedies: list[str]
) -> None:
    made = catalogue(one=f"match_names = {first}\n" + row("t", 1), two=f"match_names = {second}\n" + row("t", 1))
    finding = made.resolve_config({"model_type": "t", "hidden_size": 1}, "a shared name").finding
    assert finding is not None
    assert finding.code == "AMBIGUOUS_MODEL"
    assert [text.rpartition("alone: ")[2] for text in finding.remedies[1:]] == remedies
    for needle in {*first, *second} - {"shared", "Shared"}:
        assert name(made, {"model_type": "t", "hidden_size": 1}, f"a {needle}") in ("one", "two")


def test_malformed_config_of_a_named_model_is_refused(shipped: Catalogue) -> None:
    assert name(shipped, {"hidden_size": 5120}, "qwen3.6-27b") == "UNKNOWN_MODEL"


MALFORMED = [
    ({}, "it has no model_type"),
    ({"model_type": 3}, "model_type is 3, expected text"),
    ({"model_type": "t", "hidden_size": "64"}, "hidden_size is '64', expected a positive integer"),
    ({"model_type": "t", "hidden_size": True}, "hidden_size is true, expected a positive integer"),
    ({"model_type": "t", "hidden_size": -1}, "hidden_size is -1, expected a positive integer"),
    ({"model_type": "t", "text_config": []}, "text_config is a list, expected an object"),
    (
        {"model_type": "t", "text_config": {"hidden_size": 1.5}},
        "text_config.hidden_size is 1.5, expected a positive integer",
    ),
    ({"model_type": "t", "rope_parameters": 1}, "rope_parameters is an integer, expected an object"),
    (
        {"model_type": "t", "rope_scaling": {"mrope_interleaved": "yes"}},
        "rope_scaling.mrope_interleaved is 'yes', expected true or false",
    ),
]


@pytest.mark.parametrize(("config", "why"), MALFORMED)
def test_a_malformed_config_is_unknown_model_with_the_reason(
    shipped: Catalogue, config: dict[str, Any], why: str
) -> None:
    finding = shipped.resolve_config(config).finding
    assert finding is not None
    assert (finding.code, finding.why) == ("UNKNOWN_MODEL", f"the config.json is malformed: {why}")


UNREADABLE = {
    "text": (b"model_type", "is not valid JSON: Expecting value"),
    "list": (b"[]", "holds a list, expected an object"),
    "deep": (b"[" * 200_000, "is nested too deeply"),
    "latin": (b'{"model_type": "\xff"}', "is not valid JSON: 'utf-8' codec"),
    "twice": (b'{"model_type": "a", "model_type": "b"}', "is not valid JSON: key 'model_type' stands twice"),
    "integer": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
    "huge": (b" " * (64 * 1024 * 1024 + 1), "has more than 67108864 bytes"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_unreadable_config_is_a_usage_error(tmp_path: Path, shipped: Catalogue, kind: str) -> None:
    raw, why = UNREADABLE[kind]
    file = tmp_path / "config.json"
    file.write_bytes(raw)
    with pytest.raises(UsageError) as caught:
        shipped.resolve_config(file)
    assert str(caught.value).startswith(f"{file} {why}")


@pytest.mark.parametrize("path", ["none.json", "a\0b", "n" * 5000])
def test_a_config_that_is_not_there_is_a_usage_error(shipped: Catalogue, path: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        shipped.resolve_config(path)

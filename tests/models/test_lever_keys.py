"""The kernels that each lever claims to drop or choose among, against the lookups of constructors."""

from collections.abc import Callable

import pytest
from kernel_muster.MODEL_toml import load_manifest, manifest_folder
from kernel_muster.models.build import build_model
from kernel_muster.models.levers import MODEL_LEVERS
from kernel_muster.registry.levers import Lever, concerns, names_key, read_levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups
from lookup_page import HOPPER_TARGET

Asked = Callable[..., set[str]]
MODELS = ("qwen3.6-27b", "qwen3.6-35b-a3b")
NAMING = [lever for lever in MODEL_LEVERS if lever.keys]


@pytest.fixture(scope="module")
def asked(catalog: Catalog) -> Asked:
    """Return what a model asks for on Hopper, under levers."""

    def asked(model: str, **levers: object) -> set[str]:
        manifest, findings = load_manifest(manifest_folder() / model / "MODEL.toml", levers=catalog.levers)
        assert manifest is not None, findings
        snapshot, bad = read_levers(catalog.levers, [("given", levers), ("manifest", manifest.defaults)])
        assert bad == []
        session = LookupSession(catalog, HOPPER_TARGET, snapshot)
        build_model(manifest, Lookups(session), None)
        return {str(key) for entry in session.entries("boot") for key in entry.members}

    return asked


@pytest.fixture(scope="module")
def unmoved(asked: Asked) -> dict[str, set[str]]:
    return {model: asked(model) for model in MODELS}


@pytest.mark.parametrize("lever", NAMING, ids=lambda lever: lever.name)
def test_lever_names_keys_that_exist(lever: Lever, catalog: Catalog, unmoved: dict[str, set[str]]) -> None:
    known = {str(key) for key in catalog.by_key}.union(*unmoved.values(), {"w4a16_v3::w4a16_gemm_t_m128_v3"})
    for pattern in (one for key in lever.keys for one in key.split("|")):
        assert any(names_key(pattern, key) for key in known), pattern


@pytest.mark.parametrize("lever", MODEL_LEVERS, ids=lambda lever: lever.name)
def test_lever_names_all_keys_that_it_adds_or_drops(lever: Lever, asked: Asked, unmoved: dict[str, set[str]]) -> None:
    values = {"bool": (not lever.default,), "enum": lever.choices}.get(lever.kind, ())
    for model, usual in unmoved.items():
        for value in values:
            if lever.name == "MUSTER_FFN_ARM" and value not in ("auto", "batched"):
                continue  # not every kind of FFN has every arm; none asks for other kernels
            changed = usual ^ asked(model, **{lever.name: value})
            assert [key for key in sorted(changed) if not lever.names(key)] == []


def test_kill_switch_names_the_one_key_that_it_drops(asked: Asked, unmoved: dict[str, set[str]]) -> None:
    kills = [lever for lever in NAMING if lever.effects.get(True, "").endswith("dropped, never looked up")]
    assert len(kills) >= 6
    for lever in kills:
        (key,) = lever.keys
        assert key in unmoved["qwen3.6-27b"]
        assert key not in asked("qwen3.6-27b", **{lever.name: True})


def test_lever_of_experts_concerns_only_a_model_that_has_some(unmoved: dict[str, set[str]]) -> None:
    levers = {lever.name: lever for lever in NAMING}
    grouped, deep = levers["MUSTER_NO_MOE_GROUPED_DECODE"].keys, levers["MUSTER_W4A16_K64_MIN_K"].keys
    assert [concerns(grouped, unmoved[model]) for model in MODELS] == [False, True]
    assert [concerns(deep, unmoved[model]) for model in MODELS] == [True, False]  # its weights are not as deep


def test_levers_that_were_measured_all_name_keys() -> None:
    assert [lever.name for lever in MODEL_LEVERS if lever.evidence and not lever.keys] == []

"""The JSON of ``muster ab``: its names by version, so a renamed one cannot pass under the old version."""

from collections.abc import Iterator
from typing import Any

from kernel_muster.ab.result import SCHEMA, VERSION

_DISTANCE = (
    "positions same_bits median mean largest largest_at worst worst_sequence divergence diverged is_tie parted gap "
    "reach"
)
# Guaranteed to readers of version 2: places and names.
NAMES = {
    "": "schema version verdict passed advisory headline muster_version command date a b shared tokens repeats "
    "sequences packages thresholds models",
    "thresholds": "max_kl identity least_verify_steps least_speed top_k",
    "models": "model manifest size layers weights prompts target device set_hashes difference drafter code rows proofs "
    "checks refused failed",
    "models.drafter": "name drafts size weights set_hashes difference",
    "models.rows": "sequences prompts a b speed speed_low speed_high kernels distance floor allowed",
    "models.rows.a": "speed is_identical broken place repeats_agree repeated loop speculation",
    "models.rows.a.speed": "per_sequence low high aggregate prefill_s",
    "models.rows.a.speculation": "proposer drafts steps step_ms accepted drafted same_tokens parted margin gap allowed",
    "models.rows.kernels": "differing seconds_a seconds_b method",
    "models.rows.distance": _DISTANCE,
    "models.rows.floor": _DISTANCE,
    "models.rows.allowed": "kl median largest gap",
    "models.proofs": "arm key provider cases worst problems",
    "models.checks": "name where outcome text",
}


def _tables(value: Any, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every object with its place; lists have their items' place."""
    if isinstance(value, list):
        for one in value:
            yield from _tables(one, path)
    elif isinstance(value, dict):
        yield path, tuple(value)
        for name, one in value.items():
            yield from _tables(one, f"{path}.{name}".lstrip("."))


def test_names_of_the_document_are_those_of_its_version(cli: Any) -> None:
    ran = cli(
        "ab", "qwen3.6-35b-a3b", "--target", "cpu", "--repeats", "1", "--tokens", "8", "--sequences", "4",
        "--drafter", "qwen3.6-35b-a3b-dflash", "--a", "MUSTER_QKV_ARM=tiled", "--b", "MUSTER_QKV_ARM=wide",
        "--format", "json", *(part for text in ("abc", "bde", "cfg", "dhi") for part in ("--prompt", text)),
    )  # fmt: skip
    assert (SCHEMA, VERSION.partition(".")[0]) == ("kernel-muster/ab", "2"), "other names: write them down above"
    assert (ran.json["schema"], ran.json["version"]) == (SCHEMA, VERSION)
    found = {path: set(names) for path, names in _tables(ran.json)}
    assert {path: found[path] for path in NAMES} == {path: set(names.split()) for path, names in NAMES.items()}
    beyond = {path for path in found if path not in NAMES}
    assert {path for path in beyond if ".difference" not in path} == {"packages", "models.rows.b", *(
        f"models.rows.b.{name}" for name in ("speed", "speculation")
    )}  # fmt: skip

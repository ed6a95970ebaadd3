"""The levers of models and dispatch: declared overrides, each with its effect and its evidence."""

from kernel_muster.models.policy.attention import ASKED_ARMS, TILED_EVIDENCE
from kernel_muster.models.policy.ffn import FFN_ARMS
from kernel_muster.models.policy.moe import GROUPED_ROWS
from kernel_muster.models.policy.tile import DEEP_K, LEGACY_DEEP_K, NARROW_BLOCKS, P3_EVIDENCE, V2_EVIDENCE
from kernel_muster.registry.levers import Lever, Value


def _kill(name: str, key: str, doc: str, evidence: str) -> Lever:
    """Declare a kill switch: while it is on, the kernel is not even looked up."""
    effects: dict[Value, str] = {True: f"{key} dropped, never looked up", False: "kernel kept"}
    return Lever(name=name, kind="bool", default=False, doc=doc, evidence=evidence, effects=effects)


TILE_LEVERS = (
    Lever(
        name="MUSTER_W4A16_VARIANT",
        kind="enum",
        choices=("v1", "v2", "v3"),
        default="v1",
        doc="Variant of the 128-row tile GEMM. A variant that is asked for and absent refuses; v3 serves prefill only.",
        evidence=str(V2_EVIDENCE),
        effects={
            "v1": "no other variant is looked up",
            "v2": "v2 serves attention projections, dense-FFN prefill and batched GDN decode",
            "v3": "v3 serves prefill; the other sites stay on v1",
        },
    ),
    Lever(
        name="MUSTER_W4A16_K64_MIN_K",
        kind="int",
        default=None,
        minimum=64,
        maximum=1 << 20,
        doc="Least K of the deep-K tile (K step 64); unset, the measured edge. Beats MUSTER_NO_W4A16_K64.",
        evidence=str(DEEP_K.evidence),
    ),
    Lever(
        name="MUSTER_NO_W4A16_K64",
        kind="bool",
        default=False,
        doc=f"Bring back the legacy edge of the deep-K tile, K >= {LEGACY_DEEP_K}; MUSTER_W4A16_K64_MIN_K beats it.",
        evidence=str(DEEP_K.evidence),
        effects={True: f"deep-K tile from K = {LEGACY_DEEP_K}", False: "kernel kept at the measured edge"},
    ),
    _kill(
        "MUSTER_NO_TGEMM_PIPELINE3",
        "w4a16::w4a16_gemm_t_p3",
        "Drop the 3-stage twin of the transposed tile GEMM; its parent serves.",
        str(P3_EVIDENCE),
    ),
    _kill(
        "MUSTER_NO_K64_PIPELINE3",
        "w4a16::w4a16_gemm_t_k64_p3",
        "Drop the 3-stage twin of the deep-K tile GEMM; its parent serves.",
        str(P3_EVIDENCE),
    ),
    _kill(
        "MUSTER_NO_K64_N64",
        "w4a16::w4a16_gemm_t_k64_n64_p3",
        "Drop the narrow-N twin of the deep-K tile GEMM; the wide one serves.",
        str(NARROW_BLOCKS.evidence),
    ),
)

MOE_LEVERS = (
    Lever(
        name="MUSTER_NO_MOE_GROUPED_DECODE",
        kind="bool",
        default=False,
        doc="Never decode experts grouped; beats MUSTER_MOE_GROUPED_DECODE. Prefill stays grouped.",
        evidence=str(GROUPED_ROWS.evidence),
        effects={True: "grouped decode off at every row count", False: "grouped decode kept"},
    ),
    Lever(
        name="MUSTER_MOE_GROUPED_DECODE",
        kind="bool",
        default=False,
        doc="Force grouped expert decode below its edge.",
        evidence=str(GROUPED_ROWS.evidence),
        diagnostic=True,
        effects={True: "grouped decode at every row count", False: f"grouped decode from {GROUPED_ROWS.value} rows"},
    ),
    Lever(
        name="MUSTER_FP32_ROUTING",
        kind="bool",
        default=False,
        doc="Keep router logits in FP32 (MoE models only).",
        effects={True: "router logits in FP32", False: "router logits in BF16"},
    ),
    Lever(
        name="MUSTER_FFN_ARM",
        kind="enum",
        choices=("auto", *FFN_ARMS),
        default="auto",
        doc="Force one arm of every FFN, at every row count.",
        diagnostic=True,
        effects={"auto": "policy chooses by rows"},
    ),
)

PROJECTION_LEVERS = (
    Lever(
        name="MUSTER_QKV_ARM",
        kind="enum",
        choices=ASKED_ARMS,
        default="auto",
        doc="Arm of the QKV and output projections of attention, from 4 rows of decode or verify up.",
        evidence=str(TILED_EVIDENCE),
        effects={
            "auto": "tiled, and the batch tiers for an MTP verify",
            "tiled": "tiles of 3, 3, ... and 2 or 1 rows",
            "wide": "one GEMM over all rows",
            "per_seq": "row by row",
        },
    ),
    Lever(
        name="MUSTER_FP4_PROJ_DECODE",
        kind="bool",
        default=False,
        doc="Requantise BF16 attention weights to NVFP4 at load; on weights that are NVFP4 already it refuses.",
        effects={True: "BF16 attention weights requantised to NVFP4", False: "attention weights kept as stored"},
    ),
)

SPECULATION_LEVERS = (
    Lever(
        name="MUSTER_MTP_GATE_FORCE",
        kind="bool",
        default=False,
        doc="Pass the throughput gate of MTP speculation; refuses on a model without an MTP head.",
        diagnostic=True,
        effects={True: "MTP drafts whatever its throughput", False: "the gate decides"},
    ),
    Lever(
        name="MUSTER_MTP_PREFILL",
        kind="bool",
        default=True,
        doc="Let the MTP head read the prompt into a cache of its own; without it, drafts know what came after.",
        effects={True: "the MTP head's cache holds the prompt", False: "the MTP head's cache begins at its last token"},
    ),
    Lever(
        name="MUSTER_DFLASH_COMMIT_CTX",
        kind="bool",
        default=True,
        doc="Commit every token, after a plain pass and after an accept, to the block-diffusion drafter's context.",
        effects={True: "the drafter sees every committed token", False: "the drafter's context stays empty"},
    ),
)

MODEL_LEVERS = (*TILE_LEVERS, *MOE_LEVERS, *PROJECTION_LEVERS, *SPECULATION_LEVERS)

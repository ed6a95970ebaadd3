"""The levers of models and dispatch: declared overrides, each with its effect and its evidence."""

from kernel_muster.models.policy.attention import ASKED_ARMS, PREFILL_MMA_ROWS, TIER_ROWS, TILED_EVIDENCE
from kernel_muster.models.policy.bf16 import GEMM_FROM as BF16_GEMM_FROM
from kernel_muster.models.policy.bf16 import TIER_ROWS as BF16_TIER_ROWS
from kernel_muster.models.policy.evidence import Evidence, Threshold
from kernel_muster.models.policy.ffn import FFN_ARMS
from kernel_muster.models.policy.gdn import CHUNKED_PREFILL_ROWS, FUSED_LARGE_ROWS, LARGE_INPUTS_MI
from kernel_muster.models.policy.gdn import FUSED_ROWS as GDN_FUSED_ROWS
from kernel_muster.models.policy.gemv import CHUNKED_ROWS
from kernel_muster.models.policy.moe import FUSED_ROWS, GROUPED_ROWS
from kernel_muster.models.policy.projection import ASKED_ARMS as GEMM_ARMS
from kernel_muster.models.policy.projection import GEMV_MI, HOPPER_FROM, SMALL_FROM, SMALL_MI
from kernel_muster.models.policy.tile import (
    DEEP_K,
    LEGACY_DEEP_K,
    M128_ABOVE,
    NARROW_BLOCKS,
    P3_EVIDENCE,
    TINY_MI,
    V2_EVIDENCE,
)
from kernel_muster.registry.levers import Lever, Tuning, Value

# Which kernels levers choose among: one side of the choice each.
_M128 = "w4a16*::w4a16_gemm_t_m128*"
_DEEP = ("w4a16::w4a16_gemm_t_k64*", "w4a16::w4a16_gemm_t|w4a16::w4a16_gemm_t_p3")
_HOPPER = ("w4a16_hopper::*", "w4a16_gemv::*")
_PROJECTIONS = ("w4a16_gemv::*", "w4a16*::*gemm*")
_BF16 = ("gemv::dense_gemv_bf16*", "gemm::dense_gemm_bf16")
_GDN_INPUTS = ("w4a16_gemv::w4a16_gemv_gdn_in",)
_EXPERTS = ("moe_w4a16::moe_w4a16_grouped_*", "moe_fused_*::*")


def _kill(name: str, key: str, doc: str, evidence: Evidence) -> Lever:
    """Declare a kill switch: while it is on, the kernel is not even looked up."""
    effects: dict[Value, str] = {True: f"{key} dropped, never looked up", False: "kernel kept"}
    return Lever(
        name=name, kind="bool", default=False, doc=doc, evidence=str(evidence), measured=evidence.measured,
        effects=effects, keys=(key,),
    )  # fmt: skip


def _edge(
    name: str, edge: Threshold, tuning: Tuning, doc: str, keys: tuple[str, ...] = (), least: int = 0,
    most: int = 1 << 20,
) -> Lever:  # fmt: skip
    """Declare a threshold between kernels, which a device's measured table may move if ``tuning`` says how."""
    return Lever(
        name=name, kind="int", default=edge.value, minimum=least, maximum=most, doc=doc, evidence=str(edge.evidence),
        measured=edge.evidence.measured, tuning=tuning, keys=keys,
    )  # fmt: skip


TILE_LEVERS = (
    Lever(
        name="MUSTER_W4A16_VARIANT",
        kind="enum",
        choices=("v1", "v2", "v3"),
        default="v1",
        doc="Variant of the 128-row tile GEMM. A requested but absent variant refuses. v3 serves prefill only.",
        evidence=str(V2_EVIDENCE),
        measured=V2_EVIDENCE.measured,
        effects={
            "v1": "no other variant is looked up",
            "v2": "v2 serves attention projections, dense-FFN prefill and batched GDN decode",
            "v3": "v3 serves prefill, the other sites stay on v1",
        },
        keys=(_M128,),
    ),
    _edge(
        "MUSTER_W4A16_K64_MIN_K",
        DEEP_K,
        "same_bits",
        "Least K of the deep-K tile (K step 64). Set on purpose, it beats MUSTER_NO_W4A16_K64.",
        _DEEP,
        least=64,
    ),
    _edge(
        "MUSTER_W4A16_NARROW_BLOCKS",
        NARROW_BLOCKS,
        "same_bits",
        "Most blocks of the wide grid, ceil(N/128) * ceil(M/64), that the narrow-N twin of the deep-K tile serves.",
        ("w4a16::w4a16_gemm_t_k64*",),
    ),
    _edge(
        "MUSTER_W4A16_M128_ABOVE",
        M128_ABOVE,
        "same_bits",
        "Most rows of the 64-row tile GEMMs. More rows take the 128-row one.",
        ("w4a16::w4a16_gemm_t*", _M128),
    ),
    _edge(
        "MUSTER_W4A16_CHUNKED_ROWS",
        CHUNKED_ROWS,
        "other_bits",
        "Most rows of decode through a GEMV, in one launch or in chunks of 16. Tile GEMMs serve more rows.",
        ("w4a16_gemv::w4a16_gemv_batch16", "w4a16::*"),
    ),
    _edge(
        "MUSTER_W4A16_HOPPER_FROM",
        HOPPER_FROM,
        "other_bits",
        "Least rows of the Hopper GEMM, on sm_90a. Fewer rows use GEMV tiers.",
        _HOPPER,
        least=1,
    ),
    _edge(
        "MUSTER_W4A16_HOPPER_FROM_SMALL",
        SMALL_FROM,
        "other_bits",
        "The same for small weights: see MUSTER_W4A16_HOPPER_SMALL_MI.",
        _HOPPER,
        least=1,
    ),
    _edge(
        "MUSTER_W4A16_HOPPER_SMALL_MI",
        SMALL_MI,
        "other_bits",
        "Most elements N * K, in units of 2^20, of a weight that counts as small for the Hopper GEMM.",
        _HOPPER,
    ),
    _edge(
        "MUSTER_W4A16_GEMV_MI",
        GEMV_MI,
        "other_bits",
        "Most elements N * K, in units of 2^20, of a weight that GEMVs serve up to 256 rows, beside the Hopper GEMM.",
        _HOPPER,
    ),
    _edge(
        "MUSTER_W4A16_HOPPER_TINY_MI",
        TINY_MI,
        "other_bits",
        "Most elements N * K, in units of 2^20, of a weight that tile GEMMs serve instead of the Hopper GEMM.",
        ("w4a16_hopper::*", "w4a16::*"),
    ),
    Lever(
        name="MUSTER_W4A16_ARM",
        kind="enum",
        choices=GEMM_ARMS,
        default="auto",
        doc="Force one arm of NVFP4 projections at every row count. A projection without it uses the other. "
        "Forcing an impossible Hopper GEMM refuses.",
        diagnostic=True,
        effects={
            "auto": "policy chooses by rows",
            "gemv": "GEMV tiers, in chunks of one launch",
            "tile": "tile GEMMs, without a lookup of the Hopper GEMM",
            "hopper": "the Hopper GEMM",
        },
        keys=_PROJECTIONS,
    ),
    _kill(
        "MUSTER_NO_W4A16_HOPPER",
        "w4a16_hopper::w4a16_hopper_gemm",
        "Drop the Hopper GEMM. Tile GEMMs serve, and their copies of the weights are built.",
        HOPPER_FROM.evidence,
    ),
    Lever(
        name="MUSTER_NO_W4A16_K64",
        kind="bool",
        default=False,
        doc=f"Bring back the legacy edge of the deep-K tile, K >= {LEGACY_DEEP_K}. MUSTER_W4A16_K64_MIN_K beats it.",
        evidence=str(DEEP_K.evidence),
        measured=DEEP_K.evidence.measured,
        effects={True: f"deep-K tile from K = {LEGACY_DEEP_K}", False: "kernel kept at the measured edge"},
        keys=_DEEP,
    ),
    _kill(
        "MUSTER_NO_TGEMM_PIPELINE3",
        "w4a16::w4a16_gemm_t_p3",
        "Drop the 3-stage twin of the transposed tile GEMM. Its parent serves.",
        P3_EVIDENCE,
    ),
    _kill(
        "MUSTER_NO_K64_PIPELINE3",
        "w4a16::w4a16_gemm_t_k64_p3",
        "Drop the 3-stage twin of the deep-K tile GEMM. Its parent serves.",
        P3_EVIDENCE,
    ),
    _kill(
        "MUSTER_NO_K64_N64",
        "w4a16::w4a16_gemm_t_k64_n64_p3",
        "Drop the narrow-N twin of the deep-K tile GEMM. The wide one serves.",
        NARROW_BLOCKS.evidence,
    ),
)

_GROUPED = "; ".join(map(str, GROUPED_ROWS.all_evidence))
_GROUPED_ON = tuple(one for evidence in GROUPED_ROWS.all_evidence for one in evidence.measured)
MOE_LEVERS = (
    Lever(
        name="MUSTER_NO_MOE_GROUPED_DECODE",
        kind="bool",
        default=False,
        doc="Never decode experts grouped. Beats MUSTER_MOE_GROUPED_DECODE. Prefill stays grouped.",
        evidence=_GROUPED,
        measured=_GROUPED_ON,
        effects={True: "grouped decode off at every row count", False: "grouped decode kept"},
        keys=_EXPERTS,
    ),
    Lever(
        name="MUSTER_MOE_GROUPED_DECODE",
        kind="bool",
        default=False,
        doc="Force grouped expert decode below its edge.",
        evidence=_GROUPED,
        measured=_GROUPED_ON,
        diagnostic=True,
        effects={
            True: "grouped decode at every row count",
            False: f"grouped decode from {GROUPED_ROWS.per_arch('rows')}; "
            f"from {FUSED_ROWS + 1} at least where moe_fused_shared::* serve",
        },
        keys=_EXPERTS,
    ),
    Lever(
        name="MUSTER_FP32_ROUTING",
        kind="bool",
        default=False,
        doc="Keep router logits in FP32 (MoE models only).",
        effects={True: "router logits in FP32", False: "router logits in BF16"},
        keys=("moe::moe_router_logits_f32", "gemm::dense_gemm_bf16"),
    ),
    Lever(
        name="MUSTER_FFN_ARM",
        kind="enum",
        choices=("auto", *FFN_ARMS),
        default="auto",
        doc="Force one arm of every FFN, at every row count.",
        diagnostic=True,
        effects={"auto": "policy chooses by rows"},
        keys=("moe*::*|w4a16_gemv::w4a16_gemv_dual*|silu::*",),
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
        measured=TILED_EVIDENCE.measured,
        effects={
            "auto": "tiers up to their edge and in an MTP verify, each projection's arm from a GEMM's edge, else tiled",
            "tiled": "tiles of 3, 3, ... and 2 or 1 rows",
            "wide": "one GEMM over all rows",
            "per_seq": "row by row",
        },
        keys=_PROJECTIONS,
    ),
    _edge(
        "MUSTER_QKV_TIER_ROWS",
        TIER_ROWS,
        "same_bits",
        "Most rows of decode with one GEMV tier for each QKV and output projection. More rows use tiles of 3.",
        ("w4a16_gemv::w4a16_gemv_batch*",),
    ),
    _edge(
        "MUSTER_BF16_TIER_ROWS",
        BF16_TIER_ROWS,
        "same_bits",
        "Most rows of decode with one GEMV launch for each BF16 QKV and output projection. More rows use tiles of "
        "3, or from MUSTER_BF16_GEMM_FROM on the GEMM.",
        _BF16,
    ),
    _edge(
        "MUSTER_BF16_GEMM_FROM",
        BF16_GEMM_FROM,
        "other_bits",
        "Least rows of the GEMM of a BF16 projection. Fewer rows use the GEMV, in launches of up to 16 rows.",
        _BF16,
        least=1,
    ),
    Lever(
        name="MUSTER_FP4_PROJ_DECODE",
        kind="bool",
        default=False,
        doc="Requantise BF16 attention weights to NVFP4 at load. On NVFP4 weights it refuses.",
        effects={True: "BF16 attention weights requantised to NVFP4", False: "attention weights kept as stored"},
        keys=("quantize_nvfp4::quantize_bf16_to_nvfp4",),
    ),
)

ATTENTION_LEVERS = (
    _kill(
        "MUSTER_NO_PREFILL_MMA",
        "prefill_paged::prefill_paged_attn_mma",
        "Attend row by row in prompts, with the bits of decode. Otherwise passes of "
        f"{PREFILL_MMA_ROWS.value} rows and more use tiles.",
        PREFILL_MMA_ROWS.evidence,
    ),
)

GDN_LEVERS = (
    _kill(
        "MUSTER_NO_CHUNKED_PREFILL",
        "gated_delta_rule::gated_delta_rule_prefill_chunked",
        "Apply the delta rule row by row in prompts, with the bits of decode. Otherwise passes of more than "
        f"{CHUNKED_PREFILL_ROWS.value} rows of a sequence use chunks.",
        CHUNKED_PREFILL_ROWS.evidence,
    ),
    _edge(
        "MUSTER_GDN_IN_LARGE_ROWS",
        FUSED_LARGE_ROWS,
        "",
        "Most rows of decode with one launch for all inputs of a delta net with a large projection. Without one, "
        f"up to {GDN_FUSED_ROWS}.",
        _GDN_INPUTS,
        most=GDN_FUSED_ROWS,
    ),
    _edge(
        "MUSTER_GDN_IN_LARGE_MI",
        LARGE_INPUTS_MI,
        "",
        "Most elements N * K, in units of 2^20, of a projection that is not large for MUSTER_GDN_IN_LARGE_ROWS.",
        _GDN_INPUTS,
    ),
)

SPECULATION_LEVERS = (
    Lever(
        name="MUSTER_MTP_GATE_FORCE",
        kind="bool",
        default=False,
        doc="Pass the throughput gate of MTP speculation. Refuses on a model without an MTP head.",
        diagnostic=True,
        effects={True: "MTP drafts whatever its throughput", False: "the gate decides"},
    ),
    Lever(
        name="MUSTER_MTP_PREFILL",
        kind="bool",
        default=True,
        doc="Let the MTP head read the prompt into its own cache. Without it, drafts see only later tokens.",
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

#: Levers that choose among kernels. A kill switch is not among them: the kernel that it drops does not run anyway.
DISPATCH_LEVERS = frozenset(
    lever.name
    for lever in (*TILE_LEVERS, *MOE_LEVERS, *PROJECTION_LEVERS, *ATTENTION_LEVERS, *GDN_LEVERS)
    if lever.name == "MUSTER_NO_W4A16_K64" or not lever.name.startswith("MUSTER_NO_")
)
MODEL_LEVERS = (
    *TILE_LEVERS, *MOE_LEVERS, *PROJECTION_LEVERS, *ATTENTION_LEVERS, *GDN_LEVERS, *SPECULATION_LEVERS,
)  # fmt: skip

"""What decode-time kernels are measured on: the launches of one step of a model, at some number of sequences."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.errors import UsageError

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a model that its small kernels see."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    value_heads: int
    intermediate: int
    experts: int = 0
    head_dim: int = 256
    rotary_dim: int = 64
    key_heads: int = 16
    gdn_dim: int = 128
    taps: int = 4
    vocabulary: int = 248_320
    sections: tuple[int, int, int] = (11, 11, 10)

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return (2 * self.key_heads + self.value_heads) * self.gdn_dim


MODELS = (
    Sizes("35b", 2048, 16, 2, 32, 512, experts=256),
    Sizes("27b", 5120, 24, 4, 48, 17408),
)
PAGE = 16


def sizes_of(manifest: Manifest) -> Sizes:
    """Return the dimensions of a model that has attention, a gated delta net and an FFN; UsageError for any other."""
    model = manifest.model
    attention, gdn, rope = model.attention, model.gdn, model.rope
    intermediate = model.moe.intermediate_size if model.moe else model.intermediate_size
    if not (attention and gdn and rope and model.hidden_size and model.vocab_size and intermediate):
        raise UsageError(f"{manifest.name}: a step is measured of models with attention, a gated delta net and an FFN")
    if gdn.key_dim != gdn.value_dim or not rope.mrope_sections:
        raise UsageError(f"{manifest.name}: a step is measured of delta nets with square states, and mrope")
    time, height, width = rope.mrope_sections
    return Sizes(
        manifest.name, model.hidden_size, attention.heads, attention.kv_heads, gdn.value_heads, intermediate,
        model.moe.experts if model.moe else 0, attention.head_dim, int(attention.head_dim * rope.partial_factor),
        gdn.key_heads, gdn.key_dim, gdn.conv_width, model.vocab_size, (time, height, width),
    )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One launch: its key, arguments anew for every copy, and the bytes that it must read and write."""

    model: str
    key: str
    label: str
    reads: int
    writes: int
    make: Callable[[], Arguments]

    @property
    def copy_bytes(self) -> int:
        """Bytes that one launch touches."""
        return max(self.reads, self.writes)


class Data:
    """Makes arrays from one seed, by CuPy on the current device, or by the module given."""

    def __init__(self, module: Any = None) -> None:
        if module is None:
            import cupy

            module = cupy
        self._module = module
        self._base = module.random.default_rng(7).standard_normal(2**22, dtype=module.float32)

    def f32(self, *shape: int, low: float | None = None) -> Any:
        """Return Gaussian values, or values between ``low`` and 1."""
        values = self._module.resize(self._base, shape)
        return values if low is None else low + (1 - low) * (self._module.abs(values) % 1)

    def bf16(self, *shape: int) -> Any:
        """Return Gaussian values, truncated: as good as any for test data."""
        bits = (self._base.view(self._module.uint32) >> 16).astype(self._module.uint16)
        return self._module.resize(bits, shape).view(numpy_dtype("bf16"))

    def empty(self, *shape: int, dtype: str = "bf16") -> Any:
        """Return an output."""
        kind = numpy_dtype(dtype)
        return self._module.zeros(shape, f"u{kind.itemsize}").view(kind)

    def i32(self, values: Any) -> Any:
        """Return integers given on the host."""
        return self._module.asarray(np.asarray(values, np.int32))


def _bytes(arguments: Arguments, names: tuple[str, ...]) -> int:
    return sum(int(arguments[name].nbytes) for name in names)


def _whole(
    model: str,
    key: str,
    label: str,
    make: Callable[[], Arguments],
    written: tuple[str, ...],
    inout: tuple[str, ...] = (),
) -> Workload:
    """Return a workload that reads and writes each of its arrays once."""
    sample = make()
    arrays = tuple(name for name, value in sample.items() if hasattr(value, "nbytes"))
    reads = _bytes(sample, tuple(name for name in arrays if name not in written))
    return Workload(model, key, label, reads, _bytes(sample, (*written, *inout)), make)


def elementwise(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return norms, activations, residual and gates."""
    eps = {"eps": 1e-6}
    zero_centred = {**eps, "weight_offset": 1.0}
    wide, heads = m.heads * m.head_dim, rows * m.value_heads

    def like(*names: str, shape: tuple[int, ...] = (rows, m.hidden)) -> Arguments:
        return {name: data.bf16(*shape) for name in names}

    yield _whole(
        m.name, "norm::rms_norm", f"{rows} x {m.hidden}",
        lambda: {**like("x"), "weight": data.bf16(m.hidden), **zero_centred, **like("out")}, ("out",),
    )  # fmt: skip
    yield _whole(
        m.name, "norm::rms_norm", f"heads {rows * m.heads} x {m.head_dim}",
        lambda: {
            **like("x", "out", shape=(rows * m.heads, m.head_dim)), "weight": data.bf16(m.head_dim), **zero_centred,
        },
        ("out",),
    )  # fmt: skip
    yield _whole(
        m.name, "norm::rms_norm_residual", f"{rows} x {m.hidden}",
        lambda: {**like("x", "residual"), "weight": data.bf16(m.hidden), **zero_centred, **like("out")},
        ("out",), ("residual",),
    )  # fmt: skip
    yield _whole(
        m.name, "norm::rms_norm_gated", f"{heads} x {m.gdn_dim}",
        lambda: {**like("x", "gate", "out", shape=(heads, m.gdn_dim)), "weight": data.f32(m.gdn_dim), **eps}, ("out",),
    )  # fmt: skip
    yield _whole(
        m.name, "silu::silu_mul", f"{rows} x {m.intermediate}",
        lambda: like("gate", "up", "out", shape=(rows, m.intermediate)), ("out",),
    )  # fmt: skip
    yield _whole(
        m.name, "residual_add::bf16_residual_add", f"{rows} x {m.hidden}", lambda: like("x", "residual"),
        (), ("residual",),
    )  # fmt: skip
    gate = "residual_add::sigmoid_gate_mul" + ("_batched" if rows > 1 else "")
    yield _whole(m.name, gate, f"{rows} x {wide}", lambda: like("x", "gate", "out", shape=(rows, wide)), ("out",))


def attention_side(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return what stands between a projection and attention."""
    q, k = (rows, m.heads, m.head_dim), (rows, m.kv_heads, m.head_dim)
    positions = np.arange(rows) + 4000
    turned = 2 * rows * (m.heads + m.kv_heads) * m.rotary_dim
    rope = {"rotary_dim": m.rotary_dim, "theta": 1e7}
    yield Workload(
        m.name, "rope::rope_forward", f"{rows} rows", turned, turned,
        lambda: {"q": data.bf16(*q), "k": data.bf16(*k), "positions": data.i32(positions), **rope},
    )  # fmt: skip
    sections = dict(zip(("section_t", "section_h", "section_w"), m.sections, strict=True))
    yield Workload(
        m.name, "rope::rope_mrope_interleaved", f"{rows} rows", turned, turned,
        lambda: {"q": data.bf16(*q), "k": data.bf16(*k), "positions": data.i32([positions] * 3), **sections, **rope},
    )  # fmt: skip
    pages, row_bytes = 64, 2 * 2 * rows * m.kv_heads * m.head_dim
    cache = (pages, PAGE, m.kv_heads, m.head_dim)
    together = 2 * rows * m.heads * m.head_dim + row_bytes
    yield Workload(
        m.name, "rope::qk_norm_rope_append", f"{rows} rows", together, together,
        lambda: {
            "q": data.bf16(*q), "k": data.bf16(*k), "v": data.bf16(*k), "q_weight": data.bf16(m.head_dim),
            "k_weight": data.bf16(m.head_dim), "positions": data.i32(positions),
            "slots": data.i32(np.arange(rows) * PAGE + 3), "eps": 1e-6, "weight_offset": 1.0, **rope,
            "k_cache": data.bf16(*cache), "v_cache": data.bf16(*cache),
        },
    )  # fmt: skip
    yield Workload(
        m.name, "kv_cache::kv_cache_append", f"{rows} rows", row_bytes, row_bytes,
        lambda: {
            "k": data.bf16(*k), "v": data.bf16(*k), "slots": data.i32(np.arange(rows) * PAGE + 3),
            "k_cache": data.bf16(*cache), "v_cache": data.bf16(*cache),
        },
    )  # fmt: skip
    width = m.heads * m.head_dim
    yield _whole(
        m.name, "ssm_preprocess::deinterleave_qg", f"{rows} x {2 * width}",
        lambda: {
            "qg": data.bf16(rows, 2 * width), "head_dim": m.head_dim,
            "out_q": data.empty(rows, width), "out_gate": data.empty(rows, width),
        },
        ("out_q", "out_gate"),
    )  # fmt: skip


#: Forms of attention at decode: as it is, gated, and gated from the projections on.
PAGED_FORMS = ("", "_gated", "_fresh")


def paged(data: Data, m: Sizes, sequences: int, context: int, form: str = "") -> Workload:
    """Return decode attention of every sequence over a context of its own, pages in any order."""
    entries = -(-context // PAGE)
    pages = sequences * entries
    table = np.random.default_rng(3).permutation(pages).reshape(sequences, entries)
    cache = (pages, PAGE, m.kv_heads, m.head_dim)
    q, k = (sequences, m.heads, m.head_dim), (sequences, m.kv_heads, m.head_dim)
    last = context - 1
    slots = table[:, last // PAGE] * PAGE + last % PAGE

    def fresh() -> Arguments:
        return {
            "k": data.bf16(*k), "v": data.bf16(*k), "q_weight": data.bf16(m.head_dim),
            "k_weight": data.bf16(m.head_dim), "positions": data.i32([last] * sequences), "slots": data.i32(slots),
            "eps": 1e-6, "weight_offset": 1.0, "rotary_dim": m.rotary_dim, "theta": 1e7,
        }  # fmt: skip

    def make() -> Arguments:
        return {
            "q": data.bf16(*q), "k_cache": data.bf16(*cache), "v_cache": data.bf16(*cache),
            "block_table": data.i32(table), "context_lens": data.i32([context] * sequences),
            **({"gate": data.bf16(*q)} if form else {}), **(fresh() if form == "_fresh" else {}),
            "scale": m.head_dim**-0.5, "out": data.empty(*q),
        }  # fmt: skip

    rows = 2 * int(np.prod(q))
    size = 2 * 2 * sequences * context * m.kv_heads * m.head_dim + (rows if form else 0)
    return Workload(m.name, f"paged_decode::paged_decode_attn{form}", f"{sequences} x {context}", size, rows, make)


def prefill(data: Data, m: Sizes, rows: int, before: int, *, is_tiled: bool = False) -> Workload:
    """Return prefill attention of one sequence, row by row or in tiles of rows."""
    context = rows + before
    pages = -(-context // PAGE)
    cache, q = (pages, PAGE, m.kv_heads, m.head_dim), (rows, m.heads, m.head_dim)

    def make() -> Arguments:
        return {
            "q": data.bf16(*q), "k_cache": data.bf16(*cache), "v_cache": data.bf16(*cache),
            "block_table": data.i32([np.arange(pages)]), "cu_rows": data.i32([0, rows]),
            "context_lens": data.i32([context]), "scale": m.head_dim**-0.5, "out": data.empty(*q),
        }  # fmt: skip

    size = 2 * 2 * context * m.kv_heads * m.head_dim + 2 * int(np.prod(q))
    key = "prefill_paged::prefill_paged_attn" + ("_mma" if is_tiled else "")
    return Workload(m.name, key, f"{rows} after {before}", size, 2 * int(np.prod(q)), make)


def gdn(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return the kernels of a GDN layer with one row a sequence."""
    heads = (rows, m.value_heads)
    group = m.key_heads * 2 * m.gdn_dim + 2 * m.value_heads * m.gdn_dim
    values = m.value_heads * m.gdn_dim
    sizes = _head_sizes(m)
    yield _whole(
        m.name, "ssm_preprocess::deinterleave_qkvz", f"{rows} x {group}",
        lambda: {
            "qkvz": data.bf16(rows, group), **sizes,
            "out_qkv": data.empty(rows, m.channels), "out_z": data.empty(rows, values),
        },
        ("out_qkv", "out_z"),
    )  # fmt: skip
    yield _whole(
        m.name, "ssm_preprocess::compute_gdn_gates", f"{rows} x {m.value_heads}",
        lambda: {
            "a": data.bf16(*heads), "b": data.bf16(*heads), "a_log": data.f32(m.value_heads),
            "dt_bias": data.f32(m.value_heads), "out_decay": data.empty(*heads, dtype="f32"),
            "out_beta": data.empty(*heads, dtype="f32"),
        },
        ("out_decay", "out_beta"),
    )  # fmt: skip
    yield _whole(
        m.name, "causal_conv1d::causal_conv1d_update", f"{rows} x {m.channels}",
        lambda: {
            "x": data.bf16(rows, m.channels), "weight": data.bf16(m.channels, m.taps),
            "state": data.bf16(rows, m.channels, m.taps - 1), "slots": data.i32(np.arange(rows)),
            "out": data.empty(rows, m.channels),
        },
        ("out",), ("state",),
    )  # fmt: skip

    def common(total: int) -> Arguments:
        return {
            "qkv": data.bf16(total, m.channels), "decay": data.f32(total, m.value_heads, low=0.5),
            "beta": data.f32(total, m.value_heads, low=0.1), **sizes,
        }  # fmt: skip

    def pool(sequences: int) -> Arguments:
        state = data.f32(sequences, m.value_heads, m.gdn_dim, m.gdn_dim)
        return {"state": state, "slots": data.i32(np.arange(sequences))}

    decode = "gated_delta_rule::gated_delta_rule_decode"
    yield _whole(
        m.name, decode if rows == 1 else f"{decode}_strided", f"{rows} sequences",
        lambda: {**common(rows), **pool(rows), "out": data.empty(rows, values)}, ("out",), ("state",),
    )  # fmt: skip
    yield _whole(
        m.name, f"{decode}_norm_strided", f"{rows} sequences",
        lambda: {
            **common(rows), "gate": data.bf16(rows, values), "norm_weight": data.f32(m.gdn_dim), "eps": 1e-6,
            **pool(rows), "out": data.empty(rows, values),
        },
        ("out",), ("state",),
    )  # fmt: skip
    drafts = 4
    yield _whole(
        m.name, "gated_delta_rule::gated_delta_rule_verify_n", f"{rows} x {drafts} rows",
        lambda: {
            **common(rows * drafts), "cu_rows": data.i32(np.arange(rows + 1) * drafts), **pool(rows),
            "out": data.empty(rows * drafts, values),
            "out_states": data.empty(rows * drafts, m.value_heads, m.gdn_dim, m.gdn_dim, dtype="f32"),
        },
        ("out", "out_states"), ("state",),
    )  # fmt: skip


def _head_sizes(m: Sizes) -> Arguments:
    return {"key_heads": m.key_heads, "key_dim": m.gdn_dim, "value_heads": m.value_heads, "value_dim": m.gdn_dim}


def gdn_prefill(data: Data, m: Sizes, rows: int, is_chunked: bool = False) -> Workload:
    """Return the delta rule over a prompt, row by row or in chunks."""
    values = m.value_heads * m.gdn_dim
    return _whole(
        m.name, f"gated_delta_rule::gated_delta_rule_prefill{'_chunked' if is_chunked else ''}", f"{rows} rows",
        lambda: {
            "qkv": data.bf16(rows, m.channels), "cu_rows": data.i32([0, rows]),
            "decay": data.f32(rows, m.value_heads, low=0.5), "beta": data.f32(rows, m.value_heads, low=0.1),
            **_head_sizes(m), "state": data.f32(1, m.value_heads, m.gdn_dim, m.gdn_dim), "slots": data.i32([0]),
            "out": data.empty(rows, values),
        },
        ("out",), ("state",),
    )  # fmt: skip


def ends(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return what begins and ends a step: embedding, argmax, sampling, verify."""
    row = 2 * rows * m.hidden
    ids = np.random.default_rng(5).integers(0, m.vocabulary, rows)
    table = data.bf16(m.vocabulary, m.hidden)
    yield Workload(
        m.name, "embedding::gather", f"{rows} x {m.hidden}", row, row,
        lambda: {"table": table, "ids": data.i32(ids), "out": data.empty(rows, m.hidden)},
    )  # fmt: skip
    logits = {"logits": (rows, m.vocabulary)}

    def made(**more: Any) -> Arguments:
        return {"logits": data.bf16(*logits["logits"]), **more}

    yield _whole(
        m.name, "argmax::argmax_bf16", f"{rows} x {m.vocabulary}", lambda: made(out=data.empty(rows, dtype="i32")),
        ("out",),
    )  # fmt: skip
    yield _whole(
        m.name, "sampling::topk_bf16", f"{rows} x {m.vocabulary}, k = 20",
        lambda: made(k=20, out_values=data.empty(rows, 20, dtype="f32"), out_ids=data.empty(rows, 20, dtype="i32")),
        ("out_values", "out_ids"),
    )  # fmt: skip
    yield _whole(
        m.name, "sampling::sample_top_k_top_p", f"{rows} x {m.vocabulary}",
        lambda: made(
            temperature=data.f32(rows, low=0.7), top_k=data.i32([20] * rows), top_p=data.f32(rows, low=0.9),
            uniform=data.f32(rows, low=0.1), out=data.empty(rows, dtype="i32"),
        ),
        ("out",),
    )  # fmt: skip
    yield _whole(
        m.name, "sampling::verify_greedy", f"{rows} x 3",
        lambda: {
            "draft_ids": data.i32(np.ones((rows, 3))), "target_ids": data.i32(np.ones((rows, 4))),
            "out_accepted": data.empty(rows, dtype="i32"),
        },
        ("out_accepted",),
    )  # fmt: skip


def dense(data: Data, m: Sizes, rows: int, features: int, key: str | None = None) -> Workload:
    """Return a BF16 projection of the hidden state."""
    name = key or ("gemv::dense_gemv_bf16" if rows == 1 else "gemv::dense_gemv_bf16_batchm")

    def make() -> Arguments:
        weight = Bf16Weight(data.bf16(features, m.hidden))
        return {"x": data.bf16(rows, m.hidden), "w": weight, "out": data.empty(rows, features)}

    reads = 2 * m.hidden * (features + rows)
    return Workload(m.name, name, f"{rows} x {features} x {m.hidden}", reads, 2 * rows * features, make)


def step(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return every launch of one step with so many sequences, except those over projections of NVFP4 weights."""
    yield from elementwise(data, m, rows)
    yield from attention_side(data, m, rows)
    yield from gdn(data, m, rows)
    yield from ends(data, m, rows)
    if m.experts:
        yield dense(data, m, rows, m.experts, "gemm::dense_gemm_bf16")
    if rows <= 16:
        yield dense(data, m, rows, 2 * m.value_heads)
        yield dense(data, m, rows, m.heads * m.head_dim)

"""Kernels of torch and FlashInfer for the work of the small kernels, on the same arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kernel_muster.bench.contestants import Absent
from kernel_muster.bench.data.inputs import Arguments
from kernel_muster.bench.peers.peers import LARGEST_ERROR

# FlashInfer's scratch memory for split contexts, as its documentation advises.
_WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Peer:
    """A contestant: a launch for every copy of the arguments, and a judge, a function that makes one launch."""

    launches: list[Callable[[], Any]]
    check: Callable[[], float] | None = None


@dataclass(frozen=True)
class Maker:
    """A peer of a kernel: its name, its module, and the constructor of launches over torch's tensors."""

    name: str
    module: str
    make: Callable[[list[Arguments]], list[Callable[[], Any]]]
    largest_error: float | None = None  # None: not judged


def makers_of(key: str) -> tuple[Maker, ...]:
    """Return the peers of a kernel."""
    return _MAKERS.get(key, ())


def peer_of(maker: Maker, copies: Callable[[], list[Arguments]], stream: Any) -> Peer | Absent:
    """Return the peer over copies of the arguments, after one run on the stream. Absent without its package."""
    if find_spec("torch") is None:
        return Absent("torch is not installed")
    try:
        import_module(maker.module)
    except ImportError as error:
        return Absent(f"{maker.module.partition('.')[0]} cannot be imported: {error}")
    import torch

    sets = [{key: _torch(value) for key, value in arguments.items()} for arguments in copies()]
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        launches = maker.make(sets)
        launches[0]()  # libraries make their handles and workspaces, which is impossible during capture
    torch.cuda.synchronize()
    if maker.largest_error is None:
        return Peer(launches)
    return Peer(launches, partial(_attention_error, launches[0], sets[0]))


def _torch(value: Any) -> Any:
    import torch

    values = getattr(value, "values", None)
    if values is not None and not callable(values):
        value = values
    return torch.from_dlpack(value) if hasattr(value, "__dlpack__") else value


def _rms_norm(a: Arguments) -> Callable[[], Any]:
    import torch

    return partial(torch.nn.functional.rms_norm, a["x"], (a["x"].shape[-1],), a["weight"], a["eps"])


def _silu_mul(a: Arguments) -> Callable[[], Any]:
    import torch

    return lambda: torch.nn.functional.silu(a["gate"]) * a["up"]


def _residual_add(a: Arguments) -> Callable[[], Any]:
    return lambda: a["residual"].add_(a["x"])


def _gate_mul(a: Arguments) -> Callable[[], Any]:
    import torch

    return lambda: a["x"] * torch.sigmoid(a["gate"])


def _gather(a: Arguments) -> Callable[[], Any]:
    import torch

    return partial(torch.index_select, a["table"], 0, a["ids"])


def _argmax(a: Arguments) -> Callable[[], Any]:
    import torch

    return partial(torch.argmax, a["logits"], -1)


def _topk(a: Arguments) -> Callable[[], Any]:
    import torch

    return partial(torch.topk, a["logits"], a["k"])


def _mm(a: Arguments) -> Callable[[], Any]:
    import torch

    return partial(torch.mm, a["x"], a["w"].t(), out=a["out"])


def _sdpa(a: Arguments) -> Callable[[], Any]:
    """Return torch's attention over a cache without pages: torch has no paged attention."""
    import torch

    sequences, heads, head_dim = a["q"].shape
    key_heads = a["k_cache"].shape[2]
    k, v = (a[name].view(sequences, -1, key_heads, head_dim).transpose(1, 2) for name in ("k_cache", "v_cache"))
    # Query heads of a key head become rows: torch's kernels then read the cache once for all of them.
    q = a["q"].view(sequences, key_heads, heads // key_heads, head_dim)
    return partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, scale=a["scale"])


def _causal(a: Arguments) -> Callable[[], Any]:
    import torch

    rows = a["q"].shape[0]
    context = int(a["context_lens"][0])
    k, v = (a[name].flatten(0, 1)[:context].transpose(0, 1)[None] for name in ("k_cache", "v_cache"))
    q = a["q"].transpose(0, 1)[None]
    more = {"scale": a["scale"], "enable_gqa": True}
    if rows == context:
        return partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True, **more)
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(rows, context)
    return partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, attn_mask=bias, **more)


def _attention_error(launch: Callable[[], Any], a: Arguments) -> float:
    """Launch attention over pages once, and return its relative L2 error against FP32."""
    import torch

    a["out"].fill_(float("nan"))
    launch()
    starts = a["cu_rows"].tolist() if "cu_rows" in a else list(range(len(a["q"]) + 1))
    apart, whole = 0.0, 0.0
    for sequence, context in enumerate(a["context_lens"].tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        count, heads, head_dim = a["q"][rows].shape
        pages = a["block_table"][sequence, : -(-context // a["k_cache"].shape[1])].long()
        k, v = (a[name][pages].flatten(0, 1)[:context].float() for name in ("k_cache", "v_cache"))
        q = a["q"][rows].float().view(count, k.shape[1], heads // k.shape[1], head_dim)
        scores = torch.einsum("rkgd,ckd->rkgc", q, k) * a["scale"]
        later = torch.ones(count, context, dtype=torch.bool, device=q.device).triu(context - count + 1)
        weights = scores.masked_fill_(later[:, None, None], float("-inf")).softmax(-1)
        exact = torch.einsum("rkgc,ckd->rkgd", weights, v).reshape(count, heads, head_dim)
        apart += float((a["out"][rows].float() - exact).square().sum())
        whole += float(exact.square().sum())
    return float((apart / whole) ** 0.5)


def _pages(a: Arguments) -> tuple[Any, Any, Any]:
    """Return FlashInfer's block table: the start of each sequence's pages, the pages, and the last page's tokens.

    The first and the last lie on the host, where plans are made.
    """
    import torch

    page = a["k_cache"].shape[1]
    contexts = a["context_lens"].tolist()
    counts = [-(-context // page) for context in contexts]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    pages = torch.cat([a["block_table"][sequence, :count] for sequence, count in enumerate(counts)])
    return starts, pages, torch.tensor([(context - 1) % page + 1 for context in contexts], dtype=torch.int32)


def _flashinfer(wrapper: Any, sets: list[Arguments], rows: Sequence[Any] = (), **more: Any) -> list[Callable[[], Any]]:
    """Return launches with one plan, as in the layers of a step: planning is not timed."""
    a = sets[0]
    (_, heads, head_dim), (_, page, key_heads, _) = a["q"].shape, a["k_cache"].shape
    types = {"q_data_type": a["q"].dtype, "kv_data_type": a["k_cache"].dtype}
    wrapper.plan(*rows, *_pages(a), heads, key_heads, head_dim, page, sm_scale=a["scale"], **types, **more)
    run = partial(wrapper.run, enable_pdl=False)
    return [partial(run, one["q"], (one["k_cache"], one["v_cache"]), out=one["out"]) for one in sets]


def _workspace() -> Any:
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _flashinfer_decode(uses_tensor_cores: bool, sets: list[Arguments]) -> list[Callable[[], Any]]:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    return _flashinfer(BatchDecodeWithPagedKVCacheWrapper(_workspace(), use_tensor_cores=uses_tensor_cores), sets)


def _xqa(sets: list[Arguments]) -> list[Callable[[], Any]]:
    """Return launches of FlashInfer's TensorRT-LLM kernel, which takes block tables directly."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    workspace, longest = _workspace(), int(sets[0]["context_lens"].max())
    return [
        partial(
            xqa_batch_decode_with_kv_cache, a["q"], (a["k_cache"], a["v_cache"]), workspace, a["block_table"],
            a["context_lens"], longest, bmm1_scale=a["scale"], out=a["out"], enable_pdl=False,
        )
        for a in sets
    ]  # fmt: skip


def _flashinfer_prefill(sets: list[Arguments]) -> list[Callable[[], Any]]:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    rows = [sets[0]["cu_rows"].cpu()]
    return _flashinfer(BatchPrefillWithPagedKVCacheWrapper(_workspace()), sets, rows, causal=True)


def _by_torch(name: str, launch: Callable[[Arguments], Callable[[], Any]]) -> tuple[Maker]:
    return (Maker(name, "torch", lambda sets: [launch(one) for one in sets]),)


_MAKERS: dict[str, tuple[Maker, ...]] = {
    "norm::rms_norm": _by_torch("torch rms_norm", _rms_norm),
    "silu::silu_mul": _by_torch("torch silu, mul", _silu_mul),
    "residual_add::bf16_residual_add": _by_torch("torch add_", _residual_add),
    "residual_add::sigmoid_gate_mul": _by_torch("torch sigmoid, mul", _gate_mul),
    "residual_add::sigmoid_gate_mul_batched": _by_torch("torch sigmoid, mul", _gate_mul),
    "embedding::gather": _by_torch("torch index_select", _gather),
    "argmax::argmax_bf16": _by_torch("torch argmax", _argmax),
    "sampling::topk_bf16": _by_torch("torch topk", _topk),
    "gemv::dense_gemv_bf16": _by_torch("cuBLAS", _mm),
    "gemv::dense_gemv_bf16_batchm": _by_torch("cuBLAS", _mm),
    "gemm::dense_gemm_bf16": _by_torch("cuBLAS", _mm),
    "paged_decode::paged_decode_attn": (
        *_by_torch("torch SDPA, no pages", _sdpa),
        Maker("FlashInfer", "flashinfer.decode", partial(_flashinfer_decode, True), LARGEST_ERROR),
        Maker("FlashInfer, no tensor cores", "flashinfer.decode", partial(_flashinfer_decode, False), LARGEST_ERROR),
        Maker("FlashInfer XQA", "flashinfer.decode", _xqa, LARGEST_ERROR),
    ),
    "prefill_paged::prefill_paged_attn": _by_torch("torch SDPA, no pages", _causal),
    "prefill_paged::prefill_paged_attn_mma": (
        *_by_torch("torch SDPA, no pages", _causal),
        Maker("FlashInfer", "flashinfer.prefill", _flashinfer_prefill, LARGEST_ERROR),
    ),
}

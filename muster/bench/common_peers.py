"""What torch and FlashInfer offer for the small kernels, on the same arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from kernel_muster.bench.workloads import Arguments, Workload


@dataclass(frozen=True)
class Peer:
    """A contestant: its name, and a launch for every copy of the arguments."""

    name: str
    launches: list[Callable[[], Any]]


def peer_name(key: str) -> str | None:
    """Return what stands beside a kernel; None where nothing does."""
    made = _MAKERS.get(key)
    return None if made is None else made[0]


def peer_of(work: Workload, sets: list[Arguments], stream: Any) -> Peer | None:
    """Return the peer of a workload, which has run once on the stream; None where there is none, or no torch."""
    make = _MAKERS.get(work.key)
    if make is None or find_spec("torch") is None:
        return None
    import torch

    name, launch = make
    launches = [launch({key: _torch(value) for key, value in arguments.items()}) for arguments in sets]
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        launches[0]()  # libraries make their handles and workspaces, which no capture may
    torch.cuda.synchronize()
    return Peer(name, launches)


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
    """Return torch's attention over a cache without pages: it has no paged form."""
    import torch

    sequences, heads, head_dim = a["q"].shape
    key_heads = a["k_cache"].shape[2]
    k, v = (a[name].view(sequences, -1, key_heads, head_dim).transpose(1, 2) for name in ("k_cache", "v_cache"))
    # Query heads of a key head as rows: its kernels then read the cache once for all of them.
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


_MAKERS: dict[str, tuple[str, Callable[[Arguments], Callable[[], Any]]]] = {
    "norm::rms_norm": ("torch rms_norm", _rms_norm),
    "silu::silu_mul": ("torch silu, mul", _silu_mul),
    "residual_add::bf16_residual_add": ("torch add_", _residual_add),
    "residual_add::sigmoid_gate_mul": ("torch sigmoid, mul", _gate_mul),
    "residual_add::sigmoid_gate_mul_batched": ("torch sigmoid, mul", _gate_mul),
    "embedding::gather": ("torch index_select", _gather),
    "argmax::argmax_bf16": ("torch argmax", _argmax),
    "sampling::topk_bf16": ("torch topk", _topk),
    "gemv::dense_gemv_bf16": ("cuBLAS", _mm),
    "gemv::dense_gemv_bf16_batchm": ("cuBLAS", _mm),
    "gemm::dense_gemm_bf16": ("cuBLAS", _mm),
    "paged_decode::paged_decode_attn": ("torch SDPA, no pages", _sdpa),
    "prefill_paged::prefill_paged_attn": ("torch SDPA, no pages", _causal),
    "prefill_paged::prefill_paged_attn_mma": ("torch SDPA, no pages", _causal),
}

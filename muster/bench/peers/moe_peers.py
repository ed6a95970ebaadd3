"""Peers of routed experts, by their public interfaces. Routing is prepared in advance and never timed."""

import json
from functools import cached_property, partial
from typing import Any

import numpy as np
from kernel_muster.bench.contestants import Absent, Contestant, Entry, as_torch, installed
from kernel_muster.bench.data.experts import MoeData, Routing

_COPIES = 2
#: Peers round weights or every step to BF16, or both: errors up to 7e-3.
_LARGEST_ERROR = 8e-3
Routings = tuple[Routing, ...]


class Peers:
    """The peers with experts, with their own copies of one layer's weights, made once for all row counts."""

    def __init__(self, data: MoeData) -> None:
        self.data = data

    def contestants(self, rows: int, routings: Routings) -> tuple[Contestant, ...]:
        """Return all of them for ``rows`` rows."""
        makers = (
            ("torch bf16 grouped_mm", "torch", torch_grouped),
            ("torch bf16 gather + bmm", "torch", torch_gathered),
            ("Humming indexed", "humming-kernels", humming),
        )
        return tuple(
            Contestant(
                name,
                "peer",
                partial(_if_installed, package, make, self, rows, routings),
                largest_error=_LARGEST_ERROR,
            )
            for name, package, make in makers
        )

    @cached_property
    def bf16(self) -> list[tuple[Any, Any]]:
        """Gate and up ``[E, 2I, H]``, and down ``[E, H, I]``, dequantised. One pair for each copy."""
        up, down = _dequantized(self.data, "gate", "up"), _dequantized(self.data, "down")
        return [(up, down)] + [(up.clone(), down.clone()) for _ in range(_COPIES - 1)]

    @cached_property
    def humming(self) -> tuple[Any, Any]:
        """Humming's layers for gate and up, and for down."""
        return _humming_layer(self.data, "gate", "up"), _humming_layer(self.data, "down")


def _if_installed(package: str, make: Any, peers: Peers, rows: int, routings: Routings, stream: Any) -> Entry | Absent:
    if installed(package) is None:
        return Absent(f"{package} is not installed")
    made: Entry | Absent = make(peers, rows, routings)
    return made


def _dequantized(data: MoeData, *names: str) -> Any:
    """Return weights ``[E, N, K]`` in BF16, with several names stacked along N."""
    import torch

    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    table = torch.cat([table, -table])
    parts = []
    for name in names:
        weight = data.weights[name]
        packed, scales = as_torch(weight.packed), as_torch(weight.block_scale).view(torch.float8_e4m3fn)
        experts = []
        for expert in range(data.experts):
            codes = torch.stack([packed[expert] & 15, packed[expert] >> 4], -1).flatten(1).long()
            step = scales[expert].float().repeat_interleave(16, 1) * float(weight.global_scale_decode[expert])
            experts.append((table[codes] * step).bfloat16())
        parts.append(torch.stack(experts))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _activated(both: Any) -> Any:
    import torch

    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _entry(data: MoeData, rows: int, routings: Routings, run: Any, bytes_a_weight: float) -> Entry:
    """Return launches of ``run(routing, copy) -> [M, H]`` into one output."""
    import torch

    out = torch.full((rows, data.hidden), float("nan"), device="cuda", dtype=torch.bfloat16)

    def launch(routing: Any, copy: int) -> None:
        out.copy_(run(routing, copy))

    launches = tuple(partial(launch, routing, i % _COPIES) for i, routing in enumerate(routings))
    distinct = sum(routing.distinct for routing in routings) / len(routings)
    size = round(distinct * 3 * data.hidden * data.intermediate * bytes_a_weight)
    return Entry(launches, out, size, is_torch=True)


def torch_grouped(peers: Peers, rows: int, routings: Routings) -> Entry | Absent:
    """Return torch's grouped BF16 product on dequantised weights. Tokens are sorted in advance."""
    import torch

    data, weights = peers.data, peers.bf16
    x = as_torch(data.x[:rows])
    sorted_ = {}
    for routing in routings:
        slots = as_torch(routing.slots).long()
        share = as_torch(routing.weights).flatten()[slots].bfloat16()[:, None]
        sorted_[id(routing)] = (slots // data.choices, as_torch(routing.offsets)[1:].contiguous(), share)

    def run(routing: Routing, copy: int) -> Any:
        tokens, ends, share = sorted_[id(routing)]
        up, down = weights[copy]
        h = torch._grouped_mm(x[tokens], up.transpose(1, 2), ends)  # noqa: SLF001  (torch has no public name for it)
        y = torch._grouped_mm(_activated(h), down.transpose(1, 2), ends) * share  # noqa: SLF001
        return torch.zeros(rows, data.hidden, device="cuda", dtype=torch.bfloat16).index_add_(0, tokens, y)

    return _entry(data, rows, routings, run, 2)


def torch_gathered(peers: Peers, rows: int, routings: Routings) -> Entry | Absent:
    """Return torch's BF16 batch product on weights gathered for every choice."""
    if rows > 4:
        return Absent("a copy of the weights for every choice: only up to 4 rows")
    import torch

    data, weights = peers.data, peers.bf16
    x = as_torch(data.x[:rows])
    chosen = {id(one): (as_torch(one.ids).flatten().long(), _shares(one)) for one in routings}

    def run(routing: Routing, copy: int) -> Any:
        (ids, share), (up, down) = chosen[id(routing)], weights[copy]
        h = torch.bmm(x.repeat_interleave(data.choices, 0).unsqueeze(1), up[ids].transpose(1, 2)).squeeze(1)
        y = torch.bmm(_activated(h).unsqueeze(1), down[ids].transpose(1, 2)).squeeze(1)
        return (y.view(rows, data.choices, -1) * share).sum(1)

    return _entry(data, rows, routings, run, 2)


def _shares(routing: Routing) -> Any:
    """Return the weights of a routing as BF16 ``[M, T, 1]``. Made in advance, because a capture cannot pass arrays."""
    return as_torch(routing.weights).bfloat16()[:, :, None]


def _aligned(ids: Any, experts: int, block: int) -> tuple[Any, Any, Any]:
    """Return slots by expert, padded to whole blocks with an invalid slot; the expert of each block; the count."""
    import torch

    flat = ids.ravel()
    slots: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        own = np.flatnonzero(flat == expert).tolist()
        padding = -len(own) % block
        slots += own + [flat.size] * padding
        owners += [expert] * ((len(own) + padding) // block)
    tensors = (torch.tensor(part, dtype=torch.int32, device="cuda") for part in (slots, owners, [len(slots)]))
    one, two, three = tensors
    return one, two, three


def humming(peers: Peers, rows: int, routings: Routings) -> Entry | Absent:
    """Return Humming's indexed NVFP4 kernels with its own heuristics. Activation and sum by torch."""
    import cupy
    import torch
    from humming.forward import humming_forward
    from humming.tune import get_heuristics_config

    data, (up, down) = peers.data, peers.humming
    slots = rows * data.choices
    configs: list[Any] = []
    for layer in (up, down):
        chosen = get_heuristics_config(layer.humming_config, shape_m=slots, gemm_type="indexed")
        configs.append([[0, 1 << 30, chosen]] if isinstance(chosen, dict) else chosen)
    blocks = [config[0][2]["block_shape"][0] for config in configs]
    orders = {id(one): [_aligned(cupy.asnumpy(one.ids), data.experts, block) for block in blocks] for one in routings}
    copies = [
        [(one.weight.data, one.weight_scale.data), (one.weight.data.clone(), one.weight_scale.data.clone())]
        for one in (up, down)
    ]
    x = as_torch(data.x[:rows])
    shares = {id(one): _shares(one) for one in routings}

    def multiply(which: int, routing: Routing, copy: int, given: Any, features: int, top_k: int) -> Any:
        layer, (ids, experts, count) = (up, down)[which], orders[id(routing)][which]
        out = torch.empty(slots, features, device="cuda", dtype=torch.bfloat16)
        weight, scale = copies[which][copy]
        humming_forward(
            layer.humming_config, inputs=given, weight=weight, weight_scale=scale,
            weight_scale_2=layer.weight_scale_2.data, outputs=out, locks=layer.locks, top_k=top_k,
            tuning_config=json.dumps(configs[which]), sorted_ids=ids, expert_ids=experts, num_tokens_padded=count,
            compute_config=json.dumps({"gemm_type": "indexed"}), valid_shape_m=slots,
        )  # fmt: skip
        return out

    def run(routing: Routing, copy: int) -> Any:
        h = multiply(0, routing, copy, x, 2 * data.intermediate, data.choices)
        y = multiply(1, routing, copy, _activated(h), data.hidden, 1)
        return (y.view(rows, data.choices, -1) * shares[id(routing)]).sum(1)

    return _entry(data, rows, routings, run, 0.5625)


def _humming_layer(data: MoeData, *names: str) -> Any:
    import torch
    from humming.layer import HummingLayer

    weights = [data.weights[name] for name in names]
    packed = torch.cat([as_torch(weight.packed) for weight in weights], 1)
    scales = torch.cat([as_torch(weight.block_scale) for weight in weights], 1).view(torch.float8_e4m3fn)
    decode = torch.tensor(weights[0].global_scale_decode, device="cuda")  # gate and up have equal ones here
    layer = HummingLayer(
        shape_n=packed.shape[1], shape_k=2 * packed.shape[2], num_experts=data.experts,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"}, torch_dtype=torch.bfloat16,
    ).cuda()  # fmt: skip
    layer.load_from_tensors({"weight": packed, "weight_scale": scales, "weight_scale_2": decode})
    layer.transform()
    return layer

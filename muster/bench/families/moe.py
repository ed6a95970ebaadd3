"""The MoE family: the routed experts of a layer after routing, grouped and pairwise, for 1 to 128 tokens.

Every launch has its own routing. The name lists the timed parts: ``grouped`` has gate_up, down and unpermute. ``+
sort`` adds the order by expert before them, ``+ top-k`` the router's choice before that. ``pairwise by 2`` is two
tokens at a time, as in the pairwise kernels. Launches overlap (programmatic dependent launch) except in ``no overlap``.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

from kernel_muster.bench.contestants import Contestant, Entry, Launch, copied, found, poisoned, read_kernel
from kernel_muster.bench.data.experts import MOST_ROWS, MoeData, Routing, make_moe_data
from kernel_muster.bench.measure import BenchFamily
from kernel_muster.bench.peers.moe_peers import Peers
from kernel_muster.bench.problem import Problem, Request, Shape
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import Lookups

#: Largest relative L2 error of a right result: that of the best NVFP4 peer.
LARGEST_ERROR = 5e-3
#: Up to this number of rows the pairwise path runs beside the grouped one, to find their edge.
PAIRWISE_ROWS = 32
_COPIES = 2

Prepare = Callable[[Handle, dict[str, Any]], Launch]


class Block:
    """The experts' kernels with their weights, prepared twice, and their intermediate buffers."""

    def __init__(self, kernels: Lookups, data: MoeData) -> None:
        self.data = data
        self.topk = found(kernels, "moe", "moe_topk_softmax")
        self.sort = found(kernels, "moe", "moe_sort_by_expert")
        self.gate_up = found(kernels, "moe_w4a16", "moe_w4a16_grouped_gate_up")
        self.down = found(kernels, "moe_w4a16", "moe_w4a16_grouped_down")
        self.unpermute = found(kernels, "moe", "moe_unpermute_reduce_indexed")
        self.pairs = {rows: _pair(kernels, f"moe_fused_batch{rows}") for rows in (2, 3)}
        first = {name: self.gate_up.prepare_weight(weight) for name, weight in data.weights.items()}
        more = [{name: copied(weight) for name, weight in first.items()} for _ in range(_COPIES - 1)]
        self.copies = (first, *more)

    def grouped(self, rows: int, routing: Routing, copy: int, out: Any, before: str, prepare: Prepare) -> list[Launch]:
        """Return the launches of one pass. ``before`` names the steps before the experts: none, sort, or top-k too."""
        data, weights, slots = self.data, self.copies[copy], rows * self.data.choices
        act, y = poisoned((slots, data.intermediate)), poisoned((slots, data.hidden))
        launches = []
        if before == "top-k":
            routing = replace(routing, ids=_like(routing.ids), weights=_like(routing.weights))
            choice = {"top_k": data.choices, "out_ids": routing.ids, "out_weights": routing.weights}
            launches.append(prepare(self.topk, {"logits": routing.logits, **choice}))
        if before:
            parts = ("slots", "offsets", "work")
            routing = replace(routing, **{part: _like(getattr(routing, part)) for part in parts})
            made = {f"out_{part}": getattr(routing, part) for part in parts}
            launches.append(prepare(self.sort, {"ids": routing.ids, "experts": data.experts, **made}))
        order = {"slots": routing.slots, "offsets": routing.offsets, "work": routing.work}
        up = {"w_gate": weights["gate"], "w_up": weights["up"], "top_k": data.choices, "out": act}
        back = {"y": y, "slots": routing.slots, "weights": routing.weights, "out": out}
        return [
            *launches,
            prepare(self.gate_up, {"x": data.x[:rows], **order, **up}),
            prepare(self.down, {"h": act, "w_down": weights["down"], **order, "out": y}),
            prepare(self.unpermute, back),
        ]

    def pairwise(self, rows: int, routing: Routing, copy: int, out: Any, widest: int, prepare: Prepare) -> list[Launch]:
        """Return the launches of one pass in tiles of at most ``widest`` tokens."""
        data, weights, launches = self.data, self.copies[copy], []
        gate_up, down = self.pairs[widest]
        for start in range(0, rows, widest):
            part = slice(start, min(start + widest, rows))
            ids = routing.ids[part]
            act = poisoned((*ids.shape, data.intermediate))
            up = {"w_gate": weights["gate"], "w_up": weights["up"], "out": act}
            launches.append(prepare(gate_up, {"x": data.x[part], "ids": ids, **up}))
            back = {"weights": routing.weights[part], "w_down": weights["down"], "out": out[part]}
            launches.append(prepare(down, {"h": act, "ids": ids, **back}))
        return launches


def _pair(kernels: Lookups, module: str) -> tuple[Handle, Handle]:
    return found(kernels, module, f"{module}_gate_up"), found(kernels, module, f"{module}_down")


def _like(array: Any) -> Any:
    import cupy

    return cupy.empty_like(array)


def _in_order(launches: list[Launch]) -> None:
    for launch in launches:
        launch()


def ours(block: Block, rows: int, routings: tuple[Routing, ...]) -> Iterator[Contestant]:
    """Yield the variants of our kernels."""
    forms: list[tuple[str, Any, bool]] = [
        ("grouped", partial(block.grouped, before=""), True),
        ("grouped, no overlap", partial(block.grouped, before=""), False),
        ("grouped + sort", partial(block.grouped, before="sort"), True),
        ("grouped + top-k + sort", partial(block.grouped, before="top-k"), True),
    ]
    if rows <= PAIRWISE_ROWS:
        forms += [(f"pairwise by {n}", partial(block.pairwise, widest=n), True) for n in (2, 3)]
    for name, form, overlap in forms:
        handles = (block.gate_up, block.down, block.unpermute) if "grouped" in name else block.pairs[int(name[-1])]

        def make(stream: Any, form: Any = form, overlap: bool = overlap) -> Entry:
            def prepare(handle: Handle, arguments: dict[str, Any]) -> Launch:
                return partial(handle.prepare(**arguments, overlap=overlap), stream)

            out = poisoned((rows, block.data.hidden))
            passes = [form(rows, routing, i % _COPIES, out, prepare=prepare) for i, routing in enumerate(routings)]
            return Entry(tuple(partial(_in_order, one) for one in passes), out, _read_bytes(block.data, routings))

        yield Contestant(name, "ours", make, handles)


def _read_bytes(data: MoeData, routings: tuple[Routing, ...]) -> int:
    return round(mean(routing.distinct for routing in routings) * data.expert_bytes)


def problems(kernels: Lookups, request: Request) -> Iterator[Problem]:
    """Yield every layer of experts at every row count."""
    for name, experts, choices, hidden, intermediate in request.shapes or shapes_of(request.models):
        data = make_moe_data(experts, choices, hidden, intermediate)
        block, peers = Block(kernels, data), Peers(data)
        for rows in request.rows:
            routings = data.routings(rows)
            size = f"{experts} experts, top {choices}, {hidden} / {intermediate}"
            others = peers.contestants(rows, routings) if request.peers else ()
            # Every launch writes the same output, so the last routing is judged.
            error = partial(data.error, expected=data.expected(routings[-1]))
            contestants = (read_kernel(kernels, _read_bytes(data, routings)), *ours(block, rows, routings), *others)
            yield Problem(name, size, rows, contestants, error, LARGEST_ERROR)


def shapes_of(manifests: tuple[Manifest, ...]) -> list[Shape]:
    """Return ``(name, experts, top_k, hidden, intermediate)`` of models with experts, each size once."""
    found_: dict[Shape, list[str]] = {}
    for manifest in manifests:
        model = manifest.model
        if model.moe is not None and model.hidden_size is not None:
            size = (model.moe.experts, model.moe.top_k, model.hidden_size, model.moe.intermediate_size)
            found_.setdefault(size, []).append(manifest.name)
    return [(" / ".join(names), *size) for size, names in found_.items()]


def parse_shape(text: str) -> Shape:
    """Read ``EXPERTSxTOP_KxHIDDENxINTERMEDIATE``. UsageError describes an error."""
    match = re.fullmatch(r"(\d{1,4})x(\d{1,2})x(\d{1,5})x(\d{1,5})", text)
    sizes = tuple(map(int, match.groups())) if match else ()
    if not sizes or 0 in sizes or sizes[1] > sizes[0] or sizes[2] % 16 or sizes[3] % 16:
        raise UsageError(
            f"--shape {text!r}: expected EXPERTSxTOP_KxHIDDENxINTERMEDIATE, the last two multiples of 16, "
            "for example 256x8x2048x512"
        )
    return (text, *sizes)


FAMILY = BenchFamily("moe", problems, range(1, MOST_ROWS + 1), (1, 2, 4, 8, 16, 32, 64), parse_shape)

"""The kernels of a module, and how the rows of a call choose among them: by the policy of the layers of ``models``."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from kernel_muster.models.layers.families import GEMM_SWIGLU, batch_tiers, exact_tiers, swiglu_tiers
from kernel_muster.models.layers.tiles import may_take_wide, tile_kernels
from kernel_muster.models.policy.gemv import chunk_tier, gemv_chunks, gemv_tier
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.projection import covers_rows, projection_arm
from kernel_muster.models.policy.tile import GemmShape, TileName, choose_tile, reachable_tiles
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.torch.kernels import Kernels
from kernel_muster.torch.launching import launch

Copies = Mapping[str, Any]  # a weight in each layout

_numbers = itertools.count(1)
_MOST_STEPS = 4096
_PLANS: "WeakValueDictionary[str, Plan]" = WeakValueDictionary()


def no_plan() -> None:
    """Return None, the value of a plan loaded in another process."""


class Plan:
    """The kernels of one module, shared by its copies. A plan loaded in another process has none."""

    def __init__(self, kernels: Kernels, name: str) -> None:
        self.kernels, self.name = kernels, name
        self.lookups = kernels.lookups.for_layer(name)
        self.levers = self.lookups.levers
        self.token = f"{name}#{next(_numbers)}"
        _PLANS[self.token] = self

    def launch(self, handle: AnyHandle, *arguments: Any) -> None:
        """Launch where the kernels of this plan do."""
        launch(handle, arguments, self.kernels.ordinal)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Plan":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return no_plan, ()


def find_plan(kind: "type[Plan]", token: str) -> Any:
    """Return the plan of a token. UsageError if its module is gone, or was made in another process."""
    plan = _PLANS.get(token)
    if not isinstance(plan, kind):
        raise UsageError(
            f"{token}: no module of this process has these kernels: bind the model with kernel_muster.torch.bind"
        )
    return plan


class ProjectionPlan(Plan):
    """The kernels of one NVFP4 projection ``(N, K)``: GEMV tiers for few rows, GEMMs for more.

    Lookups and layouts are those of a projection of ``models``, for all reachable row counts. ``others`` are kernels
    that read the weight too, in launches of another plan.
    """

    def __init__(self, kernels: Kernels, name: str, shape: tuple[int, int], others: Iterable[AnyHandle] = ()) -> None:
        super().__init__(kernels, name)
        self.shape = shape
        wide = may_take_wide(self.lookups, [shape])
        self.tiers = {**exact_tiers(self.lookups), **batch_tiers(self.lookups, has_wide=wide)}
        tiles = tile_kernels(self.lookups, [shape])
        there = [one for one, handle in tiles.items() if handle]
        reached = reachable_tiles(*shape, there, self.levers)
        self.tiles: dict[TileName, AnyHandle] = {one: tiles[one] for one in there if one in reached}
        self.makers: dict[str, AnyHandle] = {}
        self._steps: dict[tuple[int, Phase], list[tuple[AnyHandle, str, slice]]] = {}
        self._plan_layouts([*self.tiers.values(), *self.tiles.values(), *others])

    def _plan_layouts(self, readers: Iterable[AnyHandle]) -> None:
        layouts, (rows, columns) = self.lookups.layouts, self.shape
        for handle in readers:
            if handle and handle.weight_layout is not None:
                self.makers.setdefault(handle.weight_layout, handle)
                layouts.want(self.name, handle.weight_layout, handle.key)
        for layout in self.makers:
            size = rows * columns // 2 + rows * columns // 16 + 4
            layouts.build(self.name, layout, size, "module of torch", self.shape)

    def prefers_gemv(self, rows: int, phase: Phase) -> bool:
        """Whether policy leaves M rows to the GEMV tiers."""
        there = [rows for rows, handle in self.tiers.items() if handle]
        return projection_arm(GemmShape(rows, *self.shape), phase, there, self.tiles, self.levers) == "gemv"

    def covers(self, rows: int) -> bool:
        """Whether GEMVs serve M rows."""
        return covers_rows(rows, [rows for rows, handle in self.tiers.items() if handle])

    def project(self, copies: Copies, x: Any, out: Any, phase: Phase) -> None:
        """Write ``out [M, N] = x [M, K] w^T``, through the policy's arm."""
        steps = self.steps(x.shape[0], phase)
        if len(steps) == 1:
            self.launch(steps[0][0], x, copies[steps[0][1]], out)
            return
        for handle, layout, rows in steps:
            self.launch(handle, x[rows], copies[layout], out[rows])

    def steps(self, rows: int, phase: Phase) -> list[tuple[AnyHandle, str, slice]]:
        """Return the launches of M rows: kernel, layout of the weight, and rows. Policy is asked once for each M."""
        known = self._steps.get((rows, phase))
        if known is not None:
            return known
        if len(self._steps) > _MOST_STEPS:
            self._steps.clear()
        found = [(handle, str(handle.weight_layout), part) for handle, part in self._chosen(rows, phase)]
        self._steps[rows, phase] = found
        return found

    def _chosen(self, rows: int, phase: Phase) -> Iterator[tuple[AnyHandle, slice]]:
        if rows == 0:
            return
        if not self.prefers_gemv(rows, phase):
            name = choose_tile(GemmShape(rows, *self.shape), phase, self.tiles, self.levers)
            yield self.tiles[name], slice(0, rows)
            return
        there = [most for most, handle in self.tiers.items() if handle]
        start = 0
        for size in gemv_chunks(rows, there):
            tier = chunk_tier(size, there)
            if tier is None:
                self._no_tier(size)
            yield self.tiers[tier], slice(start, start + size)
            start += size

    def _no_tier(self, rows: int) -> NoReturn:
        for handle in self.tiers.values():
            if not handle:
                handle.prepare()  # raises NullKernelError, with the reason
        raise UsageError(f"{self.name}: no GEMV is there for {rows} rows")


class SwiGluPlan(Plan):
    """The kernels between the projections of a SwiGLU: gate, up and activation in one launch, or the activation alone.

    ``gate``, ``up`` and ``down`` are the plans of its projections.
    """

    def __init__(self, kernels: Kernels, name: str, hidden: int, intermediate: int) -> None:
        super().__init__(kernels, name)
        self.fused, self.duals = swiglu_tiers(self.lookups)
        self.activation = self.lookups.kernel("silu", "silu_mul", reached_by=GEMM_SWIGLU)
        readers = [handle for handle in (*self.fused.values(), *self.duals.values()) if handle]
        wide, narrow = (intermediate, hidden), (hidden, intermediate)
        self.gate, self.up = (ProjectionPlan(kernels, f"{name}.{one}_proj", wide, readers) for one in ("gate", "up"))
        self.down = ProjectionPlan(kernels, f"{name}.down_proj", narrow)

    def activate(self, gate: Copies, up: Copies, x: Any, act: Any, phase: Phase) -> None:
        """Write ``act [M, I] = silu(x gate^T) * (x up^T)``, in one launch where a kernel does it for these rows."""
        rows = x.shape[0]
        if rows == 0:
            return
        linears = (self.gate, self.up, self.down)
        is_exact = rows <= 3
        by_gemv = is_exact or all(one.covers(rows) and one.prefers_gemv(rows, phase) for one in linears)
        tier = gemv_tier(rows, [most for most, handle in self.fused.items() if handle]) if by_gemv else None
        if tier is not None:
            handle = self.fused[tier]
            layout = str(handle.weight_layout)
            self.launch(handle, x, gate[layout], up[layout], act)
            return
        parts = torch.empty_like(act), torch.empty_like(act)
        self._gate_and_up(gate, up, x, parts, is_exact, phase)
        self.launch(self.activation, *parts, act)

    def _gate_and_up(
        self, gate: Copies, up: Copies, x: Any, parts: tuple[Any, Any], is_exact: bool, phase: Phase
    ) -> None:
        dual = self.duals.get(x.shape[0]) if is_exact else None
        if dual:
            layout = str(dual.weight_layout)
            self.launch(dual, x, gate[layout], up[layout], *parts)
            return
        self.gate.project(gate, x, parts[0], phase)
        self.up.project(up, x, parts[1], phase)

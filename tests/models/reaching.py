"""The launched kernels of a model: its real layers and policy on empty arrays, with every launch counted.

Sizes are those of the shipped models, because policy depends on them. Untouched memory costs nothing. Kernels write
zeros as integers, so ids and places are valid.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from kernel_muster.MODEL_toml import load_manifest, manifest_folder
from kernel_muster.models import build, drafter
from kernel_muster.models.decode.proposer import Committed
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.drafter import Drafter
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.memory import HostMemory
from kernel_muster.models.memory.scratch import Scratch, ScratchPlan
from kernel_muster.models.memory.state import ModelState, StateSizes, host_zeros
from kernel_muster.models.model import Model
from kernel_muster.models.proposers.dflash import DflashProposer
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target
from kernel_muster.registry.launch.runners import BuildState, Launch, LaunchOptions, NoRunner
from kernel_muster.registry.levers import read_levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups

TARGETS = {
    "cpu": CPU_TARGET,
    **{name: Target(name, parse_arch(name)) for name in ("sm_80", "sm_90a", "sm_100a", "sm_121a")},
}
LAYERS, MAX_ROWS = 4, 512


class CountingRunner(NoRunner):
    """Launches nothing and keeps the keys; integers that a kernel gives are zero."""

    def __init__(self) -> None:
        self.launched: dict[str, str] = {}  # key -> the first pass that launched it
        self.now = "load"

    def state(self, spec: KernelSpec) -> BuildState:
        return BuildState("loaded")

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        self.launched.setdefault(owner, self.now)

        def launch(stream: object | None = None) -> None:
            for param in bound.outputs:
                array = bound.arguments[param.name]
                if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and param.role == "out":
                    array[...] = 0

        return launch


@dataclass(frozen=True)
class Laid:
    """A weight in some layout, without values."""

    layout: str
    quant: str
    shape: tuple[int, ...]


class NoValues:
    """A source of weights that nobody wrote to."""

    def __init__(self, is_equal: bool = True) -> None:
        self._is_equal = is_equal  # whether all weights have one global scale, so Q, K and V share a copy

    def find(self, spec: WeightSpec) -> Any:
        if spec.quant == "array":
            return np.empty(spec.shape, numpy_dtype("bf16"))
        if spec.quant == "bf16":
            return Bf16Weight(np.empty(spec.shape, numpy_dtype("bf16")))
        *lead, n, k = spec.shape
        packed, scales = np.empty((*lead, n, k // 2), np.uint8), np.empty((*lead, n, k // 16), np.uint8)
        scale = 1 if self._is_equal else 1 + zlib.crc32(spec.name.encode()) % 97
        return Nvfp4Weight(packed, scales, np.full(tuple(lead), scale, np.float32))

    def quant_of(self, name: str) -> None:
        return None


def laid(spec: KernelSpec) -> KernelSpec:
    """Return a spec whose ``prepare`` touches nothing."""
    if spec.prepare is None:
        return spec
    return replace(spec, prepare=lambda w: Laid(str(spec.weight_layout), w.quant, tuple(w.shape)))


def shared_zeros(shape: tuple[int, ...], dtype: str) -> Any:
    """Return zeros whose first axis is one place in memory: hundreds of states that nobody looks at."""
    one = host_zeros(shape[1:], dtype)
    return np.lib.stride_tricks.as_strided(one, shape, (0, *one.strides))


@dataclass
class Reached:
    """A model's questions and launches."""

    session: LookupSession
    runner: CountingRunner

    @property
    def asked(self) -> set[str]:
        """Keys that were really tried, and are there."""
        found = set()
        for entry in self.session.entries("boot"):
            for key in entry.members:
                if self.session.selector.decide(key).chosen is not None:
                    found.add(str(key))
                    break
        return found

    @property
    def launched(self) -> dict[str, str]:
        """Keys that were launched, each with the first pass that did."""
        return self.runner.launched

    @property
    def chains(self) -> set[tuple[str, ...]]:
        """Preference chains, member by member."""
        return {tuple(map(str, entry.members)) for entry in self.session.entries("boot") if len(entry.members) > 1}


def dims_of(name: str, **changes: Any) -> ModelDims:
    """Return the dimensions of a shipped model, a group of layers deep."""
    manifest, findings = load_manifest(manifest_folder() / name / "MODEL.toml")
    assert manifest is not None, findings
    table = manifest.model.model_copy(update={"num_layers": LAYERS, **changes})
    return model_dims(SimpleNamespace(model=table, dflash=manifest.dflash, where=manifest.where))


def defaults_of(name: str) -> Mapping[str, Any]:
    manifest, _ = load_manifest(manifest_folder() / name / "MODEL.toml")
    assert manifest is not None
    return manifest.defaults


def session_for(
    catalog: Catalog, name: str, target: str, without: Iterable[str] = (), **levers: object
) -> tuple[LookupSession, CountingRunner]:
    """Open lookups whose kernels are counted."""
    given = {f"MUSTER_{key}": value for key, value in levers.items()}
    snapshot, bad = read_levers(catalog.levers, [("given", given), ("manifest", defaults_of(name))])
    assert bad == []
    gone = set(without)
    kernels = tuple(replace(row, spec=laid(row.spec)) for row in catalog.kernels if row.spec.key not in gone)
    runner = CountingRunner()
    return LookupSession(replace(catalog, kernels=kernels), TARGETS[target], snapshot, runner=runner), runner


def context_of(session: LookupSession, is_equal: bool) -> LayerContext:
    kernels = Lookups(session)
    planner = WeightPlanner(kernels.layouts, NoValues(is_equal), HostMemory())
    return LayerContext(kernels, planner, Scratch(ScratchPlan()), MAX_ROWS)


def reach(
    catalog: Catalog, name: str, target: str, without: Iterable[str] = (), *, scales: Iterable[bool] = (True, False),
    **levers: object,
) -> Reached:  # fmt: skip
    """Build a shipped model and run every kind of pass over it, at row counts around every edge.

    Q, K and V have one copy where their global scales are equal, and else three: ``scales`` says which to run.
    """
    session, runner = session_for(catalog, name, target, without, **levers)
    dims = dims_of(name)
    for is_equal in scales:
        ctx = context_of(session, is_equal)
        if dims.drafter is not None:
            made = drafter._build(ctx, dims, dims.drafter, ctx.kernels, None)
            drive_drafter(made, dims, runner, session)
        else:
            drive(build._build(ctx, dims, ctx.kernels), runner, session)
    return Reached(session, runner)


DECODE = (*range(1, 18), 24, 32, 33, 64, 65, 128)
#: Sequences and rows of each.
VERIFY = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 8), (1, 16), (1, 17), (2, 2), (2, 4), (4, 4), (4, 17), (8, 17))
PREFILL = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (1, 16), (1, 17), (1, 33), (1, 65), (2, 20), (3, 1), (1, 300))


def drive(model: Model, runner: CountingRunner, session: LookupSession) -> None:
    """Run passes; states are moved on by nothing."""
    for phase, shapes in (("prefill", PREFILL), ("decode", [(rows, 1) for rows in DECODE]), ("verify", VERIFY)):
        for sequences, rows in shapes:
            runner.now = f"{phase} of {sequences} x {rows}"
            run_pass(model, phase, sequences, rows)
    dims = model.dims
    if dims.attention is not None and dims.attention.rope is not None and dims.attention.rope.is_interleaved:
        for phase, rows in (("prefill", 5), ("decode", 1)):
            runner.now = f"{phase} of tokens with three positions"
            run_pass(model, phase, 1, rows, positions=np.arange(3 * rows, dtype=np.int32).reshape(3, rows))
    runner.now = "sampling"
    logits = np.empty((2, dims.vocab), numpy_dtype("bf16"))
    ones = np.ones(2, np.float32)
    model.sampler.sample(logits, ones, np.ones(2, np.int32), ones, ones)
    model.sampler.accepted(np.zeros((1, 2), np.int32), np.zeros((1, 3), np.int32))


def run_pass(model: Model, phase: Any, sequences: int, rows: int, positions: Any = None) -> None:
    """Run one pass through the layers and the LM head, and through the MTP head behind them."""
    sizes = StateSizes(sequences, sequences * (-(-rows // 16)))
    state = ModelState(model.dims, sizes, shared_zeros)
    opened = [state.open() for _ in range(sequences)]
    ids = [[0] * rows for _ in range(sequences)]
    batch = state.batch(opened, ids, phase, positions)
    hidden = model.run(batch, state).hidden
    last = hidden if phase != "prefill" else model.embedding.pick(hidden, batch.last_rows)
    model.greedy(model.lm_head.forward(last))
    if model.mtp is not None:
        own = ModelState(model.mtp.dims, sizes, shared_zeros)
        again = own.batch([own.open() for _ in range(sequences)], ids, phase, positions)
        model.mtp.forward(model.embedding.forward(again.ids), hidden, again, own.kv[0])


def drive_drafter(made: Drafter, dims: ModelDims, runner: CountingRunner, session: LookupSession) -> None:
    """Commit context rows and propose blocks."""
    for sequences, rows in (*((1, rows) for rows in range(1, 18)), (2, 9), (1, 40), (2, 100), (1, 300), (3, 1), (8, 1)):
        sizes = StateSizes(sequences, sequences * (1 + (rows + made.drafter.gamma + 1) // 16))
        proposer = DflashProposer(made, session.levers, sizes)
        target = ModelState(replace(dims, drafter=None), sizes, shared_zeros)
        opened = [target.open() for _ in range(sequences)]
        for one in opened:
            proposer.open(one)
        runner.now = f"commit of {sequences} x {rows}"
        features = np.empty((sequences * rows, len(made.drafter.target_layers) * dims.hidden), numpy_dtype("bf16"))
        zeros = [0] * sequences
        proposer.commit(Committed(opened, [rows] * sequences, zeros, None, features, zeros * rows))
        runner.now = f"block of {sequences}"
        proposer.propose(opened, [0] * sequences)

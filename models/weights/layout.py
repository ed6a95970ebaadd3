"""The layout plan of a model: the built copies of each weight, with reasons and bytes."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kernel_muster.models.memory.memory import HostMemory, Memory
from kernel_muster.models.weights.source import WeightSource, WeightSpec, moved_to
from kernel_muster.registry.contract.layouts import LayoutPlan
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.selection.handles import AnyHandle, Handle

#: Kernels by why they read a weight.
Readers = Mapping[str, Iterable[AnyHandle]]


class PlannedWeight:
    """One weight in every layout of its kernels. Without values in a plan."""

    def __init__(self, spec: WeightSpec, layouts: frozenset[str], copies: Mapping[str, Any]) -> None:
        self.spec, self.layouts, self._copies = spec, layouts, dict(copies)

    def serves(self, handle: AnyHandle) -> bool:
        """Whether the kernel exists and the plan builds its copy."""
        return bool(handle) and handle.weight_layout in self.layouts

    def copy_for(self, handle: AnyHandle) -> Any:
        """Return a kernel's copy. UsageError if there is none, NullKernelError if there is no kernel."""
        layout = handle.weight_layout
        if layout in self._copies:
            return self._copies[layout]
        if not isinstance(handle, Handle):
            handle.prepare_weight(None)  # raises NullKernelError with key, reason, waiver and site
        if layout in self.layouts:
            raise UsageError(f"{self.spec.name}: the model was planned without weights and cannot compute")
        raise UsageError(f"{self.spec.name}: no copy in layout {layout}, which {handle.key} reads")

    @property
    def plain(self) -> Any:
        """The logical weight, for kernels planned to read it directly. UsageError if there is none."""
        if self.spec.logical_layout not in self._copies:
            raise UsageError(f"{self.spec.name}: the model was planned without weights and cannot compute")
        return self._copies[self.spec.logical_layout]


class WeightPlanner:
    """Gets weights from a source, and builds in ``memory`` the copies that the selected kernels declare."""

    def __init__(self, layouts: LayoutPlan, source: WeightSource, memory: Memory | None = None) -> None:
        self._layouts, self.source = layouts, source
        self.memory = memory or HostMemory()
        self.planned: list[PlannedWeight] = []

    def plan(
        self, spec: WeightSpec, readers: Readers, value: Any = None, plain: Readers = MappingProxyType({}),
        conditions: Mapping[str, str] = MappingProxyType({}),
    ) -> PlannedWeight:  # fmt: skip
        """Build the copies of one weight. ``readers`` are kernels by reason: ``{"decode": tiers, ...}``.

        A copy that no kernel can make from the logical weight is not built, and the audit reports LAYOUT_MISSING.
        ``value`` is the logical weight if it is made here and not found in the source. ``plain`` are kernels that take
        the logical weight's values as an array, beside a weight with their layout. ``conditions`` are conditions of
        reasons: a copy without any other reason is conditional.
        """
        logical = moved_to(self.memory, self.source.find(spec) if value is None else value)
        wanted: dict[str, list[KernelKey]] = {}
        reasons: dict[str, dict[str, None]] = {}  # by layout, each once and in order
        makers: dict[str, Handle] = {}
        for reason, handles in readers.items():
            for handle in handles:
                layout = handle.weight_layout
                if layout is None or not isinstance(handle, Handle):
                    continue
                wanted.setdefault(layout, []).append(handle.key)
                if _makes(handle, layout, spec):
                    makers.setdefault(layout, handle)
                    reasons.setdefault(layout, {})[reason] = None
        is_plain = False
        for reason, handles in plain.items():
            for handle in handles:
                if not handle:
                    continue
                is_plain = True
                wanted.setdefault(spec.logical_layout, []).append(handle.key)
                reasons.setdefault(spec.logical_layout, {})[reason] = None
        for layout, keys in wanted.items():
            self._layouts.want(spec.name, layout, *keys)
        for layout, why in reasons.items():
            needs = dict.fromkeys(conditions.get(reason, "") for reason in why)
            condition = "" if "" in needs else "; ".join(needs)
            self._layouts.build(spec.name, layout, spec.size_bytes, ", ".join(why), spec.shape, condition)
        copies = {} if logical is None else {lay: maker.prepare_weight(logical) for lay, maker in makers.items()}
        if is_plain and logical is not None:
            copies.setdefault(spec.logical_layout, logical)
        planned = PlannedWeight(spec, frozenset(reasons), copies)
        self.planned.append(planned)
        return planned

    def array(self, name: str, *shape: int) -> Any | None:
        """Return a small BF16 array (a norm's or a gate's weight), or None in a plan."""
        return moved_to(self.memory, self.source.find(WeightSpec(name, shape, "array")))


def _makes(handle: Handle, layout: str, spec: WeightSpec) -> bool:
    return handle.spec.prepare is not None or layout == spec.logical_layout

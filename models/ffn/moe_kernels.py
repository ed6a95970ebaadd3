"""Lookups of expert kernels: those of a layer's arms, and after a fused kernel its parts."""

from collections.abc import Mapping, Sequence

from kernel_muster.models.dims import MoeDims
from kernel_muster.models.layers.families import Key, fused_or_parts, looked_up
from kernel_muster.models.policy.ffn import FfnArm
from kernel_muster.models.policy.moe import FUSED_ROWS, takes_fused_shared, takes_k64
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.sites import track_caller

SHARED = "the model has a shared expert"
GROUPED = "prefill, and grouped decode (moe_grouped_decode)"
_FUSED_WHEN = "the layer owns all experts and a shared one, and a softmax chooses at most 32 of at most 256"
_FUSED = ("moe_fused_shared", "moe_fused_shared_gate_up"), ("moe_fused_shared", "moe_fused_shared_down")
#: Kernels of gate and up, and of down, by the tokens of a tile.
_PAIRS: Mapping[int, tuple[Key, Key]] = {
    2: (("moe_fused_batch2", "moe_fused_batch2_gate_up"), ("moe_fused_batch2", "moe_fused_batch2_down")),
    3: (("moe_fused_batch3", "moe_fused_batch3_gate_up"), ("moe_fused_batch3", "moe_fused_batch3_down")),
}
_GATE_ADD, _COMBINE = ("moe_shared", "moe_shared_gate_add"), ("moe_shared", "moe_unpermute_shared_add")
_UNPERMUTE = ("moe", "moe_unpermute_reduce_indexed")
#: The tiles of arms that a step's two launches never serve, or only up to a few rows.
_FORCED_TILES: Mapping[FfnArm, tuple[int, ...]] = {"token_major": (2,), "batched": (2, 3)}

Pair = tuple[AnyHandle, AnyHandle]


class StepKernels:
    """The two launches of a step's experts, pairwise experts, and the last kernel of each path. None: not looked up.

    ``pairs`` are kernels of gate and up, and of down, by the tokens of a tile. ``has_shared``: the layer adds a shared
    expert. ``is_grouped``: every step is grouped. ``forced``: the only arm left by MUSTER_FFN_ARM.
    """

    @track_caller
    def __init__(
        self, kernels: Lookups, moe: MoeDims, *, is_whole: bool, has_shared: bool, is_grouped: bool,
        forced: FfnArm | None,
    ) -> None:  # fmt: skip
        takes_fused = takes_fused_shared(moe.experts, moe.top_k, moe.router, has_shared, is_whole)
        tiles = _FORCED_TILES.get(forced, ()) if forced is not None else ()
        if is_grouped and forced in (None, "grouped", "prefill", "atomic_c4"):
            takes_fused, tiles = False, ()
        elif not takes_fused:
            tiles = (2, 3)
        self.fused: Pair | None = None
        self.pairs: dict[int, Pair] = {}
        self.gate_add: AnyHandle | None = None
        self.combine: AnyHandle | None = None
        self.unpermute: AnyHandle | None = None
        for tokens in tiles:
            self.pairs[tokens] = _pair(kernels, tokens, takes_fused)
        # A pair leaves the shared expert to a kernel of its own, as the atomic form does.
        is_added_alone = has_shared and (bool(tiles) or forced == "atomic_c4")
        if is_added_alone:
            by = "MUSTER_FFN_ARM" if takes_fused else "moe_arm: pairs, or one by one"
            self.gate_add = kernels.kernel(*_GATE_ADD, when=SHARED, reached_by=by)
        behind = (_GATE_ADD,) if has_shared and not is_added_alone else ()
        self._look_up_end(kernels, has_shared, behind)
        if takes_fused:
            self._look_up_fused(kernels, [tokens for tokens in _PAIRS if tokens not in tiles], behind)

    @track_caller
    def _look_up_end(self, kernels: Lookups, has_shared: bool, behind: Sequence[Key]) -> None:
        """Look up the kernels that return the results of grouped experts, with the shared expert or before it."""
        if not has_shared:
            self.unpermute = kernels.kernel(*_UNPERMUTE, reached_by=GROUPED)
            return
        found = fused_or_parts(kernels, (_COMBINE,), (_UNPERMUTE, *behind), when=SHARED, reached_by=GROUPED)
        if found.whole is not None:
            self.combine = found.whole[0]
            return
        self.unpermute = found.parts[0]
        if behind:
            self.gate_add = found.parts[1]

    @track_caller
    def _look_up_fused(self, kernels: Lookups, tiles: Sequence[int], behind: Sequence[Key]) -> None:
        """Look up the two launches of a step, and behind them experts in pairs."""
        keys = (*(key for tokens in tiles for key in _PAIRS[tokens]), *behind)
        by = f"moe_arm: up to {FUSED_ROWS} rows, and tiles of 1 and 2 rows"
        found = fused_or_parts(kernels, _FUSED, keys, when=_FUSED_WHEN, reached_by=by)
        if found.whole is not None:
            self.fused = found.whole[0], found.whole[1]
            return
        parts = {key: looked_up(part, str(key)) for key, part in zip(keys, found.parts, strict=True)}
        for tokens in tiles:
            gate_up, down = _PAIRS[tokens]
            self.pairs[tokens] = parts[gate_up], parts[down]
        self.gate_add = parts.get(_GATE_ADD, self.gate_add)

    def pair(self, tokens: int) -> Pair | None:
        """Return the kernels of a tile of 1, 2 or 3 tokens."""
        return self.pairs.get(max(tokens, 2))


@track_caller
def _pair(kernels: Lookups, tokens: int, is_forced: bool) -> Pair:
    by = "MUSTER_FFN_ARM" if is_forced else "moe_arm: pairs, or one by one" if tokens == 2 else "moe_arm: 3 rows"
    gate_up, down = _PAIRS[tokens]
    return kernels.kernel(*gate_up, reached_by=by), kernels.kernel(*down, reached_by=by)


@track_caller
def grouped_kernel(kernels: Lookups, name: str, depth: int) -> AnyHandle:
    """Look up a kernel of grouped experts, ``gate_up`` or ``down``. If K allows it, after its twin of K step 64."""
    plain, deep = ("moe_w4a16", f"moe_w4a16_grouped_{name}"), ("moe_w4a16", f"moe_w4a16_grouped_{name}_k64")
    if not takes_k64(depth, True):
        return kernels.kernel(*plain, reached_by=GROUPED)
    return kernels.first_of(deep, plain, required=True, when="K is a multiple of 64", reached_by=GROUPED)

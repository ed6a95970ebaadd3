"""The byte floor of a decode step: its necessary reads, for any kernels."""

from kernel_muster.models.dims import ModelDims, MoeDims
from kernel_muster.models.model import Model
from kernel_muster.registry.values import frozen

_F32, _BF16 = 4, 2


@frozen
class StepBytes:
    """Bytes read by one step of some sequences: weights once, the routed experts, states, keys and values."""

    weights: int
    experts: int
    states: int
    cache: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.experts + self.states + self.cache


def step_bytes(model: Model, sequences: int, context: int) -> StepBytes:
    """Return the floor for sequences with ``context`` tokens each.

    Every weight counts once, in its stored format without padding. Experts count by the expected reach of random
    routing. Norms, activations and writes are omitted: the floor is never too high.
    """
    weights = experts = 0
    for weight in model.weights:
        if weight.spec.name.startswith("mtp") or weight.spec.name.endswith(".qkv_proj"):  # drafts; a second copy
            continue
        if len(weight.spec.shape) == 2:
            weights += weight.spec.size_bytes
        elif model.dims.moe is not None:
            experts += int(weight.spec.size_bytes * reached_share(model.dims.moe, sequences))
    return StepBytes(
        weights, experts, sequences * _state_bytes(model.dims), sequences * context * _token_bytes(model.dims)
    )


def reached_share(moe: MoeDims, rows: int) -> float:
    """Return the share of experts reached by these rows, if each chooses at random."""
    return 1 - (1 - moe.top_k / moe.experts) ** rows


def _state_bytes(dims: ModelDims) -> int:
    """Return the bytes of one sequence's recurrent states."""
    gdn = dims.gdn
    if gdn is None:
        return 0
    one = _F32 * gdn.value_heads * gdn.key_dim * gdn.value_dim + _BF16 * gdn.qkv_dim * (gdn.conv_width - 1)
    return one * dims.layer_kinds.count("gdn")


def _token_bytes(dims: ModelDims) -> int:
    """Return the bytes of one token's keys and values."""
    if dims.attention is None:
        return 0
    return 2 * _BF16 * dims.attention.kv_dim * dims.layer_kinds.count("attn")

"""The FFN component: one interface, three kinds, named arms. This module holds the interface and the kind none."""

from typing import Any, Protocol

from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.policy.ffn import FfnArm
from kernel_muster.models.policy.phase import Phase

FFN_LEVER = "MUSTER_FFN_ARM"


class FfnComponent(Protocol):
    """A decoder layer's view of its FFN: ``forward(x, phase)`` on normalised BF16 rows ``(M, H)``."""

    @property
    def is_none(self) -> bool:
        """Whether there is no FFN: forward returns its input."""

    @property
    def is_dense(self) -> bool:
        """Whether it is one SwiGLU for all tokens."""

    @property
    def fp32_routing_active(self) -> bool:
        """Whether router logits stay in FP32."""

    @property
    def arms(self) -> tuple[FfnArm, ...]:
        """The arms that a lever can force."""

    def moe_grouped_decode_ok(self, rows: int) -> bool:
        """Whether decode of this many rows reads each routed expert once."""

    def can_forward_km(self, rows: int) -> bool:
        """Whether batched GEMVs serve these rows. Known before the previous norm, without side effects."""

    def arm(self, rows: int, phase: Phase) -> FfnArm:
        """Return the arm of forward."""

    def forward(self, x: Any, phase: Phase, arm: FfnArm | None = None) -> Any:
        """Return the FFN of ``x (M, H)``, through the given arm or the policy's."""


class NoneFfn:
    """No FFN: a layer of attention alone."""

    is_none = True
    is_dense = False
    fp32_routing_active = False
    arms: tuple[FfnArm, ...] = ()

    def moe_grouped_decode_ok(self, rows: int) -> bool:
        """Return False."""
        return False

    def can_forward_km(self, rows: int) -> bool:
        """Return False."""
        return False

    def arm(self, rows: int, phase: Phase) -> FfnArm:
        """Return ``single``. It launches no kernel."""
        return "single"

    def forward(self, x: Any, phase: Phase, arm: FfnArm | None = None) -> Any:
        """Return x itself."""
        return x


def forced_arm(ctx: LayerContext, arms: tuple[FfnArm, ...]) -> FfnArm | None:
    """Return the arm forced by MUSTER_FFN_ARM. An arm that this FFN lacks is REQUEST_NOT_HONORED."""
    asked = ctx.levers[FFN_LEVER]
    for arm in arms:
        if arm == asked:
            return arm
    if asked != "auto":
        ctx.kernels.request_failed(FFN_LEVER, f"an FFN has no arm {asked}; it has {', '.join(arms)}")
    return None

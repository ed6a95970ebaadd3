"""The recurrent part of a gated delta net: short convolution, then the gated delta rule.

Every form but one advances a state by the same step, row by row: a state does not depend on how rows were cut into
launches. Long prompts go in chunks of rows, with bits of their own.
"""

from typing import Any

import numpy as np
from kernel_muster.models.dims import GdnDims
from kernel_muster.models.layers.context import LayerContext, needed, new_rows
from kernel_muster.models.layers.families import is_of
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.memory import copy_rows
from kernel_muster.models.memory.state import Recurrent
from kernel_muster.models.policy.gdn import (
    FUSED_VERIFY_ROWS,
    GdnArm,
    decode_arm,
    is_chunked_size,
    prefill_arm,
    verify_arm,
)
from kernel_muster.registry.launch.tape import SideBlock
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.values import frozen

#: Decode steps that the one launch of all inputs of a delta net does not serve.
LEFT = "more rows than is_one_launch takes"


@frozen
class GdnInputs:
    """BF16 rows: qkv ``[q all heads | k all | v all]``, the output gate z, and beta and alpha ``ba``.

    The gates make ``decay`` and ``beta`` from ba, FP32 ``(M, value_heads)``. ``convolved`` is qkv after the
    convolution, in a decode step whose projection has already advanced the convolution's state. ``beside`` makes ba,
    decay and beta in parallel: call :meth:`join` before reading them.
    """

    qkv: Any
    z: Any
    ba: Any
    decay: Any
    beta: Any
    convolved: Any | None = None
    beside: SideBlock | None = None

    def join(self) -> None:
        """Make later launches wait for ba, decay and beta."""
        if self.beside is not None:
            self.beside.join()


class DeltaRule:
    """Handles of both kernels in all their variants, and the arm of a pass."""

    def __init__(self, ctx: LayerContext, dims: GdnDims, eps: float) -> None:
        kernels, rule = ctx.kernels, "gated_delta_rule"
        conv = ("causal_conv1d", "causal_conv1d_update")
        self._conv = kernels.kernel(*conv, reached_by=f"decode of {LEFT}")
        self._conv_prefill = kernels.kernel("causal_conv1d", "causal_conv1d_update_prefill", reached_by="prefill")
        verify_n = ("causal_conv1d", "causal_conv1d_verify_n")
        self._conv_verify = kernels.first_of(verify_n, conv, required=True, reached_by="verify")
        self._has_conv_verify = is_of(self._conv_verify, verify_n)
        self._prefill = kernels.kernel(rule, "gated_delta_rule_prefill", reached_by="prefill_arm: few rows a sequence")
        self._chunked: AnyHandle | None = None
        if is_chunked_size(dims.key_dim, dims.value_dim) and not ctx.levers.flag("MUSTER_NO_CHUNKED_PREFILL"):
            self._chunked = kernels.try_kernel(
                rule, "gated_delta_rule_prefill_chunked", reached_by="prefill_arm: more rows a sequence",
                when="keys have 128 values and values 32 n, MUSTER_NO_CHUNKED_PREFILL is off",
            )  # fmt: skip
        self._chunks = {
            2: kernels.kernel(rule, "gated_delta_rule_chunk2", reached_by="verify_arm: 2 rows of one sequence"),
            3: kernels.kernel(rule, "gated_delta_rule_chunk3", reached_by="verify_arm: 3 rows of one sequence"),
        }
        row, norm_strided = (rule, "gated_delta_rule_decode"), (rule, "gated_delta_rule_decode_norm_strided")
        strided, verify = (rule, "gated_delta_rule_decode_strided"), (rule, "gated_delta_rule_verify_n")
        # All sequences in one launch, or row by row; a verify pass row by row uses the same step.
        self._decode = kernels.first_of(
            norm_strided, strided, row, required=True, reached_by="decode_arm: every decode"
        )
        self._verify = kernels.first_of(verify, row, required=True, reached_by="verify_arm: all other verify passes")
        self._has_norm, self._has_strided = is_of(self._decode, norm_strided), is_of(self._decode, strided)
        self._has_verify = is_of(self._verify, verify)
        self.heads = {
            "key_heads": dims.key_heads, "key_dim": dims.key_dim,
            "value_heads": dims.value_heads, "value_dim": dims.value_dim,
        }  # fmt: skip
        self.conv_weight = ctx.array("conv1d", dims.qkv_dim, dims.conv_width)
        self.norm_weight = ctx.array("norm", dims.value_dim)
        self._dims, self._eps, self._memory = dims, eps, ctx.memory
        self.used: dict[GdnArm, int] = {}

    def records_verify(self, rows: int, sequences: int) -> bool:
        """Whether a verify pass of M rows of S sequences can be recorded: row by row the host asks where states lie."""
        return self._has_conv_verify and self._verify_arm(rows, sequences) != "single"

    def mix(self, inputs: GdnInputs, batch: Batch, states: Recurrent) -> tuple[Any, bool]:
        """Return mixed rows ``(M, value_heads * value_dim)``, and whether the gated norm is in them already."""
        out = new_rows(inputs.z, self._dims.z_dim)
        arm = self._arm(batch)
        self.used[arm] = self.used.get(arm, 0) + 1
        if batch.phase == "verify":
            self._verify_rows(arm, inputs, batch, states, out)
            return out, False
        shared = {"decay": inputs.decay, "beta": inputs.beta, **self.heads, "state": states.ssm}
        if batch.phase == "prefill":
            qkv = self._convolved(inputs.qkv, batch, states)
            inputs.join()
            prefill = self._chunked if arm == "prefill_chunked" and self._chunked else self._prefill
            prefill(qkv=qkv, cu_rows=batch.cu_rows, **shared, slots=batch.state_slots, out=out)
            return out, False
        qkv = inputs.convolved
        if qkv is None:
            qkv = new_rows(inputs.qkv, self._dims.qkv_dim)
            self._conv(
                x=inputs.qkv, weight=needed(self.conv_weight, "conv1d"), state=states.conv, slots=batch.state_slots,
                out=qkv,
            )  # fmt: skip
        inputs.join()
        if arm == "norm_strided":
            norm = {"gate": inputs.z, "norm_weight": needed(self.norm_weight, "norm"), "eps": self._eps}
            self._decode(qkv=qkv, **norm, **shared, slots=batch.state_slots, out=out)
        elif arm == "strided":
            self._decode(qkv=qkv, **shared, slots=batch.state_slots, out=out)
        else:
            for row in range(batch.rows):
                slots = batch.state_slots[row : row + 1]
                self._step(self._decode, slice(row, row + 1), slots, qkv, inputs, states, out)
        return out, arm == "norm_strided"

    def _arm(self, batch: Batch) -> GdnArm:
        if batch.phase == "prefill":
            return prefill_arm(batch.rows, batch.prompts, bool(self._chunked))
        if batch.phase == "decode":
            return decode_arm(self._has_strided, self._has_norm)
        return self._verify_arm(batch.rows, batch.sequences)

    def _verify_arm(self, rows: int, sequences: int) -> GdnArm:
        chunks = frozenset(count for count in FUSED_VERIFY_ROWS if self._chunks[count])
        return verify_arm(rows, sequences, chunks, self._has_verify)

    def _convolved(self, x: Any, batch: Batch, states: Recurrent) -> Any:
        out = new_rows(x, self._dims.qkv_dim)
        self._conv_prefill(
            x=x, cu_rows=batch.cu_rows, weight=needed(self.conv_weight, "conv1d"), state=states.conv,
            slots=batch.state_slots, out=out,
        )  # fmt: skip
        return out

    def _verify_rows(
        self, arm: GdnArm, inputs: GdnInputs, batch: Batch, states: Recurrent, out: Any
    ) -> None:  # fmt: skip
        """Advance the states and keep them after each row, so rejected rows can be undone."""
        conv_rows, ssm_rows = states.snapshots(batch.rows)
        qkv = self._convolved_rows(inputs.qkv, batch, states, conv_rows)
        inputs.join()
        gates = {"decay": inputs.decay, "beta": inputs.beta}
        shared = {**gates, **self.heads, "state": states.ssm, "slots": batch.state_slots}
        if arm == "chunk":
            self._chunks[batch.rows](qkv=qkv, **shared, out=out, out_states=ssm_rows)
        elif arm == "verify_n":
            self._verify(qkv=qkv, cu_rows=batch.cu_rows, **shared, out=out, out_states=ssm_rows)
        else:
            for row, slot, slots in self._rows_and_slots(batch):
                self._step(self._verify, slice(row, row + 1), slots, qkv, inputs, states, out)
                copy_rows(ssm_rows[row], states.ssm[slot])

    def _convolved_rows(self, x: Any, batch: Batch, states: Recurrent, conv_rows: Any) -> Any:
        out, weight = new_rows(x, self._dims.qkv_dim), needed(self.conv_weight, "conv1d")
        if self._has_conv_verify:
            self._conv_verify(
                x=x, cu_rows=batch.cu_rows, weight=weight, state=states.conv, slots=batch.state_slots, out=out,
                out_states=conv_rows,
            )  # fmt: skip
            return out
        for row, slot, slots in self._rows_and_slots(batch):
            rows = slice(row, row + 1)
            self._conv_verify(x=x[rows], weight=weight, state=states.conv, slots=slots, out=out[rows])
            copy_rows(conv_rows[row], states.conv[slot])
        return out

    def _step(
        self, kernel: AnyHandle, rows: slice, slots: Any, qkv: Any, inputs: GdnInputs, states: Recurrent, out: Any
    ) -> None:  # fmt: skip
        """Advance one sequence by one row."""
        gates = {"decay": inputs.decay[rows], "beta": inputs.beta[rows]}
        kernel(qkv=qkv[rows], **gates, **self.heads, state=states.ssm, slots=slots, out=out[rows])

    def _rows_and_slots(self, batch: Batch) -> list[tuple[int, int, Any]]:
        """Return each row with the slot of its sequence, and the slot as an array for kernels."""
        counts = np.diff(self._memory.get(batch.cu_rows))
        owners = np.repeat(np.arange(batch.sequences), counts).tolist()
        slots = self._memory.get(batch.state_slots).tolist()
        # Arrays of their own, and no slices: kernels demand an alignment.
        alone = [self._memory.put(np.array([slot], np.int32)) for slot in slots]
        return [(row, slots[owner], alone[owner]) for row, owner in enumerate(owners)]

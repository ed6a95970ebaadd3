"""Gated delta net: norms, projections, short convolution, and the gated delta rule over recurrent states.

Activations are BF16 ``(M, features)``, gates and states FP32, the convolution's state BF16. States lie in the caller's
pools.
"""

from collections import Counter
from typing import Any

import numpy as np
from kernel_muster.models.dims import GdnDims, ModelDims
from kernel_muster.models.layers.context import LayerContext, needed, new_rows
from kernel_muster.models.layers.delta_rule import LEFT, DeltaRule, GdnInputs
from kernel_muster.models.layers.families import Bf16Kernels, batch_tiers, bf16_kernels, exact_tiers
from kernel_muster.models.layers.linear import Bf16Linear, Linear, Nvfp4Linear
from kernel_muster.models.layers.norm import GatedRmsNorm, RmsNorm
from kernel_muster.models.layers.tiles import may_take_wide, tile_kernels
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.memory import Memory
from kernel_muster.models.memory.state import Recurrent
from kernel_muster.models.policy.gdn import is_one_launch
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.launch.tape import on_side_stream
from kernel_muster.registry.selection.handles import AnyHandle

_USER, _NVFP4 = "gdn", "projections are NVFP4"
# Inputs of a convolution in the fused input launch: three states and the newest.
_FUSED_TAPS = 4


class Gdn:
    """One layer's mixer, with all its lookups here or in its delta rule."""

    def __init__(self, ctx: LayerContext, model: ModelDims, dims: GdnDims) -> None:
        kernels = ctx.kernels
        rms_norm = kernels.kernel("norm", "rms_norm", reached_by="every pass")
        rms_norm_residual = kernels.kernel("norm", "rms_norm_residual", reached_by="every pass")
        rms_norm_gated = kernels.kernel("norm", "rms_norm_gated", reached_by="prefill and verify")
        dense = bf16_kernels(kernels)
        self._qkvz_one: AnyHandle | None = None
        self._in_one: AnyHandle | None = None
        self.qkvz, self.out = self._projections(ctx, model, dims, dense)
        left = f"prefill, verify, and decode of {LEFT}"
        self._split_qkvz = kernels.kernel("ssm_preprocess", "deinterleave_qkvz", reached_by=f"{left}, from 2 rows on")
        self._gates = kernels.kernel("ssm_preprocess", "compute_gdn_gates", reached_by=left)
        self.rule = DeltaRule(ctx, dims, model.rms_eps)
        # beta and alpha control the state's decay: two rows for each value head (all of beta, all of alpha), not
        # quantised. The launch of all inputs reads their rows directly.
        fused = () if self._in_one is None else (self._in_one,)
        self.ba = Bf16Linear(ctx, ctx.spec("ba_proj", dims.ba_rows, model.hidden, "bf16"), dense, plain=fused)
        rates = (ctx.array(name, dims.value_heads) for name in ("a_log", "dt_bias"))
        self._a_log, self._dt_bias = (_f32(ctx.memory, rate) for rate in rates)
        constants = (model.rms_eps, model.norm_weight_offset)
        self.input_norm = RmsNorm(rms_norm, rms_norm_residual, ctx.array("input_norm", model.hidden), *constants)
        self.post_norm = RmsNorm(rms_norm, rms_norm_residual, ctx.array("post_norm", model.hidden), *constants)
        self.head_norm = GatedRmsNorm(rms_norm_gated, self.rule.norm_weight, model.rms_eps)
        self.dims, self._levers, self._scratch = dims, ctx.levers, ctx.scratch
        self.used: Counter[str] = Counter()  # launches that split their projection
        ctx.plan_scratch(_USER, "gdn.qkvz", 2 * ctx.max_rows * dims.qkvz_rows, (0, 0))
        ctx.plan_scratch(_USER, "gdn.normed", 2 * ctx.max_rows * dims.z_dim, (1, 1))

    def _projections(
        self, ctx: LayerContext, model: ModelDims, dims: GdnDims, dense: Bf16Kernels
    ) -> tuple[Linear, Linear]:
        """Make the input and the output projection, each as its weights were found."""
        kernels = ctx.kernels
        made: list[Linear] = []
        shapes = {"qkvz_proj": (dims.qkvz_rows, model.hidden), "out_proj": (model.hidden, dims.z_dim)}
        quants = {name: ctx.stored(name, model.quant) for name in shapes}
        if quants["qkvz_proj"] == "nvfp4":
            one = "prefill or verify of 1 row"
            self._qkvz_one = kernels.kernel("w4a16_gemv", "w4a16_gemv_qkvz", when=_NVFP4, reached_by=one)
            if dims.conv_width == _FUSED_TAPS and is_one_launch(1, *shapes["qkvz_proj"], ctx.levers):
                few = "is_one_launch: decode of few rows"
                self._in_one = kernels.try_kernel("w4a16_gemv", "w4a16_gemv_gdn_in", when=_NVFP4, reached_by=few)
        if "nvfp4" in quants.values():
            packed = [shape for name, shape in shapes.items() if quants[name] == "nvfp4"]
            has_wide = may_take_wide(kernels, packed)
            tiers = {**exact_tiers(kernels, _NVFP4), **batch_tiers(kernels, _NVFP4, has_wide)}
            tiles = tile_kernels(kernels, packed, _NVFP4)
        for name, shape in shapes.items():
            spec = ctx.spec(name, *shape, quants[name])
            if quants[name] == "bf16":
                made.append(Bf16Linear(ctx, spec, dense))
                continue
            fused = [one for one in (self._qkvz_one, self._in_one) if name == "qkvz_proj" and one is not None]
            made.append(Nvfp4Linear(ctx, spec, tiers, tiles, fused))
        if self._in_one is not None and not made[0].weight.serves(self._in_one):
            self._in_one = None
        return made[0], made[1]

    def forward(self, x: Any, batch: Batch, states: Recurrent) -> Any:
        """Return the mixed rows ``(M, H)`` of normalised rows x, and advance the states by them.

        A verify pass stores the states after each row in ``states.rows``.
        """
        inputs = self.project(x, batch.phase, states, batch.state_slots)
        mixed, is_normed = self.rule.mix(inputs, batch, states)
        if not is_normed:
            return self.output(mixed, inputs.z, batch.phase)
        out = new_rows(mixed, self.out.weight.spec.shape[0])
        self.out.forward(mixed, out, batch.phase)
        return out

    def is_one_launch(self, rows: int) -> bool:
        """Whether policy makes all inputs of a decode step's rows in one launch, and that kernel is there."""
        features, depth = self.qkvz.weight.spec.shape
        return self._in_one is not None and is_one_launch(rows, features, depth, self._levers)

    def project(self, x: Any, phase: Phase, states: Recurrent | None = None, slots: Any = None) -> GdnInputs:
        """Project normalised rows ``x (M, H)``. One row is one launch with the split, more rows are split after it.

        The small kernels of the gates run in parallel until their consumer joins them. A decode step of few sequences
        with given states makes all inputs in one launch, and advances the convolution's states.
        """
        is_one = phase == "decode" and self.is_one_launch(x.shape[0])
        if self._in_one is not None and states is not None and is_one:
            return self._project_in_one(self._in_one, x, states, slots)
        dims = self.dims
        ba = new_rows(x, dims.ba_rows)
        with on_side_stream() as side:
            self.ba.forward(x, ba, phase)
            decay, beta = self.gates(ba)
        found = GdnInputs(new_rows(x, dims.qkv_dim), new_rows(x, dims.z_dim), ba, decay, beta, beside=side)
        into = {**self.rule.heads, "out_qkv": found.qkv, "out_z": found.z}
        if x.shape[0] == 1 and self._qkvz_one is not None:
            self._qkvz_one(x=x, w=self.qkvz.weight.copy_for(self._qkvz_one), **into)
            self.used["qkvz"] += 1
        else:
            with self._scratch.lease("gdn.qkvz", _USER, (x.shape[0], dims.qkvz_rows)) as fused:
                self.qkvz.forward(x, fused, phase)
                self._split_qkvz(qkvz=fused, **into)
        return found

    def _project_in_one(self, kernel: AnyHandle, x: Any, states: Recurrent, slots: Any) -> GdnInputs:
        """Project rows of one sequence each, make their gates and convolve them."""
        dims = self.dims
        decay = np.empty_like(x, dtype=np.float32, shape=(x.shape[0], dims.value_heads))
        beta = np.empty_like(decay)
        qkv, z = new_rows(x, dims.qkv_dim), new_rows(x, dims.z_dim)
        kernel(
            x=x, w=self.qkvz.weight.copy_for(kernel), w_ba=self.ba.weight.plain.values,
            **self.rule.heads, a_log=needed(self._a_log, "a_log"), dt_bias=needed(self._dt_bias, "dt_bias"),
            conv_weight=needed(self.rule.conv_weight, "conv1d"), state=states.conv, slots=slots,
            out_qkv=qkv, out_z=z, out_decay=decay, out_beta=beta,
        )  # fmt: skip
        self.used["gdn_in"] += 1
        return GdnInputs(None, z, None, decay, beta, convolved=qkv)

    def gates(self, ba: Any) -> tuple[Any, Any]:
        """Return decay and beta FP32 ``(M, value_heads)`` of rows ``[beta of all value heads | alpha of all]``."""
        heads = self.dims.value_heads
        decay = np.empty_like(ba, dtype=np.float32, shape=(ba.shape[0], heads))
        beta = np.empty_like(decay)
        self._gates(
            a=ba[:, heads:], b=ba[:, :heads], a_log=needed(self._a_log, "a_log"),
            dt_bias=needed(self._dt_bias, "dt_bias"), out_decay=decay, out_beta=beta,
        )  # fmt: skip
        return decay, beta

    def output(self, mixed: Any, z: Any, phase: Phase) -> Any:
        """Return ``out_proj(norm(mixed) * silu(z))`` of ``(M, value_heads * value_dim)``, normed over each head."""
        out = new_rows(mixed, self.out.weight.spec.shape[0])
        with self._scratch.lease("gdn.normed", _USER, mixed.shape) as normed:
            heads = (mixed.shape[0] * self.dims.value_heads, self.dims.value_dim)
            self.head_norm.forward(mixed.reshape(heads), z.reshape(heads), normed.reshape(heads))
            self.out.forward(normed, out, phase)
        return out

    def leave(self, mixed: Any, residual: Any) -> Any:
        """Return the result of a layer without FFN: the next norm adds it to the residual."""
        return mixed


def _f32(memory: Memory, array: Any | None) -> Any | None:
    """Return an array as FP32, exactly. Kernels read rates and biases in that type only."""
    return None if array is None else memory.put(memory.get(array).astype(np.float32))

"""The place where a sequence among others first differs in bits from the same sequence alone: layer and kernels.

One step runs again launch by launch, in company and alone. Each residual norm follows a whole mixer or FFN. The first
norm with a different row marks the place, and the launches before it are the suspects.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.ab.booted import Booted
from kernel_muster.ab.decoding.decoders import is_model
from kernel_muster.ab.decoding.prompts import Prompt
from kernel_muster.ab.measure.logits import digest
from kernel_muster.models.decode.generate import GreedyDecoder
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.registry.values import frozen

_NORM = "norm::rms_norm_residual"
_PAGE = 16


@frozen
class Stop:
    """One residual norm of a step: its result for one sequence, and the kernels since the previous norm."""

    digest: bytes
    kernels: tuple[str, ...]


def locate(booted: Booted, prompts: Sequence[Prompt], sequence: int, token: int) -> str:
    """Name the place where a sequence parts from itself alone in the step of ``token``. Empty if not observable."""
    if not is_model(booted.model):
        return ""  # the launches of a model that decodes itself cannot be observed
    if token == 0:
        return "the prefill, which reads each prompt alone: a kernel is not deterministic"
    together = _stops(booted, prompts, sequence, token)
    alone = _stops(booted, [prompts[sequence]], 0, token)
    if len(together) != len(alone):
        return ""
    for at, (mine, other) in enumerate(zip(together, alone, strict=True)):
        if mine.digest != other.digest:
            only = [key for key in mine.kernels if key not in other.kernels] or list(mine.kernels)
            return f"{_part(booted, at, len(together))}, where {', '.join(only)} ran"
    return "the LM head"


def _part(booted: Booted, at: int, count: int) -> str:
    """Name the part of the model before a norm: with an FFN in each layer, mixers and FFNs alternate."""
    kinds = ["attn" if kind == "full" else kind for kind in booted.sized.model.layer_kinds]
    if count != 2 * len(kinds):
        return f"what stands before residual norm {at}"
    layer = at // 2
    return f"layers.{layer}.{'ffn' if at % 2 else kinds[layer]}"


def _stops(booted: Booted, prompts: Sequence[Prompt], sequence: int, token: int) -> list[Stop]:
    model, meter = booted.model, booted.meter
    pages = sum(-(-(len(prompt) + token + 1) // _PAGE) for prompt in prompts)
    state = model.new_state(StateSizes(len(prompts), pages, _PAGE))
    found: list[Stop] = []
    ran: dict[str, None] = {}
    steps = 0

    def seen(key: str, arguments: dict[str, Any]) -> None:
        if key != _NORM:
            ran.setdefault(key)
            return
        rows = np.asarray(model.memory.get(arguments["out"]))
        found.append(Stop(digest(rows[sequence]), tuple(ran)))
        ran.clear()

    def decode(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        meter.seen = seen if steps == token else None
        try:
            return model.decode(*given)
        finally:
            meter.seen = None

    GreedyDecoder(model, state, keep_logits=False, decode=decode).run(prompts, token + 1)
    return found

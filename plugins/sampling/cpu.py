"""Host kernels of the sampling family."""

from typing import Any

import numpy as np
from kernel_muster.plugins._reference import F32, Array, f32
from kernel_muster.registry.errors import ContractError


def sample_top_k_top_p(
    logits: Array, temperature: Array, top_k: Array, top_p: Array, uniform: Array, out: Array
) -> None:
    """Write one token a row, ``out [M]`` int32, drawn from ``logits [M, V]`` BF16 by the given ``uniform [M]`` FP32.

    In this order: logits fall (of equal ones the lowest index first), the first ``top_k`` stay (0: all), the softmax of
    ``logit / temperature`` over them, the shortest run of them whose sum reaches ``top_p`` stays, and the first whose
    cumulative sum exceeds ``uniform`` times their total is the token. A temperature of 0 takes the largest logit.
    Softmax and sums are float64, sums in falling order of logits, so that one ``uniform`` always gives one token.
    Parameters out of range, NaN, or a row without a finite largest logit raise ContractError before any write.
    """
    owner = "sampling::sample_top_k_top_p"
    for name, values, is_right, expected in (
        ("temperature", temperature, (temperature >= 0) & np.isfinite(temperature), "0 or more, finite"),
        ("top_k", top_k, top_k >= 0, "0 (off) or more"),
        ("top_p", top_p, (top_p > 0) & (top_p <= 1), "0 < top_p <= 1"),
        ("uniform", uniform, (uniform >= 0) & (uniform < 1), "0 <= uniform < 1"),
    ):
        _refuse_first(owner, name, values, ~is_right, expected)
    rows = f32(logits)
    _check_logits(owner, rows, needs_finite=True)
    for row, values in enumerate(rows):
        ranked = _ranked(values)[: int(top_k[row]) or None]
        chosen = 0 if temperature[row] == 0 else _drawn(values[ranked], temperature[row], top_p[row], uniform[row])
        out[row] = ranked[chosen]


def topk_bf16(logits: Array, k: int, out_values: Array, out_ids: Array) -> None:
    """Write the ``k`` largest of each row of ``logits [M, V]`` BF16, largest first, of equal ones the lowest index.

    ``out_values [M, k]`` FP32 are exact, ``out_ids [M, k]`` int32. A NaN raises ContractError before any write.
    """
    rows = f32(logits)
    _check_logits("sampling::topk_bf16", rows, needs_finite=False)
    for row, values in enumerate(rows):
        out_ids[row] = _ranked(values)[:k]
        out_values[row] = values[out_ids[row]]


def verify_greedy(draft_ids: Array, target_ids: Array, out_accepted: Array) -> None:
    """Write how many drafts of each sequence hold, ``out_accepted [S]`` int32: those before the first wrong one.

    ``draft_ids [S, n]`` int32 is right where it equals ``target_ids [S, n + 1]`` int32, the token that the target chose
    at its place; -1 fills a row with fewer drafts up and never holds, because a negative target raises ContractError.
    """
    wrong = np.argwhere(target_ids < 0)
    if len(wrong):
        row, place = wrong[0].tolist()
        found = target_ids[row, place]
        raise ContractError(f"sampling::verify_greedy: target_ids[{row}, {place}] is {found}, expected a token's id")
    for row, drafts in enumerate(draft_ids):
        misses = np.flatnonzero(drafts != target_ids[row, : drafts.size])
        out_accepted[row] = misses[0] if misses.size else drafts.size


def _refuse_first(owner: str, name: str, values: Array, is_wrong: Array, expected: str) -> None:
    wrong = np.flatnonzero(is_wrong)
    if wrong.size:
        raise ContractError(f"{owner}: {name}[{wrong[0]}] is {values[wrong[0]]}, expected {expected}")


def _check_logits(owner: str, rows: F32, needs_finite: bool) -> None:
    if rows.shape[1] == 0:
        raise ContractError(f"{owner}: logits has shape {rows.shape}, expected at least one logit a row")
    for row, values in enumerate(rows):
        if np.isnan(values).any():
            raise ContractError(f"{owner}: NaN in row {row} of logits, expected numbers")
        if needs_finite and not np.isfinite(values.max()):
            raise ContractError(f"{owner}: the largest logit of row {row} is {values.max()}, expected a finite number")


def _ranked(values: F32) -> Array:
    """Return the indices by falling value; a stable sort leaves ties in index order."""
    return np.argsort(-values, kind="stable")


def _drawn(falling: F32, temperature: Any, top_p: Any, uniform: Any) -> int:
    """Return the place of the drawn one among logits that fall."""
    wide = falling.astype(np.float64)
    sums = np.cumsum(np.exp((wide - wide[0]) / np.float64(temperature)))
    kept = int(np.searchsorted(sums, np.float64(top_p) * sums[-1])) + 1  # the first sum that reaches top_p
    return int(np.searchsorted(sums[:kept], np.float64(uniform) * sums[:kept][-1], side="right"))

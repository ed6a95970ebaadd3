"""The outputs of a kernel of many rows, from runs of a kernel of one row: for claims of bit identity.

The state is handed on from launch to launch; ``S`` sequences own slots of it, and each row belongs to one of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from kernel_muster.plugins._sequences import PADDING
from kernel_muster.registry.contract.contracts import Arguments, ByRows, Run

Names = tuple[str, ...]
Dims = Mapping[str, int]


def row_after_row(cut: Names) -> ByRows:
    """Return the rows of a kernel with one row for each sequence; ``cut`` names the arguments with such rows."""

    def by_rows(run: Run, arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
        owners = [(row, row) for row in range(len(arguments["slots"]))]
        return _advance(run, arguments, cut, owners)

    return by_rows


def single_rows(cut: Names) -> ByRows:
    """Return the rows of a kernel for one sequence, with the state after each row."""

    def by_rows(run: Run, arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
        return _advance(run, arguments, cut, [(row, 0) for row in range(dims["M"])])

    return by_rows


def rows_of_sequences(cut: Names) -> ByRows:
    """Return the rows of a kernel for several sequences, divided by ``cu_rows``."""

    def by_rows(run: Run, arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
        rest = {name: value for name, value in arguments.items() if name != "cu_rows"}
        return _advance(run, rest, cut, _owners(arguments["cu_rows"]))

    return by_rows


def after_each_row(cut: Names) -> ByRows:
    """Return the rows of a kernel for several sequences with the state after each row: all at once, then row by row."""

    def by_rows(run: Run, arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
        at_once = run({name: value for name, value in arguments.items() if name != "out_states"})
        one = {**arguments, "cu_rows": np.array([0, 1], np.int32)}
        return {**at_once, "out_states": _advance(run, one, cut, _owners(arguments["cu_rows"]))["out_states"]}

    return by_rows


def _owners(cu_rows: Any) -> list[tuple[int, int]]:
    """Return each row with its sequence."""
    counts = np.diff(cu_rows)
    return list(enumerate(np.repeat(np.arange(len(counts)), counts).tolist()))


def _advance(run: Run, arguments: Arguments, cut: Names, owners: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Advance one row a launch, given as ``(row, its sequence)``; return state, out, and the state after each row."""
    state, outs, states = arguments["state"], [], []
    rest = {name: value for name, value in arguments.items() if name not in ("out_states", *cut)}
    for row, sequence in owners:
        one_row = {name: arguments[name][row : row + 1] for name in cut}
        slots = arguments["slots"][sequence : sequence + 1]
        made = run({**rest, **one_row, "state": state, "slots": slots})
        state = made["state"]
        outs.append(made["out"])
        states.append(np.zeros_like(state[0]) if slots[0] == PADDING else state[slots[0]])
    found = {"state": state, "out": np.concatenate([arguments["out"][:0], *outs])}
    if "out_states" in arguments:
        found["out_states"] = np.array([*states], state.dtype).reshape(len(states), *state.shape[1:])
    return found

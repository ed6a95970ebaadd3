"""Contracts of choosing tokens. All are exact: cases keep away from the edges where rounding would decide."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import EXACT, F64, Array, Dims, f64
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam

_LOGITS = TensorParam("logits", "bf16", ("M", "V"))
_WIDEST = 4097


def _falling(logits: F64) -> Array:
    """Return the indices by falling value, then by rising index."""
    return np.lexsort((np.arange(len(logits)), -logits))


def _kept_probabilities(logits: F64, temperature: float, top_k: int, top_p: float) -> tuple[Array, F64]:
    """Return the candidates that stay, in falling order, and their probabilities, which sum to 1."""
    order = _falling(logits)[: top_k or None]
    powers = np.exp((logits[order] - logits[order[0]]) / temperature)
    powers /= powers.sum()
    ahead = np.concatenate([[0.0], np.cumsum(powers)[:-1]])
    stays = ahead < top_p
    return order[stays], powers[stays] / powers[stays].sum()


def _exact_sample(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    tokens: list[int] = []
    for row, logits in enumerate(f64(arguments["logits"])):
        temperature = float(arguments["temperature"][row])
        if temperature == 0.0:
            tokens.append(int(np.argmax(logits)))
            continue
        limits = int(arguments["top_k"][row]), float(arguments["top_p"][row])
        order, probabilities = _kept_probabilities(logits, temperature, *limits)
        passed = np.cumsum(probabilities) <= float(arguments["uniform"][row])
        tokens.append(int(order[passed.sum()]))
    return {"out": np.array(tokens, np.int32)}


def _sample_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Peaked logits, rows with each limit on and off, ``top_p`` and ``uniform`` in the middle between two edges."""
    rows, width = dims["M"], dims["V"]
    logits = (4.0 * rng.standard_normal((rows, width))).astype(numpy_dtype("bf16"))
    made: Arguments = {
        "logits": logits,
        "temperature": np.array([(0.7, 1.0, 0.0, 1.5)[row % 4] for row in range(rows)], np.float32),
        "top_k": np.array([(0, min(20, width), 1, 0, width)[row % 5] for row in range(rows)], np.int32),
        "top_p": np.ones(rows, np.float32),
        "uniform": np.zeros(rows, np.float32),
    }
    for row in range(rows):
        temperature, top_k = float(made["temperature"][row]) or 1.0, int(made["top_k"][row])
        if row % 3 == 0:
            _, probabilities = _kept_probabilities(f64(logits[row]), temperature, top_k, 1.0)
            made["top_p"][row] = _middle(probabilities, rng)
        _, probabilities = _kept_probabilities(f64(logits[row]), temperature, top_k, float(made["top_p"][row]))
        made["uniform"][row] = _middle(probabilities, rng)
    return made


def _middle(probabilities: F64, rng: "np.random.Generator") -> float:
    """Return the middle of the interval that one of the three likeliest has of the sum."""
    chosen = int(rng.integers(min(3, len(probabilities))))
    return float(np.sum(probabilities[:chosen]) + probabilities[chosen] / 2)


SAMPLE = Contract(
    "sample_top_k_top_p",
    "one token a row by inverse CDF over logits in falling order (ties: lowest index), after top_k, softmax of "
    "logit / temperature, and top_p; temperature 0 is argmax",
    Signature(
        (
            _LOGITS,
            TensorParam("temperature", "f32", ("M",)),
            TensorParam("top_k", "i32", ("M",)),
            TensorParam("top_p", "f32", ("M",)),
            TensorParam("uniform", "f32", ("M",)),
            TensorParam("out", "i32", ("M",), "out"),
        )
    ),
    _exact_sample,
    tuple(
        Case(name, {"M": m, "V": v})
        for name, m, v in (
            ("one_row", 1, 256),
            ("one_logit", 3, 1),
            ("many_ties", 33, _WIDEST),
            ("ties_in_vectors", 7, 4096),
            ("vocabulary", 1, 248_320),
            ("few_of_many", 2, 40_000),
            ("odd", 17, 77),
            ("no_rows", 0, 256),
        )
    ),
    Tolerance(
        0.0,
        0.0,
        "cases choose uniform and top_p in the middle of the interval of one of the three likeliest of at most 248320 "
        "Gaussian logits of deviation 4: wider than what FP32 sums in any order err by (248320 * 2^-24)",
    ),
    inputs=_sample_inputs,
)


def _exact_topk(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    rows = f64(arguments["logits"])
    ids = np.array([_falling(logits)[: dims["k"]] for logits in rows], np.int64).reshape(len(rows), dims["k"])
    return {"out_values": np.take_along_axis(rows, ids, axis=1), "out_ids": ids}


TOPK = Contract(
    "topk_bf16",
    "the k largest logits of each row in falling order, of equal ones the lowest index first; NaN is refused",
    Signature(
        (
            _LOGITS,
            ScalarParam("k", "i32", minimum=1),
            TensorParam("out_values", "f32", ("M", "k"), "out"),
            TensorParam("out_ids", "i32", ("M", "k"), "out"),
        ),
        limits=(("k", "V"),),
    ),
    _exact_topk,
    tuple(
        Case(name, {"M": m, "V": v, "k": k})
        for name, m, v, k in (
            ("one_row", 1, 256, 8),
            ("one_logit", 2, 1, 1),
            ("many_ties", 9, _WIDEST, 20),
            ("vocabulary", 1, 248_320, 64),
            ("few_of_many", 2, 40_000, 20),
            ("nearly_all", 2, 4096, 4000),
            ("all", 3, 17, 17),
            ("no_rows", 0, 64, 4),
        )
    ),
    EXACT,
)


def _exact_verify(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    holds = arguments["draft_ids"] == arguments["target_ids"][:, : dims["n"]]
    return {"out_accepted": np.cumprod(holds, axis=1).sum(axis=1)}


def _drafts(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Row by row: all right, a wrong one at a random place, one missing; after a wrong one some are right again."""
    target = rng.integers(0, 1000, (dims["S"], dims["n"] + 1), np.int32)
    draft = target[:, : dims["n"]].copy()
    for row in range(dims["S"] if dims["n"] else 0):
        if row % 3:
            draft[row, rng.integers(dims["n"])] = 1000 if row % 3 == 1 else -1
    return {"draft_ids": draft, "target_ids": target}


VERIFY_GREEDY = Contract(
    "verify_greedy",
    "how many drafted tokens equal the target's choice before the first that does not; a draft of -1 never holds",
    Signature(
        (
            TensorParam("draft_ids", "i32", ("S", "n")),
            TensorParam("target_ids", "i32", ("S", "n + 1")),
            TensorParam("out_accepted", "i32", ("S",), "out"),
        )
    ),
    _exact_verify,
    tuple(
        Case(name, {"S": s, "n": n})
        for name, s, n in (
            ("one_sequence", 1, 3),
            ("one_draft", 6, 1),
            ("no_drafts", 2, 0),
            ("many_drafts", 17, 16),
            ("no_sequences", 0, 3),
        )
    ),
    EXACT,
    inputs=_drafts,
)

"""The decoder interface of a comparison. The decode engine, and models that decode themselves."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, Protocol

import numpy as np
from kernel_muster.models.decode import DecodeEngine
from kernel_muster.models.decode.captured import CapturedStep
from kernel_muster.models.decode.generate import Gate
from kernel_muster.models.decode.proposer import Proposer
from kernel_muster.models.drafter import Drafter
from kernel_muster.models.memory.state import ModelState, SequenceState, StateSizes
from kernel_muster.models.model import Model, Pass
from kernel_muster.models.proposers.dflash import DflashProposer
from kernel_muster.models.proposers.mtp import MtpProposer
from kernel_muster.registry.contract.builders import DecodesItself
from kernel_muster.registry.errors import MusterError, UsageError
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.values import frozen
from ml_dtypes import finfo

PAGE = 16
NO_DRAFTS = "--drafts: this model decodes itself, and nothing drafts for it: leave it out, or give 0"


@frozen(kw_only=True)
class Decoded:
    """Greedy tokens of each prompt, the BF16 rows ``(V,)`` on the host that gave them (if kept), and wall seconds.

    ``step_s`` are steps after the prefill, all sequences together. ``verify_s`` those with drafts and verification.
    """

    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[tuple[Any, ...], ...] = ()
    prefill_s: float = 0.0
    step_s: tuple[float, ...] = ()
    verify_s: tuple[float, ...] = ()
    verify_steps: int = 0
    accepted: int = 0
    drafted: int = 0


class Decoder(Protocol):
    """Decodes some prompts together, greedily, with or without drafts in each step."""

    def prepare(self, sequences: int) -> None:
        """Prepare the step for this number of sequences, once."""

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *, keep_logits: bool = False, drafts: int = 0
    ) -> Decoded:
        """Return ``new_tokens`` tokens for each prompt."""

    def close(self) -> None:
        """Free memory."""


class ReadsAlone(Model):
    """A model that reads each prompt in separate passes, so its kernels do not depend on other prompts.

    Effects of C sequences then arise in decode alone.
    """

    def prefill(
        self,
        state: ModelState,
        sequences: Sequence[SequenceState],
        prompts: Sequence[Sequence[int]],
        reads: Sequence[int] = (),
    ) -> Iterator[Pass]:
        """Yield the passes of each prompt, one prompt after the other."""
        for sequence, prompt in zip(sequences, prompts, strict=True):
            yield from super().prefill(state, [sequence], [prompt], reads)


def is_model(built: object) -> bool:
    """Whether a builder made a built-in model. Of other objects only one method is used."""
    return issubclass(type(built), Model)


def decodes_itself(built: object) -> bool:
    """Whether a builder made a model that decodes without the engine: ``DecodesItself``."""
    try:
        return callable(getattr(built, "decode_greedily", None))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  (attributes of somebody else's object may raise anything)
        return False


def undecodable(built: object) -> str:
    """Return the reason why commands cannot decode a builder's model, even a plan. Empty if they can."""
    if is_model(built) or decodes_itself(built):
        return ""
    if issubclass(type(built), Drafter):
        return "it drafts for another model: it decodes nothing by itself"
    return (
        f"the builder made a {type(built).__name__}, which decodes nothing by itself: this command decodes what the "
        f"built-in builder makes ({Model.__module__}.{Model.__name__}), and models that have the method "
        "decode_greedily(prompts, new_tokens); give it one, or run this model with code of its own, and judge it with "
        "muster audit"
    )


def _reads_alone(model: Model) -> ReadsAlone:
    """Return a model that reads prompts one by one."""
    return ReadsAlone(**{item.name: getattr(model, item.name) for item in fields(model)})


def decoder_of(
    model: Any, levers: Levers, sequences: int, context: int, vocab: int | None, on_steps: Callable[[], None]
) -> "tuple[Any, Decoder]":
    """Return a built model in its decoding form, and its decoder. MusterError if there is none.

    ``on_steps`` is called after a run's prefill. For a model that decodes itself, all is steps. ``vocab`` is the number
    of logits in a row. None if the manifest does not give it.
    """
    if why := undecodable(model):
        raise MusterError(why)
    if not is_model(model):
        return model, OwnDecoder(model, vocab, on_steps)
    alone = _reads_alone(model)
    return alone, EngineDecoder(alone, levers, sequences, context, on_steps)


class OwnDecoder:
    """A model that decodes itself. Its results are checked. Its time, prompts included, counts as its steps'."""

    def __init__(self, model: DecodesItself, vocab: int | None, on_steps: Callable[[], None]) -> None:
        self._model, self._vocab, self._on_steps = model, vocab, on_steps

    def prepare(self, sequences: int) -> None:
        """No effect: nothing is recorded."""

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *, keep_logits: bool = False, drafts: int = 0
    ) -> Decoded:
        """Return ``new_tokens`` tokens for each prompt. MusterError if the result violates the protocol."""
        if drafts:
            raise UsageError(NO_DRAFTS)
        self._on_steps()
        start = time.perf_counter()
        made = self._model.decode_greedily([list(prompt) for prompt in prompts], new_tokens)
        seconds = time.perf_counter() - start
        tokens, logits = _checked(made, len(prompts), new_tokens, self._vocab)
        step_s = (seconds / new_tokens,) * new_tokens
        return Decoded(tokens=tokens, logits=logits if keep_logits else (), step_s=step_s)

    def close(self) -> None:
        """No effect: the model keeps its memory."""


def _checked(
    made: Any, prompts: int, new_tokens: int, vocab: int | None
) -> tuple[tuple[tuple[int, ...], ...], tuple[Any, ...]]:
    """Return tokens and logits as tuples. MusterError for a wrong count, or a token that is not the likeliest."""
    if not isinstance(made, tuple) or len(made) != 2:
        raise MusterError(f"decode_greedily returned a {type(made).__name__}, expected a tuple (tokens, logits)")
    try:
        tokens, logits = (_taken(part, prompts, new_tokens) for part in made)
    except TypeError as error:
        raise MusterError(f"decode_greedily: tokens or logits are no sequences for each prompt: {error}") from None
    for name, part in (("tokens", tokens), ("logits", logits)):
        counts = [len(row) for row in part]
        if counts != [new_tokens] * prompts:
            raise MusterError(f"decode_greedily: {name} of lengths {counts}, expected {prompts} of {new_tokens}")
    for sequence, (ids, rows) in enumerate(zip(tokens, logits, strict=True)):
        for at, (token, row) in enumerate(zip(ids, rows, strict=True)):
            if why := _unlikely(token, row, vocab):
                raise MusterError(f"decode_greedily: sequence {sequence}, token {at}: {why}")
    return tuple(tuple(map(int, ids)) for ids in tokens), logits


def _taken(part: Any, prompts: int, new_tokens: int) -> tuple[tuple[Any, ...], ...]:
    """Return one part for each prompt, and one more if there are too many: an iterator may be endless.

    Rows are copied on arrival: a model may reuse their memory for the next rows, or for another run.
    """
    return tuple(
        tuple(np.array(one) if _is_array(one) else one for one in islice(row, new_tokens + 1))
        for row in islice(part, prompts + 1)
    )


def _is_array(row: Any) -> bool:
    """Whether it is an array without masked values."""
    return isinstance(row, np.ndarray) and not isinstance(row, np.ma.MaskedArray)


def _is_floats(dtype: np.dtype[Any]) -> bool:
    """Whether FP64 holds all values of a float type, also of ml_dtypes."""
    try:
        finfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        return False
    return bool(np.can_cast(dtype, np.float64))


def _unlikely(token: Any, row: Any, vocab: int | None) -> str:
    """Return the reason why a token is not the likeliest of a row of logits. Empty if it is."""
    if not _is_array(row) or row.ndim != 1 or not len(row) or not _is_floats(row.dtype):
        shown = f"{row.dtype} {row.shape}" if _is_array(row) else type(row).__name__
        return f"logits are {shown}, expected a NumPy array (V,) of floats"
    if vocab is not None and len(row) != vocab:
        return f"{len(row)} logits, expected {vocab}: the manifest's vocab_size, at the size that decodes"
    if isinstance(token, bool | np.bool_) or not isinstance(token, int | np.integer) or not 0 <= token < len(row):
        return f"{token!r} is no token from 0 to {len(row) - 1}"
    values = row.astype(np.float64)
    if np.isfinite(values).all() and values[token] != values.max():
        return f"{token} is not the likeliest, which is {int(values.argmax())}"
    return ""


class EngineDecoder:
    """Decodes with the engine: one recorded step for each number of sequences, a graph on a device.

    ``on_steps`` is called after the prefill of a run without drafts.
    """

    def __init__(
        self, model: Model, levers: Levers, sequences: int, context: int, on_steps: Callable[[], None]
    ) -> None:
        self._levers = levers
        self._drafter: tuple[Drafter, Levers] | None = None
        self._sizes = StateSizes(sequences, sequences * -(-context // PAGE), PAGE)
        self._engine = _Watched(model, self._sizes, context)
        self._engine.on_steps = on_steps

    def draft_with(self, drafter: Drafter, levers: Levers) -> None:
        """Use a drafter in place of the MTP head, with its own number of drafts in each step."""
        self._drafter = drafter, levers

    def _proposer(self, drafts: int) -> Proposer | None:
        if not drafts:
            return None
        if self._drafter is None:
            return MtpProposer(self._engine.model, self._levers, drafts, self._sizes)
        drafter, levers = self._drafter
        return DflashProposer(drafter, levers, self._sizes)

    def prepare(self, sequences: int) -> None:
        """Record the step for this number of sequences."""
        self._engine.prepare([sequences])

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *, keep_logits: bool = False, drafts: int = 0
    ) -> Decoded:
        """Return ``new_tokens`` tokens for each prompt."""
        engine = self._engine
        engine.has_begun = False
        found = engine.generate(
            prompts, new_tokens, keep_logits=keep_logits, proposer=self._proposer(drafts), gate=Gate(is_forced=True)
        )
        return Decoded(
            tokens=tuple(map(tuple, found.tokens)),
            logits=tuple(map(tuple, found.logits)) if keep_logits else (),
            prefill_s=found.prefill_s,
            step_s=tuple(found.step_s),
            verify_s=tuple(found.verify_s),
            verify_steps=found.verify_steps,
            accepted=found.accepted,
            drafted=found.drafted,
        )

    def close(self) -> None:
        """Free the engine's memory."""
        self._engine.close()


class _Watched(DecodeEngine):
    """An engine that reports the first step of a run."""

    on_steps: Callable[[], None] = staticmethod(lambda: None)
    has_begun = False

    def enqueue(self, *arguments: Any, **options: Any) -> CapturedStep:
        """Enqueue a step, like the engine."""
        if not self.has_begun:
            self.has_begun = True
            self.on_steps()
        return super().enqueue(*arguments, **options)

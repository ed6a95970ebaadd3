"""A short decode of one model: it proves that the audited model also runs, and measures nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kernel_muster.ab.booted import ArmRefused, Booted, Building, boot_arm
from kernel_muster.ab.decoding.decoders import is_model
from kernel_muster.ab.decoding.prompts import made_prompts, read_prompts
from kernel_muster.ab.decoding.sizes import size_text
from kernel_muster.ab.decoding.weights import folded_names, weights_text
from kernel_muster.ab.measure.logits import is_flat, not_finite
from kernel_muster.ab.runs import raised_text
from kernel_muster.audit.later import judged_late, late_report, late_rows
from kernel_muster.audit.opening import BootRequest
from kernel_muster.audit.report import FindingRow
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen

#: Further names of a checkpoint stand in the JSON only.
_MOST_NAMES = 12


@frozen(kw_only=True)
class ShortDecode:
    """The result of the decode. ``size`` names the reductions. Empty at full size. ``late`` are lookups after the seal.

    ``is_flat``: each row of logits is constant. ``unused`` names tensors of a checkpoint that were not read.
    """

    size: str
    weights: str
    prompts: str
    maturity: str
    sequences: int
    tokens: tuple[tuple[int, ...], ...]
    prefill_ms: float
    step_ms: float
    is_finite: bool
    late: tuple[FindingRow, ...] = ()
    # since 1.3
    is_flat: bool = False
    unused: tuple[str, ...] = ()

    @property
    def has_computed(self) -> bool:
        """Whether the logits carry information."""
        return self.is_finite and not self.is_flat

    @property
    def _times(self) -> str:
        if not self.prefill_ms:  # unknown for a model that decodes itself
            return f"{self.step_ms:.2f} ms a step, prompts included"
        return f"prefill {self.prefill_ms:.1f} ms, {self.step_ms:.2f} ms a step"

    def lines(self) -> list[str]:
        """Return the result in a few lines."""
        size = f"REDUCED SIZE, it says nothing about speed or quality: {self.size}" if self.size else "full size"
        found = [
            size,
            f"weights: {self.weights}; prompts: {self.prompts}",
            f"{self.sequences} sequences, {len(self.tokens[0])} tokens each, greedy: {self._times}",
            *(f"sequence {at}: {' '.join(map(str, row))}" for at, row in enumerate(self.tokens)),
        ]
        if self.maturity and self.maturity != "production":
            found.append(f"the builder calls itself {self.maturity}: nothing that serves may use it")
        if not self.is_finite:
            found.append("logits are not finite: this model computes nothing")
        if self.is_flat:
            found.append("all logits of a row are equal, at every token: this model computes nothing")
            found.append("norms that fit the weights? model.rms_norm_zero_centred says what they multiply by")
        return found

    def unused_lines(self) -> list[str]:
        """Name the unread tensors of a checkpoint. With fewer layers, most belong to the others."""
        return folded_names(self.unused, 1 if self.size else _MOST_NAMES)


@contextmanager
def _refuses(booted: Booted) -> Iterator[None]:
    """Turn every exception of a kernel into ArmRefused: it is the kernel's failure, not the command's.

    So is a lookup that missed after the seal, even if the model continued without its kernel.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Lack of memory; a model that decodes itself may raise it for other reasons.
        if isinstance(error, UsageError) and not hasattr(error, "__notes__") and is_model(booted.model):
            raise
        raise ArmRefused("boot", late_report(booted.session), f"decoding stopped: {raised_text(error)}") from error
    if judged_late(booted.session).is_refused:
        raise ArmRefused("boot", late_report(booted.session), "it decoded, and asked for what no audit saw")


def short_decode(request: BootRequest, building: Building, tokens: int, prompts: Sequence[str] = ()) -> ShortDecode:
    """Boot the model with weights and decode. ArmRefused if that fails, UsageError for impossible options."""
    booted = boot_arm("boot", request, building)
    try:
        vocab = booted.sized.model.vocab_size or 1
        whole = booted.manifest.model.vocab_size
        given = read_prompts(prompts, vocab, whole) if prompts else None
        chosen = given or made_prompts(building.sequences, vocab, building.seed)
        with _refuses(booted):
            booted.prepare(building.sequences)
            found = booted.decoder.generate(chosen.take(building.sequences), tokens, keep_logits=True)
    finally:
        booted.decoder.close()
    return ShortDecode(
        size=size_text(booted.manifest, booted.sized),
        weights=weights_text(building.folder, building.seed),
        prompts=chosen.origin,
        maturity=booted.maturity,
        sequences=building.sequences,
        tokens=found.tokens,
        prefill_ms=1e3 * found.prefill_s,
        step_ms=1e3 * sum(found.step_s) / max(len(found.step_s), 1),
        late=late_rows(booted.session),
        is_finite=not not_finite(found.logits),
        is_flat=is_flat(found.logits),
        unused=booted.unread,
    )

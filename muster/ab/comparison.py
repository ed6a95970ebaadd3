"""The comparison of two booted arms: results, speed, and differences."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kernel_muster.ab.arms import A, B
from kernel_muster.ab.booted import Booted, close_quietly
from kernel_muster.ab.decoding.decoders import Decoded
from kernel_muster.ab.decoding.prompts import Prompt, Prompts, made_prompts, read_prompts
from kernel_muster.ab.decoding.sizes import size_text
from kernel_muster.ab.decoding.weights import weights_text
from kernel_muster.ab.judging import allowed_of, judge_proofs, judge_rows
from kernel_muster.ab.kernel_times import device_kernels, host_kernels
from kernel_muster.ab.locating import locate
from kernel_muster.ab.measure.coherence import coherence
from kernel_muster.ab.measure.logits import (
    NEAR_TIE,
    Distance,
    digests,
    distance,
    first_difference,
    gap,
    is_flat,
    margin,
    not_finite,
    unrelated_kl,
)
from kernel_muster.ab.measure.metering import KernelUse, Uses, differing_kernels, uses_of
from kernel_muster.ab.plan import DRAFTS, Plan
from kernel_muster.ab.result import (
    Allowed,
    Check,
    DrafterResult,
    Kernels,
    ModelResult,
    Proof,
    Row,
    Side,
    Speculation,
    Speed,
    Thresholds,
)
from kernel_muster.ab.runs import FLOOR, ArmStopped, Run, Timed, stops
from kernel_muster.audit.diff import compare
from kernel_muster.audit.later import judged_late
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.keys import parse_key


@dataclass
class _Alone:
    """The results of each prompt decoded alone."""

    generate: Callable[..., Decoded]
    found: dict[Prompt, tuple[bytes, ...]] = field(default_factory=dict)

    def digests(self, prompt: Prompt) -> tuple[bytes, ...]:
        if prompt not in self.found:
            alone = self.generate([prompt], keep_logits=True)
            (self.found[prompt],) = digests(alone.logits)
        return self.found[prompt]


class Comparison:
    """Both arms of one model during their comparison."""

    def __init__(self, plan: Plan, a: Booted, b: Booted, boot_floor: Callable[[], Booted]) -> None:
        self._plan, self._a, self._b, self._boot_floor = plan, a, b, boot_floor
        self._floor: Booted | None = None
        self._alone = {name: _Alone(partial(self._generate, name)) for name in (A, B)}
        self._plain: dict[int, Decoded] = {}  # the reference's run at this row's number of sequences
        self._turns: dict[int, float | None] = {}
        self._busier: dict[str, str] = {}
        self._code_a, self._code_b = a.all_kernels, b.all_kernels
        self._changed = frozenset(
            key for key in {*self._code_a, *self._code_b} if self._code_a.get(key) != self._code_b.get(key)
        )
        vocab = a.sized.model.vocab_size or 1
        whole = a.manifest.model.vocab_size
        given = read_prompts(plan.prompts, vocab, whole) if plan.prompts else None
        self._prompts: Prompts = given or made_prompts(max(plan.sequences), vocab, plan.seed)
        self._drafts = plan.drafts if plan.drafts is not None else DRAFTS if a.has_mtp and b.has_mtp else 0
        if a.drafting is not None:
            self._drafts = a.drafting.drafts

    def result(self) -> ModelResult:
        """Run everything and judge it."""
        a, plan = self._a, self._plan
        rows, stopped = [], []
        try:
            self._prepare()
            for count in plan.sequences:
                rows.append(self._row(count))
        except ArmStopped as error:
            ran = [dict.fromkeys(booted.meter.uses, KernelUse(1)) for booted in (self._a, self._b)]
            self._note(*ran)  # up to the failure the runs differ in length
            stopped.append(_stopped(error))
        proofs = tuple(self._proofs())
        report, rest = a.report, (*self._late(), *self._unkept())
        return ModelResult(
            model=a.manifest.name, manifest=str(a.manifest.path), size=size_text(a.manifest, a.sized),
            layers=a.sized.model.num_layers or 0, weights=weights_text(plan.folder, plan.seed),
            prompts=self._prompts.origin, target=report.arch, device=_device_text(a),
            set_hashes=(report.set_hash, self._b.report.set_hash),
            difference=compare(a.report, self._b.report), drafter=self._drafter(), code=tuple(self._code()),
            rows=tuple(rows), proofs=proofs,
            checks=(*judge_proofs(proofs), *stopped, *judge_rows(rows, plan.thresholds), *rest),
        )  # fmt: skip

    def close(self) -> None:
        """Free the boots of the rounding measurement."""
        if self._floor is not None:
            close_quietly(self._floor)

    def _late(self) -> Iterator[Check]:
        """Judge lookups of an arm's model or drafter after the seal: no audit covered them."""
        for arm, booted in ((A, self._a), (B, self._b)):
            for session in (booted.session, *([booted.drafting.session] if booted.drafting else [])):
                for judged in judged_late(session).findings:
                    found = judged.finding
                    text = f"{found.code}: {found.subject}: {found.why}"
                    outcome = "failed" if judged.refuses else "informs"
                    yield Check(name="late", where=f"decode of arm {arm}", outcome=outcome, text=text)  # type: ignore[arg-type]

    def _unkept(self) -> Iterator[Check]:
        """Report a cache that keeps no compiled code: each run compiles again."""
        for arm, booted in ((A, self._a), (B, self._b)):
            for report in (booted.report, *([booted.drafting.session.report] if booted.drafting else [])):
                for row in report.findings:
                    if row.code == "CACHE_NOT_KEPT":
                        text = f"{row.code}: {row.subject}: {row.why}"
                        yield Check(name="cache", where=f"boot of arm {arm}", outcome="informs", text=text)

    def _code(self) -> Iterator[tuple[str, str, str]]:
        for key in sorted(self._changed):
            yield key, self._code_a.get(key, "(not asked for)"), self._code_b.get(key, "(not asked for)")

    def _drafter(self) -> DrafterResult | None:
        wish, a, b = self._plan.drafter, self._a.drafting, self._b.drafting
        if wish is None or a is None or b is None:
            return None
        reports = a.session.report, b.session.report
        return DrafterResult(
            name=a.manifest.name, drafts=a.drafts, size=size_text(a.manifest, a.sized),
            weights=wish.weights(self._plan.seed), set_hashes=tuple(one.set_hash for one in reports),
            difference=compare(*reports),
        )  # fmt: skip

    def _row(self, count: int) -> Row:
        plan = self._plan
        prompts = self._prompts.take(count)
        plan.say(f"{self._a.manifest.name}: {count} sequences")
        self._a.meter.restart()
        self._b.meter.restart()
        a = self._generate(A, prompts, keep_logits=True)
        b = self._generate(B, prompts, keep_logits=True)
        with stops(B, f"C={count}"):
            _check_lengths(a, b)
        self._plain = {count: a}
        differing = self._differing(count)
        found = distance(a.logits, b.logits, a.tokens, b.tokens, plan.thresholds.top_k)
        is_measured = bool(differing) and plan.thresholds.max_kl is None
        floor = self._rounding(prompts, a, differing) if is_measured else None
        timed = self._timed(prompts, (a, b))
        ratios = timed.ratios
        kernels = self._kernels(count, differing, timed)
        return Row(
            sequences=count, prompts=len({*prompts}),
            a=self._side(A, prompts, a, timed.a, timed.agree[0]), b=self._side(B, prompts, b, timed.b, timed.agree[1]),
            speed=statistics.median(ratios), speed_low=min(ratios), speed_high=max(ratios), kernels=kernels,
            distance=found, floor=floor, allowed=self._allowed(a, floor, plan.thresholds),
        )  # fmt: skip

    def _allowed(self, a: Decoded, floor: Distance | None, limits: Thresholds) -> Allowed:
        return allowed_of(
            limits, floor, unrelated=unrelated_kl(a.logits, limits.top_k), routes=self._a.sized.model.moe is not None
        )

    def _generate(self, name: str, prompts: Sequence[Prompt], **options: Any) -> Decoded:
        """Decode in one arm. ArmStopped if that fails, or if kept logits carry no information."""
        booted = self._a if name == A else self._b
        with stops(name, f"C={len(prompts)}"):
            found = booted.decoder.generate(prompts, self._plan.tokens, **options)
            if why := not_finite(found.logits):  # equal garbage has equal bits
                raise MusterError(why)
            if is_flat(found.logits):
                raise MusterError("all logits of a row are equal, at every token")
            return found

    def _prepare(self) -> None:
        for name, booted in ((A, self._a), (B, self._b)):
            for count in sorted({1, *self._plan.sequences}):
                with stops(name, f"C={count}"):
                    booted.prepare(count)

    def _differing(self, count: int) -> tuple[str, ...]:
        """Return the kernels that differed in the last runs, and in their recorded steps."""
        recorded = uses_of(self._a.recorded[count]), uses_of(self._b.recorded[count])
        return tuple(sorted(self._note(self._a.meter.uses, self._b.meter.uses) | self._note(*recorded)))

    def _note(self, a: Uses, b: Uses) -> frozenset[str]:
        """Return the kernels that differ between two spans, and remember the arm with more launches of each."""
        found, none = differing_kernels(a, b, self._changed), KernelUse()
        for key in found:
            self._busier.setdefault(key, A if a.get(key, none).launches > b.get(key, none).launches else B)
        return found

    def _kernels(self, count: int, differing: tuple[str, ...], timed: Timed) -> Kernels:
        device = self._a.session.target.device
        if device is None:
            return host_kernels(differing, timed.kernels_a, timed.kernels_b)
        return device_kernels(differing, self._a.recorded[count], self._b.recorded[count], device.ordinal)

    def _rounding(self, prompts: Sequence[Prompt], a: Decoded, differing: tuple[str, ...]) -> Distance:
        """Measure the effect of rounding in the differing kernels on the reference arm."""
        with stops(FLOOR, f"C={len(prompts)}"):
            if self._floor is None:
                self._floor = self._boot_floor()
            moved = self._moved(self._floor, prompts, frozenset(differing))
        return distance(a.logits, moved.logits, a.tokens, moved.tokens, self._plan.thresholds.top_k)

    def _moved(self, floor: Booted, prompts: Sequence[Prompt], keys: frozenset[str]) -> Decoded:
        """Decode with the results of some kernels moved."""
        nudger = floor.nudger
        assert nudger is not None  # noqa: S101  (it was booted with one)
        nudger.keys = keys
        # Only unprepared steps: a captured graph moves the kernels of its capture.
        floor.prepare(len(prompts))
        return floor.decoder.generate(prompts, self._plan.tokens, keep_logits=True)

    def _timed(self, prompts: Sequence[Prompt], first: tuple[Decoded, Decoded]) -> Timed:
        """Run both arms in turn, with alternating order, so drift affects both equally."""
        timed = Timed()
        for turn in range(self._plan.repeats):
            pair = {}
            for name in (A, B) if turn % 2 == 0 else (B, A):
                booted = self._a if name == A else self._b
                pair[name] = self._generate(name, prompts)
                uses = timed.kernels_a if name == A else timed.kernels_b
                uses.append({key: use.seconds for key, use in booted.meter.steps.items()})
            timed.add(pair[A], pair[B], first)
        return timed

    def _side(self, name: str, prompts: Sequence[Prompt], found: Decoded, runs: list[Run], repeats_agree: bool) -> Side:
        broken = self._broken(name, prompts, found)
        speeds = [run.speed(self._plan.tokens) for run in runs]
        measure = coherence(found.tokens)
        return Side(
            speed=Speed(
                per_sequence=statistics.median(speeds), low=min(speeds), high=max(speeds),
                aggregate=statistics.median(speeds) * len(prompts),
                prefill_s=statistics.median(run.prefill_s for run in runs),
            ),
            is_identical=broken is None, broken=broken, place=self._place(name, prompts, broken),
            repeats_agree=repeats_agree, repeated=measure.repeated,
            loop=measure.loop, speculation=self._speculation(name, prompts, found) if self._drafts else None,
        )  # fmt: skip

    def _broken(self, name: str, prompts: Sequence[Prompt], found: Decoded) -> tuple[int, int] | None:
        """Return the first sequence and token whose logits differ in bits from those of the prompt alone."""
        for at, (prompt, mine) in enumerate(zip(prompts, digests(found.logits), strict=True)):
            first = first_difference(self._alone[name].digests(prompt), mine)
            if first is not None:
                return at, first
        return None

    def _place(self, name: str, prompts: Sequence[Prompt], broken: tuple[int, int] | None) -> str:
        """Name the place in the model where bits part. It informs, and is no measurement."""
        if broken is None:
            return ""
        self._plan.say(f"where sequence {broken[0]} of arm {name} parts from itself alone")
        booted = self._a if name == A else self._b
        with stops(name, f"C={len(prompts)}"):
            return locate(booted, prompts, *broken)

    def _speculation(self, name: str, prompts: Sequence[Prompt], plain: Decoded) -> Speculation:
        found = self._generate(name, prompts, drafts=self._drafts)
        decided = (
            (margin(plain.logits[at][first], other[first]), at, first)
            for at, (mine, other) in enumerate(zip(plain.tokens, found.tokens, strict=True))
            if (first := first_difference(mine, other)) is not None
        )
        worst = max(decided, default=(0.0, 0, 0))
        return Speculation(
            proposer="mtp" if self._a.drafting is None else "dflash", drafts=self._drafts, steps=found.verify_steps,
            step_ms=1e3 * statistics.median(found.verify_s) if found.verify_s else 0.0, accepted=found.accepted,
            drafted=found.drafted, same_tokens=plain.tokens == found.tokens,
            **self._parting(prompts, plain, found, worst),
        )  # fmt: skip

    def _parting(
        self, prompts: Sequence[Prompt], plain: Decoded, found: Decoded, worst: tuple[float, int, int]
    ) -> dict[str, Any]:
        """Return where drafting chose another token that is no near tie, and the gap that rounding explains there."""
        ratio, sequence, token = worst
        if ratio <= NEAR_TIE:
            return {"parted": None, "margin": ratio}
        down = gap(plain.logits[sequence][token], found.tokens[sequence][token])
        most = self._turned_by_rounding(prompts)
        return {"parted": (sequence, token), "margin": ratio, "gap": down, "allowed": most}

    def _turned_by_rounding(self, prompts: Sequence[Prompt]) -> float | None:
        """Return the gap in nats within which tokens may swap if every kernel rounds differently, measured once.

        A verify pass has more rows than a step, and kernels for more rows may sum in another order.
        """
        count = len(prompts)
        if count not in self._turns:
            plain = self._plain[count]
            self._plan.say(f"what rounding in every kernel does at {count} sequences")
            with stops(FLOOR, f"C={count}"):
                floor = self._boot_floor()
                try:
                    moved = self._moved(floor, prompts, frozenset(floor.all_kernels))
                finally:
                    close_quietly(floor)
            limits = replace(self._plan.thresholds, max_kl=None)
            found = distance(plain.logits, moved.logits, plain.tokens, moved.tokens, limits.top_k)
            self._turns[count] = self._allowed(plain, found, limits).gap
        return self._turns[count]

    def _suspects(self) -> dict[str, tuple[tuple[str, Booted], ...]]:
        """Return the keys to prove, each with its arms: equal code is proven once, in the arm with more launches."""
        both = ((A, self._a), (B, self._b))
        found: dict[str, tuple[tuple[str, Booted], ...]] = dict.fromkeys(self._changed, both)
        for key, name in self._busier.items():
            found.setdefault(key, tuple(one for one in both if one[0] == name))
        return found

    def _proofs(self) -> Iterator[Proof]:
        """Check each differing kernel against its contract: it is the first suspect."""
        from kernel_muster.audit.checking import CASE_S
        from kernel_muster.audit.proof.proofs import device_memory, host_memory, prove

        for key, arms in sorted(self._suspects().items()):
            for name, booted in arms:
                handle = booted.handle_of(parse_key(key)) if key in booted.all_kernels else None
                if handle is None:
                    continue
                self._plan.say(f"{key} of arm {name} against its contract")
                device = booted.session.target.device
                memory = host_memory() if device is None else device_memory(device.ordinal)
                cases = list(prove(handle, memory, booted.handle_of, seconds=CASE_S))
                problems = [f"{found.code}: {found.why}" for case in cases for found in case.findings]
                yield Proof(
                    arm=name, key=key, provider=str(handle.provider), cases=len(cases),
                    worst=max((case.worst for case in cases), default=0.0), problems=tuple(problems),
                )  # fmt: skip


def _check_lengths(a: Decoded, b: Decoded) -> None:
    """MusterError if one arm has longer rows of logits: a manifest may not give their length."""
    for sequence, rows in enumerate(zip(a.logits, b.logits, strict=True)):
        for at, (mine, other) in enumerate(zip(*rows, strict=True)):
            if len(mine) != len(other):
                raise MusterError(f"sequence {sequence}, token {at}: {len(other)} logits, in arm A {len(mine)}")


def _stopped(error: ArmStopped) -> Check:
    """Return the check that failed, or that lacks the rounding run."""
    if error.arm != FLOOR:
        return Check(name="decode", where=error.where, outcome="failed", text=str(error))
    text = f"{error}; --max-kl judges without it"
    return Check(name="rounding", where=error.where, outcome="inconclusive", text=text)


def _device_text(booted: Booted) -> str:
    """Return the driver's name of the device. Empty for the host."""
    device = booted.session.target.device
    if device is None:
        return ""
    return f"{device.name}, {device.multiprocessors} SMs, driver for CUDA {device.driver}"

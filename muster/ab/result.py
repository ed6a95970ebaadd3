"""The result of a comparison, as plain data for the renderers and the JSON."""

from dataclasses import field
from typing import Literal

from kernel_muster.ab.measure.logits import Distance
from kernel_muster.audit.diff import Difference
from kernel_muster.audit.report import Report
from kernel_muster.registry.values import frozen

SCHEMA = "kernel-muster/ab"
#: 2.0: a row's ``allowed`` (kl, median, largest, gap) in place of ``allowed_kl``; the kind of drafting, and the
#: drafter. 2.1: a speculation's ``gap`` and ``allowed``. 2.2: a model's ``failed``, and the verdict incomplete. All
#: names are in tests/muster/test_ab_document.py: another name or meaning needs another major version.
VERSION = "2.3"

#: The kind of drafting: by the model's own head, or by a block-diffusion drafter beside it.
ProposerName = Literal["mtp", "dflash"]
#: equal: the same bits everywhere. agree: other bits within the reach of rounding. differ: a check failed.
#: inconclusive: no check failed, but the judged part hardly ran. refused: an arm did not boot. incomplete: no finding
#: refused an arm, but its model's builder failed.
Verdict = Literal["equal", "agree", "differ", "inconclusive", "refused", "incomplete"]
Identity = Literal["reference", "always", "off"]
Decides = Literal["passed", "failed", "inconclusive", "informs"]


@frozen(kw_only=True)
class Thresholds:
    """The limits. ``max_kl`` None: the measured effect of rounding; ``least_speed`` None: speed only informs."""

    max_kl: float | None = None
    identity: Identity = "reference"
    least_verify_steps: int = 16
    least_speed: float | None = None
    top_k: int = 64


@frozen(kw_only=True)
class Speed:
    """Tokens a second: of one sequence (median of the repeats, and their range), and of all together."""

    per_sequence: float
    low: float
    high: float
    aggregate: float
    prefill_s: float


@frozen(kw_only=True)
class Speculation:
    """The result of drafting: ``steps`` are sequences times verify passes.

    ``parted`` is the sequence and token that differ from plain decode at its clearest decision, if that is no near tie.
    ``margin`` is the relative distance of the other token from the likeliest there, ``gap`` the same in nats, and
    ``allowed`` the nats explained by rounding, None if not needed.
    """

    proposer: ProposerName
    drafts: int
    steps: int
    step_ms: float
    accepted: int
    drafted: int
    same_tokens: bool
    parted: tuple[int, int] | None
    margin: float
    gap: float = 0.0
    allowed: float | None = None

    @property
    def acceptance(self) -> float:
        """The share of accepted drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0


@frozen(kw_only=True)
class Side:
    """One arm at one number of sequences.

    ``broken`` is the first sequence and token whose bits differ from n = 1, ``place`` the part of the model where
    that began.
    """

    speed: Speed
    is_identical: bool
    broken: tuple[int, int] | None
    place: str
    repeats_agree: bool
    repeated: float
    loop: int
    speculation: Speculation | None = None


@frozen(kw_only=True)
class Kernels:
    """The differing kernels of the two arms: their own time, B's over A's, and its method."""

    differing: tuple[str, ...]
    seconds_a: float
    seconds_b: float
    method: str

    @property
    def speed(self) -> float | None:
        """B's speed-up. None without differing kernels or times."""
        return self.seconds_a / self.seconds_b if self.seconds_a > 0 and self.seconds_b > 0 else None


@frozen(kw_only=True)
class Allowed:
    """The allowed distance of B from A: the median KL of a sequence and of all positions, the KL of one position, and
    the gap in nats of another token. A gap of None: any.
    """

    kl: float
    median: float
    largest: float
    gap: float | None


@frozen(kw_only=True)
class Row:
    """Both arms at one number of sequences. ``speed`` is B's over A's, the median of alternating pairs."""

    sequences: int
    prompts: int
    a: Side
    b: Side
    speed: float
    speed_low: float
    speed_high: float
    kernels: Kernels
    distance: Distance
    floor: Distance | None
    allowed: Allowed


@frozen(kw_only=True)
class Proof:
    """A differing kernel of the arms (other code, or other launches), against its contract's cases."""

    arm: str
    key: str
    provider: str
    cases: int
    worst: float
    problems: tuple[str, ...]


@frozen(kw_only=True)
class Check:
    """One check: whether it decides or informs, its place, and its text."""

    name: str
    where: str
    outcome: Decides
    text: str


@frozen(kw_only=True)
class DrafterResult:
    """The drafter of both arms: the differences between its boots, and its size and weights."""

    name: str
    drafts: int
    size: str
    weights: str
    set_hashes: tuple[str, ...]
    difference: Difference


@frozen(kw_only=True)
class ModelResult:
    """One model.

    ``code`` names the keys with different code, with that of A and of B. ``set_hashes`` are those of the arms' reports.
    ``refused`` holds, for an arm that did not boot, its report and its builder's exception. ``failed`` names those of
    them without a refusing finding, whose builder failed.
    """

    model: str
    manifest: str
    size: str
    layers: int
    weights: str
    prompts: str
    target: str
    device: str
    set_hashes: tuple[str, ...] = ()
    difference: Difference | None = None
    drafter: DrafterResult | None = None
    code: tuple[tuple[str, str, str], ...] = ()
    rows: tuple[Row, ...] = ()
    proofs: tuple[Proof, ...] = ()
    checks: tuple[Check, ...] = ()
    refused: tuple[tuple[str, Report, str], ...] = field(default=())
    failed: tuple[str, ...] = ()

    @property
    def has_other_work(self) -> bool:
        """Whether some kernel differed between the arms, at some number of sequences."""
        return any(row.kernels.differing for row in self.rows)

    @property
    def has_drafted(self) -> bool:
        """Whether tokens were drafted in some run."""
        return any(row.a.speculation is not None or row.b.speculation is not None for row in self.rows)

    @property
    def is_refused(self) -> bool:
        """Whether an arm did not boot, for any reason."""
        return bool(self.refused)

    @property
    def has_only_failed(self) -> bool:
        """Whether an arm did not boot because a builder failed, without a refusing finding."""
        return self.is_refused and len(self.failed) == len(self.refused)


@frozen(kw_only=True)
class Comparison:
    """The result of one run of the command."""

    schema: str = SCHEMA
    version: str = VERSION
    muster_version: str
    command: str
    date: str
    a: str
    b: str
    shared: str
    tokens: int
    repeats: int
    sequences: tuple[int, ...]
    packages: dict[str, str]
    thresholds: Thresholds
    models: tuple[ModelResult, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all models."""
        without_result = [model for model in self.models if model.is_refused]
        if without_result:
            return "incomplete" if all(model.has_only_failed for model in without_result) else "refused"
        if any(check.outcome == "failed" for model in self.models for check in model.checks):
            return "differ"
        if any(check.outcome == "inconclusive" for model in self.models for check in model.checks):
            return "inconclusive"
        rows = [row for model in self.models for row in model.rows]
        same = all(row.distance.same_bits for row in rows)
        return "equal" if rows and same else "agree"

    @property
    def passed(self) -> bool:
        """Whether no check failed and all were made."""
        return self.verdict in ("equal", "agree")

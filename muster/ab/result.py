"""What a comparison found, as plain data: the renderers and the JSON are made of it."""

from dataclasses import field
from typing import Literal

from kernel_muster.ab.measure.logits import Distance
from kernel_muster.audit.diff import Difference
from kernel_muster.audit.report import Report
from kernel_muster.registry.values import frozen

SCHEMA = "kernel-muster/ab"
#: 2.0: a row's ``allowed`` (kl, median, largest, gap) in place of ``allowed_kl``; who drafts, and the drafter. 2.1:
#: a speculation's ``gap`` and ``allowed``. 2.2: a model's ``failed``, and the verdict incomplete. All names are in
#: tests/muster/test_ab_document.py: another name or meaning takes another major version.
VERSION = "2.2"

#: Who drafts: the model's own head, or a block-diffusion drafter beside it.
ProposerName = Literal["mtp", "dflash"]
#: equal: the same bits everywhere. agree: other bits, no further apart than rounding explains. differ: a check failed.
#: inconclusive: nothing failed, but what was to be judged hardly ran. refused: an arm did not boot. incomplete: nothing
#: refused an arm, and its model's builder failed.
Verdict = Literal["equal", "agree", "differ", "inconclusive", "refused", "incomplete"]
Identity = Literal["reference", "always", "off"]
Decides = Literal["passed", "failed", "inconclusive", "informs"]


@frozen(kw_only=True)
class Thresholds:
    """What decides. ``max_kl`` None: what rounding explains, measured; ``least_speed`` None: speed decides nothing."""

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
    """What drafting did: ``steps`` are sequences times verify passes.

    ``parted`` is the sequence and token that differ from plain decode where plain decode was decided most, no near tie;
    ``margin`` is how far the other token is below the likeliest there, relative to it, ``gap`` the same in nats, and
    ``allowed`` how many nats rounding explains, None where nothing needs it.
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
        """The share of drafts that held."""
        return self.accepted / self.drafted if self.drafted else 0.0


@frozen(kw_only=True)
class Side:
    """One arm at one number of sequences.

    ``broken`` is the first sequence and token whose bits are not n = 1's, ``place`` where in the model that began.
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
    """The kernels that are other work in the two arms: their own time, B's over A's, and how it was taken."""

    differing: tuple[str, ...]
    seconds_a: float
    seconds_b: float
    method: str

    @property
    def speed(self) -> float | None:
        """How much faster B's are; None where nothing differs or nothing was timed."""
        return self.seconds_a / self.seconds_b if self.seconds_a > 0 and self.seconds_b > 0 else None


@frozen(kw_only=True)
class Allowed:
    """How far B may be from A: the median KL of a sequence and of all positions, the KL of one position, and the gap in
    nats of a token that is another one. A gap of None: any.
    """

    kl: float
    median: float
    largest: float
    gap: float | None


@frozen(kw_only=True)
class Row:
    """Both arms at one number of sequences. ``speed`` is B's over A's, the median of pairs that ran side by side."""

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
    """A kernel that is other work in the arms (other code, or other launches), against its contract's cases."""

    arm: str
    key: str
    provider: str
    cases: int
    worst: float
    problems: tuple[str, ...]


@frozen(kw_only=True)
class Check:
    """One thing that decides or informs, where, and what it says."""

    name: str
    where: str
    outcome: Decides
    text: str


@frozen(kw_only=True)
class DrafterResult:
    """The drafter that both arms had: how its boots differ, and the size and weights that it had."""

    name: str
    drafts: int
    size: str
    weights: str
    set_hashes: tuple[str, ...]
    difference: Difference


@frozen(kw_only=True)
class ModelResult:
    """One model.

    ``code`` names the keys whose code is not the same, with that of A and of B; ``set_hashes`` are those of the arms'
    reports; ``refused`` holds, for an arm that did not boot, its report and what its builder raised, ``failed`` the
    names of those of them whose builder failed and that nothing refused.
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
        """Whether some kernel was other work in the arms, at some number of sequences."""
        return any(row.kernels.differing for row in self.rows)

    @property
    def has_drafted(self) -> bool:
        """Whether tokens were drafted in some run."""
        return any(row.a.speculation is not None or row.b.speculation is not None for row in self.rows)

    @property
    def is_refused(self) -> bool:
        """Whether an arm did not boot, for whatever reason."""
        return bool(self.refused)

    @property
    def has_only_failed(self) -> bool:
        """Whether an arm did not boot because a builder failed, and nothing refused one."""
        return self.is_refused and len(self.failed) == len(self.refused)


@frozen(kw_only=True)
class Comparison:
    """Everything that one run of the command found."""

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
        """The verdict over all models: the worst of them."""
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
        """Whether nothing failed and everything was judged."""
        return self.verdict in ("equal", "agree")

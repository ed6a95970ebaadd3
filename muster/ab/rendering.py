"""A comparison as sections for text, terminal and Markdown, and as a document for JSON."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from kernel_muster.ab.measure.logits import MARGIN, SPREAD
from kernel_muster.ab.result import Comparison, ModelResult, Row
from kernel_muster.audit.diff import render_diff
from kernel_muster.audit.render.plain import plural
from kernel_muster.audit.render.sections import Section, Table, finding_sections
from kernel_muster.audit.report import Report

_SPEED = ("C", "A tok/s", "B tok/s", "A sum", "B sum", "B/A", "range", "kernels B/A")
_DRAFTING = ("C", "verify ms A", "verify ms B", "steps A", "steps B", "accepted A", "accepted B")
_SAME = (
    "C", "bits A, B", "KL median", "allowed", "KL mean", "KL max", "allowed", "parts at", "n = 1 bits A",
    "n = 1 bits B", "repeats A", "repeats B",
)  # fmt: skip


def headline(found: Comparison) -> str:
    """Return the verdict in one line, with its basis if that is weak."""
    models = ", ".join(dict.fromkeys(model.model or "(no model)" for model in found.models))
    verdict = found.verdict
    if verdict in ("refused", "incomplete"):
        arms = [f"arm {arm} of {m.model}" for m in found.models for arm, _, _ in m.refused]
        rest = _compared_too([model.model for model in found.models if not model.is_refused])
        if verdict == "incomplete":
            return f"INCOMPLETE: the model's builder failed in {' and '.join(arms)}: {rest}"
        return f"REFUSED: {'; '.join(arms)} did not boot: {rest}"
    said = {
        "equal": _equal(found),
        "agree": "AGREE: B computes what A computes, up to rounding",
        "differ": "DIFFER: B cannot stand in for A",
        "inconclusive": "INCONCLUSIVE: nothing differs, but not everything was judged",
    }[verdict]
    if verdict in ("differ", "inconclusive"):
        outcome = "failed" if verdict == "differ" else "inconclusive"
        failed = [check for model in found.models for check in model.checks if check.outcome == outcome]
        said += f": {failed[0].name} at {failed[0].where}: {failed[0].text}"
        said += f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"{said}; on {models}{_little(found)}"


def _compared_too(models: list[str]) -> str:
    return f"compared were only {', '.join(models)}, below" if models else "nothing was compared"


def _equal(found: Comparison) -> str:
    """Return the text for equal bits, with the reason if the arms do not differ."""
    idle = [model.model for model in found.models if not model.has_other_work]
    if any(model.has_drafted and model.drafter and not model.drafter.difference.equal for model in found.models):
        return "EQUAL: A and B give the same bits; the drafter's boots differ: see Drafting"
    if not idle:
        return "EQUAL: A and B give the same bits"
    where = "" if len(idle) == len(found.models) else f" on {', '.join(idle)}"
    if found.a == found.b:
        return f"EQUAL, but nothing differed{where}: the arms are the same"
    return (
        f"EQUAL, but nothing differed{where}: no kernel that ran and no launch is another: what is set chose the same"
    )


def _little(found: Comparison) -> str:
    """Return the weak basis of a verdict: one model, one prompt, one run, untrained weights, a small model."""
    parts = ["one model"] if len(found.models) == 1 else []
    if any(row.prompts == 1 for model in found.models for row in model.rows[-1:]):
        parts.append("one prompt")
    parts += ["one run"] if found.repeats == 1 else []
    if any(model.size for model in found.models):
        parts.append("reduced size")
    if any(model.weights.startswith("random") for model in found.models):
        parts.append("random weights")
    return f" (from {', '.join(parts)}: it says nothing about others)" if parts else ""


def sections(found: Comparison) -> Iterator[Section]:
    """Yield the deciding checks first, then the header, then each model's figures."""
    yield from _refusals(found)
    failed = [(m, c) for m in found.models for c in m.checks if c.outcome == "failed"]
    if failed:
        lines = tuple(f"{m.model}, {c.where}: {c.name}: {c.text}" for m, c in failed)
        yield Section(f"Decides against B: {plural(len(failed), 'check')}", "refuse", lines=lines)
    idle = [(m, c) for m in found.models for c in m.checks if c.outcome == "inconclusive"]
    if idle:
        lines = tuple(f"{m.model}, {c.where}: {c.name}: {c.text}" for m, c in idle)
        yield Section(f"Not judged: {plural(len(idle), 'check')}", "refuse", lines=lines)
    yield Section("Arms", lines=(*_arms(found),))
    for model in found.models:
        if not model.is_refused:
            yield from _model(model, found)
    yield Section("What decides", lines=(*_rules(found),))


def _refusals(found: Comparison) -> Iterator[Section]:
    for model in found.models:
        for who, report, why in _told_once(model.refused):
            if why:
                yield Section(f"{who} of {model.model}: not built", "refuse", lines=(why,))
            for section in finding_sections(report.findings):
                title = f"{who} of {model.model}: {section.title}"
                yield Section(title, section.tone, section.entries, section.lines, section.table)


def _told_once(refused: tuple[tuple[str, Report, str], ...]) -> Iterator[tuple[str, Report, str]]:
    """Yield the refusal of each arm, merged if both are equal."""
    if len(refused) > 1 and len({(report.findings, why) for _, report, why in refused}) == 1:
        yield (f"Arms {' and '.join(arm for arm, _, _ in refused)}", *refused[0][1:])
        return
    for arm, report, why in refused:
        yield f"Arm {arm}", report, why


def _arms(found: Comparison) -> Iterator[str]:
    yield f"A (the reference): {found.a}"
    yield f"B: {found.b}"
    yield f"both: {found.shared}"
    yield f"kernel-muster {found.muster_version}; " + ", ".join(f"{k} {v}" for k, v in found.packages.items())
    yield f"{found.date}: {found.command}"


def _model(model: ModelResult, found: Comparison) -> Iterator[Section]:
    device = f"{model.target}{f' ({model.device})' if model.device else ''}"
    lines = [f"target {device}, {model.layers} layers, weights: {model.weights}, prompts: {model.prompts}"]
    if model.set_hashes:
        lines.append("set hash " + ", ".join(f"{a} {h[:16]}" for a, h in zip("AB", model.set_hashes, strict=True)))
    if model.size:
        lines.append(f"REDUCED SIZE, figures say nothing about the full model: {model.size}")
    if model.drafter is not None:
        lines.append(f"drafter {model.drafter.name}, weights: {model.drafter.weights}"
                     + (f"; REDUCED SIZE: {model.drafter.size}" if model.drafter.size else ""))  # fmt: skip
    if not model.device:
        lines.append("figures of the host are ratios of one run: B/A counts, tokens a second do not")
    if model.rows and model.rows[-1].prompts < model.rows[-1].sequences:
        lines.append(f"{model.rows[-1].prompts} prompts for {model.rows[-1].sequences} sequences: equal ones ask for "
                     "equal experts, which flatters MoE")  # fmt: skip
    yield Section(f"Model {model.model}", lines=tuple(lines))
    yield Section("Differs between the arms", lines=(*_differences(model),))
    yield Section(f"Speed, {found.tokens} tokens a sequence, median of {plural(found.repeats, 'pair')} of runs",
                  table=Table(_SPEED, tuple(map(_speed_cells, model.rows))),
                  lines=tuple(_kernel_lines(model.rows)))  # fmt: skip
    yield from _drafting(model.rows)
    yield Section("Same results", table=Table(_SAME, tuple(map(_same_cells, model.rows))))
    notes = tuple(f"{c.where}: {c.text}" for c in model.checks if c.outcome == "informs")
    notes += tuple(c.text for c in model.checks if c.name == "contract" and c.outcome == "passed")
    notes += tuple(_coherence_lines(model.rows))
    yield Section("Informs", lines=notes)


def _differences(model: ModelResult) -> Iterator[str]:
    if model.difference is not None:
        if model.difference.equal and not model.code:
            yield "nothing: the arms are the same"
        elif not model.difference.equal:
            yield from (line.rstrip() for line in render_diff(model.difference).splitlines()[1:] if line.strip())
    if model.drafter is not None and not model.drafter.difference.equal:
        yield f"the boots of the drafter {model.drafter.name}"
        yield from (
            f"  {line.rstrip()}" for line in render_diff(model.drafter.difference).splitlines()[1:] if line.strip()
        )
    for key, one, other in model.code:
        yield f"code of {key}: {one} -> {other}"


def _speed_cells(row: Row) -> tuple[str, ...]:
    kernels = row.kernels.speed
    return (
        str(row.sequences), f"{row.a.speed.per_sequence:.1f}", f"{row.b.speed.per_sequence:.1f}",
        f"{row.a.speed.aggregate:.1f}", f"{row.b.speed.aggregate:.1f}", f"{row.speed:.2f}",
        f"{row.speed_low:.2f}..{row.speed_high:.2f}", "-" if kernels is None else f"{kernels:.2f}",
    )  # fmt: skip


def _drafting(rows: Iterable[Row]) -> Iterator[Section]:
    pairs = [(row.sequences, row.a.speculation, row.b.speculation) for row in rows]
    cells = [
        (
            str(count), f"{one.step_ms:.2f}", f"{other.step_ms:.2f}", str(one.steps), str(other.steps),
            f"{one.acceptance:.0%}", f"{other.acceptance:.0%}",
        )
        for count, one, other in pairs
        if one is not None and other is not None
    ]  # fmt: skip
    if cells:
        one = next(one for _, one, _ in pairs if one is not None)
        who = "by the MTP head" if one.proposer == "mtp" else "by the block-diffusion drafter"
        title = f"Drafting {who}, {plural(one.drafts, 'draft')} a step; a verify step is timed with its drafting"
        yield Section(title, table=Table(_DRAFTING, tuple(cells)))


def _kernel_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Name the differing kernels, once for all row counts with the same ones."""
    by_keys: dict[tuple[str, ...], list[int]] = {}
    methods = {row.kernels.method for row in rows if row.kernels.method}
    for row in rows:
        by_keys.setdefault(row.kernels.differing, []).append(row.sequences)
    for keys, counts in by_keys.items():
        where = ", ".join(f"C={count}" for count in counts)
        yield f"{where}: kernels that are other work: {', '.join(keys) or 'none'}"
    yield from (f"kernels B/A: {method}" for method in sorted(methods))


def _same_cells(row: Row) -> tuple[str, ...]:
    found = row.distance
    parts = "-" if found.divergence is None else f"{found.divergence}{' (near tie)' if found.is_tie else ''}"
    return (
        str(row.sequences), "same" if found.same_bits else "other", _kl(found.worst), _kl(row.allowed.kl),
        _kl(found.mean), _kl(found.largest), _kl(row.allowed.largest), parts,
        _yes(row.a.is_identical), _yes(row.b.is_identical), _yes(row.a.repeats_agree), _yes(row.b.repeats_agree),
    )  # fmt: skip


def _coherence_lines(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        yield (
            f"C={row.sequences}: repeated 4-grams A {row.a.repeated:.0%}, B {row.b.repeated:.0%}; longest loop at an "
            f"end A {row.a.loop}, B {row.b.loop} tokens"
        )


def _kl(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "NO"


def _rules(found: Comparison) -> Iterator[str]:
    limits = found.thresholds
    if limits.max_kl is None:
        yield (
            f"KL: the worst sequence's median and that of all positions, at most {MARGIN:g} times those of A with the "
            "results of the kernels that differ moved by one unit in the last place of BF16, at random: twice what "
            "rounding explains"
        )
    else:
        yield f"KL: the worst sequence's median, at most {limits.max_kl:g}; one position's, {SPREAD:g} times as much"
    if limits.max_kl is None:
        yield (
            f"largest: the KL of one position, at most {MARGIN:g} times the largest of that run or {MARGIN * SPREAD:g} "
            "times the median of its worst sequence; where experts are routed, at most half the deviation of an "
            "unrelated context"
        )
        yield "parting: another greedy token only at a near tie, or no further down than rounding may move logits"
    yield {
        "reference": "bits of n = 1: B must keep them where A does, each against its own n = 1",
        "always": "bits of n = 1: both arms must keep them, each against its own n = 1",
        "off": "bits of n = 1: inform only",
    }[limits.identity]
    yield "contracts: kernels that are other work in the arms must pass their contracts' cases"
    yield "repeats: timed runs must give the tokens of the first"
    yield f"verify steps: at least {limits.least_verify_steps} where tokens are drafted; fewer prove nothing"
    if limits.least_speed is not None:
        yield f"speed: B at least {limits.least_speed:g} of A"
    yield "coherence and, unless a least is given, speed inform"


def document(found: Comparison, *, advisory: bool) -> dict[str, Any]:
    """Return the whole comparison as plain data for JSON."""
    data = {
        "schema": found.schema,
        "version": found.version,
        "verdict": found.verdict,
        "passed": found.passed,
        "advisory": advisory,
        "headline": headline(found),
    }
    plain: dict[str, Any] = _plain({**data, **asdict(found)})
    return plain


def _plain(value: Any) -> Any:
    """Return a value for JSON: a figure that is not finite is null, and names outside UTF-8 are escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value

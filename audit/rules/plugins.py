"""Rules about what plugins registered, judged for one target."""

from collections import Counter
from collections.abc import Iterator, Mapping

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.messages.message import Message, joined, message, quoted
from kernel_muster.registry.selection.catalog import PluginRow
from kernel_muster.registry.selection.select import Decision
from kernel_muster.registry.suggestions import Names
from kernel_muster.registry.wording import listed


def _decisions(evidence: Evidence) -> Iterator[Decision]:
    return (evidence.decide(key) for key in sorted(evidence.catalog.by_key))


def duplicate_kernels(evidence: Evidence) -> Iterator[Finding]:
    """Several kernels compete for one key and nothing decides."""
    for decision in _decisions(evidence):
        if decision.chosen is None or not decision.rivals:
            continue
        rivals = (decision.chosen, *decision.rivals)
        names = sorted({str(rival.provider) for rival in rivals})
        counted = Counter(r.provider.normal_name for r in rivals)
        # Between two kernels of one distribution the lever cannot decide.
        single = [name for name, count in counted.items() if count == 1]
        remedies = tuple(message("remedy.prefer", key=decision.key, distribution=name) for name in single[:2])
        yield Finding(
            "DUPLICATE_KERNEL",
            str(decision.key),
            message("duplicate_kernel", count=len(rivals), target=str(evidence.target), providers=names),
            tuple(sorted(f"{r.provider} (plugin {r.provider.plugin})" for r in rivals)),
            (*remedies, *apart(counted)),
        )


def apart(counted: Mapping[str, int]) -> tuple[str, ...]:
    """Say how to tell equal kernels apart, of these many of each distribution."""
    if len(counted) == 1:
        return (message("remedy.keep_one", distribution=next(iter(counted))),)
    return message("remedy.override_one"), message("remedy.uninstall_one")


def overridden_kernels(evidence: Evidence) -> Iterator[Finding]:
    """One distribution's kernel serves in the place of another's: by override, with its whole module, or by selection.

    What MUSTER_PREFER decided is the operator's own word: the levers of the report say it.
    """
    for decision in _decisions(evidence):
        chosen = decision.chosen
        if chosen is None or decision.circle:
            continue
        lost = sorted({str(c.registered.provider) for c in decision.candidates if c.rule in ("overridden", "replaced")})
        outranked = sorted(set(_outranked(decision)))
        mine = str(chosen.provider)
        why = [message("overridden", provider=mine, lost=lost)] if lost else []
        why += [
            message("overridden.rank", provider=mine, other=provider, reason=quoted(reason))
            for provider, reason in outranked
        ]
        if why:
            name, plugin = chosen.provider.distribution, chosen.provider.plugin
            remedies: tuple[str, ...] = (message("remedy.uninstall_meant", distribution=name),)
            if not lost:
                remedies = (
                    message("remedy.block_server", plugin=plugin),
                    message("remedy.override", distribution=name),
                )
            yield Finding("OVERRIDDEN", str(decision.key), joined(why), (mine,), remedies)


def _outranked(decision: Decision) -> Iterator[tuple[str, str]]:
    """Yield who would have served but for another distribution's kernel, of a better tier or closer to the target."""
    mine = decision.chosen.provider.normal_name if decision.chosen else ""
    for candidate in decision.candidates:
        provider = candidate.registered.provider
        if candidate.rule in ("tier", "specificity") and provider.normal_name != mine:
            yield str(provider), candidate.reason


def override_circles(evidence: Evidence) -> Iterator[Finding]:
    """Several distributions override each other, so that none of them is left."""
    for decision in _decisions(evidence):
        if decision.circle:
            names = sorted(str(registered.provider) for registered in decision.circle)
            why = message("bad_override.circle", providers=names)
            remedies = (message("remedy.uninstall_all_but_one"),)
            yield Finding("BAD_OVERRIDE", str(decision.key), why, tuple(names), remedies)


def dead_registrations(evidence: Evidence) -> Iterator[Finding]:
    """Nothing asked for any key of a third-party plugin, or a miss looks like one of its keys."""
    if not evidence.is_complete or not evidence.rows:
        return
    asked = {evidence.decide(key).renamed_to or key for key in evidence.asked_keys}
    # what a waiver excuses is absent on purpose
    absent = (key for key in sorted(asked) if evidence.decide(key).chosen is None and evidence.excuse(key) is None)
    missed = Names(map(str, absent))
    opt_in = {r.spec.kernel_key for r in evidence.catalog.kernels if r.spec.opt_in in evidence.levers}
    for row in evidence.catalog.plugins_that("loaded"):
        unasked = sorted(set(row.keys) - asked - opt_in)
        if row.is_host or not unasked:
            continue
        hints = [
            message("dead_registration.near", key=key, missed=close[0])
            for key in unasked
            if (close := missed.near(str(key), 1))
        ]
        if hints or not set(row.keys) & (asked | opt_in):
            yield _dead(row, [str(key) for key in unasked], hints)


def _dead(row: PluginRow, unasked: list[str], hints: list[Message]) -> Finding:
    nothing = message("dead_registration", count=len(unasked), keys=listed(unasked))
    return Finding(
        "DEAD_REGISTRATION",
        row.name,
        joined(hints or [nothing]),
        (f"{row.distribution} {row.version} ({row.value})",),
        (message("remedy.correct_keys"), message("remedy.or_uninstall", distribution=row.distribution)),
    )

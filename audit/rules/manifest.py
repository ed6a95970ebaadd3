"""Rules about what the manifest declares."""

from collections.abc import Iterator
from datetime import date

from kernel_muster.audit.evidence import Evidence
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.waivers import Waiver
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU, canonical_arch, parse_arch
from kernel_muster.registry.keys import KernelKey, KeyNames, parse_key
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.wording import listed


def waiver_states(evidence: Evidence) -> Iterator[Finding]:
    """Each waiver in scope excuses something that was asked for and is absent, and has not run out."""
    for waiver in evidence.waivers.values():
        if waiver.key not in evidence.tried_keys:
            if evidence.is_complete and evidence.rows:
                yield _unused(evidence, waiver)
        elif evidence.decide(waiver.key).chosen is not None:
            yield _stale(evidence, waiver)
        else:
            yield from run_out(waiver, evidence.as_of)


def _unused(evidence: Evidence, waiver: Waiver) -> Finding:
    skipped = sorted(map(str, evidence.chains_of.get(waiver.key, ())))
    meant = tuple(map(parse_key, evidence.unwaived_misses.like(waiver.key)))
    if skipped:
        why = message("unused_waiver.chain", key=waiver.key, first=listed(skipped), near=meant)
    else:
        why = message("unused_waiver", key=waiver.key, near=meant)
    correct = (message("remedy.correct_waiver", keys=meant),) if meant else ()
    remove = message("remedy.or_remove" if meant else "remedy.remove", entry=waiver.dotted)
    return Finding(
        "UNUSED_WAIVER", str(waiver.key), why, (waiver.where,), (*correct, remove, message("remedy.scope_waiver"))
    )


def _stale(evidence: Evidence, waiver: Waiver) -> Finding:
    chosen = evidence.decide(waiver.key).chosen
    assert chosen is not None  # noqa: S101  (the caller has just looked)
    values = {"key": waiver.key, "provider": str(chosen.provider), "target": str(evidence.target)}
    if waiver.scope:
        why = message("stale_waiver.scoped", scope=waiver.scope, **values)
    else:
        why = message("stale_waiver", **values)
    remedies = (message("remedy.remove", entry=waiver.dotted), message("remedy.scope_archs"))
    return Finding("STALE_WAIVER", str(waiver.key), why, (waiver.where,), remedies)


def run_out(waiver: Waiver, as_of: date) -> Iterator[Finding]:
    """Say that a waiver has run out, or soon will."""
    if waiver.is_expired(as_of):
        yield _dated(waiver, "EXPIRED_WAIVER", "expired_waiver", as_of)
    elif waiver.is_expiring(as_of):
        yield _dated(waiver, "WAIVER_EXPIRING", "waiver_expiring", as_of)


def _dated(waiver: Waiver, code: str, template: str, as_of: date) -> Finding:
    why = message(template, key=waiver.key, until=str(waiver.until), as_of=str(as_of), reason=waiver.reason)
    remedies = (message("remedy.provide"), message("remedy.renew"))
    return Finding(code, str(waiver.key), why, (waiver.where,), remedies)


def expected_present(evidence: Evidence) -> Iterator[Finding]:
    """Each expected_present entry in scope was asked for and found; a miss has its own finding."""
    if not evidence.is_complete or not evidence.rows:
        return
    asked = evidence.asked_keys | {evidence.decide(key).renamed_to for key in evidence.asked_keys}
    others = KeyNames(evidence.asked_keys - {entry.key for entry in evidence.manifest.expected_present})
    for entry in evidence.in_scope(evidence.manifest.expected_present):
        meant: tuple[KernelKey, ...] = ()
        values = {"key": entry.key, "reason": entry.reason}
        is_absent = evidence.decide(entry.key).chosen is None
        if is_absent and entry.key in evidence.options.without:
            continue  # it is there, and left out to compare
        if entry.key not in asked:
            meant = tuple(map(parse_key, others.like(entry.key)))
            why = message("expected_not_asked", near=meant, **values)
        elif is_absent and entry.key in evidence.options.allow_unresolved:
            # The miss may be allowed; what the manifest promises may not, and would go unsaid with it.
            why = message("expected_not_asked.allowed", **values)
        elif is_absent and evidence.excuse(entry.key) is not None:
            why = message("expected_not_asked.waived", **values)
        else:
            continue
        correct = (message("remedy.correct_expected", keys=meant),) if meant else ()
        lever = message("remedy.or_correct_lever" if meant else "remedy.correct_lever")
        remedies = (*correct, lever, message("remedy.or_remove", entry=entry.dotted))
        yield Finding("EXPECTED_NOT_ASKED", str(entry.key), why, (entry.where,), remedies)


def plain_scopes(manifest: Manifest) -> Iterator[Finding]:
    """Note architectures in scopes that no device is called by; beside the device's own name they are meant."""
    places: dict[str, list[str]] = {}
    for entry in (*manifest.waivers, *manifest.expected_present):
        for name in entry.archs:
            called = CPU if name == CPU else str(canonical_arch(parse_arch(name).capability))
            if name != called and called not in entry.archs:
                places.setdefault(name, []).append(entry.where)
    for name, where in places.items():
        device = canonical_arch(parse_arch(name).capability)
        capability = f"{device.capability[0]}.{device.capability[1]}"
        why = message("plain_arch.scope", capability=capability, device=str(device), arch=name)
        remedies = (message("remedy.device_arch", device=str(device)),)
        yield Finding("PLAIN_ARCH", name, why, tuple(dict.fromkeys(where)), remedies)

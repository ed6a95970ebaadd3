"""Rules about what the manifest declares."""

from collections.abc import Iterator
from datetime import date

from kernel_muster.audit.evidence import Evidence
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.waivers import Waiver
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU, canonical_arch, parse_arch
from kernel_muster.registry.keys import KeyNames
from kernel_muster.registry.suggestions import named
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
    chain = f" (a chain that begins with {listed(skipped)} resolved before it came to it)" if skipped else ""
    meant = evidence.unwaived_misses.like(waiver.key)
    correct = (f"correct the key: {' or '.join(meant)} is asked for, and absent",) if meant else ()
    return Finding(
        "UNUSED_WAIVER",
        str(waiver.key),
        f"nothing asked for it{chain}{named(meant)}",
        (waiver.where,),
        (
            *correct,
            f"{'or ' * bool(meant)}remove {waiver.dotted}",
            "or scope it to where it is asked for: archs, quants, levers",
        ),
    )


def _stale(evidence: Evidence, waiver: Waiver) -> Finding:
    chosen = evidence.decide(waiver.key).chosen
    assert chosen is not None  # noqa: S101  (the caller has just looked)
    scope = f" (scope: {waiver.scope})" if waiver.scope else ""
    return Finding(
        "STALE_WAIVER",
        str(waiver.key),
        f"{chosen.provider} provides it on {evidence.target}{scope}",
        (waiver.where,),
        (f"remove {waiver.dotted}", 'or scope it to the architectures that lack the kernel: archs = ["..."]'),
    )


def run_out(waiver: Waiver, as_of: date) -> Iterator[Finding]:
    """Say that a waiver has run out, or soon will."""
    if waiver.is_expired(as_of):
        yield _dated(waiver, "EXPIRED_WAIVER", f"it ended on {waiver.until}; as of {as_of}")
    elif waiver.is_expiring(as_of):
        yield _dated(waiver, "WAIVER_EXPIRING", f"it ends on {waiver.until}; as of {as_of}")


def _dated(waiver: Waiver, code: str, why: str) -> Finding:
    remedies = ("provide the kernel, and remove the waiver", "or renew its date, with a reason that is still true")
    return Finding(code, str(waiver.key), f"{why}; reason given: {waiver.reason}", (waiver.where,), remedies)


def expected_present(evidence: Evidence) -> Iterator[Finding]:
    """Each expected_present entry in scope was asked for and found; a miss has its own finding."""
    if not evidence.is_complete or not evidence.rows:
        return
    asked = evidence.asked_keys | {evidence.decide(key).renamed_to for key in evidence.asked_keys}
    others = KeyNames(evidence.asked_keys - {entry.key for entry in evidence.manifest.expected_present})
    for entry in evidence.in_scope(evidence.manifest.expected_present):
        meant: list[str] = []
        is_absent = evidence.decide(entry.key).chosen is None
        if is_absent and entry.key in evidence.options.without:
            continue  # it is there, and left out to compare
        if entry.key not in asked:
            meant = others.like(entry.key)
            why = f"nothing asked for it, but the manifest expects it: {entry.reason}{named(meant)}"
        elif is_absent and entry.key in evidence.options.allow_unresolved:
            # The miss may be allowed; what the manifest promises may not, and would go unsaid with it.
            why = f"it is absent, which was allowed, but the manifest expects it: {entry.reason}"
        elif is_absent and evidence.excuse(entry.key) is not None:
            why = f"it is absent and waived, but the manifest expects it: {entry.reason}"
        else:
            continue
        correct = (f"correct the key: {' or '.join(meant)} is asked for",) if meant else ()
        lever = f"{'or ' * bool(meant)}correct the configuration or lever that keeps the model from asking"
        remedies = (*correct, lever, f"or remove {entry.dotted}")
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
        why = f"devices of compute capability {device.capability[0]}.{device.capability[1]} are called {device}"
        why += f": what is scoped to {name} does not hold on them"
        yield Finding("PLAIN_ARCH", name, why, tuple(dict.fromkeys(where)), (f"name the architecture {device}",))

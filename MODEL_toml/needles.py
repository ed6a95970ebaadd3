"""Which manifests a reference means, by their ``match_names``: texts that tell models of one type apart."""

from collections.abc import Iterable, Mapping

from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.wording import plain, shown
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.messages.message import message


def matched_needles(manifests: Iterable[Manifest], reference: str) -> dict[str, list[str]]:
    """Return the needles of each manifest that occur in the reference, less those within a longer matched one."""
    text = reference.casefold()
    matched = {
        manifest.name: [needle.casefold() for needle in manifest.match_names if needle.casefold() in text]
        for manifest in manifests
    }
    every = {needle for needles in matched.values() for needle in needles}
    beaten = {needle for needle in every for other in every if needle != other and needle in other}
    return {name: [needle for needle in needles if needle not in beaten] for name, needles in matched.items()}


def needle_text(matched: Mapping[str, list[str]]) -> str:
    """Write needles with the manifests that have them."""
    found = (f"{' '.join(map(shown, needles))} of {name}" for name, needles in matched.items() if needles)
    return ", ".join(found) or "none"


def deciding_needles(found: Iterable[Manifest]) -> dict[str, list[str]]:
    """Return the needles of each candidate that would decide for it alone: those that no other candidate has."""
    candidates = list(found)
    holders: dict[str, set[str]] = {}
    for manifest in candidates:
        for needle in manifest.match_names:
            holders.setdefault(needle.casefold(), set()).add(str(manifest.path))
    return {
        manifest.name: [needle for needle in manifest.match_names if len(holders[needle.casefold()]) == 1]
        for manifest in candidates
    }


def other_model(manifest: Manifest, known: Iterable[Manifest], *references: str) -> Finding | None:
    """Report references that hold another model's needle; None where each needle is the model's own, or there is none.

    A reference that holds needles of both is reported too: nobody knows then which model was meant.
    """
    for reference in references:
        matched = matched_needles(known, reference)
        others = {name: needles for name, needles in matched.items() if needles and name != manifest.name}
        if others:
            return _reported(manifest, reference, others)
    return None


def _reported(manifest: Manifest, reference: str, others: Mapping[str, list[str]]) -> Finding:
    values = {"reference": plain(reference), "needles": needle_text(others), "model": manifest.name}
    why, names = message("reference_names_other", **values), sorted(others)
    remedies = (
        message("remedy.name_meant", model=manifest.name, others=names),
        message("remedy.clean_reference", others=names),
    )
    return Finding("REFERENCE_NAMES_OTHER", manifest.name, why, (manifest.where("model", "name"),), remedies)

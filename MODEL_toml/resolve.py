"""Which manifest serves a model: by name, or by what its ``config.json`` says. Never by order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.contradictions import contradictions
from kernel_muster.MODEL_toml.hf_config import CONFIG_NAME, ConfigFacts, config_facts, read_config
from kernel_muster.MODEL_toml.loader import claimed_names, load_manifest
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.wording import shown
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import near
from kernel_muster.registry.levers import Lever
from kernel_muster.registry.values import frozen

MANIFEST_NAME = "MODEL.toml"
_LONGEST_NAME = 300
_MOST_SHOWN = 8


@frozen
class Resolution:
    """Either a manifest or the finding that says why there is none, and the steps that led there.

    The finding of a model whose manifest is broken is one of the catalogue's own findings.
    """

    manifest: Manifest | None
    finding: Finding | None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Catalogue:
    """All manifests of some folders, by name; ``findings`` says what is wrong with any of them."""

    manifests: tuple[Manifest, ...] = ()
    findings: tuple[Finding, ...] = ()
    broken: Mapping[str, Finding] = field(default_factory=dict)

    @classmethod
    def from_folders(cls, folders: Iterable[str | Path], *, levers: Iterable[Lever] | None = None) -> "Catalogue":
        """Load ``<name>/MODEL.toml`` of every folder (a folder that is a model's own will do)."""
        files: dict[Path, Path] = {}
        findings: list[Finding] = []
        for folder in folders:
            found = _manifest_files(Path(folder))
            if not found:
                findings.append(_empty_folder(Path(folder)))
            for file in found:
                files.setdefault(_real(file), file)
        return cls.from_files(files.values(), levers=levers, findings=findings)

    @classmethod
    def from_files(
        cls, files: Iterable[str | Path], *, levers: Iterable[Lever] | None = None, findings: Iterable[Finding] = ()
    ) -> "Catalogue":
        """Load some manifests; everything wrong with any of them is in ``findings``."""
        declared = None if levers is None else tuple(levers)
        manifests: list[Manifest] = []
        wrong = list(findings)
        broken: dict[str, Finding] = {}
        for file in sorted(map(Path, files)):
            manifest, problems = load_manifest(file, levers=declared)
            wrong.extend(problems)
            if manifest is not None:
                manifests.append(manifest)
            else:
                broken.update(dict.fromkeys(claimed_names(file), problems[0]))
        manifests.sort(key=lambda manifest: (manifest.name, str(manifest.path)))
        return cls(tuple(manifests), (*wrong, *_duplicates(manifests)), broken)

    def resolve(self, reference: str | Path) -> Resolution:
        """Find the manifest of a name or Hugging Face id, or of a folder that holds a ``config.json``."""
        text = str(reference)
        named = self._named(text)
        if named is not None:
            return named
        if has_config(text):
            return self.resolve_config(text, text)
        steps = (f"no manifest has the name or hf_id {shown(text)}",)
        why = f"no manifest is named {shown(text)}{_as_path(text)}"
        return Resolution(None, _unknown(shown(text), why, self._near(text)), steps)

    def resolve_config(self, config: str | Path | Mapping[str, Any], reference: str | Path | None = None) -> Resolution:
        """Find the manifest of a ``config.json`` (path, folder or content) and of what the user called the model.

        UsageError if the file cannot be read.
        """
        content = config if isinstance(config, Mapping) else read_config(Path(config))
        text = None if reference is None else str(reference)
        named = None if text is None else self._named(text)
        if named is not None:
            return _agreed(_compared(named, content), content)
        try:
            facts = config_facts(content)
        except ValueError as error:
            why = f"the config.json is malformed: {error}"
            return Resolution(None, _unknown("config.json", why, ()), (why,))
        return _agreed(self._by_type(facts, text), content)

    def _named(self, text: str) -> Resolution | None:
        found = [manifest for manifest in self.manifests if text in (manifest.name, manifest.hf_id)]
        if found:
            steps = (f"{shown(text)} is the exact name or hf_id of {_names(found)}",)
            return self._settled(found, shown(text), text, steps)
        if text in self.broken:
            return Resolution(None, self.broken[text], (f"the manifest of {shown(text)} is broken",))
        return None

    def _by_type(self, facts: ConfigFacts, reference: str | None) -> Resolution:
        steps = facts.steps
        subject = f"({facts.label}, {facts.hidden_size})"
        for tier, size in (("exact", facts.hidden_size), ("wildcard", None)):
            if tier == "exact" and size is None:
                continue
            found = [manifest for manifest in self.manifests if _claims(manifest, facts.model_types, size)]
            steps = (*steps, f"{tier} rows: {_names(found) if found else 'none'}")
            if len(found) > 1:
                return self._tie_broken(found, subject, reference, steps)
            if found:
                return self._settled(found, subject, reference, steps)
        why = f"no manifest claims model_type {facts.label}, hidden_size {facts.hidden_size}"
        if sizes := self._sizes(facts):
            return Resolution(None, _unknown(subject, f"{why}; of this type there is {sizes}", ()), steps)
        claimed = {row.model_type for manifest in self.manifests for row in manifest.model_types}
        hints = sorted({name for one in facts.model_types for name in near(one, claimed)})
        return Resolution(None, _unknown(subject, why, hints), steps)

    def _sizes(self, facts: ConfigFacts) -> str:
        """Say which sizes there are of the type of a config, and whose they are."""
        known: dict[int, list[str]] = {}
        for manifest in self.manifests:
            for row in manifest.model_types:
                if row.model_type in facts.model_types and row.hidden_size is not None:
                    known.setdefault(row.hidden_size, []).append(manifest.name)
        return ", ".join(
            f"hidden_size {size} ({', '.join(sorted(set(names)))})" for size, names in sorted(known.items())
        )

    def _tie_broken(
        self, found: list[Manifest], subject: str, reference: str | None, steps: tuple[str, ...]
    ) -> Resolution:
        matched = _matched_needles(found, (reference or "").casefold())
        best = {name: needles for name, needles in matched.items() if needles}
        steps = (
            *steps,
            f"match_names found in {shown(reference)}: {_needle_text(best)}" if reference else "no reference",
        )
        winners = [manifest for manifest in found if best.get(manifest.name)]
        return self._settled(winners or found, subject, reference, steps)

    def _settled(
        self, found: list[Manifest], subject: str, reference: str | None, steps: tuple[str, ...]
    ) -> Resolution:
        names = {manifest.name for manifest in found}
        for finding in self.findings:
            if finding.code == "DUPLICATE_MODEL" and finding.subject in names:
                return Resolution(None, finding, steps)
        if len(found) > 1:
            return _tie(found, subject, reference, steps)
        manifest = found[0]
        return Resolution(manifest, None, (*steps, f"resolved as {manifest.name} ({manifest.path})"))

    def _near(self, text: str) -> list[str]:
        if len(text) > _LONGEST_NAME:
            return []
        known = {name.casefold(): name for one in self.manifests for name in (one.hf_id, one.name) if name}
        return [known[name] for name in near(text.casefold(), known)]


def _as_path(text: str) -> str:
    """Say what a name is that looks like a path; a Hugging Face id has a slash too, but in its middle."""
    try:
        path = Path(text)
        if path.is_dir():
            return ", and the folder of that name holds no config.json"
        if path.exists():
            return ", and the file of that name is no folder of a model; a manifest is given with --manifest"
    except (OSError, ValueError):  # too long, or a NUL
        return ""
    return ", and there is no such file or folder" if text.startswith((".", "/", "~")) or text.endswith("/") else ""


def misfit(manifest: Manifest, config: str | Path) -> Finding | None:
    """Say why a config.json (or the one in a folder) is not of a manifest's model; UsageError if it cannot be read."""
    content = read_config(Path(config))
    return _agreed(_compared(Resolution(manifest, None), content), content).finding


def _compared(named: Resolution, config: Mapping[str, Any]) -> Resolution:
    """Refuse a model resolved by name whose config.json says another type or size than its manifest."""
    manifest = named.manifest
    if manifest is None:
        return named
    try:
        facts = config_facts(config)
    except ValueError as error:
        why = f"the config.json is malformed: {error}"
        return Resolution(None, _unknown("config.json", why, ()), (*named.steps, why))
    serves: list[tuple[str | None, int | None]] = [(row.model_type, row.hidden_size) for row in manifest.model_types]
    # A drafter's config.json has the type of the plain transformer whose layers it is made of.
    own_type = None if manifest.dflash else manifest.model.model_type
    serves = serves or [(own_type, manifest.model.hidden_size)]
    if any(_fits(facts, kind, size) for kind, size in serves):
        return named
    said = f"model_type {facts.label}, hidden_size {facts.hidden_size or 'not given'}"
    have = " or ".join(f"model_type {kind or 'any'}, hidden_size {size or 'any'}" for kind, size in serves)
    why = f"{manifest.name} was named, but the config.json says {said}; {manifest.name} is {have}"
    where = manifest.where("model_types") if manifest.model_types else manifest.where("model", "name")
    remedies = (f"name the model of that config.json, or give the config.json of {manifest.name}",)
    return Resolution(None, Finding("UNKNOWN_MODEL", manifest.name, why, (where,), remedies), (*named.steps, why))


def _agreed(resolution: Resolution, config: Mapping[str, Any]) -> Resolution:
    """Refuse a manifest whose dimensions are not those of the config.json that it was found for."""
    manifest = resolution.manifest
    found = () if manifest is None else contradictions(manifest.model, config)
    if manifest is None or not found:
        return resolution
    what = "; ".join(found[:_MOST_SHOWN]) + (f"; and {len(found) - _MOST_SHOWN} more" * (len(found) > _MOST_SHOWN))
    why = f"the config.json has type and size of {manifest.name}, and contradicts its manifest: {what}"
    remedies = (
        "give the model of that config.json a manifest of its own: --manifest FILE",
        "or correct one of the two",
    )
    finding = Finding("UNKNOWN_MODEL", manifest.name, why, (manifest.where("model"),), remedies)
    return Resolution(None, finding, (*resolution.steps, f"but the config.json contradicts it: {what}"))


def _fits(facts: ConfigFacts, model_type: str | None, hidden_size: int | None) -> bool:
    """Whether a config contradicts neither a type nor a size; what one of them leaves out is no contradiction."""
    same_type = model_type is None or model_type in facts.model_types
    return same_type and (None in (hidden_size, facts.hidden_size) or hidden_size == facts.hidden_size)


def _claims(manifest: Manifest, model_types: tuple[str, ...], size: int | None) -> bool:
    return any(row.model_type in model_types and row.hidden_size == size for row in manifest.model_types)


def _matched_needles(found: list[Manifest], reference: str) -> dict[str, list[str]]:
    """The needles of each manifest that stand in the reference, less those that lie within a longer matched one."""
    matched = {
        manifest.name: [needle.casefold() for needle in manifest.match_names if needle.casefold() in reference]
        for manifest in found
    }
    every = {needle for needles in matched.values() for needle in needles}
    beaten = {needle for needle in every for other in every if needle != other and needle in other}
    return {name: [needle for needle in needles if needle not in beaten] for name, needles in matched.items()}


def _needle_text(best: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{' '.join(map(shown, needles))} of {name}" for name, needles in best.items()) or "none"


def _tie(found: list[Manifest], subject: str, reference: str | None, steps: tuple[str, ...]) -> Resolution:
    where = tuple(manifest.where("model", "name") for manifest in found)
    tell = "; ".join(
        f"{manifest.name} by {' or '.join(map(shown, manifest.match_names))}"
        for manifest in found
        if manifest.match_names
    )
    given = "no reference was given" if reference is None else f"the reference {shown(reference)} does not decide"
    why = f"{len(found)} manifests serve {subject} equally well: {_names(found)}; {given}"
    remedies = [f"name one of them: {_names(found)}"]
    if tell:
        remedies.append(f"or give a reference (--ref) that holds what tells them apart: {tell}")
    return Resolution(None, Finding("AMBIGUOUS_MODEL", subject, why, where, tuple(remedies)), steps)


def _unknown(subject: str, why: str, near_names: Iterable[str]) -> Finding:
    names = list(near_names)
    hint = f"; did you mean {' or '.join(names)}?" if names else ""
    remedies = (
        "muster models lists all of them",
        "or write a manifest for it, and give that: --manifest FILE, or boot(manifest=FILE)",
    )
    return Finding("UNKNOWN_MODEL", subject, why + hint, (), remedies)


def _names(manifests: Iterable[Manifest]) -> str:
    return ", ".join(sorted(manifest.name for manifest in manifests))


def _duplicates(manifests: list[Manifest]) -> list[Finding]:
    groups: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        groups.setdefault(manifest.name.casefold(), []).append(manifest)
    found = []
    for group in groups.values():
        for name in sorted({manifest.name for manifest in group}) if len(group) > 1 else ():
            where = tuple(manifest.where("model", "name") for manifest in group)
            why = f"{len(group)} manifests describe a model named {name}"
            found.append(Finding("DUPLICATE_MODEL", name, why, where, ("rename or remove all but one of them",)))
    return found


def _manifest_files(folder: Path) -> list[Path]:
    try:
        own = folder / MANIFEST_NAME
        return [own] if own.is_file() else sorted(folder.glob(f"*/{MANIFEST_NAME}"))
    except (OSError, ValueError):
        return []


def _empty_folder(folder: Path) -> Finding:
    try:
        what = "holds no <name>/MODEL.toml" if folder.is_dir() else "is no folder"
    except (OSError, ValueError):
        what = "cannot be read"
    name = shown(str(folder)).strip("'")
    return Finding("BAD_MANIFEST", name, f"{name} {what}", (name,), ("name a folder of <name>/MODEL.toml files",))


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()


def has_config(text: str) -> bool:
    """Whether a reference is a folder with a config.json, or such a file."""
    if not text:  # as a path it would be the current folder, which nobody named
        return False
    try:
        path = Path(text)
        return (path / CONFIG_NAME).is_file() or (path.suffix == ".json" and path.is_file())
    except (OSError, ValueError):
        return False

"""Which manifest serves a model: by name, or by its ``config.json``. Never by order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.hf.check import contradiction_finding, doubts, type_misfit
from kernel_muster.MODEL_toml.hf.config import CONFIG_NAME, ConfigFacts, HfConfig, config_at, config_facts, config_of
from kernel_muster.MODEL_toml.loader import claimed_names, load_manifest
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.needles import deciding_needles, matched_needles, needle_text, other_model
from kernel_muster.MODEL_toml.wording import shown
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import near
from kernel_muster.registry.levers import Lever
from kernel_muster.registry.messages.message import message, quoted
from kernel_muster.registry.values import frozen

MANIFEST_NAME = "MODEL.toml"
_LONGEST_NAME = 300


@frozen
class Resolution:
    """Either a manifest or the finding that gives the reason for none, and the steps that led there.

    The finding of a model whose manifest is broken is one of the catalogue's own findings. ``doubts`` are findings
    beside a manifest: of its config.json, and of the reference.
    """

    manifest: Manifest | None
    finding: Finding | None
    steps: tuple[str, ...] = ()
    doubts: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings of the resolution."""
        return (*(() if self.finding is None else (self.finding,)), *self.doubts)


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

    def resolve(self, reference: str | Path, cwd: Path | None = None) -> Resolution:
        """Find the manifest of a name or Hugging Face id, or of a folder that holds a ``config.json``.

        ``cwd`` is where a relative folder starts; the working directory by default.
        """
        text = str(reference)
        named = self._named(text)
        if named is not None:
            return named
        if has_config(text, cwd):
            return self.resolve_config(config_at(cwd or Path(), text), text)
        steps = (f"no manifest has the name or hf_id {shown(text)}",)
        why = message("unknown_model.name", name=shown(text), path=_as_path(text, cwd or Path()))
        return Resolution(None, _unknown(shown(text), why, self._near(text)), steps)

    def resolve_config(
        self, config: str | Path | Mapping[str, Any] | HfConfig, reference: str | Path | None = None
    ) -> Resolution:
        """Find the manifest of a ``config.json`` (path, folder or content) and of the user's name of the model.

        UsageError if the file cannot be read.
        """
        hf = config_of(config)
        text = None if reference is None else str(reference)
        named = None if text is None else self._named(text)
        if named is not None:
            return self._judged(_typed(named, hf), hf, str(hf.file or ""))
        try:
            facts = config_facts(hf)
        except ValueError as error:
            return _malformed(error, ())
        return self._judged(self._by_type(facts, text), hf, text or "", str(hf.file or ""))

    def _judged(self, found: Resolution, config: HfConfig, *references: str) -> Resolution:
        """Judge a resolved manifest by the config, and the user's references by the other manifests."""
        judged = fitted(found, config, self.manifests)
        if judged.manifest is None:
            return judged
        other = other_model(judged.manifest, self.manifests, *references)
        return replace(judged, doubts=(*judged.doubts, *(() if other is None else (other,))))

    def doubts_of(self, manifest: Manifest, folder: str | Path, cwd: Path | None = None) -> tuple[Finding, ...]:
        """Report what the config.json of a folder leaves in doubt about a manifest; UsageError if it is unreadable."""
        other = other_model(manifest, self.manifests, str(folder))
        return (*doubts(manifest, config_at(cwd or Path(), folder)), *(() if other is None else (other,)))

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
            found = self._claimants(facts, size)
            steps = (*steps, f"{tier} rows: {_names(found) if found else 'none'}")
            if called := self._called(facts, size, reference, found):
                steps = (*steps, f"called by the reference, with rows of the type as it stands: {_names(called)}")
                found += called
            if len(found) > 1:
                return self._tie_broken(found, subject, reference, steps)
            if found:
                return self._settled(found, subject, reference, steps)
        why = f"no manifest claims model_type {facts.label}, hidden_size {facts.hidden_size}"
        meant = [name for name, needles in matched_needles(self.manifests, reference or "").items() if needles]
        if sizes := self._sizes(facts):
            return Resolution(None, _unknown(subject, f"{why}; of this type there is {sizes}", (), meant), steps)
        claimed = {row.model_type for manifest in self.manifests for row in manifest.model_types}
        hints = sorted({name for one in facts.model_types for name in near(one, claimed)})
        return Resolution(None, _unknown(subject, why, hints, meant), steps)

    def _claimants(self, facts: ConfigFacts, size: int | None) -> list[Manifest]:
        """Return the manifests with a row of the likeliest type that any has; ``foo_text`` comes before ``foo``."""
        for rank in facts.ranks:
            if found := [manifest for manifest in self.manifests if _claims(manifest, rank, size)]:
                return found
        return []

    def _called(
        self, facts: ConfigFacts, size: int | None, reference: str | None, found: list[Manifest]
    ) -> list[Manifest]:
        """Return further manifests that the reference calls by a needle and that have the type as the file states it.

        Interleaved mrope makes another type of a stated one, for which such a manifest need have no row.
        """
        matched = matched_needles(self.manifests, reference or "")
        others = (manifest for manifest in self.manifests if manifest not in found and matched[manifest.name])
        return [manifest for manifest in others if _claims(manifest, facts.stated, size)]

    def _sizes(self, facts: ConfigFacts) -> str:
        """Name the sizes that manifests claim of the type of a config."""
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
        best = {name: needles for name, needles in matched_needles(found, reference or "").items() if needles}
        steps = (
            *steps,
            f"match_names found in {shown(reference)}: {needle_text(best)}" if reference else "no reference",
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


def _as_path(text: str, cwd: Path) -> str:
    """Say what a name is that looks like a path; a Hugging Face id has a slash too, but in its middle."""
    try:
        path = cwd / text
        if path.is_dir():
            return message("unknown_model.folder")
        if path.exists():
            return message("unknown_model.file")
    except (OSError, ValueError):  # too long, or a NUL
        return ""
    return ", and there is no such file or folder" if text.startswith((".", "/", "~")) or text.endswith("/") else ""


def fit(manifest: Manifest, config: str | Path | HfConfig) -> Resolution:
    """Judge a manifest by a config.json, or by the one in a folder; UsageError if it cannot be read."""
    hf = config_of(config)
    return fitted(_typed(Resolution(manifest, None), hf), hf)


def fitted(found: Resolution, config: HfConfig, known: Iterable[Manifest] = ()) -> Resolution:
    """Refuse a manifest that a config contradicts, and add the doubts about the rest; ``known`` may be suggested."""
    manifest = found.manifest
    if manifest is None:
        return found
    finding = contradiction_finding(manifest, config, known)
    if finding is None:
        return replace(found, doubts=(*found.doubts, *doubts(manifest, config)))
    steps = (*found.steps, f"but the config.json contradicts it: {finding.why.partition(': ')[2]}")
    return Resolution(None, finding, steps)


def _typed(named: Resolution, config: HfConfig) -> Resolution:
    """Refuse a model resolved by name whose config.json has another type or size than its manifest."""
    manifest = named.manifest
    if manifest is None:
        return named
    try:
        misfit = type_misfit(manifest, config_facts(config))
    except ValueError as error:
        return _malformed(error, named.steps)
    if misfit is None:
        return named
    why = message("unknown_model.misfit", model=manifest.name, misfit=misfit)
    where = manifest.where("model_types") if manifest.model_types else manifest.where("model", "name")
    remedies = (message("remedy.fitting_config", model=manifest.name),)
    return Resolution(None, Finding("UNKNOWN_MODEL", manifest.name, why, (where,), remedies), (*named.steps, why))


def _malformed(error: ValueError, steps: tuple[str, ...]) -> Resolution:
    why = message("unknown_model.malformed", error=str(error))
    return Resolution(None, _unknown("config.json", why, ()), (*steps, why))


def _claims(manifest: Manifest, model_types: tuple[str, ...], size: int | None) -> bool:
    return any(row.model_type in model_types and row.hidden_size == size for row in manifest.model_types)


def _tie(found: list[Manifest], subject: str, reference: str | None, steps: tuple[str, ...]) -> Resolution:
    where = tuple(manifest.where("model", "name") for manifest in found)
    deciding = deciding_needles(found)
    tell = "; ".join(f"{name} by {' or '.join(map(shown, needles))}" for name, needles in deciding.items() if needles)
    values = {"count": len(found), "subject": subject, "models": _names(found)}
    if reference is None:
        why = message("ambiguous_model", **values)
    else:
        why = message("ambiguous_model.reference", reference=shown(reference), **values)
    remedies = [message("remedy.name_one", models=_names(found))]
    if tell:
        remedies.append(message("remedy.reference", needles=tell))
    if alike := sorted(name for name, needles in deciding.items() if not needles):
        remedies.append(message("remedy.match_names", models=" and of ".join(alike)))
    return Resolution(None, Finding("AMBIGUOUS_MODEL", subject, why, where, tuple(remedies)), steps)


def _unknown(subject: str, why: str, near_names: Iterable[str], called: Iterable[str] = ()) -> Finding:
    """Report a model without a manifest; ``called`` are models whose needle the reference holds."""
    names = list(near_names)
    remedies = (
        *(message("remedy.name_model", model=name) for name in called),
        message("remedy.list_models"),
        message("remedy.write_manifest"),
    )
    found = message("unknown_model", why=quoted(why), near=names)
    return Finding("UNKNOWN_MODEL", subject, found, (), remedies, lacks="" if names else "muster_manifests")


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
            why = message("duplicate_model", count=len(group), model=name)
            found.append(Finding("DUPLICATE_MODEL", name, why, where, (message("remedy.rename_models"),)))
    return found


def _manifest_files(folder: Path) -> list[Path]:
    try:
        own = folder / MANIFEST_NAME
        return [own] if own.is_file() else sorted(folder.glob(f"*/{MANIFEST_NAME}"))
    except (OSError, ValueError):
        return []


def _empty_folder(folder: Path) -> Finding:
    try:
        template = "bad_manifest.empty_folder" if folder.is_dir() else "bad_manifest.no_folder"
    except (OSError, ValueError):
        template = "bad_manifest.unreadable"
    name = shown(str(folder)).strip("'")
    return Finding("BAD_MANIFEST", name, message(template, folder=name), (name,), (message("remedy.name_folder"),))


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()


def has_config(text: str, cwd: Path | None = None) -> bool:
    """Whether a reference is a folder with a config.json, or such a file; a relative one starts at ``cwd``."""
    if not text:  # as a path it would be the current folder, which nobody named
        return False
    try:
        path = (cwd or Path()) / text
        return (path / CONFIG_NAME).is_file() or (path.suffix == ".json" and path.is_file())
    except (OSError, ValueError):
        return False

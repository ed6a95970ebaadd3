"""Sites for ``muster explain``: the lookups of a line of model code, their kernels, and the levers that change them."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kernel_muster.audit.render.plain import plural
from kernel_muster.audit.render.sections import Section, lever_text
from kernel_muster.audit.reporting import lever_row
from kernel_muster.cli.process.exits import complain, describe
from kernel_muster.cli.process.output import only_results_on_stdout
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.contract.builders import choose_builder
from kernel_muster.registry.errors import MusterError, UsageError
from kernel_muster.registry.levers import Levers, Setting
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.records import LookupEntry
from kernel_muster.registry.selection.select import Selector
from kernel_muster.registry.values import frozen

_SITE = re.compile(r"[^:]+\.py:\d+\Z")


def is_site(text: str) -> bool:
    """Whether a text is a file and a line, in the form of a dispatch site: ``layers/attention.py:29``."""
    return _SITE.match(text) is not None


@frozen
class Question:
    """One lookup at a site, and the models that make it."""

    entry: LookupEntry
    models: tuple[str, ...]

    def is_served(self, selector: Selector) -> bool:
        """Whether a kernel serves it."""
        return any(selector.decide(key).chosen is not None for key in self.entry.members)


def questions_at(text: str, selector: Selector) -> tuple[Question, ...]:
    """Return the lookups of plan builds of all models at a site, for a target and levers. UsageError if there are none.

    ``text`` is the end of a site's path and its line. A model that these levers or its plugins exclude makes no
    lookup. If a builder fails, its earlier lookups count, and stderr reports the failure.
    """
    found: dict[tuple[object, ...], tuple[LookupEntry, dict[str, None]]] = {}
    lines: set[str] = set()
    for model, entry in asked_by_models(selector):
        place = entry.site.partition(" ")[0]
        lines.add(place)
        if f"/{place}".endswith(f"/{text.lstrip('./')}"):
            question = (entry.site, entry.members, entry.kind, entry.when, entry.reached_by)
            found.setdefault(question, (entry, {}))[1][model] = None
    if not found:
        raise UsageError(f"no model asks for a kernel at {text}{_near(text, lines)}")
    return tuple(Question(entry, tuple(models)) for _, (entry, models) in sorted(found.items(), key=str))


def asked_by_models(selector: Selector) -> Iterator[tuple[str, LookupEntry]]:
    """Yield the lookups of plan builds of all models, each with the model.

    If a builder fails, its earlier lookups count, and stderr reports the failure.
    """
    catalog = selector.catalog
    folders = [manifest_folder(), *catalog.manifest_folders]
    for manifest in Catalogue.from_folders(folders, levers=catalog.levers).manifests:
        session = LookupSession(catalog, selector.target, selector.levers)
        try:
            builder = choose_builder(catalog.builders, manifest.model_type, manifest.name)
            with only_results_on_stdout():
                builder.build(manifest, Lookups(session), None)
        except MusterError:
            continue
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (a builder, which may be a plugin's, raises anything)
            complain(f"what {manifest.name} asks is not all here: its builder failed: {describe(error)}")
        yield from ((manifest.name, entry) for entry in session.entries("boot"))


def _near(text: str, lines: Iterable[str]) -> str:
    """List the lines of the same file with lookups."""
    file = text.rpartition(":")[0].rpartition("/")[2]
    same = sorted({one for one in lines if one.rpartition(":")[0].endswith(f"/{file}")}, key=_by_line)
    return f"; lines of that file that do: {', '.join(same)}" if same else f"; no line of {file} does"


def _by_line(place: str) -> tuple[str, int]:
    path, _, line = place.rpartition(":")
    return path, int(line)


def site_data(text: str, questions: Iterable[Question], selector: Selector) -> dict[str, Any]:
    """Return the lookups of a site as plain data for JSON."""
    return {
        "site": text,
        "target": str(selector.target),
        "questions": [
            {
                "site": one.entry.site,
                "keys": list(map(str, one.entry.members)),
                "kind": one.entry.kind,
                "when": one.entry.when,
                "reached_by": one.entry.reached_by,
                "models": list(one.models),
                "served_by": [str(decision.chosen.provider) if decision.chosen else "" for decision in map(
                    selector.decide, one.entry.members
                )],
                "levers": [setting.lever.name for setting in settings_of(map(str, one.entry.members), selector.levers)],
            }
            for one in questions
        ],
    }  # fmt: skip


def site_sections(questions: Iterable[Question], selector: Selector) -> Iterator[Section]:
    """Yield a section for each lookup at a site, with the levers that drop its keys or choose another."""
    for one in questions:
        entry = one.entry
        lines = [f"{'chain, in order' if len(entry.members) > 1 else 'key'}, {entry.kind}"]
        for key in entry.members:
            decision = selector.decide(key)
            lines.append(f"    {key}: {decision.chosen.provider if decision.chosen else decision.reason}")
        if entry.when:
            lines.append(f"asked for when {entry.when}")
        if entry.reached_by:
            lines.append(f"reached by {entry.reached_by}")
        lines.append(f"by {plural(len(one.models), 'model')}: {', '.join(one.models)}")
        keys = tuple(map(str, entry.members))
        lines += (lever_text(lever_row(setting)) for setting in settings_of(keys, selector.levers))
        lines.append(absence_text(keys))
        yield Section(entry.site, lines=tuple(lines))


def absence_text(keys: Iterable[str]) -> str:
    """Name the levers that remove any kernel, beside a key's own levers."""
    return f"MUSTER_DISABLE={','.join(keys)} -> absent, which refuses a boot that asks for it [not for serving]"


def settings_of(keys: Iterable[str], levers: Levers) -> tuple[Setting, ...]:
    """Return the levers that drop one of these keys, or choose between it and others, with their values."""
    named = tuple(keys)
    return tuple(setting for setting in levers.settings if any(setting.lever.names(key) for key in named))

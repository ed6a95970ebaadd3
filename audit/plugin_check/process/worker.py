"""The work of ``muster plugin check``, in a process where a crash or a hang ends nothing else.

Each step is announced before it runs and reported after, so that the parent knows in which step a process died; it
starts another one without that step. Nothing here prints; the parent passes on what plugins print.
"""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

from kernel_muster.audit.plugin_check.protocol.channel import Sender
from kernel_muster.audit.plugin_check.protocol.events import (
    Builds,
    Finished,
    Listed,
    ListedKernel,
    ListedPlugin,
    Loading,
    Stopped,
)
from kernel_muster.audit.plugin_check.steps.loading import load_findings, own_kernels, rows_of
from kernel_muster.audit.plugin_check.steps.reporter import Reporter, leave
from kernel_muster.audit.plugin_check.steps.step import Step
from kernel_muster.audit.plugin_check.steps.steps import step_count, steps_after_load
from kernel_muster.audit.plugin_check.steps.targets import declared_archs
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.cuda_kernel import is_device_backend
from kernel_muster.registry.contract.specs import Registered, is_host_backend
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.discovery.entry_points import scan
from kernel_muster.registry.discovery.loading import BLOCKING, RAISE_LIMIT
from kernel_muster.registry.distributions import HOST_DISTRIBUTION, same_distribution
from kernel_muster.registry.errors import MusterError, UsageError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.launch.choose import has_toolkit
from kernel_muster.registry.levers import CORE_LEVERS, read_levers
from kernel_muster.registry.messages.message import quoted
from kernel_muster.registry.plugin_code import running
from kernel_muster.registry.selection.catalog import Catalog, PluginRow
from kernel_muster.registry.selection.select import is_host_only

_LIMIT = "MUSTER_PLUGIN_TIMEOUT_S"
_STOPPED = 70


def work(
    sender: Sender,
    *,
    distribution: str,
    plugin: str | None,
    path: Iterable[str],
    skip: Iterable[str],
    failed: Iterable[str],
    seconds: float,
    cache_dir: str | None,
) -> NoReturn:
    """Check a distribution's plugins, or one of them, and end the process whatever threads they left.

    ``skip`` names the steps that earlier processes ran, ``failed`` those of them that failed.
    """
    sys.path[:] = path
    faulthandler.enable()
    try:
        _check(sender, Reporter(sender, skip, failed, seconds), distribution, plugin, seconds, cache_dir)
        leave()
    except Exception as error:  # noqa: BLE001  (the parent reports it, and knows whose fault it is)
        if not isinstance(error, UsageError):  # the parent reports that as its own
            sys.stderr.write(f"{error}\n" if isinstance(error, MusterError) else traceback.format_exc())
            sys.stderr.flush()
        sender.send(Stopped(is_usage=isinstance(error, UsageError), why=str(error)))
        os._exit(_STOPPED)


def _check(
    sender: Sender, reporter: Reporter, distribution: str, plugin: str | None, seconds: float, cache_dir: str | None
) -> None:
    found: list[Catalog] = []
    limit, remedy = _limit(seconds)

    def find() -> Catalog:
        running.listen(_teller(sender, distribution))
        found.append(discover(timeout_s=limit))
        running.listen(lambda who: None)
        return found[0]

    def load() -> Iterator[Finding]:
        yield from (_for_author(finding, remedy) for finding in load_findings(find(), distribution, plugin))

    # What the later steps need is loaded in each process; it is reported once.
    reporter.run(Step("load", distribution, "", load))
    if not found:
        find()
    rows = rows_of(found[0], distribution, plugin)
    own = own_kernels(found[0], rows)
    sender.send(
        Listed(
            plugins=tuple(map(_listed_plugin, rows)),
            kernels=tuple(map(_listed_kernel, own)),
            steps=1 + step_count(own),
        )
    )
    # One for all steps: where the cache keeps nothing, it keeps at least what it has built.
    builds = any(is_device_backend(registered.spec.backend) for registered in own) and has_toolkit()
    builder = Builder(BuildCache(Path(cache_dir) if cache_dir else None)) if builds else None
    for step in steps_after_load(found[0], rows, reporter.failed, builder, cache_dir):
        reporter.run(step)
    if builder is not None:
        sender.send(Builds(findings=builder.findings()))
    sender.send(Finished())


def _listed_plugin(row: PluginRow) -> ListedPlugin:
    return ListedPlugin(
        name=row.name,
        distribution=row.distribution,
        version=row.version,
        status=row.status,
        value=row.value,
        location=row.location,
        hooks=row.hooks,
        keys=tuple(map(str, row.keys)),
        notes=row.notes,
    )


def _listed_kernel(registered: Registered) -> ListedKernel:
    spec = registered.spec
    builds = declared_archs(spec.code_archs) if is_device_backend(spec.backend) else ()
    return ListedKernel(
        key=spec.key,
        contract=spec.contract,
        builds=tuple(map(str, builds)),
        is_for_host=is_host_backend(spec.backend),
        is_for_device=not is_host_only(spec),
    )


def _limit(seconds: float) -> tuple[float, str]:
    """Return how long a plugin may load, and how it gets longer: an audit's limit, and at most half of a step's time.

    The other half is for what follows in the step; UsageError for a lever without a sensible value.
    """
    given = {_LIMIT: os.environ[_LIMIT]} if _LIMIT in os.environ else {}
    levers, malformed = read_levers(CORE_LEVERS, [("environment", given)])
    if malformed:
        raise UsageError(f"{_LIMIT}: {malformed[0].why}")
    limit = float(levers[_LIMIT] or 10)
    if limit <= seconds * 0.5:
        return limit, RAISE_LIMIT
    return seconds * 0.5, f"raise --timeout: a plugin may load for half of it, and for {_LIMIT} ({limit:g} s) at most"


def _for_author(finding: Finding, raise_limit: str) -> Finding:
    """Return a finding for who can mend the plugin: nothing is blocked here."""
    remedies = tuple(
        raise_limit if quoted(remedy).template == RAISE_LIMIT.template else remedy
        for remedy in finding.remedies
        if quoted(remedy).template not in BLOCKING
    )
    return replace(finding, remedies=remedies)


def _teller(sender: Sender, distribution: str) -> Callable[[str], None]:
    """Return what reports to the parent which plugin loads."""
    entries = {f"plugin {entry.name}": entry for entry in scan().entries}

    def tell(who: str) -> None:
        if (entry := entries.get(who)) is None:
            sender.send(Loading())
            return
        where = f"{entry.distribution} {entry.version} ({entry.value})"
        is_own = same_distribution(entry.distribution, distribution)
        is_host = same_distribution(entry.distribution, HOST_DISTRIBUTION)
        whose: Literal["", "own", "other"] = "own" if is_own else "" if is_host else "other"
        sender.send(Loading(plugin=entry.name, where=where, whose=whose))

    return tell

"""The registry, opened for measurement on a device."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kernel_muster.cli.process.exits import complain
from kernel_muster.cli.process.output import only_results_on_stdout, say
from kernel_muster.registry.errors import BootRefused

if TYPE_CHECKING:
    from kernel_muster.registry.selection.lookups import Lookups


def open_to_measure(
    what: str, target: str | None, *, is_json: bool, levers: Mapping[str, object] | None = None,
    local_plugins: Mapping[str, object] | None = None, no_plugins: Iterable[str] | None = None,
) -> "Lookups | None":  # fmt: skip
    """Return the registry on a device. None without a device, or if a finding would refuse a boot. Either is reported.

    As JSON a refusal is the report of its boot, on stdout.
    """
    from kernel_muster.api import open_registry

    try:
        with only_results_on_stdout():
            kernels = open_registry(target, levers=levers, local_plugins=local_plugins, no_plugins=no_plugins or ())
    except BootRefused as refused:
        say_refused(what, refused, is_json=is_json)
        return None
    if kernels.target.device is not None:
        return kernels
    kind = "the host is none" if kernels.target.is_cpu else "an architecture alone is none"
    text = f"{kernels.target}: {what} needs a device, and {kind}: leave --target out, or name a GPU: --target cuda"
    complain(text) if is_json else say(text)
    return None


def say_refused(what: str, refused: BootRefused, *, is_json: bool) -> None:
    """Report the refusal, with remedies."""
    from kernel_muster.audit.render.json_report import render_json
    from kernel_muster.audit.render.sections import finding_sections
    from kernel_muster.audit.render.text import render_sections
    from kernel_muster.audit.report import Report
    from kernel_muster.cli.remedies import fitted

    if not isinstance(refused.report, Report):
        raise refused
    report = fitted(refused.report, "measure")
    if is_json:
        say(render_json(report))
        return
    codes = ", ".join(dict.fromkeys(row.code for row in report.findings if row.severity == "refuse"))
    first = f"REFUSED: {what} did not begin: {codes}"
    say(render_sections(finding_sections(report.findings), first, first))

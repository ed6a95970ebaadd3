"""Files that another distribution has put into this package, where they pass for a part of it."""

import re
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

from kernel_muster.registry.distributions import HOST_DISTRIBUTION, HOST_MODULE, same_distribution
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.wording import listed

_MANIFESTS = f"{HOST_MODULE}/MODEL_toml"
_LISTED = re.compile(rf'^"?({HOST_MODULE}/[^,\n]*?)"?,', re.MULTILINE | re.IGNORECASE)
_MOST_NAMED = 3


def intrusion(distribution: Distribution) -> Iterator[Finding]:
    """Yield a finding about the files of a distribution that lie in this package and are none of it.

    Of the host itself, those are manifests that its RECORD does not list. An editable install lists nothing.
    """
    files = sorted(_LISTED.findall(distribution.read_text("RECORD") or ""))
    name = str(distribution.metadata["Name"])
    template, remedy = "plugin_load_failed.intruder", "remedy.uninstall"
    if same_distribution(name, HOST_DISTRIBUTION):
        files = sorted(_manifests(distribution) - set(files)) if files else []
        template, remedy = "plugin_load_failed.intruded", "remedy.reinstall_host"
    if files:
        why = message(template, files=listed(files, _MOST_NAMED), host=HOST_MODULE)
        where = (str(distribution.locate_file(HOST_MODULE)),)
        yield Finding("PLUGIN_LOAD_FAILED", name, why, where, (message(remedy, distribution=name),))


def _manifests(host: Distribution) -> set[str]:
    folder = Path(str(host.locate_file(_MANIFESTS)))
    return {f"{_MANIFESTS}/{file.parent.name}/{file.name}" for file in folder.glob("*/MODEL.toml")}

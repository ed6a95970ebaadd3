"""Reports of boots that a program opened: options are called what that program calls them.

Findings name the options of the command, where most people meet them: ``--no-plugin acme``. A program has none of
those; it has ``boot(no_plugins=["acme"])``.
"""

import re
from dataclasses import replace

from kernel_muster.audit.report import FindingRow, Report

#: Parameters of boot() by the command's options, and whether they take several.
PARAMETERS = {
    "--plugin": ("plugins", True),
    "--no-plugin": ("no_plugins", True),
    "--manifests": ("manifest_folders", True),
    "--dangerously-allow-unresolved": ("dangerously_allow_unresolved", True),
    "--manifest": ("manifest", False),
    "--quant": ("quant", False),
    "--ref": ("model", False),
    "--stage": ("stage", False),
    "--target": ("target", False),
}
# Longer names first; a value is what follows and is no word of the sentence: FILE, sm_90a, the name of a plugin.
_OPTION = re.compile(
    rf"({'|'.join(sorted(PARAMETERS, key=len, reverse=True))})(?![\w-])(?: (?!names\b|that\b)([\w.-]*\w)(?=[,;)]|$| ))?"
)
_COMMAND = re.compile(r"\bmuster [a-z]")


def for_program(report: Report) -> Report:
    """Return a report whose findings name boot()'s parameters; what they are about and where stays as it is."""
    return replace(report, findings=tuple(map(_for_program, report.findings)))


def _for_program(row: FindingRow) -> FindingRow:
    return replace(row, why=_said(row.why), remedies=tuple(map(_said, row.remedies)))


def _said(text: str) -> str:
    command = _COMMAND.search(text)  # whose options stay what they are
    before, rest = (text, "") if command is None else (text[: command.start()], text[command.start() :])
    return _OPTION.sub(_parameter, before) + rest


def _parameter(option: re.Match[str]) -> str:
    name, takes_several = PARAMETERS[option[1]]
    value = option[2]
    if value is None:
        return name
    quoted = value if value.isupper() else f'"{value}"'  # FILE stands for a value
    return f"{name}=[{quoted}]" if takes_several else f"{name}={quoted}"

"""The options shared by the commands, and parsers for their values."""

import re
from collections.abc import Iterable
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from kernel_muster.registry.errors import UsageError


class Format(StrEnum):
    """Output format of a list."""

    TEXT = "text"
    JSON = "json"


class ReportFormat(StrEnum):
    """Output format of a report."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


class ProfileName(StrEnum):
    """Purpose of the audit."""

    SERVE = "serve"
    QUALIFY = "qualify"


class StageName(StrEnum):
    """Degree of proof of a kernel."""

    REGISTERED = "registered"
    COMPILED = "compiled"
    LOADED = "loaded"
    PROVEN = "proven"


class QuantName(StrEnum):
    """Quantisation of the weights."""

    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    FP8 = "fp8"
    BF16 = "bf16"


_FILE = {"exists": True, "dir_okay": False, "show_default": False}

Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Name, Hugging Face id, or a folder with config.json.", show_default=False),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="cuda, cuda:<n>, an architecture (sm_90a) or cpu. Default: the GPU. cpu is never a default.",
        show_default=False,
    ),
]
Manifest = Annotated[Path | None, typer.Option(help="Use this MODEL.toml.", **_FILE)]
Config = Annotated[
    Path | None,
    typer.Option(help="Resolve the model from this config.json.", exists=True, show_default=False),
]
Reference = Annotated[
    str | None,
    typer.Option("--ref", help="Your name for the model; decides between equal manifests.", show_default=False),
]
Manifests = Annotated[
    list[Path] | None,
    typer.Option(
        "--manifests",
        help="Resolve among the manifests of this folder only; repeatable.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
Quant = Annotated[
    QuantName | None,
    typer.Option(help="Refuse unless the model is built with this quantisation.", show_default=False),
]
Profile = Annotated[
    ProfileName, typer.Option(help="serve, or qualify for a release: warnings refuse, and most notes warn.")
]
Stage = Annotated[
    StageName | None,
    typer.Option(
        help="Stage that every kernel must reach; default: the highest possible here. A kernel below it qualifies the "
        "verdict; with --profile qualify it refuses.",
        show_default=False,
    ),
]
AsOf = Annotated[
    str | None, typer.Option(metavar="DATE", help="Judge waivers as of this day (YYYY-MM-DD, UTC).", show_default=False)
]
ExpectSetHash = Annotated[
    str | None, typer.Option(metavar="HASH", help="Refuse any other set of kernels.", show_default=False)
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--dangerously-allow-unresolved",
        metavar="KEY,...",
        help="Pass although exactly these keys are absent. Slow; every output is marked as degraded.",
        show_default=False,
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="NAME", help="Refuse unless this plugin loads; repeatable.", show_default=False),
]
NoPlugins = Annotated[
    list[str] | None,
    typer.Option("--no-plugin", metavar="NAME", help="Do not import this plugin; repeatable.", show_default=False),
]
ListFormat = Annotated[Format, typer.Option("--format", help="Output format.")]
AnyFormat = Annotated[ReportFormat, typer.Option("--format", help="Output format.")]
Output = Annotated[
    Path | None, typer.Option(help="Write to this file (whole or not at all), not to stdout.", show_default=False)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="All rows, reasons and logs; tracebacks of internal errors.")
]


def parse_date(text: str | None) -> date | None:
    """Read ``YYYY-MM-DD``. UsageError otherwise."""
    if text is None:
        return None
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise UsageError(f"--as-of: {text!r} is no date: expected YYYY-MM-DD")


def parse_set_hash(text: str | None) -> str | None:
    """Check a SHA-256 in hexadecimal. UsageError otherwise."""
    if text is None or re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return text and text.lower()
    raise UsageError(f"--expect-set-hash: {text!r} is no SHA-256: expected 64 hexadecimal digits")


def parse_counts(text: str, option: str, largest: int) -> tuple[int, ...]:
    """Read ``1,4,8``: each number once, in the given order; UsageError for any value outside 1 to ``largest``."""
    from kernel_muster.MODEL_toml.wording import shown

    parts = [part.strip() for part in text.split(",")]
    # Plain digits only: Python also accepts 1_0 and digits of other scripts, and refuses to read 5000 of them.
    if not all(re.fullmatch(r"0*[0-9]{1,9}", part) and 1 <= int(part) <= largest for part in parts):
        raise UsageError(f"{option} {shown(text)}: expected numbers from 1 to {largest}, with commas")
    return tuple(dict.fromkeys(map(int, parts)))


def check_not_empty(texts: Iterable[str] | None, option: str) -> None:
    """UsageError for an empty value of a repeatable option: it would match everything or nothing."""
    if not all(text.strip() for text in texts or ()):
        raise UsageError(f"{option}: an item is empty")


def split_commas(texts: Iterable[str] | None, option: str) -> tuple[str, ...]:
    """Split ``a,b`` of a repeatable option. UsageError for an empty item."""
    items = tuple(item.strip() for text in texts or () for item in text.split(","))
    if not all(items):
        raise UsageError(f"{option}: an item is empty")
    return items

"""The ``muster`` command, put together."""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from kernel_muster._version import __version__
from kernel_muster.cli.audit import audit
from kernel_muster.cli.bench import bench
from kernel_muster.cli.diff import diff
from kernel_muster.cli.exits import INTERRUPTED, command, complain
from kernel_muster.cli.explain import explain
from kernel_muster.cli.kernels import kernels
from kernel_muster.cli.levers import levers
from kernel_muster.cli.manifest import lint, schema
from kernel_muster.cli.matrix import matrix
from kernel_muster.cli.models import models
from kernel_muster.cli.output import discard_stdout
from kernel_muster.cli.plugin import check
from kernel_muster.cli.plugins import plugins
from kernel_muster.cli.replay import replay

_HELP = "Account for every GPU kernel that a model asks for at boot, or refuse the boot."


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernel-muster {__version__}")
        raise typer.Exit(0)


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


def _nothing() -> None:
    pass


def _app() -> typer.Typer:
    # Plain help: rich would draw boxes where ASCII was promised, and takes 50 ms to import.
    app = typer.Typer(help=_HELP, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
                      no_args_is_help=True)  # fmt: skip
    commands: tuple[Callable[..., int], ...] = (
        audit, replay, matrix, models, kernels, plugins, levers, explain, diff, bench,
    )  # fmt: skip
    for function in commands:
        app.command()(command(function))
    groups: dict[str, tuple[str, tuple[Callable[..., int], ...]]] = {
        "manifest": ("Check manifests.", (lint, schema)),
        "plugin": ("Check plugins.", (check,)),
    }
    for name, (help_text, members) in groups.items():
        group = typer.Typer(help=help_text, rich_markup_mode=None, no_args_is_help=True)
        group.callback()(_nothing)  # keeps the name of a group's only command
        for function in members:
            group.command()(command(function))
        app.add_typer(group, name=name)

    @app.callback()
    def options(version: Version = False) -> None:
        pass

    return app


def run(arguments: Sequence[str]) -> int:
    """Run the command with arguments and return its exit code."""
    try:
        _app()(args=list(arguments), prog_name="muster")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 2
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
    return 0

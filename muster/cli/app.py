"""The ``muster`` command, put together."""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any

import typer
from kernel_muster._version import __version__
from kernel_muster.cli.process import results
from kernel_muster.cli.process.exits import INTERRUPTED, USAGE, command, complain, here
from typer.core import TyperGroup

RunBody = Callable[[Callable[[], int]], int]
_HELP = "Account for every GPU kernel that a model asks for at boot, or refuse the boot."
#: In the order of the help. Each is a function and a module of the same name.
_COMMANDS = (
    "audit",
    "boot",
    "replay",
    "matrix",
    "models",
    "kernels",
    "plugins",
    "levers",
    "explain",
    "diff",
    "bench",
    "tune",
    "ab",
)
#: Groups: help, and functions in the module of the group's name.
_GROUPS = {"manifest": ("Check manifests.", ("lint", "schema")), "plugin": ("Check plugins.", ("check",))}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernel-muster {__version__}")
        raise typer.Exit(0)


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


def _nothing() -> None:
    pass


class _Commands(TyperGroup):
    """The command's group. It removes a parsing library's prefix from messages about option values."""

    def invoke(self, ctx: Any) -> Any:
        """Run the called command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


def _group(module: ModuleType, help_text: str, functions: Sequence[str], run_body: RunBody) -> typer.Typer:
    group = typer.Typer(help=help_text, rich_markup_mode=None, no_args_is_help=True)
    group.callback()(_nothing)  # keeps the name of a group's only command
    for name in functions:
        group.command()(command(getattr(module, name), run_body))
    return group


def _app(called: str = "", run_body: RunBody = here) -> typer.Typer:
    """Build the command: all of it, or only the called part, so no other command costs an import."""
    # Plain help: rich would draw boxes in place of ASCII, and takes 50 ms to import.
    app = typer.Typer(cls=_Commands, help=_HELP, add_completion=False, rich_markup_mode=None,
                      pretty_exceptions_enable=False, no_args_is_help=True)  # fmt: skip
    names = (*_COMMANDS, *_GROUPS)
    for name in (called,) if called in names else names:
        module = import_module(f"kernel_muster.cli.commands.{name}")
        if name in _GROUPS:
            app.add_typer(_group(module, *_GROUPS[name], run_body), name=name)
        else:
            app.command()(command(getattr(module, name), run_body))

    @app.callback()
    def options(version: Version = False) -> None:
        pass

    return app


def run(arguments: Sequence[str], run_body: RunBody = here) -> int:
    """Run the command with arguments and return its exit code. ``run_body`` runs everything but parsing."""
    try:
        _app(arguments[0] if arguments else "", run_body)(args=list(arguments), prog_name="muster")
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):  # typer prints no message
            complain("interrupted")
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 2
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        results.discard()
    except OSError as error:  # typer itself writes help and usage errors
        results.discard()
        complain(f"error: help and usage errors cannot be written: {error.strerror or error}")
        return USAGE
    return 0

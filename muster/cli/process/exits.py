"""Exit codes, and the one place that turns every outcome of a command into one."""

import functools
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from kernel_muster.audit.render.plain import ascii_only
from kernel_muster.cli.process import output
from kernel_muster.registry.errors import DeviceStuck, UsageError
from kernel_muster.registry.paths import current_folder

_EXIT = sys.exit
_NEXT_LINE = re.compile(r"\n(?=\S)")
#: Paths of results, as given by the user; readers and writers know their base.
_AS_WRITTEN = ("manifest", "config", "weights", "drafter_weights", "files", "output", "trace")
PASSED, REFUSED, USAGE, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 130


def here(body: Callable[[], int]) -> int:
    """Run a command's body in this process."""
    return body()


def command(function: Callable[..., int], run_body: Callable[[Callable[[], int]], int] = here) -> Callable[..., None]:
    """Turn a function that returns an exit code into one for typer. No exception leaves it as a traceback.

    ``run_body`` runs it, and turns every exception into its exit code.
    """

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        is_verbose = bool(arguments.get("verbose"))
        arguments = {name: value if name in _AS_WRITTEN else _absolute(value) for name, value in arguments.items()}
        raise typer.Exit(run_body(lambda: guarded(lambda: function(**arguments), is_verbose=is_verbose)))

    return run


def _absolute(value: Any) -> Any:
    """Resolve relative paths now: no plugin has run yet that could change the working directory."""
    if isinstance(value, list):
        return [_absolute(one) for one in value]
    return current_folder() / value if isinstance(value, Path) else value


def guarded(body: Callable[[], int], *, is_verbose: bool = False) -> int:
    """Run a command's body and return its exit code. ``sys.exit`` is restored after changes by plugins."""
    try:
        with output.beginning_here():
            return body()
    except UsageError as error:
        complain(f"error: {error}")
        return USAGE
    except DeviceStuck as error:
        complain(f"error: {error}")
        return REFUSED
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BaseException as error:  # noqa: BLE001  (SystemExit too: a plugin must not choose our exit code)
        complain(f"internal error: {describe(error)}")
        complain_traceback(error, is_verbose)
        complain("this is a bug in kernel-muster: please report it as CONTRIBUTING.md says, with --verbose")
        return INTERNAL
    finally:
        sys.exit = _EXIT


def describe(error: BaseException) -> str:
    """Return an exception on one line, with the place that raised it."""
    from kernel_muster.registry.plugin_code.watch import located

    return located(error)


def complain(text: str) -> None:
    """Write to stderr in ASCII; a closed stderr is no failure.

    Further lines are indented, so a line break in a name cannot imitate the command's own line.
    """
    try:
        sys.stderr.write(f"muster: {_NEXT_LINE.sub(chr(10) + '  ', ascii_only(text))}\n")
        sys.stderr.flush()
    except OSError:
        return


def complain_traceback(error: BaseException, is_verbose: bool) -> None:
    """Print the traceback, if requested."""
    if is_verbose:
        complain("".join(traceback.format_exception(error)).rstrip())

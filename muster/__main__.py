"""The ``muster`` command, as a module: ``python -m kernel_muster``."""

import contextlib
import gc
import os
import sys


def _open_closed_streams() -> None:
    """Let what goes to a closed stdout or stderr go nowhere: the exit code counts all the same."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (open to the end of the process)


def _print_version() -> int:
    from kernel_muster._version import __version__
    from kernel_muster.cli.output import say
    from kernel_muster.registry.errors import UsageError

    try:
        say(f"kernel-muster {__version__}")
    except UsageError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"muster: error: {error}\n")
        return 2
    return 0


def main() -> int:
    """Run the command. The version alone needs none of it."""
    _open_closed_streams()
    if sys.argv[1:] == ["--version"]:
        return _print_version()
    # A short process that makes many objects and drops few: one collection takes 5% of an audit's time, and those at
    # exit 12%, for memory that the end of the process gives back anyway.
    gc.set_threshold(1_000_000)
    from kernel_muster.cli.app import run

    try:
        return run(sys.argv[1:])
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(main())

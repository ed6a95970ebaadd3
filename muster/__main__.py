"""The ``muster`` command, as a module: ``python -m kernel_muster``."""

import contextlib
import gc
import os
import sys
from typing import Any

_INTERRUPTED = 130
# Two interrupts at once, of a key or of who sends them to the process and to its group, are one.
_PATIENCE_S = 1.0


def _open_closed_streams() -> None:
    """Let what goes to a closed stdout or stderr go nowhere: the exit code counts all the same."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (open to the end of the process)


def _interrupt_once() -> None:
    """Let an interrupt that comes right behind another one be the same one; the default raises in what handles it."""
    import signal
    from time import monotonic

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    last = -_PATIENCE_S

    def interrupted(number: int, frame: Any) -> None:
        nonlocal last
        if (now := monotonic()) - last >= _PATIENCE_S:
            last = now
            raise KeyboardInterrupt

    with contextlib.suppress(ValueError):  # not in the main thread, where no interrupt comes either
        signal.signal(signal.SIGINT, interrupted)


def _print_version() -> int:
    from kernel_muster._version import __version__
    from kernel_muster.cli.process.output import say
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
    _interrupt_once()
    # A short process that makes many objects and drops few: one collection takes 5% of an audit's time, and those at
    # exit 12%, for memory that the end of the process gives back anyway.
    gc.set_threshold(1_000_000)
    # Pydantic would read the entry points of all distributions, and fail where one of them is malformed: discovery
    # reads them too, and makes that a finding.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from kernel_muster.cli.app import run
        from kernel_muster.cli.process.guard import in_child

        code = run(sys.argv[1:], in_child)
    except KeyboardInterrupt:  # while the command was still being imported
        sys.stderr.write("muster: interrupted\n")
        code = _INTERRUPTED
    finally:
        gc.freeze()
    if code == _INTERRUPTED or _has_stuck():
        _end_now(code)
    return code


def _has_stuck() -> bool:
    """Whether a device is stuck. What never came near one has not imported the module that knows."""
    module = sys.modules.get("kernel_muster.registry.hardware.stuck")
    return module is not None and bool(module.has_stuck())


def _end_now(code: int) -> None:
    """End the process without its threads: those that build would first build all, one at a stuck device never ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())

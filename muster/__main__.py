"""The ``muster`` command, as a module: ``python -m kernel_muster``."""

import contextlib
import gc
import os
import sys
from typing import Any

_INTERRUPTED = 130
# Two interrupts at once count as one: a key press, or one sent to the process and to its group.
_PATIENCE_S = 1.0


def _open_closed_streams() -> None:
    """Redirect a closed stdout or stderr to nowhere: the exit code counts all the same."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (open to the end of the process)


def _interrupt_once() -> None:
    """Merge an interrupt with one just before it. The default handler would raise in the first one's handling."""
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

    with contextlib.suppress(ValueError):  # outside the main thread, which gets all interrupts
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
    """Run the command. The version alone needs none of the imports."""
    _open_closed_streams()
    if sys.argv[1:] == ["--version"]:
        return _print_version()
    _interrupt_once()
    # A short process makes many objects and drops few. One collection takes 5% of an audit's time, those at exit 12%,
    # for memory that the end of the process frees anyway.
    gc.set_threshold(1_000_000)
    # Pydantic would read the entry points of all distributions, and fail on a malformed one. Discovery reads them too,
    # and makes a finding.
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
    """Whether a device is stuck. The module is imported only by processes that used a device."""
    module = sys.modules.get("kernel_muster.registry.hardware.stuck")
    return module is not None and bool(module.has_stuck())


def _end_now(code: int) -> None:
    """End the process without its threads: they would finish all builds, or wait forever for a stuck device."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())

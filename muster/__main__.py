"""The ``muster`` command, as a module: ``python -m kernel_muster``."""

import gc
import sys


def main() -> int:
    """Run the command. The version alone needs none of it."""
    if sys.argv[1:] == ["--version"]:
        from kernel_muster._version import __version__

        print(f"kernel-muster {__version__}")
        return 0
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

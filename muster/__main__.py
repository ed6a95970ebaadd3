"""The ``muster`` command, as a module: ``python -m kernel_muster``."""

import gc
import sys


def main() -> int:
    """Run the command. The version alone needs none of it."""
    if sys.argv[1:] == ["--version"]:
        from kernel_muster._version import __version__

        print(f"kernel-muster {__version__}")
        return 0
    # A short process that makes many objects and drops few: collecting them takes 5% of its time.
    gc.set_threshold(100_000)
    from kernel_muster.cli.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

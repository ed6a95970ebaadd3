"""The ``muster`` command, as a module: ``python -m kernel_muster``."""

import sys


def main() -> int:
    """Run the command. The version alone needs none of it."""
    if sys.argv[1:] == ["--version"]:
        from kernel_muster._version import __version__

        print(f"kernel-muster {__version__}")
        return 0
    from kernel_muster.cli.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

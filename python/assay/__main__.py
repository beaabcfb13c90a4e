"""The command `assay`, of a shell's or as `python -m assay`."""

from __future__ import annotations

import signal
import sys

from ._native import run


def main() -> int:
    """Runs the command line of this process and returns its exit code."""
    # Python's handler sets a flag that nobody reads while the command runs; this one ends the process, as the binary's does.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run(["assay", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

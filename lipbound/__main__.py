"""``python -m lipbound``, and the program ``lipbound``."""

import os
import sys


def main() -> None:
    """The command line, which Ctrl-C ends with one line, at any moment."""
    wait_passively()
    try:
        from lipbound.cli import interruption
        from lipbound.cli import main as run

        interruption.watch()
        run()
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        leave()
    except SystemExit as end:
        if end.code == 130:
            leave()
        raise


def wait_passively() -> None:
    """Let torch's threads sleep while they wait for each other: where other programs use the cores, those that spin keep the ones that work waiting.

    Read when torch is loaded. What the user has set stays.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def leave() -> None:
    """End at once: torch takes seconds to be taken down, and nothing is left to be done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


if __name__ == "__main__":
    sys.argv[0] = "lipbound"  # runs record their command
    main()

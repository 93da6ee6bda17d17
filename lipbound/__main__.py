"""``python -m lipbound``, and the program ``lipbound``."""

import gc
import os
import sys


def main() -> None:
    """The command line, which Ctrl-C ends with one line, at any moment."""
    spin_briefly()
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
    finally:
        gc.freeze()  # Python's end would look through all modules for garbage, for a second


def spin_briefly() -> None:
    """Let torch's threads sleep soon while they wait for each other.

    On cores that other programs use, those that spin hinder those that work. Read when torch is
    loaded. What the user has set stays. Threads that sleep at once would cost a half more where the
    cores are free.
    """
    if not any(
        name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    ):
        os.environ["GOMP_SPINCOUNT"] = "5000"


def leave() -> None:
    """End at once: torch takes seconds to be taken down, and nothing is left to be done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


if __name__ == "__main__":
    sys.argv[0] = "lipbound"  # runs record their command
    main()

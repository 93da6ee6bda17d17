"""``python -m lipbound``, and the program ``lipbound``."""

import signal
import sys


def main() -> None:
    """The command line, which Ctrl-C ends with one line, and SIGTERM as well."""
    try:
        # by which schedulers of clusters end a job
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        from lipbound.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    sys.argv[0] = "lipbound"  # runs record their command
    main()

"""``python -m lipbound``, and the program ``lipbound``."""

import sys


def main() -> None:
    """The command line, which Ctrl-C ends with one line, at any moment."""
    try:
        from lipbound.cli import interruption
        from lipbound.cli import main as run

        interruption.watch()
        run()
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    sys.argv[0] = "lipbound"  # runs record their command
    main()

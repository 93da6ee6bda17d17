"""``python -m lipbound``, and the program ``lipbound``."""

import signal
import sys
from types import FrameType


def main() -> None:
    """The command line, which Ctrl-C ends with one line, and SIGTERM as well."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.default_int_handler(number, frame)

    try:
        # by which schedulers of clusters end a job
        signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
            signal.signal(signal.SIGINT, interrupt)
        from lipbound.cli import main as run

        run(received)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    sys.argv[0] = "lipbound"  # runs record their command
    main()

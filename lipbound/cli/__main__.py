"""``python -m lipbound.cli``: the command line."""

import sys

from lipbound.cli import interruption, main

if __name__ == "__main__":
    sys.argv[0] = "lipbound"  # runs record their command
    interruption.watch()
    main()

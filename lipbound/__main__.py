"""``python -m lipbound``: the command line."""

from lipbound.cli import main

main()

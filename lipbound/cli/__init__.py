"""The command line."""

# Importing modules registers their commands, in the order of --help.
# isort: off
from lipbound.cli import measuring, reporting  # noqa: F401
from lipbound.cli.application import app, main, state

__all__ = ["app", "main", "state"]

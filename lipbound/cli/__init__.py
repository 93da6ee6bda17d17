"""The command line."""

from lipbound.cli import interruption as interruption
from lipbound.cli import measuring, reporting, reproducing, describing  # noqa: F401, I001  (importing them registers their commands, in the order of --help)
from lipbound.cli.application import app, main, state

__all__ = ["app", "main", "state"]

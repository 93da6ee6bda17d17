"""The command line."""

from lipbound.cli import commands  # noqa: F401 - registers them
from lipbound.cli.application import app, main, state

__all__ = ["app", "main", "state"]

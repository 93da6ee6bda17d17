"""The checkpoints that come with lipbound, as a source of models."""

from pathlib import Path

from lipbound.errors import CheckpointError, nearest
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.sources.catalogue import BUILTINS, MINILM_SHA256, PREFIX, Builtin
from lipbound.models.sources.source import LoadOptions

__all__ = ["BUILTINS", "MINILM_SHA256", "PREFIX", "Builtin", "BuiltinSource"]


class BuiltinSource:
    """A name of `BUILTINS` behind "builtin:"."""

    def matches(self, model: object) -> bool:
        """Whether it begins with "builtin:"."""
        return isinstance(model, str | Path) and str(model).startswith(PREFIX)

    def load(self, model: str | Path, options: LoadOptions) -> Checkpoint:
        """The builtin of that name; raises CheckpointError for names that are not in `BUILTINS`."""
        name = str(model).removeprefix(PREFIX)
        if name not in BUILTINS:
            raise CheckpointError(f"unknown builtin checkpoint {name!r}; {nearest(name, BUILTINS)}")
        return BUILTINS[name].load(name, options)

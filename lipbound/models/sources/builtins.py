"""The checkpoints that come with lipbound, as a source of models."""

from pathlib import Path

from lipbound.errors import CheckpointError
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.sources.catalogue import BUILTINS, MINILM_SHA256, PREFIX, Builtin, builtin
from lipbound.models.sources.source import LoadOptions

__all__ = ["BUILTINS", "MINILM_SHA256", "PREFIX", "Builtin", "BuiltinSource"]


class BuiltinSource:
    """A name of `BUILTINS` behind "builtin:"."""

    def matches(self, model: object) -> bool:
        """Whether it begins with "builtin:", in letters of any size."""
        return isinstance(model, str | Path) and str(model).lower().startswith(PREFIX)

    def load(self, model: str | Path, options: LoadOptions) -> Checkpoint:
        """The builtin of that name; raises CheckpointError for names that are not in `BUILTINS`."""
        name = str(model)[len(PREFIX) :]
        if options.revision is not None:
            raise CheckpointError(
                f"revision {options.revision!r} was given for the builtin checkpoint {name!r}; "
                "revisions are for hub models"
            )
        if options.gguf_file is not None:
            raise CheckpointError(
                f"gguf_file is {options.gguf_file!r}, but builtin checkpoints take none; it is "
                "for directories and hub models"
            )
        return builtin(name).load(name, options)

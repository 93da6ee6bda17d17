"""Models that the user has loaded already."""

from transformers import PreTrainedModel

from lipbound.errors import CheckpointError, tell
from lipbound.models import offload
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.precision import check_floating, in_dtype
from lipbound.models.sources.source import LoadOptions
from lipbound.models.sources.weight_checks import check_finite, state_sha256


class LoadedModelSource:
    """A transformers model in memory, used as it is and moved; a copy of it where its weights are in another dtype."""

    def matches(self, model: object) -> bool:
        """Whether it is a transformers model."""
        return isinstance(model, PreTrainedModel)

    def load(self, model: PreTrainedModel, options: LoadOptions) -> Checkpoint:
        """The same model, on the device and in the dtype wanted; raises CheckpointError where its weights are, or should be, on disk."""
        if options.weights == "layers" or offload.by_layer(model):
            raise CheckpointError(
                f"model is a loaded {type(model).__name__}, but reading weights layer by layer starts from files; give the checkpoint's directory "
                "or hub id with weights='layers'"
            )
        if options.revision is not None:
            raise CheckpointError(f"revision {options.revision!r} was given for a model in memory; revisions are for hub models")
        if options.gguf_file is not None:
            raise CheckpointError(f"gguf_file is {options.gguf_file!r}, but a model in memory takes none; it is for directories and hub models")
        check_floating(model, type(model).__name__)
        loaded, note = in_dtype(model, options.dtype)
        loaded = loaded.to(device=options.device)
        if note is not None:
            tell(note)
        check_finite(loaded, type(model).__name__)
        source = str(model.name_or_path) or None
        commit = getattr(model.config, "_commit_hash", None)
        return Checkpoint(
            loaded,
            source or type(model).__name__,
            "sha256:" + state_sha256(loaded),
            source,
            commit,
            loaded=True,
            notes=[] if note is None else [note],
        )

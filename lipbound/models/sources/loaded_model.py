"""Models that the user has loaded already."""

from transformers import PreTrainedModel

from lipbound.errors import CheckpointError
from lipbound.models import offload
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.sources.source import LoadOptions
from lipbound.models.sources.weight_checks import check_finite, state_sha256


class LoadedModelSource:
    """A transformers model in memory, used as it is, moved and cast."""

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
        loaded = model.to(device=options.device, dtype=options.dtype)
        check_finite(loaded, type(model).__name__)
        source = str(model.name_or_path) or None
        commit = getattr(model.config, "_commit_hash", None)
        return Checkpoint(loaded, source or type(model).__name__, "sha256:" + state_sha256(loaded), source, commit, loaded=True)

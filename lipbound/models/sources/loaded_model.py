"""Models that the user has loaded already."""

from dataclasses import replace

from transformers import PreTrainedModel

from lipbound.errors import CheckpointError, tell
from lipbound.models import offload
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.precision import check_floating, in_dtype
from lipbound.models.sources.source import LoadOptions
from lipbound.models.sources.weight_checks import check_finite, config_sha256, state_sha256
from lipbound.models.unwrapping import unwrapped


class LoadedModelSource:
    """A transformers model in memory, or a wrapper of one, used as it is and moved; a copy of it
    where its weights are in another dtype."""

    def matches(self, model: object) -> bool:
        """Tell whether it is a transformers model once wrappers are taken off."""
        return isinstance(unwrapped(model)[0], PreTrainedModel)

    def load(self, model: object, options: LoadOptions) -> Checkpoint:
        """The same model, on the device and in the dtype wanted; raises CheckpointError where its
        weights are, or should be, on disk.

        Of a `Checkpoint` the name and the revision stay, so that its numbers are known to be of the
        same weights.
        """
        inner, notes = unwrapped(model)
        assert isinstance(inner, PreTrainedModel)
        for note in notes:
            tell(note)
        loaded = self._loaded(inner, notes, options)
        if not isinstance(model, Checkpoint):
            return loaded
        return replace(model, model=loaded.model, loaded=True, notes=[*model.notes, *loaded.notes])

    def _loaded(self, model: PreTrainedModel, notes: list[str], options: LoadOptions) -> Checkpoint:
        if options.weights == "layers" or offload.by_layer(model):
            raise CheckpointError(
                f"model is a loaded {type(model).__name__}, but reading weights layer by layer "
                "starts from files; give the checkpoint's directory "
                "or hub id with weights='layers'"
            )
        if options.revision is not None:
            raise CheckpointError(
                f"revision {options.revision!r} was given for a model in memory; revisions are "
                "for hub models"
            )
        if options.gguf_file is not None:
            raise CheckpointError(
                f"gguf_file is {options.gguf_file!r}, but a model in memory takes none; it is "
                "for directories and hub models"
            )
        if options.adapter not in (None, "none"):
            raise CheckpointError(
                "adapter= is for checkpoints that are loaded by name; a model in memory is "
                "measured with the adapters in its layers (merge it there: "
                "peft.PeftModel.from_pretrained(model, adapter))"
            )
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
            notes=notes if note is None else [*notes, note],
            configuration=f"sha256:{config_sha256(model.config)}",
        )

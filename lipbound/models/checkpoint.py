"""A loaded model, with where it came from and what prepares its inputs."""

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel

from lipbound.errors import CheckpointError
from lipbound.models import gguf_file
from lipbound.models.quiet import first_line, quiet
from lipbound.models.weight_files import check_fetched

MODALITIES = {"input_ids": "text", "pixel_values": "image"}
"""What a model takes, by the name of its main input."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.vocab",
    "tekken.json",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENS_INSTEAD = "token numbers, or name another tokenizer with tokenizer="
IMAGES_INSTEAD = (
    "a dict of ready inputs, {'pixel_values': ...}, or name another processor with processor="
)


@dataclass
class Checkpoint:
    """A loaded model and where it came from.

    Attributes:
        model: in evaluation mode, float32 or float64, eager attention.
        name: what the user asked for.
        revision: commit of a hub model, or "sha256:..." over the weights of a directory or a loaded
            model.
        source: what tokenizer and processor are loaded from (a directory or a hub id), or None for
            a loaded model without one.
        commit: the hub commit, or None.
        loaded: whether the user handed over a loaded model, which no name leads back to.
        by_layer: whether the weights stay on disk and each module's are in memory only while it
            runs (`lipbound.models.offload`).
        notes: sentences on what is not as it was handed over.
        gguf_file: the GGUF file in ``source`` that weights and tokenizer came from, or None.
        quantization: how the weights were stored, "GGUF Q4_1 (...)" for one, where they were
            quantised; None where they were not.
        tokenizer_from, processor_from: directory or hub id whose tokenizer or image processor is
            taken in place of the checkpoint's own, or None.
        configuration: "sha256:..." over the config.json of a directory, or over what the
            configuration of a loaded model says; None where ``revision`` covers it.
    """

    model: PreTrainedModel
    name: str
    revision: str
    source: str | None
    commit: str | None = None
    loaded: bool = False
    by_layer: bool = False
    notes: list[str] = field(default_factory=list)
    gguf_file: str | None = None
    quantization: str | None = None
    tokenizer_from: str | None = None
    processor_from: str | None = None
    configuration: str | None = None

    @property
    def main_input(self) -> str:
        """The name of the model's main input: the one it declares, or, where its forward has none
        of that name, one that it has."""
        declared = str(self.model.main_input_name)
        parameters = inspect.signature(self.model.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return (
            declared
            if declared in names
            else next(
                (name for name in names if name in MODALITIES), names[0] if names else declared
            )
        )

    def __repr__(self) -> str:
        where = ", weights on disk" if self.by_layer else ""
        return (
            f"Checkpoint({self.name!r}, {type(self.model).__name__}, "
            f"{str(self.model.dtype).removeprefix('torch.')}{where}, {self.revision[:19]})"
        )

    @property
    def modality(self) -> str:
        """ "text" or "image", or the name of the model's main input where it is neither."""
        return MODALITIES.get(self.main_input, self.main_input)

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, or the one that was given for it; raises CheckpointError
        where there is none."""
        if self.tokenizer_from is not None:
            return self._given(AutoTokenizer, "tokenizer", self.tokenizer_from, TOKENIZER_FILES)
        if self.gguf_file is not None:
            return self._inside(self.gguf_file)
        return self._companion(AutoTokenizer, "tokenizer", TOKENIZER_FILES, TOKENS_INSTEAD)

    def image_processor(self) -> Any:
        """The checkpoint's image processor, or the one that was given for it; raises
        CheckpointError where there is none."""
        if self.processor_from is not None:
            return self._given(
                AutoImageProcessor, "image processor", self.processor_from, PROCESSOR_FILES
            )
        return self._companion(
            AutoImageProcessor, "image processor", PROCESSOR_FILES, IMAGES_INSTEAD
        )

    def _inside(self, file: str) -> Any:
        """The tokenizer in a GGUF file."""
        try:
            assert self.source is not None
            with quiet(), gguf_file.read_once(Path(self.source, file)):
                return AutoTokenizer.from_pretrained(
                    self.source, gguf_file=file, trust_remote_code=False
                )
        except Exception as error:  # files of other makers raise a zoo of types
            raise CheckpointError(
                f"{self.name} has no tokenizer that transformers can read ({first_line(error)}); "
                f"give data as {TOKENS_INSTEAD}"
            ) from error

    def _given(self, loader: Any, what: str, name: str, files: tuple[str, ...]) -> Any:
        """Load the tokenizer or processor that was named in place of the checkpoint's own."""
        folder = Path(name).expanduser()
        if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in files):
            raise CheckpointError(
                f"{name} has no files of a {what} ({files[0]} or the like); give a directory "
                "that has, or a hub id"
            )
        check_fetched(folder, files)
        repo, _, revision = (str(folder), "", "") if folder.is_dir() else name.partition("@")
        try:
            with quiet():
                return loader.from_pretrained(
                    repo, revision=revision or "main", trust_remote_code=False
                )
        except Exception as error:  # names that lead nowhere and broken files raise a zoo of types
            raise CheckpointError(
                f"there is no usable {what} at {name} ({first_line(error)}); give a directory or "
                "a hub id"
            ) from error

    def _companion(self, loader: Any, what: str, files: tuple[str, ...], instead: str) -> Any:
        if self.source is None:
            raise CheckpointError(
                f"the loaded model does not say where its {what} is; give data as {instead}"
            )
        folder = Path(self.source)
        # without its files transformers makes up a tokenizer that knows no word
        if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in files):
            raise CheckpointError(
                f"{self.name} has no files of its {what} ({files[0]} or the like); add them, or "
                f"give data as {instead}"
            )
        check_fetched(folder, files)
        try:
            with quiet():
                return loader.from_pretrained(self.source, trust_remote_code=False)
        except Exception as error:  # broken files raise a zoo of types
            raise CheckpointError(
                f"{self.name} has no usable {what} ({first_line(error)}); give data as {instead}"
            ) from error

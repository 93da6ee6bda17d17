"""Models that other packages make by name: timm's, and open_clip's."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lipbound.errors import CheckpointError
from lipbound.models.checkpoint import Checkpoint, LoadOptions
from lipbound.models.quiet import explained, first_line, quiet
from lipbound.models.sources import loaded_model

Made = tuple[nn.Module, Callable[[Any], Tensor]]
"""A model, and the transform that makes its tensor of an image."""


class TimmModel(nn.Module):
    """A model of timm that reads images under the name that image models of transformers have."""

    main_input_name = "pixel_values"

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: Tensor) -> Any:
        return self.inner(pixel_values)


class OpenClipModel(nn.Module):
    """A model of open_clip, of whose towers those run that are given something."""

    main_input_name = "pixel_values"

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: Tensor | None = None, input_ids: Tensor | None = None) -> Any:
        images = None if pixel_values is None else self.inner.encode_image(pixel_values)
        return images, None if input_ids is None else self.inner.encode_text(input_ids)


@dataclass(frozen=True)
class ImageTransform:
    """A transform of single images, called as an image processor of transformers is.

    Attributes:
        transform: makes a tensor (channels, height, width) of an image.
        described: what it does, in one line.
    """

    transform: Callable[[Any], Tensor]
    described: str

    def __call__(self, images: list[Any], return_tensors: str = "pt") -> dict[str, Tensor]:
        """Return the tensors of images, (samples, channels, height, width)."""
        return {"pixel_values": torch.stack([self.transform(image) for image in images])}


def _timm(package: Any, name: str, weights: str) -> Made:
    model = package.create_model(name, pretrained=not weights)
    if weights:
        _fill(model, weights)
    settings = package.data.resolve_model_data_config(model)
    return TimmModel(model), package.data.create_transform(**settings, is_training=False)


def _open_clip(package: Any, name: str, weights: str) -> Made:
    if not weights:
        known = [tag for one, tag in package.list_pretrained() if one == name]
        raise CheckpointError(
            f"open_clip:{name} has several sets of weights; name one, open_clip:{name}@TAG "
            f"({', '.join(known) or 'none is published'}), or a file"
        )
    local = Path(weights).expanduser().exists()
    made = package.create_model_and_transforms(name, pretrained=None if local else weights)
    if local:
        _fill(made[0], weights)
    return OpenClipModel(made[0]), made[2]


MAKERS: Mapping[str, Callable[[Any, str, str], Made]] = {"timm": _timm, "open_clip": _open_clip}
"""By package, the function that makes a model of the package itself, a name, and weights.

Weights are "" for the package's own.
"""


def load_other(model: object, options: LoadOptions) -> Checkpoint | None:
    """Load "timm:NAME" or "open_clip:NAME@TAG", with weights from the hub or from a local file.

    Args:
        model: the name; behind an @ a .safetensors file, or of open_clip the tag of weights.
        options: dtype and device.

    Returns:
        The checkpoint, with the package's own transform of images; None for other names.

    Raises:
        CheckpointError: the package is not installed, knows no such model, or cannot load it.
    """
    kind, colon, rest = str(model).partition(":")
    if not isinstance(model, str) or not colon or kind not in MAKERS:
        return None
    options.refuse_given(f"a model of {kind}")
    name, _, weights = rest.partition("@")
    try:
        package = importlib.import_module(kind)
    except ImportError as error:
        raise CheckpointError(
            f"{model} needs the package {kind}, which cannot be imported ({first_line(error)}); "
            f"install it, with the torchvision that fits torch {torch.__version__}"
        ) from error
    with explained(CheckpointError, f"{model} cannot be loaded: "), quiet():
        made, transform = MAKERS[kind](package, name, weights)
    loaded_model.check_floating(made, name)
    loaded = loaded_model.in_dtype(made, options.dtype)[0].to(device=options.device).eval()
    loaded_model.check_finite(loaded, name)
    processor = ImageTransform(transform, f"{kind}'s transform, {' '.join(str(transform).split())}")
    return Checkpoint(loaded, model, loaded_model.state_sha256(loaded), None, processor=processor)


def _fill(model: nn.Module, weights: str) -> None:
    """Load weights of a .safetensors file into a model, all of which must fit."""
    path = Path(weights).expanduser()
    if path.suffix != ".safetensors" or not path.is_file():
        raise CheckpointError(f"{weights} is no .safetensors file; give one, or leave it out")
    model.load_state_dict(load_file(path))

"""Images as model inputs: files, folders, tables, and the photographs that are the default."""

import importlib.util
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.quiet import first_line, quiet
from lipbound.models.readers import pixels
from lipbound.models.readers.files import IMAGE_FILES, TABLES, ending, there, visible
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.tables import DataItems, ItemKind

IMAGE_COLUMNS = ("image", "img", "picture")
PROCESSING = {
    "do_resize": ("size", "resample"),
    "do_center_crop": ("crop_size",),
    "do_rescale": ("rescale_factor",),
    "do_normalize": ("image_mean", "image_std"),
}
"""Steps of image processors, and the settings of each that go into a run's provenance."""
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "motorcycle_left.png",
    "rocket.jpg",
    "camera.png",
    "coins.png",
    "grass.png",
)
"""Files of scikit-image that are the default images."""


def _as_image(value: Any) -> Path | Image.Image | None:
    """The path of an image, or an image of an array (height, width) or, of 8 bits, (height, width,
    3 or 4), where a value is one."""
    if isinstance(value, np.ndarray) and value.size:
        colours = value.ndim == 3 and value.shape[-1] in (3, 4) and value.dtype == np.uint8
        grey = value.ndim == 2 and value.dtype in (np.uint8, np.uint16, np.int32, np.float32)
        return Image.fromarray(value) if colours or grey else None
    path = there(value)
    return (
        path if path is not None and path.is_file() and path.suffix.lower() in IMAGE_FILES else None
    )


class ImageReader(Reader):
    """Images, one sample each, through the checkpoint's image processor."""

    modality = "image"
    kind = ItemKind(
        Image.Image,
        takes="images",
        one="an image",
        many="images",
        columns=IMAGE_COLUMNS,
        convert=_as_image,
    )

    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """The first images of a folder, a table or a list, upright and in RGB, as the processor
        makes them."""
        found = self.items(checkpoint, data, selection.split, selection.column)
        items, notes = found.take(selection.samples, selection.shuffle, self.kind.many)
        if not items:
            raise InputsError(f"{found.description} has no images in it")
        told = Counter[str]()
        chosen = [
            _rgb(item, told, f"image {k} of {found.description}") for k, item in enumerate(items)
        ]
        processor = checkpoint.image_processor()
        try:
            with quiet():
                batch = processor(images=chosen, return_tensors="pt")
        except Exception as error:  # processors are programs of their own
            raise InputsError(
                f"the image processor of {checkpoint.name} does not take {found.description}: "
                f"{first_line(error)}"
            ) from error
        tensors = {name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}
        return Inputs(
            tensors,
            selection.described(found.description),
            _processing(processor),
            notes + pixels.notes(told, len(chosen)),
        )

    def default(self) -> tuple[list[Path], str]:
        """`PHOTOGRAPHS`; raises InputsError where scikit-image is not installed."""
        return _photographs(), "photographs from scikit-image"

    def open_file(self, path: Path, checkpoint: Checkpoint) -> list[Path]:
        """The one image of a file."""
        if path.suffix.lower() not in IMAGE_FILES:
            raise InputsError(
                f"{path} is not an image file, but {checkpoint.name} takes images; give a folder "
                "of images, a dataset or a table"
            )
        return [path]

    def open_folder(self, path: Path) -> DataItems | None:
        """The images of a folder and the folders in it, by their paths; None for a folder of
        tables."""
        files = [file for file in visible(path) if file.suffix.lower() in IMAGE_FILES]
        tables = {ending(file) for file in path.iterdir()} & TABLES.keys()
        if tables - ({".tsv"} if files else set()):
            return None
        if not files:
            raise InputsError(f"{path} holds no images ({', '.join(IMAGE_FILES)})")
        return DataItems(
            files,
            path.name,
            lambda: [str(file.parent.relative_to(path)) for file in files],
            ("folder", "folders"),
        )


def _processing(processor: Any) -> str:
    """An image processor and its settings in one line.

    >>> from transformers import ViTImageProcessor
    >>> processor = ViTImageProcessor(size={"height": 8, "width": 8})
    >>> _processing(processor).partition(": ")[2].split(", image")[0]
    'size 8 x 8, resample bilinear, rescale factor 0.00392157'
    """
    names = [
        name
        for step, settings in PROCESSING.items()
        if getattr(processor, step, None)
        for name in settings
    ]
    parts = [
        f"{name.replace('_', ' ')} {_plain(name, getattr(processor, name))}"
        for name in names
        if getattr(processor, name, None) is not None
    ]
    kind = type(processor).__name__
    return f"{kind}: {', '.join(parts)}" if parts else kind


def _plain(name: str, value: Any) -> str:
    """A setting of a processor in words and numbers."""
    if name == "resample":
        return Image.Resampling(value).name.lower()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        given = {key: number for key, number in value.items() if number is not None}
        if given.keys() == {"height", "width"}:
            return f"{given['height']} x {given['width']}"
        return " and ".join(f"{key.replace('_', ' ')} {number}" for key, number in given.items())
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_plain("", one) for one in value) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _photographs() -> list[Path]:
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise InputsError(
            "the default photographs come with scikit-image, which is not installed; pip install "
            "'lipbound[demo]', or give data"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return [folder / name for name in PHOTOGRAPHS]


def _rgb(item: Image.Image | Path, told: Counter[str], what: str) -> Image.Image:
    """An image, or that of a file, as `pixels.rgb` makes it."""
    name = str(item) if isinstance(item, Path) else what
    try:
        if not isinstance(item, Path):
            return pixels.rgb(item, told)
        with Image.open(item) as picture:
            return pixels.rgb(picture, told)
    except InputsError as error:
        raise InputsError(f"{name} is not taken: {error}") from error
    except Exception as error:  # broken files raise whatever their format's reader does
        raise InputsError(f"{name} is not a readable image: {first_line(error)}") from error

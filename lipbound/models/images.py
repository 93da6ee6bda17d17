"""Images as model inputs: files, folders, tables, and the photographs that are the default."""

import importlib.util
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.datasets import TABLES, Inputs, has_table, read_rows
from lipbound.models.quiet import quiet

IMAGE_COLUMNS = ("image", "img", "picture")


IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


PROCESSING = (
    "do_resize",
    "size",
    "resample",
    "do_center_crop",
    "crop_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)
"""Settings of image processors that go into a run's provenance."""


PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg", "camera.png", "coins.png", "grass.png")
"""Files of scikit-image that are the default images."""


# -- images --------------------------------------------------------------------------------------------------------------


def read_images(checkpoint: Checkpoint, data: Any, samples: int, split: str | None, column: str | None) -> Inputs:
    """The first images of a folder, a table or a list, through the checkpoint's processor; arguments as of `lipbound.models.inputs.prepare`."""
    if data is None:
        pictures, description = _photographs(), "photographs from scikit-image"
    elif isinstance(data, str | Path) and Path(data).is_dir() and not has_table(Path(data)):
        pictures, description = _folder(Path(data)), Path(data).name
    elif isinstance(data, str | Path) and Path(data).is_file() and Path(data).suffix not in TABLES:
        if Path(data).suffix.lower() not in IMAGE_FILES:
            raise InputsError(f"{data} is not an image file, but {checkpoint.name} takes images; give a folder of images, a dataset or a table")
        pictures, description = iter([_open(Path(data))]), Path(data).name
    else:
        pictures, description = read_rows(data, split, column, IMAGE_COLUMNS, Image.Image, checkpoint)
    chosen = [picture.convert("RGB") for picture in islice(pictures, samples)]
    if not chosen:
        raise InputsError(f"{description} has no images in it")
    processor = checkpoint.image_processor()
    with quiet():
        batch = processor(images=chosen, return_tensors="pt")
    return Inputs({name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}, description, _processing(processor))


def _processing(processor: Any) -> str:
    """An image processor and its settings in one line."""
    parts = [f"{name} {_plain(getattr(processor, name))}" for name in PROCESSING if getattr(processor, name, None) is not None]
    return ", ".join([type(processor).__name__, *parts])


def _plain(value: Any) -> str:
    """A setting of a processor without its Python types."""
    return str({k: v for k, v in dict(value).items() if v is not None} if isinstance(value, Mapping) else value)


def _photographs() -> Iterator[Image.Image]:
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise InputsError("the default photographs come with scikit-image, which is not installed; pip install 'lipbound[demo]', or give data")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return (_open(folder / name) for name in PHOTOGRAPHS)


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise InputsError(f"{path} is not a readable image") from error


def _folder(folder: Path) -> Iterator[Image.Image]:
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGE_FILES)
    if not files:
        raise InputsError(f"{folder} holds no images ({', '.join(IMAGE_FILES)})")
    return (_open(file) for file in files)

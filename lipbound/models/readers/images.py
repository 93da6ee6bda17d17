"""Images as model inputs: files, folders, tables, and the photographs that are the default."""

import importlib.util
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.batch import Inputs
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import quiet
from lipbound.models.readers.files import IMAGE_FILES, TABLES
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.tables import ItemKind

IMAGE_COLUMNS = ("image", "img", "picture")
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


class ImageReader(Reader):
    """Images, one sample each, through the checkpoint's image processor."""

    modality = "image"
    kind = ItemKind(Image.Image, takes="images", one="an image", many="images", columns=IMAGE_COLUMNS)

    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """The first images of a folder, a table or a list, in RGB, as the processor makes them."""
        pictures, description = self.items(checkpoint, data, selection.split, selection.column)
        chosen = [picture.convert("RGB") for picture in islice(pictures, selection.samples)]
        if not chosen:
            raise InputsError(f"{description} has no images in it")
        processor = checkpoint.image_processor()
        with quiet():
            batch = processor(images=chosen, return_tensors="pt")
        return Inputs({name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}, description, _processing(processor))

    def default(self) -> tuple[Iterator[Image.Image], str]:
        """`PHOTOGRAPHS`; raises InputsError where scikit-image is not installed."""
        return _photographs(), "photographs from scikit-image"

    def open_file(self, path: Path, checkpoint: Checkpoint) -> Iterator[Image.Image]:
        """The one image of a file."""
        if path.suffix.lower() not in IMAGE_FILES:
            raise InputsError(f"{path} is not an image file, but {checkpoint.name} takes images; give a folder of images, a dataset or a table")
        return iter([_open(path)])

    def open_folder(self, path: Path) -> Iterator[Image.Image] | None:
        """The images of a folder and the folders in it, by their paths; None for a folder of tables."""
        if any(file.suffix in TABLES for file in path.iterdir()):
            return None
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in IMAGE_FILES)
        if not files:
            raise InputsError(f"{path} holds no images ({', '.join(IMAGE_FILES)})")
        return (_open(file) for file in files)


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
    except Exception as error:  # broken files raise whatever their format's reader does
        raise InputsError(f"{path} is not a readable image") from error

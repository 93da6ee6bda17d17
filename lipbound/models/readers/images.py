"""Images as model inputs: files, folders, tables, and the photographs that are the default."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from lipbound.errors import InputsError
from lipbound.models.checkpoint import Checkpoint, Inputs
from lipbound.models.quiet import explained, quiet
from lipbound.models.readers import files
from lipbound.models.readers.reader import DataItems, Reader, Selection

PROCESSING = {
    "size": "do_resize",
    "resample": "do_resize",
    "crop_size": "do_center_crop",
    "rescale_factor": "do_rescale",
    "image_mean": "do_normalize",
    "image_std": "do_normalize",
}
"""Settings of image processors that go into a run's provenance, and the step that each is of."""
PHOTOGRAPHS = Path(__file__).parent.parent / "builtin" / "photographs"
"""Folder of the default images, reduced from those of scikit-image (benchmarks/photographs.py)."""
SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
FULL = 65535
"""Largest value of 16 bits."""


class ImageReader(Reader):
    """Images, one sample each, through the checkpoint's image processor."""

    modality = "image"
    item_type, one, many, takes = Image.Image, "an image", "images", "images"
    columns = ("image", "img", "picture")

    def item(self, value: Any) -> Path | Image.Image | None:
        """Return an image, or what stands for one: the path of a file, or an array.

        Arrays are (height, width), or of 8 bits (height, width, 3 or 4).
        """
        if isinstance(value, np.ndarray) and value.size:
            colours = value.ndim == 3 and value.shape[-1] in (3, 4) and value.dtype == np.uint8
            grey = value.ndim == 2 and value.dtype in (np.uint8, np.uint16, np.int32, np.float32)
            return Image.fromarray(value) if colours or grey else None
        path = files.there(value)
        if path is not None and path.is_file() and path.suffix.lower() in files.IMAGE_FILES:
            return path
        return value if isinstance(value, Image.Image) else None

    def read(self, checkpoint: Checkpoint, data: Any, selection: Selection) -> Inputs:
        """Return the first images, upright and in RGB, as the image processor makes them.

        Raises:
            InputsError: there are no images, or the processor does not take them.
        """
        found = self.items(checkpoint, data, selection)
        items, notes = found.take(selection, self.many)
        where, told = found.description, Counter[str]()
        if not items:
            raise InputsError(f"{where} has no images in it")
        images = [_opened(item, told, f"image {k} of {where}") for k, item in enumerate(items)]
        processor = checkpoint.image_processor()
        before = f"the image processor of {checkpoint.name} does not take {where}: "
        with explained(InputsError, before), quiet():  # processors are programs of their own
            batch = processor(images=images, return_tensors="pt")
        tensors = {name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}
        notes += [f"{n} of {len(images)} images {said}" for said, n in told.items()]
        return Inputs(tensors, selection.described(where), _processing(processor), notes)

    def default(self) -> tuple[list[Path], str]:
        """Return the paths of the images in `PHOTOGRAPHS`, and their description."""
        return sorted(PHOTOGRAPHS.glob("*.png")), "photographs from scikit-image"

    def open_file(self, path: Path, checkpoint: Checkpoint) -> list[Path]:
        """Return the path of an image file.

        Raises:
            InputsError: it is no image.
        """
        if path.suffix.lower() not in files.IMAGE_FILES:
            raise InputsError(f"{path} is not an image file, but {checkpoint.name} takes images")
        return [path]

    def open_folder(self, path: Path, takes: str) -> DataItems | None:
        """Return the images of a folder and its subfolders; None for a folder of tables.

        Raises:
            InputsError: there are none.
        """
        images = [file for file in files.visible(path) if file.suffix.lower() in files.IMAGE_FILES]
        tables = {files.ending(file) for file in path.iterdir()} & files.TABLES.keys()
        if tables - ({".tsv"} if images else set()):
            return None
        if not images:
            raise InputsError(f"{path} holds no images ({', '.join(files.IMAGE_FILES)}), {takes}")
        return DataItems.of_files(path, images)


def _processing(processor: Any) -> str:
    """Return an image processor and its settings in one line.

    >>> from transformers import ViTImageProcessor
    >>> processor = ViTImageProcessor(size={"height": 8, "width": 8})
    >>> _processing(processor).partition(": ")[2].split(", image")[0]
    'size 8 x 8, resample bilinear, rescale factor 0.00392157'
    """
    if described := getattr(processor, "described", None):
        return str(described)
    said = [
        f"{name.replace('_', ' ')} {_plain(value, name)}"
        for name, step in PROCESSING.items()
        if getattr(processor, step, None) and (value := getattr(processor, name, None)) is not None
    ]
    return type(processor).__name__ + (f": {', '.join(said)}" if said else "")


def _plain(value: Any, name: str = "") -> str:
    """Return a setting of a processor in words and numbers."""
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
        return "(" + ", ".join(map(_plain, value)) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _opened(item: Image.Image | Path, told: Counter[str], what: str) -> Image.Image:
    name = str(item) if isinstance(item, Path) else what
    # broken files raise whatever their format's reader does
    with explained(InputsError, f"{name} is not a readable image: "):
        if not isinstance(item, Path):
            return rgb(item, told)
        with Image.open(item) as image:
            return rgb(image, told)


def rgb(image: Image.Image, told: Counter[str]) -> Image.Image:
    """Return an image upright, as its EXIF data say, in RGB with 8 bits a channel.

    Args:
        image: of any mode; of several frames the one it stands at.
        told: counts what was done to it beyond a change of mode, as ends of sentences.
    """
    if getattr(image, "n_frames", 1) > 1:
        told["have further frames, which were left out"] += 1
    image = ImageOps.exif_transpose(image)
    if image.mode in (*SIXTEEN, "I", "F"):
        image = _eight_bits(image, told)
    if image.mode not in TRANSPARENT and "transparency" not in image.info:
        return image.convert("RGB")
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    if image.getchannel("A").getextrema()[0] == 255:
        return image.convert("RGB")
    told["have transparent parts, which were laid on white"] += 1
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _eight_bits(image: Image.Image, told: Counter[str]) -> Image.Image:
    """Return a grey image in 8 bits, from the range that its mode, or else its values, must have.

    Raises:
        ValueError: its numbers are of no known range.
    """
    values = np.asarray(image).astype(np.float64)
    low, high, integers = float(values.min()), float(values.max()), image.mode != "F"
    sort = "32-bit integers" if integers else "floating-point numbers"
    for factor, fits, said in (
        (255 / FULL, image.mode in SIXTEEN, "have 16 bits, which were brought to 8"),
        (255.0, high <= 1 and not integers, f"hold {sort} from 0 to 1, brought to 8 bits"),
        (1.0, high <= 255, f"hold {sort} below 256, which were taken for those of 8 bits"),
        (255 / FULL, high <= FULL and integers, f"hold {sort}, taken for those of 16 bits"),
    ):
        if low >= 0 and fits:
            told[said] += 1
            return Image.fromarray(np.floor(values * factor + 0.5).astype(np.uint8))
    raise ValueError(
        f"it has values from {low:g} to {high:g} (mode {image.mode}), whose range is not known; "
        f"scale them to {'0 to 255 or 0 to 65535' if integers else '0 to 1 or 0 to 255'}"
    )

"""A picture, of whatever depth and format, as the upright 8-bit RGB picture that image processors
take."""

from collections import Counter

import numpy as np
from PIL import Image, ImageOps

from lipbound.errors import InputsError

SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
FULL = 65535
"""Largest value of 16 bits."""


def rgb(picture: Image.Image, told: Counter[str]) -> Image.Image:
    """The picture upright, as its EXIF data say, in RGB with 8 bits a channel.

    Args:
        picture: of any mode; of several frames the one it stands at.
        told: what was done to it beyond a change of mode is counted here, each as the end of a
            sentence.

    Raises:
        InputsError: its numbers are of no known range.
    """
    if getattr(picture, "n_frames", 1) > 1:
        told["have further frames, which were left out"] += 1
    picture = ImageOps.exif_transpose(picture)
    if picture.mode in SIXTEEN or picture.mode in ("I", "F"):
        picture = _eight_bits(picture, told)
    if picture.mode not in TRANSPARENT and "transparency" not in picture.info:
        return picture.convert("RGB")
    picture = (picture.convert("LA") if picture.mode == "La" else picture).convert("RGBA")
    if picture.getchannel("A").getextrema()[0] == 255:
        return picture.convert("RGB")
    told["have transparent parts, which were laid on white"] += 1
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def _eight_bits(picture: Image.Image, told: Counter[str]) -> Image.Image:
    """A grey picture of 16 or 32 bits or of floats, brought to 8 bits from the range that its mode,
    or else its values, must have."""
    values = np.asarray(picture).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    integers = picture.mode != "F"
    if picture.mode in SIXTEEN:
        factor, said = (
            255 / FULL,
            "have 16 bits, which were brought to 8 (0 to 65535 became 0 to 255)",
        )
    elif not np.isfinite(values).all():
        raise InputsError("it has NaN or infinite values")
    elif low >= 0 and high <= 1 and not integers:
        factor, said = (
            255.0,
            "hold floating-point numbers from 0 to 1, which were brought to 8 bits",
        )
    elif low >= 0 and high <= 255:
        factor, said = (
            1.0,
            f"hold {'32-bit integers' if integers else 'floating-point numbers'} below 256, "
            "which were taken for those of 8 bits",
        )
    elif low >= 0 and high <= FULL and integers:
        factor, said = (
            255 / FULL,
            "hold 32-bit integers, which were taken for those of 16 bits and brought to 8 (0 to "
            "65535 became 0 to 255)",
        )
    else:
        ranges = "0 to 255 or 0 to 65535" if integers else "0 to 1 or 0 to 255"
        raise InputsError(
            f"it has values from {low:g} to {high:g} (mode {picture.mode}), whose range is not "
            f"known; scale them to {ranges}"
        )
    told[said] += 1
    return Image.fromarray(np.floor(values * factor + 0.5).astype(np.uint8))


def notes(told: Counter[str], count: int) -> list[str]:
    """A sentence for each thing that was done to some of ``count`` pictures."""
    return [
        f"{number} of {count} images {said}"
        for number, said in ((n, s if n > 1 else _singular(s)) for s, n in told.items())
    ]


def _singular(said: str) -> str:
    verb, _, rest = said.partition(" ")
    return f"{ {'have': 'has', 'hold': 'holds'}[verb] } {rest}"

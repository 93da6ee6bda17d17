"""The photographs that image models are measured on by default, reduced from those of scikit-image.

They have at most 224 pixels a side. What a photograph becomes at 32 x 32 pixels, which is what the
vision transformers that come with the package see, is the same from the small one as from the large
one: the differences of a plain reduction, a level here and there, are put back.

Run: python benchmarks/photographs.py (needs scikit-image)
"""

from pathlib import Path

import numpy as np
import skimage
from PIL import Image

from lipbound.models.readers import PHOTOGRAPHS

FILES = (
    *("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg"),
    *("camera.png", "coins.png", "grass.png"),
)
"""Of scikit-image, in the order in which they are samples."""
SIDE, SEEN = 224, (32, 32)
BILINEAR = Image.Resampling.BILINEAR


def resized(channel: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(Image.fromarray(channel.astype(np.float32)).resize(size, BILINEAR))


def reduced(photograph: Image.Image) -> Image.Image:
    """A smaller one, which is the same at `SEEN`."""
    wanted = np.atleast_3d(np.asarray(photograph.resize(SEEN, BILINEAR), dtype=float))
    small = photograph.copy()
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    values = np.atleast_3d(np.asarray(small, dtype=float))
    for c in range(wanted.shape[2]):
        for _ in range(200):
            missing = wanted[..., c] - resized(values[..., c], SEEN)
            values[..., c] = (values[..., c] + resized(missing, small.size)).clip(0, 255)
    made = Image.fromarray(np.rint(values).astype(np.uint8).squeeze())
    if made.resize(SEEN, BILINEAR).tobytes() != photograph.resize(SEEN, BILINEAR).tobytes():
        raise SystemExit("it is not the same any more")
    return made


def main() -> None:
    for number, name in enumerate(FILES, 1):
        large = Image.open(Path(skimage.__file__).parent / "data" / name)
        small = PHOTOGRAPHS / f"{number}-{Path(name).stem.removesuffix('_left')}.png"
        reduced(large).save(small, optimize=True)
        print(small, small.stat().st_size)


if __name__ == "__main__":
    main()

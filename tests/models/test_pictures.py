"""Images of every depth and format against arrays that are worked out by hand."""

import io
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import lipbound as lb
from lipbound.errors import InputsError, Notice
from lipbound.models.inputs import prepare
from lipbound.models.loading import Checkpoint, load_checkpoint
from lipbound.models.readers.images import rgb

RAMP = np.linspace(0, 255, 400).reshape(20, 20).round()
"""Grey levels of 8 bits."""


@pytest.fixture(scope="module")
def checkpoint(vit: Path) -> Checkpoint:
    return load_checkpoint(vit)


def grey(values: np.ndarray, dtype: type) -> Image.Image:
    return Image.fromarray(values.astype(dtype))


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (grey(RAMP * 257, np.uint16), "16 bits"),
        (grey(RAMP * 257, np.int32), "taken for those of 16 bits"),
        (grey(RAMP, np.int32), "taken for those of 8 bits"),
        (grey(RAMP / 255, np.float32), "floating-point numbers from 0 to 1"),
        (grey(RAMP, np.float32), "floating-point numbers below 256"),
    ],
)
def test_any_depth_is_the_picture_of_8_bits(
    checkpoint: Checkpoint, picture: Image.Image, said: str
) -> None:
    with pytest.warns(Notice, match=f"1 of 1 images .*{said}"):
        inputs = prepare(checkpoint, [picture])
    assert torch.equal(
        inputs.batch["pixel_values"],
        prepare(checkpoint, [grey(RAMP, np.uint8)]).batch["pixel_values"],
    )
    assert said in inputs.notes[0]


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_files_of_16_bits(ending: str, tmp_path: Path) -> None:
    grey(RAMP * 257, np.uint16).save(tmp_path / f"x.{ending}")
    with Image.open(tmp_path / f"x.{ending}") as picture:
        assert np.array_equal(np.asarray(rgb(picture, Counter()))[..., 0], RAMP)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (grey(RAMP - 5, np.float32), "values from -5 to 250"),
        (grey(RAMP * 1000, np.int32), "values from 0 to 255000 .mode I., whose range is not known"),
        (grey(RAMP / 0.5, np.float32), "range is not known; scale them to 0 to 1 or 0 to 255"),
        (grey(np.full((4, 4), np.nan), np.float32), "nan"),
    ],
)
def test_ranges_that_are_not_known_are_refused(
    checkpoint: Checkpoint, picture: Image.Image, message: str
) -> None:
    with pytest.raises(
        InputsError, match=f"image 0 of 1 given image is not a readable image: it has .*{message}"
    ):
        prepare(checkpoint, [picture])


def with_alpha(alpha: int) -> Image.Image:
    picture = np.full((8, 8, 4), 255, dtype=np.uint8)
    picture[..., :3], picture[:4, :, 3] = (200, 0, 0), alpha
    return Image.fromarray(picture)


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "PA"])
def test_transparent_parts_are_laid_on_white(mode: str) -> None:
    if mode == "PA":
        pytest.importorskip("PIL", "12.0", reason="older ones make such pictures without alpha")
    told = Counter[str]()
    made = np.asarray(rgb(with_alpha(0).convert(mode), told))
    assert abs(made[:4].astype(int) - 255).max() == 0
    # palettes have few colours
    assert abs(made[4:].astype(int) - (200, 0, 0)).max() <= (0 if mode != "PA" else 26)
    assert "laid on white" in next(iter(told))


def test_half_transparent_grey() -> None:
    values = np.stack([np.zeros((4, 4)), np.full((4, 4), 128)], -1).astype(np.uint8)
    made = np.asarray(rgb(Image.fromarray(values), Counter()))
    assert set(made.ravel().tolist()) == {127}


def test_an_opaque_picture_is_told_nothing_of() -> None:
    told = Counter[str]()
    assert np.array_equal(
        np.asarray(rgb(with_alpha(255), told)), np.asarray(with_alpha(255).convert("RGB"))
    )
    assert not told


def test_the_camera_was_held_upright(checkpoint: Checkpoint, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    Image.fromarray(values).save(tmp_path / "turned.png", exif=exif)
    upright = Image.fromarray(np.ascontiguousarray(np.rot90(values, -1)))
    assert torch.equal(
        prepare(checkpoint, tmp_path / "turned.png", samples=1).batch["pixel_values"],
        prepare(checkpoint, upright).batch["pixel_values"],
    )


@pytest.mark.parametrize("ending", ["gif", "tif"])
def test_later_frames_are_told(checkpoint: Checkpoint, ending: str, tmp_path: Path) -> None:
    frames = [grey(RAMP, np.uint8), grey(255 - RAMP, np.uint8)]
    frames[0].save(tmp_path / f"moving.{ending}", save_all=True, append_images=frames[1:])
    with pytest.warns(Notice, match="1 of 1 images have further frames, which were left out"):
        pixels = prepare(checkpoint, tmp_path / f"moving.{ending}", samples=1).batch["pixel_values"]
    assert torch.allclose(pixels, prepare(checkpoint, frames[0]).batch["pixel_values"], atol=0.02)


def test_notes_are_in_the_run(vit: Path) -> None:
    with pytest.warns(Notice, match="16 bits"):
        ds = lb.compare(
            vit,
            [grey(RAMP * 257, np.uint16)],
            bounds=["castin"],
            delta=None,
            layers=0,
            progress=False,
        )
    assert any("16 bits" in note for note in ds.attrs["notes"])
    assert ds.attrs["preprocessing"].endswith(
        ": size 16 x 16, resample bilinear, rescale factor 0.00392157, image mean (0.5, 0.5, "
        "0.5), image std (0.5, 0.5, 0.5)"
    )


def test_arrays_are_pictures(checkpoint: Checkpoint) -> None:
    colours = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    expected = prepare(checkpoint, [Image.fromarray(colours), grey(RAMP, np.uint8)]).batch[
        "pixel_values"
    ]
    assert torch.equal(
        prepare(checkpoint, [colours, RAMP.astype(np.uint8)]).batch["pixel_values"], expected
    )
    with pytest.raises(InputsError, match=r"holds items of type ndarray, but .* takes images"):
        prepare(checkpoint, [colours.astype(np.float64)])


def test_paths_of_images(checkpoint: Checkpoint, tmp_path: Path) -> None:
    pictures = [grey(np.roll(RAMP, k), np.uint8) for k in range(3)]
    for k, picture in enumerate(pictures):
        picture.save(tmp_path / f"{k}.png")
    expected = prepare(checkpoint, pictures).batch["pixel_values"]
    names = [str(tmp_path / f"{k}.png") for k in range(3)]
    assert torch.equal(prepare(checkpoint, names).batch["pixel_values"], expected)
    assert torch.equal(
        prepare(checkpoint, [Path(name) for name in names]).batch["pixel_values"], expected
    )
    with pytest.raises(InputsError, match=r"data holds .*9\.png, which is no such file"):
        prepare(checkpoint, [tmp_path / "0.png", tmp_path / "9.png"])
    with pytest.raises(InputsError, match=r"data holds 9\.png, which is no such file"):
        prepare(checkpoint, ["9.png"])
    frame = pd.DataFrame({"image": names})
    assert torch.equal(prepare(checkpoint, frame).batch["pixel_values"], expected)


def test_rows_that_are_no_images(checkpoint: Checkpoint) -> None:
    good = io.BytesIO()
    grey(RAMP, np.uint8).save(good, "png")
    rows = [{"bytes": good.getvalue(), "path": None}, {"bytes": b"garbage", "path": None}]
    table = datasets.Dataset.from_dict({"image": rows}).cast_column("image", datasets.Image())
    assert prepare(checkpoint, table, samples=1).samples == 1
    with pytest.raises(InputsError, match="row 1 of a dataset cannot be read: "):
        prepare(checkpoint, table)
    with pytest.raises(InputsError, match="breaks off after 1 rows: "):
        prepare(checkpoint, table.to_iterable_dataset())


def test_folders_of_classes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("cat", "dog", "owl"):
        (tmp_path / name).mkdir()
        for k in range(6):
            grey(
                np.random.default_rng(10 * ord(name[0]) + k).integers(0, 255, (16, 16)), np.uint8
            ).save(tmp_path / name / f"{k}.png")
    with pytest.warns(
        Notice,
        match=r"are sorted by folder, and the first 4 are of 1 of 3 folders \(cat\); shuffle=0, "
        r"or another seed, draws from all",
    ):
        first = prepare(checkpoint, tmp_path, samples=4)
    every = prepare(checkpoint, tmp_path, samples="all")
    assert every.samples == 18
    assert not every.notes
    assert torch.equal(every.batch["pixel_values"][:4], first.batch["pixel_values"])
    drawn = prepare(checkpoint, tmp_path, samples=6, shuffle=3)
    assert drawn.description.endswith(", shuffled with seed 3")
    assert not drawn.notes
    found = [
        next(k for k in range(18) if torch.equal(every.batch["pixel_values"][k], one))
        for one in drawn.batch["pixel_values"]
    ]
    assert len(set(found)) == 6
    assert len({k // 6 for k in found}) > 1
    assert torch.equal(
        prepare(checkpoint, tmp_path, samples=6, shuffle=3).batch["pixel_values"],
        drawn.batch["pixel_values"],
    )
    assert not torch.equal(
        prepare(checkpoint, tmp_path, samples=6, shuffle=4).batch["pixel_values"],
        drawn.batch["pixel_values"],
    )

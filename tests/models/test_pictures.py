"""Images of every depth and format against arrays that are worked out by hand."""

import io
from collections import Counter

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from support.checks import refused

import lipbound as lb
from lipbound.models.loading import load_checkpoint
from lipbound.models.readers import rgb

RAMP = np.linspace(0, 255, 400).reshape(20, 20).round()
"""Grey levels of 8 bits."""
RANDOM = np.random.default_rng(0).integers(0, 255, (3, 12, 20, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def checkpoint(vit):
    return load_checkpoint(vit)


def grey(values):
    return Image.fromarray(values.astype(np.uint8))


def pixels(checkpoint, data, **options):
    return lb.prepare(checkpoint, data, **options).batch["pixel_values"]


@pytest.mark.parametrize(("dtype", "mode"), [("uint16", "I;16"), ("int32", "I"), ("float32", "F")])
def test_depths_of_more_than_8_bits_are_refused(checkpoint, dtype, mode, tmp_path):
    """What white is, their numbers do not say."""
    picture = Image.fromarray(RAMP.astype(dtype))
    picture.save(tmp_path / "x.tif")
    for data in (tmp_path / "x.tif", [picture]):
        words = f" is not a readable image: it is of mode {mode}", "bring it to 8 bits"
        refused(lambda d=data: lb.prepare(checkpoint, d), *words, error=lb.errors.InputsError)


def with_alpha(alpha):
    picture = np.full((8, 8, 4), 255, dtype=np.uint8)
    picture[..., :3], picture[:4, :, 3] = (200, 0, 0), alpha
    return Image.fromarray(picture)


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "PA"])
def test_transparent_parts_are_laid_on_white(mode):
    if mode == "PA":
        pytest.importorskip("PIL", "12.0", reason="older ones make such pictures without alpha")
    told = Counter[str]()
    made = np.asarray(rgb(with_alpha(0).convert(mode), told))
    assert abs(made[:4].astype(int) - 255).max() == 0
    # palettes have few colours
    assert abs(made[4:].astype(int) - (200, 0, 0)).max() <= (0 if mode != "PA" else 26)
    assert "laid on white" in next(iter(told))


def test_half_transparent_grey_and_opaque_colours():
    values = np.stack([np.zeros((4, 4)), np.full((4, 4), 128)], -1).astype(np.uint8)
    assert set(np.asarray(rgb(Image.fromarray(values), Counter())).ravel().tolist()) == {127}
    opaque, told = with_alpha(255), Counter[str]()
    assert np.array_equal(np.asarray(rgb(opaque, told)), np.asarray(opaque.convert("RGB")))
    assert not told


def test_the_camera_was_held_upright(checkpoint, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    Image.fromarray(RANDOM[0]).save(tmp_path / "turned.png", exif=exif)
    upright = Image.fromarray(np.ascontiguousarray(np.rot90(RANDOM[0], -1)))
    found = pixels(checkpoint, tmp_path / "turned.png", samples=1)
    assert torch.equal(found, pixels(checkpoint, upright))


@pytest.mark.parametrize("ending", ["gif", "tif"])
def test_later_frames_are_told(checkpoint, ending, tmp_path):
    file, frames = tmp_path / f"moving.{ending}", [grey(RAMP), grey(255 - RAMP)]
    frames[0].save(file, save_all=True, append_images=frames[1:])
    with pytest.warns(lb.Notice, match="1 of 1 images have further frames, which were left out"):
        found = pixels(checkpoint, file, samples=1)
    assert torch.allclose(found, pixels(checkpoint, frames[0]), atol=0.02)


def test_notes_are_in_the_run(vit):
    options = {"bounds": ["castin"], "delta": None, "layers": 0, "progress": False}
    with pytest.warns(lb.Notice, match="laid on white"):
        ds = lb.compare(vit, [with_alpha(0)], **options)
    assert any("laid on white" in note for note in ds.attrs["notes"])
    assert ds.attrs["preprocessing"].endswith(
        ": size 16 x 16, resample bilinear, rescale factor 0.00392157, image mean (0.5, 0.5, "
        "0.5), image std (0.5, 0.5, 0.5)"
    )


def test_pictures_wherever_they_are(checkpoint, tmp_path):
    pictures = [Image.fromarray(values) for values in RANDOM]
    names = [tmp_path / f"{k}.png" for k in range(3)]
    for name, picture in zip(names, pictures, strict=True):
        picture.save(name)
    expected = pixels(checkpoint, pictures)
    assert expected.shape == (3, 3, 16, 16)
    table = datasets.Dataset.from_dict({"img": pictures, "label": [0, 1, 2]})
    table = table.cast_column("img", datasets.Image())
    frame = pd.DataFrame({"image": list(map(str, names))})
    everywhere = [tmp_path, names, frame["image"].tolist(), list(RANDOM), table, frame]
    for data in everywhere:
        assert torch.equal(pixels(checkpoint, data), expected)
    for data in (names[0], pictures[0]):
        assert torch.equal(pixels(checkpoint, data), expected[:1])
    table.to_parquet(tmp_path / "t.parquet")
    assert torch.equal(pixels(checkpoint, tmp_path / "t.parquet", samples=2), expected[:2])
    for data, words in (
        ([names[0], tmp_path / "9.png"], "9.png, which is no such file"),
        (["9.png"], "data holds 9.png, which is no such file"),
        ([RANDOM[0].astype(np.float64)], "holds items of type ndarray, but "),
    ):
        refused(lambda d=data: lb.prepare(checkpoint, d), words, error=lb.errors.InputsError)


def test_rows_that_are_no_images(checkpoint):
    good = io.BytesIO()
    grey(RAMP).save(good, "png")
    rows = [{"bytes": good.getvalue(), "path": None}, {"bytes": b"garbage", "path": None}]
    table = datasets.Dataset.from_dict({"image": rows}).cast_column("image", datasets.Image())
    assert lb.prepare(checkpoint, table, samples=1).samples == 1
    for data in (table, table.to_iterable_dataset()):
        words = "a dataset cannot be read after 1 rows: "
        refused(lambda d=data: lb.prepare(checkpoint, d), words, error=lb.errors.InputsError)


def test_folders_of_classes(checkpoint, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog", "owl"):
        (tmp_path / name).mkdir()
        for k in range(6):
            grey(rng.integers(0, 255, (16, 16))).save(tmp_path / name / f"{k}.png")
    first = pixels(checkpoint, tmp_path, samples=4)
    whole = lb.prepare(checkpoint, tmp_path, samples="all")
    every = whole.batch["pixel_values"]
    assert (whole.samples, whole.notes) == (18, [])
    assert torch.equal(every[:4], first)
    drawn = lb.prepare(checkpoint, tmp_path, samples=6, shuffle=3)
    assert drawn.description.endswith(", shuffled with seed 3")
    assert not drawn.notes
    mine = drawn.batch["pixel_values"]
    found = [next(k for k in range(18) if torch.equal(every[k], one)) for one in mine]
    assert len(set(found)) == 6
    assert len({k // 6 for k in found}) > 1
    for seed, same in ((3, True), (4, False)):
        again = pixels(checkpoint, tmp_path, samples=6, shuffle=seed)
        assert torch.equal(again, mine) == same

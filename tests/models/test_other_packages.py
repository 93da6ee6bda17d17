"""Models that timm and open_clip make by name, with packages of ours in their place."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import lipbound as lb
from lipbound.errors import CheckpointError


class Tower(nn.Module):
    """A transformer on four patches of an image of 4 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.patches(x).flatten(2).mT)


class Pair(nn.Module):
    """Two towers."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.words = Tower(), nn.Embedding(9, 8)
        self.text = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def encode_image(self, image: Tensor) -> Tensor:
        return self.visual(image)

    def encode_text(self, text: Tensor) -> Tensor:
        return self.text(self.words(text))


def transform(image: Image.Image) -> Tensor:
    return torch.as_tensor(np.asarray(image.resize((4, 4))) / 255.0).float().permute(2, 0, 1)


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    timm, data, clip = ModuleType("timm"), ModuleType("timm.data"), ModuleType("open_clip")

    def create_model(name: str, *, pretrained: bool) -> nn.Module:
        if name.partition(".")[0] != "tower_tiny":
            raise RuntimeError(f"Unknown model ({name})")
        torch.manual_seed(5 if pretrained else 6)
        return Tower()

    def create_model_and_transforms(name: str, *, pretrained: str | None) -> tuple[Any, Any, Any]:
        torch.manual_seed(7)
        return Pair(), None, transform

    made: dict[str, Any] = {"create_model": create_model, "data": data}
    vars(timm).update(made)
    settings: dict[str, Any] = {"resolve_model_data_config": lambda model: {}}
    vars(data).update(settings, create_transform=lambda is_training: transform)
    tags = [("pair", "tag_a"), ("pair", "tag_b"), ("other", "tag_c")]
    vars(clip).update(list_pretrained=lambda: tags)
    vars(clip)["create_model_and_transforms"] = create_model_and_transforms
    for name, module in (("timm", timm), ("timm.data", data), ("open_clip", clip)):
        monkeypatch.setitem(sys.modules, name, module)


IMAGES = [Image.fromarray(np.full((6, 6, 3), 40 * k, dtype=np.uint8)) for k in (1, 4)]


def test_timm_models_read_images(tmp_path: Path) -> None:
    """Weights of the hub, or of a file; the transform is timm's, and is told."""
    ds = lb.compare("timm:tower_tiny.in1k", IMAGES, bounds="none", progress=False)
    assert ds.attrs["preprocessing"].startswith("timm's transform, ")
    torch.manual_seed(5)
    own = Tower().eval()
    pixels = torch.stack([transform(image) for image in IMAGES])
    expected = lb.compare(own, pixels, bounds="none", progress=False)
    np.testing.assert_allclose(ds["exact"], expected["exact"], rtol=1e-6)
    assert lb.verify(ds, data=IMAGES).ok
    save_file(own.state_dict(), tmp_path / "tower.safetensors")
    name = f"timm:tower_tiny@{tmp_path / 'tower.safetensors'}"
    again = lb.compare(name, IMAGES, bounds="none", progress=False)
    np.testing.assert_array_equal(ds["exact"], again["exact"])
    assert again.attrs["revision"] == ds.attrs["revision"]


def test_open_clip_models_read_images_and_tokens() -> None:
    ds = lb.compare("open_clip:pair@tag_b", IMAGES, bounds="none", progress=False)
    assert ds["layer_name"].values.tolist() == ["inner.visual.block.self_attn"]
    ready = {"input_ids": torch.tensor([[1, 2, 3]])}
    words = lb.compare("open_clip:pair@tag_b", ready, bounds="none", progress=False)
    assert words["layer_name"].values.tolist() == ["inner.text.self_attn"]


def test_what_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (
        ("timm:tower_tin", "timm:tower_tin cannot be loaded: Unknown model"),
        ("open_clip:pair", r"name one, open_clip:pair@TAG \(tag_a, tag_b\), or a file"),
        ("timm:tower_tiny@weights.pth", "weights.pth is no .safetensors file"),
    ):
        with pytest.raises(CheckpointError, match=why):
            lb.load_checkpoint(name)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*Tower"):
        lb.load_checkpoint(f"timm:tower_tiny@{tmp_path / 'other.safetensors'}")
    with pytest.raises(CheckpointError, match="weights 'layers' was given for a model of timm"):
        lb.load_checkpoint("timm:tower_tiny", weights="layers")
    with pytest.raises(CheckpointError, match="revisions are for hub models"):
        lb.load_checkpoint("timm:tower_tiny", revision="main")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(CheckpointError, match="needs the package timm, which cannot be imported"):
        lb.load_checkpoint("timm:tower_tiny")

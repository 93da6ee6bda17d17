"""Models of several towers, and models that declare another main input than they take."""

import pytest
import torch
import transformers as tf
from support.models import IMAGE, TEXT, build

import lipbound as lb
from lipbound.models.loading import Checkpoint, load_checkpoint


def clip(kind: str) -> tf.PreTrainedModel:
    """A small model of two towers, biases and all random."""
    name = {"clip": "CLIP", "owlvit": "OwlViT", "siglip": "Siglip"}[kind]
    text = {**TEXT, "eos_token_id": 2, "pad_token_id": 0}
    text |= {"projection_size": 24} if kind == "siglip" else {}
    config = {"text_config": text, "vision_config": dict(IMAGE), "projection_dim": 24}
    return build(lambda: getattr(tf, f"{name}Model")(getattr(tf, f"{name}Config")(**config)))


def both() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "input_ids": torch.tensor([[1, 7, 9, 2]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.int64),
        "pixel_values": torch.randn(1, 3, 16, 16),
    }


@pytest.mark.parametrize("kind", ["clip", "owlvit", "siglip"])
def test_two_towers_are_compared_as_they_are_captured(kind: str) -> None:
    model = clip(kind)
    layers = lb.capture(model, both())
    ds = lb.compare(model, both(), bounds=["castin"], delta=None, progress=False)
    pooled = int(kind == "siglip")  # by attention of one learned query to the patches
    assert ds.sizes["layer"] == len(layers) == 4 + pooled
    assert (ds["stream"] == "memory").sum() == pooled
    for i, att in enumerate(layers):
        expected = lb.spectral_norm(att, tol=1e-4).lower.double()
        assert ds["exact"].values[:, i] == pytest.approx(expected.numpy(), rel=2e-3, abs=0)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_what_towers_lack(kind: str) -> None:
    checkpoint = load_checkpoint(clip(kind))
    for name in ("input_ids", "pixel_values"):
        given = {key: t for key, t in both().items() if key != name}
        with pytest.raises(lb.errors.CaptureError, match="cannot compute with these inputs"):
            lb.capture(checkpoint, lb.prepare(checkpoint, given))
    pixels, number = both()["pixel_values"], r"input_ids has the number .* knows tokens 0 to 59"
    wrong = ([[1, 60]], number), ([[-1, 2]], number), ([[1] * 41], "exceed the 40 positions")
    for ids, why in wrong:
        with pytest.raises(lb.errors.InputsError, match=why):
            lb.prepare(checkpoint, {"input_ids": torch.tensor(ids), "pixel_values": pixels})


class Undeclared(tf.ViTModel):
    """A vision model that does not say what it takes."""

    main_input_name = "input_ids"


def test_the_main_input_is_one_that_the_model_takes(vit: object) -> None:
    checkpoint = load_checkpoint(build(lambda: Undeclared(tf.ViTConfig(**IMAGE))), processor=vit)
    assert (checkpoint.main_input, checkpoint.modality) == ("pixel_values", "image")
    pixels = {"pixel_values": both()["pixel_values"]}
    ds = lb.compare(checkpoint.model, pixels, bounds=["castin"], delta=None, progress=False)
    assert ds.sizes["layer"] == 2
    assert lb.prepare(checkpoint, samples=2).batch["pixel_values"].shape == (2, 3, 16, 16)


def test_what_takes_neither() -> None:
    class Other(tf.ViTModel):
        main_input_name = "input_ids"

        def forward(self, waves: torch.Tensor, **kwargs: object) -> object:
            return super().forward(waves)

    checkpoint = Checkpoint(build(lambda: Other(tf.ViTConfig(**IMAGE))), "waves", "", None)
    assert checkpoint.main_input == "waves"
    with pytest.raises(lb.errors.InputsError, match="takes waves; give inputs="):
        lb.prepare(checkpoint)

"""Ready inputs, lengths, hub datasets, tokenizers and processors; what is refused, in one table."""

from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pytest
import skimage
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import save_file
from support.checks import refused
from support.models import AFFINE, LLAMA, MODERN, build

import lipbound as lb
from lipbound.errors import CheckpointError, InputsError, Notice
from lipbound.models.checkpoint import Inputs
from lipbound.models.loading import Checkpoint, load_checkpoint
from lipbound.models.readers import PHOTOGRAPHS


@pytest.fixture(scope="module")
def bert(bert):
    return load_checkpoint(bert)


@pytest.fixture(scope="module")
def vit(vit):
    return load_checkpoint(vit)


TEXTS = ["the ferry is in a clock", "keeper", "   ", "a lighthouse and the island"]


def test_default_photographs_are_those_of_scikit_image_as_builtin_models_see_them():
    """Numbers that were published on the large ones are those on the small ones."""
    images = sorted(PHOTOGRAPHS.glob("*.png"))
    assert sum(image.stat().st_size for image in images) < 5e5
    folder = Path(skimage.__file__).parent / "data"
    large = [next(folder.glob(f"{image.stem[2:]}*.*g")) for image in images]
    checkpoint = load_checkpoint("builtin:vit")
    found, expected = lb.prepare(checkpoint), lb.prepare(checkpoint, large)
    assert (found.samples, found.description) == (8, "photographs from scikit-image")
    assert torch.equal(found.batch["pixel_values"], expected.batch["pixel_values"])


def test_ready_inputs(bert, tmp_path):
    ids = {"input_ids": torch.arange(12).view(3, 4)}
    save_file(ids, tmp_path / "ready.safetensors")
    found = [lb.prepare(bert, data, samples=2) for data in (ids, tmp_path / "ready.safetensors")]
    assert all(torch.equal(one.batch["input_ids"], ids["input_ids"][:2]) for one in found)
    assert found[0].fingerprint == found[1].fingerprint != lb.prepare(bert, ids).fingerprint
    assert lb.prepare(bert, ids).samples == 3


def test_hub_datasets_are_named_with_split_and_config(bert, monkeypatch):
    asked = []

    def fake(repo, config=None, split=None):
        asked.append((repo, config, split))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", fake)
    hub, splits = Mock(), ["train", "validation"]
    monkeypatch.setattr("lipbound.models.readers.HfApi", hub)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda repo, config: splits)
    found = lb.prepare(bert, "owner/news:small", max_length=40)
    assert found.description == "owner/news:small, validation split"
    lb.prepare(bert, "news", split="extra", max_length=40)
    assert asked == [("owner/news", "small", "validation"), ("news", None, "extra")]
    monkeypatch.undo()
    # `datasets` tries for half a minute, unless it is told that there is no hub
    hub().dataset_info.side_effect = OSError("no connection")
    monkeypatch.setattr("lipbound.models.readers.HfApi", hub)
    asked_again = Mock(side_effect=AssertionError("the hub is asked again"))
    monkeypatch.setattr("datasets.load.HfApi", Mock(return_value=Mock(hf_hub_download=asked_again)))
    for name in ("news", "news!"):
        with pytest.raises(InputsError, match=rf"^data '{name}' could not .*, \['{name}'\], or in"):
            lb.prepare(bert, name, max_length=40)
    assert not asked_again.called
    assert not datasets.config.HF_HUB_OFFLINE


def test_positions(bert):
    """RoBERTa's begin behind the padding index, XLNet declares -1, dynamic rotary tables grow."""

    def of(make):
        return Checkpoint(build(make), "", "", None).positions

    assert [of(AFFINE[name]) for name in ("bert", "roberta", "gpt2")] == [40, 38, 40]
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    dynamic = tf.LlamaConfig(**LLAMA, rope_parameters=rope)
    assert of(lambda: tf.LlamaModel(dynamic)) == 160
    assert of(MODERN["Llama"]) == 40
    config = tf.XLNetConfig(vocab_size=60, d_model=24, n_layer=1, n_head=4, d_inner=32)
    checkpoint = Checkpoint(build(lambda: tf.XLNetModel(config)), "xlnet", "", None)
    assert checkpoint.positions is None
    assert lb.prepare(checkpoint, {"input_ids": torch.ones(1, 200, dtype=torch.long)}).samples == 1


def test_a_length_that_was_not_asked_for_is_what_the_model_takes(bert, tmp_path):
    """Windows and several texts, in a run too, which is found again by what it recorded."""
    story, note = "the ferry is in a clock " * 20, "texts are cut at 40 tokens, the positions of "
    for data in (story, [story, "the keeper"]):
        with pytest.warns(Notice, match=note):
            inputs = lb.prepare(bert, data)
        asked = lb.prepare(bert, data, max_length=40)
        assert torch.equal(inputs.batch["input_ids"], asked.batch["input_ids"])
        assert inputs.preprocessing == asked.preprocessing
    ds = lb.compare(bert.name, story, samples=1, bounds="none", out=tmp_path / "run.zarr")
    assert ds["length"].values.tolist() == [40]
    assert any(note in one for one in ds.attrs["notes"])
    assert lb.verify(tmp_path / "run.zarr").ok


NOT_FINITE = {"inputs_embeds": torch.full((1, 3, 24), torch.nan)}
PICTURE = Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8))
BAD = [
    # which model, data, and what must be said; files of all kinds are in tests/test_bad_inputs.py
    ("bert", [], "empty list"),
    ("bert", [" ", ""], "no text in it"),
    ("bert", PICTURE, "holds items of type Image, but "),
    ("bert", [PICTURE], "holds items of type Image, but "),
    ("bert", pd.DataFrame([["x", "y"]]), "name one of 0, 1 with column="),
    ("bert", pd.DataFrame({"a b": ["x"], "c": ["y"]}), "name one of 'a b', c with column="),
    ("bert", 3, "data is 3"),
    ("bert", {"input_ids": [1, 2]}, "must be named tensors"),
    ("bert", NOT_FINITE, "must be floating-point and finite"),
    ("bert", ["w1", [4, 5]], "holds items of type list"),
    ("vit", ["words"], "holds items of type str"),
]


def test_bad_data(bert, vit):
    for model, data, words in BAD:
        model = {"bert": bert, "vit": vit}[model]
        refused(lambda m=model, d=data: lb.prepare(m, d, max_length=40), words, error=InputsError)
    for number in ("some", 1.5, 0, True):
        words = "it must be a whole number, at least 1, or 'all'"
        refused(lambda n=number: lb.prepare(bert, TEXTS, samples=n), words, error=InputsError)


def test_tokenizers_and_processors_are_lent(bert, vit):
    lent = load_checkpoint(bert.name, tokenizer="Builtin:gpt2").tokenizer()
    own = load_checkpoint("builtin:gpt2").tokenizer()
    assert lent("the clock")["input_ids"] == own("the clock")["input_ids"]
    there = load_checkpoint(vit.name, processor="builtin:vit").image_processor()
    assert there.size == load_checkpoint("builtin:vit").image_processor().size
    with pytest.raises(CheckpointError, match="unknown builtin checkpoint 'gpt3'; did you mean"):
        load_checkpoint(bert.name, tokenizer="builtin:gpt3")


def test_settings_of_the_forward_pass_are_passed_on():
    """Images of another size than the model's, which its positions are interpolated for."""
    vit = build(AFFINE["vit"])
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    batch = {"pixel_values": pixels, "interpolate_pos_encoding": True}
    inputs = lb.prepare(load_checkpoint(vit), batch)
    assert inputs.options == {"interpolate_pos_encoding": True}
    assert inputs.fingerprint != Inputs(inputs.batch, "").fingerprint
    ds = lb.compare(vit, batch, bounds=["lipbound"], exact_samples=1, progress=False)
    assert ds.attrs["tokens"] == 37
    with pytest.raises(InputsError, match="smaller is no setting of ViTModel's forward pass"):
        lb.prepare(load_checkpoint(vit), {**batch, "smaller": True})

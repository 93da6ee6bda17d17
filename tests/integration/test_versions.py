"""Whatever versions of transformers, zarr and others are installed, numbers are the same, and what
one of them cannot read is said. `make test-old` runs these under transformers 4."""

import importlib.metadata
import json

import numpy as np
import pytest
import torch
import transformers as tf
import xarray as xr
from packaging.version import Version
from PIL import Image
from support.checks import close, refused
from support.models import build

import lipbound as lb
from lipbound.models.weight_files import unreadable
from lipbound.runs.store import read

OLD = Version(tf.__version__).major < 5
LLAMA = {"rope_theta": 500000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("name", "inputs", "largest", "mean"),
    [
        ("gpt2", "147c7fb71d00", 3.3037779, 1.31743035),
        ("llama", "147c7fb71d00", 1.83994508, 1.33554508),
        ("qwen3", "147c7fb71d00", 2.25359841, 1.22285217),
        ("minilm", "e26cec49faba", 7.47301459, 4.33142061),
        ("vit", "1b0c4a6da30b", 6.64934614, 2.79676182),
    ],
)
def test_builtins_are_the_same(name, inputs, largest, mean):
    """Measured on torch 2.4 and 2.13, with transformers 4.57, 5.0 and 5.23.

    The tolerance is for the tokens of ViT's later layers: its own softmax is in float32 in 4.57 and
    5.23, and in float64 in 5.0.
    """
    shades = np.add.outer(np.arange(40) * 5, np.arange(48) * 2)[..., None].repeat(3, -1)
    picture = Image.fromarray(shades.astype("uint8"))
    given = {"data": [picture]} if name == "vit" else {"samples": 1, "max_length": 16}
    how = {"dtype": "float64", "tol": 1e-8, "bounds": ["lipbound"], "progress": False}
    ds = lb.compare(f"builtin:{name}", **given, **how)
    assert ds.attrs["data_fingerprint"].startswith(f"sha256:{inputs}")
    exact = ds["exact"].values
    found = (exact.max(), np.exp(np.log(exact).mean()))
    np.testing.assert_allclose(found, (largest, mean), rtol=1e-7)


def save_llama(folder, **said):
    """Write a small Llama, and return it; what its configuration says may be said otherwise."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 64, "num_hidden_layers": 1}
    config = tf.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64)
    model = build(lambda: tf.LlamaModel(config))
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written = {key: value for key, value in written.items() if not key.startswith("rope")}
    written |= {"transformers_version": "5.23.0"} | said
    (folder / "config.json").write_text(json.dumps(written))
    return model


def test_rotary_angles_are_those_that_the_checkpoint_says_or_it_is_refused(tmp_path):
    save_llama(tmp_path, rope_parameters=LLAMA)
    if OLD:  # which takes 10000 without a word
        words = "transformers 5.23.0", "rope_parameters", ">=5"
        refused(lambda: lb.load_checkpoint(tmp_path), *words, error=lb.errors.CheckpointError)
        return
    turns_by(tmp_path, 500000.0)


def turns_by(folder, theta):
    """The rotation of a checkpoint is by powers of one over theta."""
    model = lb.load_checkpoint(folder, dtype="float64").model
    expected = theta ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    close(model.rotary_emb.inv_freq.double(), expected, 1e-6)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        {"rope_theta": 500000.0},
    ],
)
def test_rotary_angles_that_every_version_reads(said, tmp_path):
    save_llama(tmp_path, **said)
    turns_by(tmp_path, float(said.get("rope_theta", 10000.0)))


@pytest.mark.parametrize("context", [lb.attention_probabilities, lb.attention_layers])
@pytest.mark.parametrize(("name", "seen"), [("Bert", not OLD), ("ConvBert", False)])
def test_attention_that_penalties_do_not_see_is_refused(name, seen, context):
    """BERT's goes through the interface since transformers 5, and ConvBERT's has not yet."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9}
    config = getattr(tf, f"{name}Config")(num_attention_heads=2, **sizes)
    model = build(lambda: getattr(tf, f"{name}Model")(config))
    if seen:
        with context(model) as found:
            model(torch.tensor([[1, 2, 3]]))
        assert len(found) == 2
        return
    words = f"{name}Model ran, and none ", f"(transformers {tf.__version__})"
    words += ("output_attentions=True", *(["or install transformers>=5"] if OLD else []))

    def run():
        with context(model):
            model(torch.tensor([[1, 2, 3]]))

    refused(run, *words, error=lb.errors.CaptureError)


@pytest.fixture
def study(tmp_path):
    """Data with texts of fixed length, as numpy makes them, stored."""
    ds = xr.Dataset(
        {"exact": ("side", [1.0, 2.0]), "note": ("side", ["a", "bc"])},
        coords={"side": ["keys", "values"]},
        attrs={"lipbound": "0.1.0", "figure": "x", "versions": {"zarr": "999.1", "xarray": "2.0"}},
    )
    return lb.save(ds, tmp_path / "study.zarr")


def test_texts_are_stored_as_every_zarr_reads_them(study):
    for name in ("side", "note"):
        assert json.loads((study / name / "zarr.json").read_text())["data_type"] == "string"
    found = read(study)
    assert found["side"].values.tolist() == ["keys", "values"]
    assert found["note"].values.tolist() == ["a", "bc"]
    assert list(found.coords) == ["side"]


def test_a_store_of_a_newer_zarr_is_not_called_damaged(study):
    about = study / "exact" / "zarr.json"
    written = json.loads(about.read_text())
    about.write_text(json.dumps(written | {"data_type": {"name": "float1024"}}))
    with pytest.raises(lb.errors.StoreError, match=r"was written by zarr 999\.1, newer") as raised:
        read(study)
    assert "pip install --upgrade xarray zarr, or compute it again" in str(raised.value)
    assert not isinstance(raised.value, lb.errors.AlteredRunError)
    # the same of versions that are here is damage
    text = (study / "zarr.json").read_text()
    here = importlib.metadata.version("zarr")
    (study / "zarr.json").write_text(text.replace("999.1", here))
    with pytest.raises(lb.errors.AlteredRunError, match="is damaged: a part of it cannot be read"):
        read(study)


def test_pickled_weights_that_an_old_torch_may_not_read_are_not_called_damaged():
    said = "even with `weights_only=True`, we now require users to upgrade torch to at least v2.6"
    assert unreadable(ValueError(said)) == said

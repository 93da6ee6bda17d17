"""Which files of a checkpoint are read, and what is said of those that cannot be."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from support.models import LLAMA, build
from support.versions import newer_torch, newer_transformers

import lipbound as lb
from lipbound.errors import CheckpointError, Notice
from lipbound.models.loading import load_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
IDS = torch.tensor([[5, 9, 3, 17, 40, 8, 22]])
PICKLED = newer_torch("2.6", "pickled weights that transformers reads")
BOTH = pytest.mark.parametrize("weights", ["whole", "layers"])


def llama(seed: int = 0) -> tf.PreTrainedModel:
    return build(lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA)), seed)


def says(folder: Path, **entries: object) -> None:
    """Write entries into a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def outputs(folder: Path, weights: str) -> torch.Tensor:
    with torch.no_grad():
        return load_checkpoint(folder, weights=weights).model(IDS).last_hidden_state


def expected(model: tf.PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.base_model(IDS).last_hidden_state


SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
BROKEN = r"is cut off, damaged or no safetensors file \(.*\); fetch it again \(of Git LFS: `git lfs"
NO_INDEX = "is no index of weights, or an empty one, or leads elsewhere"
HARM: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a shard cut off": (SHARD, lambda whole: whole[:-200], BROKEN),
    "a header cut off": (SHARD, lambda whole: whole[:50], BROKEN),
    "a pointer": (SHARD, lambda whole: POINTER, BROKEN),
    "no bytes": (SHARD, lambda whole: b"", BROKEN),
    "text": (SHARD, lambda whole: b"<!doctype html> not found", BROKEN),
    "an index without bytes": (INDEX, lambda whole: b"", NO_INDEX),
    "an index of nothing": (INDEX, lambda w: b'{"metadata": {}, "weight_map": {}}', NO_INDEX),
    "an index of another kind": (INDEX, lambda whole: b'{"weight_map": 3}', NO_INDEX),
    "an index without sizes": (INDEX, lambda w: b'{"weight_map": {"a": "b"}}', NO_INDEX),
    "an index that leads beside": (INDEX, lambda w: w.replace(b"model-0", b"../m-0"), NO_INDEX),
    "an index that leads away": (INDEX, lambda w: w.replace(b"model-0", b"/m-0"), NO_INDEX),
}


@BOTH
@pytest.mark.parametrize("harm", HARM)
def test_the_file_that_is_wrong_is_named(harm: str, weights: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    name, change, words = HARM[harm]
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path / name))} {words}"):
        load_checkpoint(tmp_path, weights=weights)


@BOTH
def test_a_shard_that_is_not_there_is_named(weights: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "other").mkdir()
    load_checkpoint(tmp_path / "other" / "..", weights=weights)  # however the folder is reached
    (tmp_path / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD} is named by the checkpoint and not there"):
        load_checkpoint(tmp_path, weights=weights)


def written(model: tf.PreTrainedModel, file: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, file, metadata={"format": "pt"})


@BOTH
def test_the_file_that_is_read_is_told_and_alone_makes_the_revision(
    weights: str, tmp_path: Path
) -> None:
    other, options = llama(seed=3), {"weights": weights, "bounds": "none", "progress": False}
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    written(other, tmp_path / "model.safetensors")
    note = f"the weights are read from model.safetensors; {INDEX} beside it is not read"
    with pytest.warns(Notice, match=note):
        ds = lb.compare(tmp_path, {"input_ids": IDS}, **options)
    assert note in ds.attrs["notes"]
    for file in (*tmp_path.glob("model-*"), tmp_path / INDEX):
        file.unlink()
    assert load_checkpoint(tmp_path, weights=weights).revision == ds.attrs["revision"]
    assert torch.equal(outputs(tmp_path, weights), expected(other))
    written(llama(seed=4), tmp_path / "other.safetensors")
    says(tmp_path, transformers_weights="other.safetensors")
    with pytest.warns(Notice, match=r"read from other\.safetensors; model\.safetensors beside"):
        assert torch.equal(outputs(tmp_path, weights), expected(llama(seed=4)))
    says(tmp_path, transformers_weights="nowhere.safetensors")
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors is named .* and not there"):
        load_checkpoint(tmp_path, weights=weights)


@BOTH
@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"num_attention_heads": 0}, r"transformers fails on it \(ZeroDivisionError"),
        ({"head_dim": 0}, "transformers fails on it|have other shapes|do not fill"),
        pytest.param(
            {"hidden_size": 2**31},
            "its weights (have other shapes|do not fill its architecture)",
            marks=newer_transformers("models are made in memory before their weights are read"),
        ),
        (
            {"num_attention_heads": "4"},
            r"field 'num_attention_heads': TypeError: .* got str|fails on it \(TypeError",
        ),
        ({"hidden_act": "nothing"}, r"transformers fails on it \(KeyError: .*nothing"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_in_a_sentence(
    entries: dict[str, object], sentence: str, weights: str, tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    says(tmp_path, **entries)
    with pytest.raises(CheckpointError, match=sentence):
        load_checkpoint(tmp_path, weights=weights)


@BOTH
def test_shards_of_a_distributed_checkpoint_are_refused(weights: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(
        (tmp_path / "model.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match="holds a distributed checkpoint"):
        load_checkpoint(tmp_path, weights=weights)


@BOTH
@pytest.mark.parametrize(
    "asked", ["flash_attention_2", "owner/kernel-of-the-hub", "no-such-attention"]
)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_that_the_configuration_asks_for_does_not_matter(
    key: str, asked: str, weights: str, tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    says(tmp_path, **{key: asked})
    assert torch.equal(outputs(tmp_path, weights), expected(llama()))


@BOTH
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_names_that_wrappers_gave_are_not_the_models(
    prefix: str, weights: str, tmp_path: Path
) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    state = {prefix + name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"what is there instead is {prefix}embed_tokens"):
        load_checkpoint(tmp_path, weights=weights)


@PICKLED
def test_a_pickled_module_is_not_run_and_no_advice_to_run_it_is_passed_on(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError,
        match="holds other things than weights, none of which were run; save the model again",
    ) as caught:
        load_checkpoint(tmp_path)
    assert "\x1b" not in str(caught.value)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="what is there instead is epoch, state_dict"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="its file of weights is damaged or holds other"):
        load_checkpoint(tmp_path)


def test_a_finished_run_of_another_configuration_is_not_taken_for_this_one(tmp_path: Path) -> None:
    folder, inputs = tmp_path / "model", {"input_ids": IDS}
    llama().save_pretrained(folder)
    options = {"bounds": "none", "progress": False}
    ds = lb.compare(folder, inputs, **options, out=tmp_path / "a.zarr")
    says(folder, rms_norm_eps=0.5)
    found = lb.verify(ds, data=inputs, places=1)
    assert any("not the recorded configuration" in fault for fault in found.faults)
    models = [
        build(lambda eps=eps: tf.LlamaModel(tf.LlamaConfig(**LLAMA, rms_norm_eps=eps)))
        for eps in (1e-6, 0.5)
    ]
    ds = lb.compare(models[0], inputs, **options, out=tmp_path / "b.zarr")
    models[0].config.use_cache = False  # what no number depends on
    again = {**options, "out": tmp_path / "b.zarr", "resume": True}
    assert lb.compare(models[0], inputs, **again).identical(ds)
    for model, run in ((folder, "a.zarr"), (models[1], "b.zarr")):
        with pytest.raises(lb.LipboundError, match="configuration was sha256:"):
            lb.compare(model, inputs, **again | {"out": tmp_path / run})

"""Which files of a checkpoint are read, and what is said of those that cannot be."""

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from support.models import LLAMA, build, model_of
from support.versions import newer_torch, newer_transformers

import lipbound as lb
from lipbound.errors import CheckpointError, Notice

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
IDS = torch.tensor([[5, 9, 3, 17, 40, 8, 22]])
PICKLED = newer_torch("2.6", "pickled weights that transformers reads")
BOTH = pytest.mark.parametrize("weights", ["whole", "layers"])


def llama(seed=0):
    return build(lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA)), seed)


def says(folder, **entries):
    """Write entries into a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def outputs(folder, weights):
    with torch.no_grad():
        return lb.load_checkpoint(folder, weights=weights).model(IDS).last_hidden_state


def expected(model):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.base_model(IDS).last_hidden_state


SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def harmed(name, change, folder):
    """Shards and their index, of which one file has other bytes."""
    llama().save_pretrained(folder, max_shard_size="20KB")
    (folder / name).write_bytes(change((folder / name).read_bytes()))


def saying(entries, folder):
    """A whole checkpoint whose configuration says something else."""
    llama().save_pretrained(folder)
    says(folder, **entries)


def named(rename, folder):
    """A whole checkpoint whose weights have other names."""
    model = llama()
    model.config.save_pretrained(folder)
    state = {rename(name): tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def holding(value, folder):
    """A whole checkpoint with one number that is none."""
    model = llama()
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight[-1, -1] = value
    model.save_pretrained(folder)


def distributed(folder):
    llama().save_pretrained(folder)
    shard = folder / "shard-00001-model-00001-of-00001.safetensors"
    shard.write_bytes((folder / "model.safetensors").read_bytes())


def lost(folder):
    llama().save_pretrained(folder, max_shard_size="20KB")
    (folder / SHARD).unlink()


BROKEN = rf"/{SHARD} is cut off, damaged or no safetensors file \(.*\); fetch it again \(of Git LFS"
NO_INDEX = f"/{INDEX} is no index of weights, or an empty one; fetch it again"
ELSEWHERE = "is named by the checkpoint and not there; fetch it again"
FAILS = r"transformers fails on it \({}.*\); is its configuration whole, and sound"
HUGE = newer_transformers("models are made in memory before their weights are read")
TIED = r"embed_tokens\.weight among them, .* what is there instead is lm_head\.weight"
REFUSED = [
    # how it is saved, what it is saved with, and what must be said of it
    (harmed, (SHARD, lambda whole: whole[:-200]), BROKEN),
    (harmed, (SHARD, lambda whole: whole[:50]), BROKEN),
    (harmed, (SHARD, lambda whole: POINTER), BROKEN),
    (harmed, (SHARD, lambda whole: b""), BROKEN),
    (harmed, (SHARD, lambda whole: b"<!doctype html> not found"), BROKEN),
    (harmed, (INDEX, lambda whole: b""), NO_INDEX),
    (harmed, (INDEX, lambda whole: b'{"metadata": {}, "weight_map": {}}'), NO_INDEX),
    (harmed, (INDEX, lambda whole: b'{"weight_map": 3}'), NO_INDEX),
    (harmed, (INDEX, lambda whole: b'{"weight_map": {"a": "b"}}'), f"/b {ELSEWHERE}"),
    (harmed, (INDEX, lambda whole: whole.replace(b"model-0", b"../m-0")), f"m-0.* {ELSEWHERE}"),
    (harmed, (INDEX, lambda whole: whole.replace(b"model-0", b"/m-0")), f"m-0.* {ELSEWHERE}"),
    (lost, (), f"/{SHARD} {ELSEWHERE}"),
    (distributed, (), "holds a distributed checkpoint"),
    (named, (lambda name: f"_orig_mod.{name}",), r"instead is _orig_mod\.embed_tokens"),
    (named, (lambda name: f"module.{name}",), r"what is there instead is module\.embed_tokens"),
    # of tied weights safetensors' save_model keeps one name, which may be the head's
    (named, (lambda name: name.replace("embed_tokens", "lm_head"),), TIED),
    (saying, ({"transformers_weights": "gone.safetensors"},), rf"/gone\.safetensors {ELSEWHERE}"),
    (saying, ({"num_attention_heads": 0},), FAILS.format("ZeroDivisionError")),
    (saying, ({"head_dim": 0},), "transformers fails on it|have other shapes|do not fill"),
    pytest.param(saying, ({"hidden_size": 2**31},), "have other shapes|do not fill", marks=HUGE),
    (saying, ({"num_attention_heads": "4"},), f"TypeError: .* got str|{FAILS.format('TypeError')}"),
    (saying, ({"hidden_act": "nothing"},), FAILS.format("KeyError: .*nothing")),
]
NO_NUMBER = r"NaN or infinite numbers, in layers\.1\.self_attn\.k_proj\.weight"
UNFIT = [
    (saying, ({"num_hidden_layers": 3},), "would be random numbers"),
    (saying, ({"vocab_size": 70},), "could not be loaded|would be random numbers"),
    (saying, ({"quantization_config": {"quant_method": "gptq", "bits": 4}},), "quantized"),
    *((holding, (value,), NO_NUMBER) for value in (torch.nan, torch.inf, -torch.inf)),
]
ON_DISK = newer_transformers("weights are not left on disk")
REFUSED += [pytest.param(*row, marks=ON_DISK) for row in UNFIT]


@BOTH
@pytest.mark.parametrize(("save", "given", "words"), REFUSED)
def test_what_is_wrong_is_named(save, given, words, weights, tmp_path):
    save(*given, tmp_path)
    with pytest.raises(CheckpointError, match=words):
        lb.load_checkpoint(tmp_path, weights=weights)


@BOTH
def test_folders_may_be_reached_in_any_way(weights, tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "other").mkdir()
    lb.load_checkpoint(tmp_path / "other" / "..", weights=weights)


def written(model, file):
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, file, metadata={"format": "pt"})


@BOTH
def test_the_file_that_is_read_is_told_and_alone_makes_the_revision(weights, tmp_path):
    other, options = llama(seed=3), {"weights": weights, "bounds": "none", "progress": False}
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    written(other, tmp_path / "model.safetensors")
    note = f"the weights are read from model.safetensors; {INDEX} beside it is not read"
    with pytest.warns(Notice, match=note):
        ds = lb.compare(tmp_path, {"input_ids": IDS}, **options)
    assert note in ds.attrs["notes"]
    for file in (*tmp_path.glob("model-*"), tmp_path / INDEX):
        file.unlink()
    assert lb.load_checkpoint(tmp_path, weights=weights).revision == ds.attrs["revision"]
    assert torch.equal(outputs(tmp_path, weights), expected(other))
    written(llama(seed=4), tmp_path / "other.safetensors")
    says(tmp_path, transformers_weights="other.safetensors")
    with pytest.warns(Notice, match=r"read from other\.safetensors; model\.safetensors beside"):
        assert torch.equal(outputs(tmp_path, weights), expected(llama(seed=4)))


@BOTH
@pytest.mark.parametrize(
    "asked", ["flash_attention_2", "owner/kernel-of-the-hub", "no-such-attention"]
)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_that_the_configuration_asks_for_does_not_matter(key, asked, weights, tmp_path):
    llama().save_pretrained(tmp_path)
    says(tmp_path, **{key: asked})
    assert torch.equal(outputs(tmp_path, weights), expected(llama()))


@PICKLED
def test_a_pickled_module_is_not_run_and_no_advice_to_run_it_is_passed_on(tmp_path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model, tmp_path / "pytorch_model.bin")
    words = "holds other things than weights, none of which were run; save the model again"
    with pytest.raises(CheckpointError, match=words) as caught:
        lb.load_checkpoint(tmp_path)
    assert "\x1b" not in str(caught.value)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="what is there instead is epoch, state_dict"):
        lb.load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="its file is damaged or holds other"):
        lb.load_checkpoint(tmp_path)


def test_a_finished_run_of_another_configuration_is_not_taken_for_this_one(tmp_path):
    folder, inputs = tmp_path / "model", {"input_ids": IDS}
    llama().save_pretrained(folder)
    options = {"bounds": "none", "progress": False}
    ds = lb.compare(folder, inputs, **options, out=tmp_path / "a.zarr")
    says(folder, rms_norm_eps=0.5)
    found = lb.verify(ds, data=inputs, places=1)
    assert any("not the recorded configuration" in fault for fault in found.faults)
    models = [build(model_of("Llama", **LLAMA, rms_norm_eps=eps)) for eps in (1e-6, 0.5)]
    ds = lb.compare(models[0], inputs, **options, out=tmp_path / "b.zarr")
    models[0].config.use_cache = False  # what no number depends on
    again = {**options, "out": tmp_path / "b.zarr", "resume": True}
    assert lb.compare(models[0], inputs, **again).identical(ds)
    for model, run in ((folder, "a.zarr"), (models[1], "b.zarr")):
        with pytest.raises(lb.LipboundError, match="configuration was sha256:"):
            lb.compare(model, inputs, **again | {"out": tmp_path / run})

"""Which files of a checkpoint are read, and what is said of those that cannot be."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file, save_model
from support.models import LLAMA, build
from support.versions import newer_torch, newer_transformers

import lipbound as lb
from lipbound.errors import CheckpointError, Notice
from lipbound.models.loading import load_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
IDS = torch.tensor([[5, 9, 3, 17, 40, 8, 22]])
PICKLED = newer_torch("2.6", "pickled weights that transformers reads")
BOTH = pytest.mark.parametrize("weights", ["whole", "layers"])


def llama(seed: int = 0) -> tf.PreTrainedModel:
    return build(lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA)), seed)


def renamed_in(index: Path, name: str) -> None:
    """Give every tensor of an index another file."""
    said = json.loads(index.read_text())
    index.write_text(json.dumps(said | {"weight_map": dict.fromkeys(said["weight_map"], name)}))


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
HARM: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a shard cut off": (
        SHARD,
        lambda f: f.write_bytes(f.read_bytes()[:-200]),
        r"is cut off, damaged or no safetensors file \(.*(not fully covered|IncompleteBuffer)",
    ),
    "a header cut off": (SHARD, lambda f: f.write_bytes(f.read_bytes()[:50]), "is cut off"),
    "a pointer": (
        SHARD,
        lambda f: f.write_text(POINTER),
        "is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`",
    ),
    "no bytes": (SHARD, lambda f: f.write_bytes(b""), "is empty"),
    "text": (
        SHARD,
        lambda f: f.write_text("<!doctype html> not found"),
        "is cut off, damaged or no safetensors file",
    ),
    "an index without bytes": (INDEX, lambda f: f.write_text(""), "is empty"),
    "an index of nothing": (
        INDEX,
        lambda f: f.write_text('{"metadata": {}, "weight_map": {}}'),
        "is no index of weights, or an empty one",
    ),
    "an index of another kind": (
        INDEX,
        lambda f: f.write_text('{"weight_map": 3}'),
        "is no index of weights, or an empty one",
    ),
    "an index that leads to a folder beside": (
        INDEX,
        lambda f: renamed_in(f, "../other/model.safetensors"),
        r"leads out of its folder, to '\.\./other/model\.safetensors', which is not read",
    ),
    "an index that leads anywhere": (
        INDEX,
        lambda f: renamed_in(f, str(f.resolve().parent / "w.safetensors")),
        "leads out of its folder, to '.*', which is not read",
    ),
    "an index without sizes": (
        INDEX,
        lambda f: f.write_text('{"weight_map": {"norm.weight": "w.safetensors"}}'),
        "is no index of weights, or an empty one",
    ),
    "a pointer for a configuration": (
        "config.json",
        lambda f: f.write_text(POINTER),
        "is a pointer of Git LFS",
    ),
}


@BOTH
@pytest.mark.parametrize("harm", HARM)
def test_the_file_that_is_wrong_is_named(harm: str, weights: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    name, do, sentence = HARM[harm]
    do(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path / name))} {sentence}"):
        load_checkpoint(tmp_path, weights=weights)


@BOTH
def test_a_shard_that_is_not_there_is_named(weights: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "other").mkdir()
    load_checkpoint(tmp_path / "other" / "..", weights=weights)  # however the folder is reached
    (tmp_path / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD} is named by the checkpoint and not there"):
        load_checkpoint(tmp_path, weights=weights)


@BOTH
def test_one_file_beside_shards_is_told_and_alone_makes_the_revision(
    weights: str, tmp_path: Path
) -> None:
    other = llama(seed=3)
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    save_file(
        {name: tensor.clone() for name, tensor in other.state_dict().items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.warns(Notice, match=f"read from model.safetensors; {INDEX} beside it is not read"):
        ds = lb.compare(
            tmp_path, {"input_ids": IDS}, bounds=["lipbound"], weights=weights, progress=False
        )
    assert (
        f"the weights are read from model.safetensors; {INDEX} beside it is not read"
        in ds.attrs["notes"]
    )
    for shard in tmp_path.glob("model-*"):
        shard.unlink()
    (tmp_path / INDEX).unlink()
    assert load_checkpoint(tmp_path, weights=weights).revision == ds.attrs["revision"]
    assert torch.equal(outputs(tmp_path, weights), expected(other))


@BOTH
def test_the_file_that_the_configuration_names_is_read(weights: str, tmp_path: Path) -> None:
    other = llama(seed=3)
    llama().save_pretrained(tmp_path)
    save_file(
        {name: tensor.clone() for name, tensor in other.state_dict().items()},
        tmp_path / "other.safetensors",
        metadata={"format": "pt"},
    )
    says(tmp_path, transformers_weights="other.safetensors")
    with pytest.warns(
        Notice, match=r"read from other\.safetensors; model\.safetensors beside it is not read"
    ):
        assert torch.equal(outputs(tmp_path, weights), expected(other))
    says(tmp_path, transformers_weights="nowhere.safetensors")
    with pytest.raises(
        CheckpointError, match=r"nowhere\.safetensors is named by the checkpoint and not there"
    ):
        load_checkpoint(tmp_path, weights=weights)


@BOTH
@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"num_attention_heads": 0}, "its configuration says 0 of what there must be at least one"),
        ({"head_dim": 0}, "its configuration says 0 of what there must be at least one"),
        pytest.param(
            {"hidden_size": 2**31},
            "its weights (have other shapes|do not fill its architecture)",
            marks=newer_transformers("models are made in memory before their weights are read"),
        ),
        (
            {"num_hidden_layers": 2**31},
            "says 2147483648 layers, and its weights are [0-9]+ tensors",
        ),
        (
            {"num_attention_heads": "4"},
            r"field 'num_attention_heads': TypeError: .* got str|fails on it \(TypeError",
        ),
        ({"hidden_act": "nothing"}, r"transformers fails on it \(KeyError: 'nothing'\)"),
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
@pytest.mark.parametrize("architectures", [None, ["LlamaForCausalLM"]])
def test_tied_weights_under_the_name_of_the_head(
    architectures: list[str] | None, weights: str, tmp_path: Path
) -> None:
    model = build(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, tie_word_embeddings=True)))
    model.config.save_pretrained(tmp_path)
    says(tmp_path, architectures=architectures)
    save_model(model, str(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(outputs(tmp_path, weights), expected(model))
    says(tmp_path, tie_word_embeddings=False)
    with pytest.raises(
        CheckpointError,
        match=r"embed_tokens\.weight among them, .* what is there instead is lm_head\.weight",
    ):
        load_checkpoint(tmp_path, weights=weights)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize(
    "form", ["model.safetensors", pytest.param("pytorch_model.bin", marks=PICKLED)]
)
def test_names_that_wrappers_gave(form: str, prefix: str, tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    state = {prefix + name: tensor.clone() for name, tensor in model.state_dict().items()}
    if form.endswith(".bin"):
        torch.save(state, tmp_path / form)
    else:
        save_file(state, tmp_path / form)
        assert torch.equal(outputs(tmp_path, "layers"), expected(model))
    assert torch.equal(outputs(tmp_path, "whole"), expected(model))


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


def test_a_changed_configuration_is_told(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    inputs = {"input_ids": IDS}
    ds = lb.compare(
        tmp_path, inputs, bounds=["lipbound"], progress=False, out=tmp_path / "run.zarr"
    )
    says(tmp_path, rms_norm_eps=0.5)
    now = lb.verify(ds, data=inputs, places=1)
    assert any("not the recorded configuration" in fault for fault in now.faults)
    with pytest.raises(lb.LipboundError, match="configuration was sha256:"):
        lb.compare(
            tmp_path,
            inputs,
            bounds=["lipbound"],
            progress=False,
            out=tmp_path / "run.zarr",
            resume=True,
        )


def test_a_finished_run_of_another_configuration_is_not_taken_for_this_one(tmp_path: Path) -> None:
    model, other = (
        build(lambda eps=eps: tf.LlamaModel(tf.LlamaConfig(**LLAMA, rms_norm_eps=eps)))
        for eps in (1e-6, 0.5)
    )
    arguments = {"bounds": ["lipbound"], "progress": False, "out": tmp_path / "run.zarr"}
    ds = lb.compare(model, {"input_ids": IDS}, **arguments)
    model.config.use_cache = False  # what no number depends on
    assert lb.compare(model, {"input_ids": IDS}, **arguments, resume=True).identical(ds)
    with pytest.raises(lb.LipboundError, match="configuration was sha256:"):
        lb.compare(other, {"input_ids": IDS}, **arguments, resume=True)

import copy
import gc
import math
import os

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from support.checks import refused
from support.models import AFFINE, GPT2, LLAMA, MODERN, TEXT, build, inputs_for, save_bert
from support.versions import marked, newer_torch
from torch import nn

from lipbound import devices
from lipbound.errors import CheckpointError
from lipbound.models import weight_files
from lipbound.models.capture.capture import Capturer
from lipbound.models.loading import load_checkpoint
from lipbound.models.weight_files import plain_copy, resident

BARE = ("bert", "gpt2", "albert", "opt", "vit", "clip text", "siglip vision")
MODELS = {
    **{name: MODERN[name] for name in ("Llama", "Mistral", "Qwen 3", "Gemma 3")},
    **{name: AFFINE[name] for name in BARE},
    "Llama with its head": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**LLAMA, tie_word_embeddings=False)
    ),
    "gpt2 with its head": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "bert without pooler": lambda: tf.BertModel(tf.BertConfig(**TEXT), add_pooling_layer=False),
    "bert with a classifier": lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT)),
}


def hidden_states(model):
    inputs = inputs_for(model, padded=model.main_input_name == "input_ids")
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True).hidden_states


def same(one, other):
    pairs = list(zip(hidden_states(one), hidden_states(other), strict=True))
    return len(pairs) > 2 and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def in_memory(module):
    return [name for name, parameter in module.named_parameters() if not parameter.is_meta]


def save(name, folder, dtype=torch.bfloat16, **options):
    build(MODELS[name]).to(dtype).save_pretrained(folder, **options)
    return folder


def both(folder, dtype="float32"):
    """The model read layer by layer, and the whole one, whose numbers are the same."""
    checkpoint = load_checkpoint(folder, dtype=dtype, weights="layers")
    whole = load_checkpoint(folder, dtype=dtype, weights="whole")
    assert (checkpoint.by_layer, whole.by_layer) == (True, False)
    assert checkpoint.revision == whole.revision
    model, other = checkpoint.model, whole.model
    assert model.dtype == other.dtype == getattr(torch, dtype)
    assert same(model, other)
    assert [n for n in in_memory(model) if "pooler" not in n] == []
    mine, theirs = ({n: b.dtype for n, b in one.named_buffers()} for one in (model, other))
    assert mine == theirs
    return model, other


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_a_whole_model(tmp_path, name):
    both(save(name, tmp_path))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen 3", "gpt2", "bert"])
@pytest.mark.parametrize(
    ("source", "dtype"),
    [("bfloat16", "float64"), ("float16", "float32"), *((f"float{n}",) * 2 for n in (32, 64))],
)
def test_dtypes(tmp_path, name, source, dtype):
    both(save(name, tmp_path, getattr(torch, source)), dtype)


def test_sharded(tmp_path):
    save("Llama", tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    both(tmp_path)


def test_old_names_of_parameters(tmp_path):
    save_bert(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file).items()
    state = {f"bert.{k}".replace("LayerNorm.weight", "LayerNorm.gamma"): t for k, t in stored}
    save_file(state | {"cls.predictions.bias": torch.zeros(60)}, file, {"format": "pt"})
    both(tmp_path)


def test_resident_and_plain_copy(tmp_path):
    model, whole = both(save("Llama", tmp_path))
    part, other = model.layers[1], whole.layers[1]
    with resident(part), resident(part.mlp):
        assert sorted(in_memory(model)) == [f"layers.1.{name}" for name in sorted(in_memory(other))]
        pairs = zip(part.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert same(model, whole)
        assert len(in_memory(model)) == len(in_memory(other))
    assert in_memory(model) == []
    copied = plain_copy(model)
    assert in_memory(model) == []
    assert weight_files.is_offloaded(model)
    assert not weight_files.is_offloaded(copied)
    hooks = [hook for module in copied.modules() for hook in module._forward_hooks.values()]
    assert not any(hasattr(hook, "__self__") for hook in hooks)
    next(tmp_path.glob("*.safetensors")).rename(tmp_path / "elsewhere")
    assert same(copied.double(), whole.double())
    assert all(p.dtype == torch.float64 for p in copied.parameters())


def test_embeddings_come_whole_where_they_are_asked_for(tmp_path):
    model = load_checkpoint(save("Llama", tmp_path), weights="layers").model
    table = plain_copy(model.embed_tokens)
    ids = torch.tensor([3, 5])
    assert table.weight.dtype == torch.float32
    assert torch.equal(table(ids), model.embed_tokens(ids))
    with resident(model.embed_tokens):
        assert torch.equal(table(ids), model.embed_tokens(ids))


def test_deep_copies_read_for_themselves(tmp_path):
    model = load_checkpoint(save("gpt2", tmp_path), weights="layers").model
    copied = copy.deepcopy(model)
    assert same(copied, model)
    assert in_memory(copied) == in_memory(model) == []


def test_weights_leave_after_a_failed_pass(tmp_path):
    model = load_checkpoint(save("Llama", tmp_path), weights="layers").model

    def stop(*_):
        raise RuntimeError("stop")

    hook = model.layers[1].self_attn.k_proj.register_forward_hook(stop)
    refused(lambda: hidden_states(model), "stop", error=RuntimeError)
    hook.remove()
    assert in_memory(model) == []
    assert same(model, load_checkpoint(tmp_path, weights="whole").model)


def test_peak_of_what_is_in_memory(tmp_path):
    config = tf.LlamaConfig(**LLAMA | {"vocab_size": 500, "num_hidden_layers": 6})
    build(lambda: tf.LlamaModel(config)).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_checkpoint(tmp_path, weights="layers").model
    largest = max(p.numel() * p.element_size() for p in model.layers.parameters())
    held = []
    tables = []

    def count(*_):
        here = [p for p in model.layers.parameters() if not p.is_meta]
        held.append(sum({p.data_ptr(): p.numel() * p.element_size() for p in here}.values()))

    def look(module, _):
        tables.append(module.weight.dtype)

    hooks = [module.register_forward_pre_hook(count) for module in model.modules()]
    hooks.append(model.embed_tokens.register_forward_pre_hook(look))
    hidden_states(model)
    for hook in hooks:
        hook.remove()
    assert max(held) == largest  # one weight matrix at a time
    assert tables == [torch.bfloat16]  # the file's own table, never cast as a whole
    gc.collect()
    shapes = {tuple(p.shape) for p in model.parameters()}
    alive = [t for t in gc.get_objects() if type(t) is nn.Parameter and not t.is_meta]
    alive = [t for t in alive if t.dtype == torch.float32 and tuple(t.shape) in shapes]
    assert [t for t in alive if not t.requires_grad] == []


def test_capture(tmp_path):
    save("bert", tmp_path)
    batch = inputs_for(build(AFFINE["bert"]))
    by_layer, whole = (
        Capturer(load_checkpoint(tmp_path, weights=weights).model, around=True)
        for weights in ("layers", "whole")
    )
    for one, other in zip(by_layer.run(batch), whole.run(batch), strict=True):
        assert torch.equal(one.attention.w_q, other.attention.w_q)
        assert torch.equal(one.attention.out, other.attention.out)
        mine, theirs = one.attention.surroundings, other.attention.surroundings
        assert mine.residual == theirs.residual == "post"
        assert torch.equal(mine.followed_by.weight, theirs.followed_by.weight)


@newer_torch("2.6", "pickled weights are not read")
def test_auto_depends_on_free_memory(tmp_path, monkeypatch):
    save("gpt2", tmp_path)
    size = sum(
        math.prod(one.shape) for one in weight_files.stored_tensors(tmp_path.iterdir()).values()
    )
    for free, dtype, expected in ((8.5, "float32", 0), (7.5, "float32", 1), (8.5, "float64", 1)):
        monkeypatch.setattr(devices, "available", lambda device, free=free: free * size)
        assert load_checkpoint(tmp_path, dtype=dtype).by_layer == expected
    monkeypatch.setattr(devices, "available", lambda device: 0.0)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert not load_checkpoint(tmp_path).by_layer
    words = "has its weights in pytorch_model.bin, ", "use weights='whole'"
    refused(lambda: load_checkpoint(tmp_path, weights="layers"), *words)


def test_files_that_go_or_change_later(tmp_path):
    model = load_checkpoint(save("gpt2", tmp_path), weights="layers").model
    refused(lambda: load_checkpoint(model), "give its directory or hub id")
    words = "weights 'layers' was given for a model in memory"
    refused(lambda: load_checkpoint(build(AFFINE["gpt2"]), weights="layers"), words)
    file = tmp_path / "model.safetensors"
    os.utime(file, ns=(0, 0))
    refused(lambda: hidden_states(model), "has changed since", error=CheckpointError)
    file.unlink()
    for call in (lambda: hidden_states(model), lambda: plain_copy(model.h[0])):
        refused(call, "cannot be read from", error=CheckpointError)
    assert in_memory(model) == []


GATED = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16}
STORED = {
    "experts": lambda: tf.MixtralModel(tf.MixtralConfig(**LLAMA, num_local_experts=2)),
    "gated": lambda: tf.Dinov2Model(tf.Dinov2Config(**GATED, patch_size=4, use_swiglu_ffn=True)),
}
"""Models whose files hold other pieces than their modules do."""


@pytest.mark.parametrize("kind", marked(STORED, {"gated": "Dinov2 is stored as it is"}))
def test_weights_stored_in_another_form(kind, tmp_path):
    build(STORED[kind]).save_pretrained(tmp_path)
    words = "to be joined or split", "use weights='whole'"
    refused(lambda: load_checkpoint(tmp_path, weights="layers"), *words, error=CheckpointError)

import json
import sys

import numpy as np
import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from support.checks import refused
from support.commands import command
from support.models import GPT2, IMAGE, LLAMA, TEXT, build
from support.versions import marked

import lipbound as lb
from lipbound.errors import CheckpointError, Notice
from lipbound.runs.sweep import planned_runs

IDS = torch.tensor([[5, 9, 3, 17, 40, 8, 22]])
TWO = {"model.layers.0.self_attn.q_proj": (24, 24), "model.layers.1.self_attn.v_proj": (24, 12)}
ALPHAS = {"layers.1.self_attn.v_proj": 5, "q_proj": 2}


def llama_head():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))


def gpt2_head():
    return tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2))


PLAIN = {"r": 3, "lora_alpha": 8}
TURNED = {"transformer.h.0.attn.c_attn": (24, 72), "transformer.h.1.mlp.c_fc": (24, 96)}
FORMS = {
    "llama": (llama_head, PLAIN, {**TWO, "lm_head": (24, 60)}),
    "by name": (llama_head, {**PLAIN, "alpha_pattern": ALPHAS, "use_rslora": True}, TWO),
    "transposed": (gpt2_head, {"r": 2, "lora_alpha": 3, "fan_in_fan_out": True}, TURNED),
}


def save(folder, make, config, shapes):
    """A checkpoint, and beside it in ``adapter`` random matrices of the shapes (in, out); returns
    the sum by the formula, per weight."""
    model, rank, alphas = build(make), config["r"], config.get("alpha_pattern", {})
    model.save_pretrained(folder)
    g = torch.Generator().manual_seed(7)
    stored = {}
    expected = {}
    for path, (wide, tall) in shapes.items():
        a, b = torch.randn(rank, wide, generator=g), torch.randn(tall, rank, generator=g)
        before = f"base_model.model.{path}.lora_"
        stored |= {f"{before}A.weight": a, f"{before}B.weight": b}
        ends = (value for name, value in alphas.items() if path.endswith(name))
        alpha = next(ends, config["lora_alpha"])
        product = alpha / rank ** (0.5 if config.get("use_rslora") else 1) * b.double() @ a.double()
        weight = model.get_submodule(path).weight.detach().double()
        expected[path] = weight + (product.T if "transformer" in path else product)
    write(folder / "adapter", {**config, "target_modules": list(shapes)}, stored)
    return expected


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], **config})
    )


def llama(folder):
    save(folder, *FORMS["llama"])
    return folder


def beside(folder):
    """The same with the adapter in the folder of the weights."""
    llama(folder)
    for file in (folder / "adapter").iterdir():
        file.rename(folder / file.name)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_merged_weights_are_the_formula(form, tmp_path):
    expected = save(tmp_path, *FORMS[form])
    drawn = torch.get_rng_state()
    checkpoint = lb.load_checkpoint(tmp_path, adapter=tmp_path / "adapter", dtype="float64")
    assert torch.equal(torch.get_rng_state(), drawn)
    plain = dict(build(FORMS[form][0]).double().base_model.named_parameters())
    found = {name: part.detach() for name, part in checkpoint.model.named_parameters()}
    inside = {f"{path.partition('.')[2]}.weight": weight for path, weight in expected.items()}
    assert found.keys() == plain.keys()
    for name, weight in found.items():
        assert torch.allclose(weight, inside.get(name, plain[name]), rtol=1e-14, atol=1e-14)
        assert (name in inside) == bool((weight - plain[name]).abs().max() > 0.1)


def trained(make, folder, **config):
    """A checkpoint with an adapter by PEFT, all numbers of which are random, in ``adapter``;
    returns the model as PEFT loads it, not merged."""
    build(make).save_pretrained(folder)
    model = peft.get_peft_model(build(make), peft.LoraConfig(r=4, **config))
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=g)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return peft.PeftModel.from_pretrained(build(make), folder / "adapter")


def llama_classes():
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**LLAMA, pad_token_id=0))


ALL = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "DoRA": (llama_head, {"target_modules": ALL, "use_dora": True}),
    "embeddings, norms and a head": (
        llama_head,
        {"target_modules": [*ALL, "embed_tokens"], "modules_to_save": ["norm", "lm_head"]},
    ),
    "one layer by number": (llama_head, {"target_modules": ALL, "layers_to_transform": [1]}),
    "names by a pattern": (llama_head, {"target_modules": r"model\.layers\.0.*\.(q|o)_proj"}),
    "of a classifier": (llama_classes, {"target_modules": ALL, "task_type": "SEQ_CLS"}),
    "of a model without a head": (
        lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA)),
        {"target_modules": ALL, "task_type": "FEATURE_EXTRACTION"},
    ),
    "biases": (lambda: tf.BertModel(tf.BertConfig(**TEXT)), {"bias": "lora_only"}),
    "of experts": (
        lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**LLAMA, num_local_experts=3)),
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
    "of pictures": (
        lambda: tf.ViTForImageClassification(tf.ViTConfig(**IMAGE)),
        {"target_modules": ["query", "q_proj"], "modules_to_save": ["classifier"]},
    ),
}
NEW = {"of experts": "experts are modules of their own", "of pictures": "names differ"}


@pytest.mark.parametrize("kind", marked(KINDS, NEW))
def test_what_peft_trained_is_what_is_measured(kind, tmp_path):
    make, config = KINDS[kind]
    # torch's grouped product of experts knows no float64
    dtype, limit = ("float32", 1e-4) if kind == "of experts" else ("float64", 1e-6)
    theirs = trained(make, tmp_path, **config).to(getattr(torch, dtype))
    theirs.set_attn_implementation("eager")
    inner = theirs.get_base_model().base_model
    plain = lb.load_checkpoint(tmp_path, dtype=dtype).model
    mine = lb.load_checkpoint(tmp_path, adapter=tmp_path / "adapter", dtype=dtype).model
    assert type(mine) is type(plain)
    assert mine.state_dict().keys() == plain.state_dict().keys()
    pixels = torch.linspace(-1, 1, 3 * 16 * 16, dtype=torch.float64).view(1, 3, 16, 16)
    given = pixels if kind == "of pictures" else IDS
    with torch.no_grad():
        expected = inner(given).last_hidden_state
        assert torch.allclose(mine(given).last_hidden_state, expected, rtol=limit, atol=limit)
        assert not torch.allclose(plain(given).last_hidden_state, expected, atol=1e-2)


@pytest.mark.parametrize("weights", ["whole", "layers"])
def test_an_adapter_beside_the_weights_is_refused_unless_it_is_asked_for(weights, tmp_path):
    """Where it is left out, transformers does not merge it either."""
    folder = str(beside(tmp_path))
    words = "holds an adapter beside", f"adapter='{folder}' merges it, adapter='none' leaves it out"
    refused(lambda: lb.load_checkpoint(folder, weights=weights), *words, error=CheckpointError)
    without = lb.load_checkpoint(folder, adapter=False, weights=weights)
    merged = lb.load_checkpoint(folder, adapter=folder)
    assert without.revision == merged.revision.partition("+")[0]
    model = build(llama_head)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model.base_model(IDS).last_hidden_state
        found, other = (one.model(IDS).last_hidden_state for one in (without, merged))
    assert torch.allclose(found, plain, atol=1e-6)
    assert not torch.allclose(other, plain, rtol=1e-2)


def test_runs_say_with_which_adapter_and_are_found_again(tmp_path):
    folder = llama(tmp_path)
    adapter = folder / "adapter"
    inputs = {"input_ids": IDS}
    run = lb.compare(folder, inputs, adapter=adapter, bounds=["lipbound"], progress=False)
    plain = lb.compare(folder, inputs, bounds=["lipbound"], progress=False)
    assert not np.allclose(run["exact"], plain["exact"], rtol=1e-2)
    diff = lb.diff(folder, folder, inputs=inputs, adapter=adapter, bounds=[], progress=False)
    np.testing.assert_allclose(diff["ratio"], run["exact"] / plain["exact"], rtol=1e-6)
    assert run.attrs["model"] == f"{folder} with adapter {adapter}"
    assert run.attrs["revision"].startswith(plain.attrs["revision"] + "+sha256:")
    assert run.attrs["source"]["adapter"] == str(adapter)
    assert lb.verify(run, data=inputs, places=2).ok
    doubled = {name: 2 * tensor for name, tensor in stored(adapter).items()}
    save_file(doubled, adapter / "adapter_model.safetensors")
    again = lb.verify(run, data=inputs, places=2)
    assert any("not the recorded weights" in problem for problem in again.problems)


def test_command_line_and_sweeps_take_adapters(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("model: builtin:gpt2\nadapter: false\n")
    assert next(iter(planned_runs(file).values()))["adapter"] is False
    folder = beside(tmp_path / "model")
    status, _, said = command("compare", folder, "--data", "the ferry")
    assert status == 2
    assert f"adapter='{folder}'" in said
    line = ["compare", folder, "--adapter", "none", "--data", "the ferry", "--max-length", 8]
    status, _, said = command(*line)
    assert status == 2
    assert "has no files of its tokenizer" in said


def stored(adapter):
    found = load_file(adapter / "adapter_model.safetensors")
    return {name: tensor.clone() for name, tensor in found.items()}


def test_other_adapters_are_refused(tmp_path, monkeypatch):
    folder = llama(tmp_path)
    adapter = folder / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = stored(adapter)
    parts = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    moved = {name.replace("layers.1", "layers.9"): tensor for name, tensor in tensors.items()}
    short = {name: t[:, :-1].contiguous() if "A." in name else t for name, t in tensors.items()}
    inside = "base_model.model.model.layers.{}.self_attn.v_proj.lora_A"
    megatron = {"megatron_config": {"a": 1}, "megatron_core": "evil"}  # which PEFT would import
    for words, changes, held in (
        ('says peft_type: "IA3", which is not merged here', {"peft_type": "IA3"}, tensors),
        ("says peft_type: null", {"peft_type": None}, tensors),
        ('init_lora_weights: "pissa"', {"init_lora_weights": "pissa"}, tensors),
        ("says megatron_config: {", megatron, tensors),
        ("does not know something_new", {"something_new": 3}, tensors),
        ("PEFT does not merge the adapter", {"target_modules": ["nowhere"]}, tensors),
        ("PEFT does not merge the adapter", {"target_modules": ["lm_head"]}, tensors),
        (f"{inside.format(1)}.default.weight is in the adapter", {}, parts),
        (f"{inside.format(9)}.", {}, moved),  # older PEFT puts "default" in between
        ("in LlamaModel alone; give the model that it was trained on", {}, moved),
        ("size mismatch", {}, short),
    ):
        write(adapter, config | changes, held)
        refused(lambda: lb.load_checkpoint(folder, adapter=adapter), words, error=CheckpointError)
    write(adapter, config, tensors)
    for given, options, words in (
        (adapter, {"weights": "layers"}, "merged in memory; use weights='whole', not 'layers'"),
        (3, {}, "adapter is 3; give the directory"),
        (folder, {}, "without adapter_config.json"),
        ("./nowhere", {}, "there is no directory"),
    ):
        refused(lambda g=given, o=options: lb.load_checkpoint(folder, adapter=g, **o), words)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "peft", None)
        words = "is merged by peft; pip install 'lipbound[adapters]'"
        refused(lambda: lb.load_checkpoint(folder, adapter=adapter), words)
    file = adapter / "adapter_model.safetensors"
    file.write_text("version https://git-lfs")
    words = "adapter_model.safetensors is cut off, damaged or no safetensors file"
    refused(lambda: lb.load_checkpoint(folder, adapter=adapter), words)
    file.rename(adapter / "adapter_model.bin")
    words = "has no adapter_model.safetensors, and pickles are not read"
    refused(lambda: lb.load_checkpoint(folder, adapter=adapter), words)


def test_an_adapter_alone_brings_its_model(tmp_path):
    folder = llama(tmp_path)
    adapter = folder / "adapter"
    tensors = stored(adapter)
    write(adapter, PLAIN, tensors)
    # as training scripts leave it
    (adapter / "config.json").write_bytes((folder / "config.json").read_bytes())
    said = f"names no model; give one, with adapter='{adapter}'"
    refused(lambda: lb.load_checkpoint(adapter), said, error=CheckpointError)
    places = {"base_model_name_or_path": str(folder), "revision": "main"}
    write(adapter, PLAIN | places | {"target_modules": list(FORMS["llama"][2])}, tensors)
    both, one = lb.load_checkpoint(folder, adapter=adapter), lb.load_checkpoint(adapter)
    assert (one.name, one.revision, one.source) == (both.name, both.revision, both.source)
    with torch.no_grad():
        assert torch.equal(one.model(IDS)[0], both.model(IDS)[0])
    run = lb.compare(adapter, {"input_ids": IDS}, bounds=["lipbound"], progress=False)
    assert lb.verify(run, data={"input_ids": IDS}, places=2).ok
    with pytest.raises(CheckpointError, match=f"is itself an adapter, of {folder}; give"):
        lb.load_checkpoint(adapter, adapter="none")
    other = folder / "other"
    write(other, {"base_model_name_or_path": str(adapter)}, tensors)
    with pytest.raises(CheckpointError, match="adapter is itself an adapter"):
        lb.load_checkpoint(other)


def test_an_adapter_of_another_model_is_told_and_none_merged_in_memory(tmp_path):
    adapter = llama(tmp_path) / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "owner/base"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.warns(Notice, match="of owner/base, is merged into"):
        checkpoint = lb.load_checkpoint(tmp_path, adapter=adapter)
    assert len(checkpoint.notes) == 1
    with pytest.raises(CheckpointError, match=r"adapter .* was given for a model in memory; merge"):
        lb.load_checkpoint(build(llama_head), adapter=adapter)


def test_a_model_of_peft_in_memory_is_measured_as_it_is(tmp_path):
    """Its layers are not merged: what they compute is that of merged ones, while they are on."""
    theirs = trained(llama_head, tmp_path, target_modules=ALL)
    on = lb.capture(theirs, {"input_ids": IDS})
    with theirs.disable_adapter():
        off = lb.capture(theirs, {"input_ids": IDS})
    for found, adapter in ((on, tmp_path / "adapter"), (off, None)):
        model = lb.load_checkpoint(tmp_path, adapter=adapter).model
        for mine, expected in zip(found, lb.capture(model, {"input_ids": IDS}), strict=True):
            norms = (lb.spectral_norm(one, method="dense").lower for one in (mine, expected))
            torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)

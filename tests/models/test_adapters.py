import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from support.commands import call
from support.models import GPT2, LLAMA, TEXT, build
from support.versions import marked
from torch import Tensor
from transformers.integrations import peft as peft_integration
from transformers.models.auto import auto_factory

import lipbound as lb
from lipbound.errors import CheckpointError, Notice
from lipbound.models.loading import load_checkpoint
from lipbound.models.offload import resident
from lipbound.runs.sweep import planned_runs

IDS = torch.tensor([[5, 9, 3, 17, 40, 8, 22]])
FORMS: dict[
    str, tuple[Callable[[], tf.PreTrainedModel], dict[str, object], dict[str, tuple[int, int]]]
] = {
    "llama": (
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)),
        {"r": 3, "lora_alpha": 8},
        {
            "model.layers.0.self_attn.q_proj": (24, 24),
            "model.layers.1.self_attn.v_proj": (24, 12),
            "lm_head": (24, 60),
        },
    ),
    "ranks and scales by name": (
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)),
        {
            "r": 3,
            "lora_alpha": 8,
            "alpha_pattern": {"layers.1.self_attn.v_proj": 5, "q_proj": 2},
            "use_rslora": True,
        },
        {"model.layers.0.self_attn.q_proj": (24, 24), "model.layers.1.self_attn.v_proj": (24, 12)},
    ),
    "gpt2, whose weights are transposed": (
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2)),
        {"r": 2, "lora_alpha": 3, "fan_in_fan_out": True},
        {"transformer.h.0.attn.c_attn": (24, 72), "transformer.h.1.mlp.c_fc": (24, 96)},
    ),
}


def save(
    folder: Path,
    make: Callable[[], tf.PreTrainedModel],
    config: dict[str, object],
    shapes: dict[str, tuple[int, int]],
) -> dict[str, Tensor]:
    """A checkpoint, and beside it in ``adapter`` random matrices of the shapes (in, out); returns
    the sum by the formula, per weight."""
    model = build(make)
    model.save_pretrained(folder)
    g = torch.Generator().manual_seed(7)
    stored: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}
    for path, (wide, tall) in shapes.items():
        a, b = (
            torch.randn(int(str(config["r"])), wide, generator=g),
            torch.randn(tall, int(str(config["r"])), generator=g),
        )
        stored |= {
            f"base_model.model.{path}.lora_A.weight": a,
            f"base_model.model.{path}.lora_B.weight": b,
        }
        alphas: dict[str, float] = config.get("alpha_pattern", {})  # type: ignore[assignment]
        alpha = next(
            (value for name, value in alphas.items() if path.endswith(name)), config["lora_alpha"]
        )
        rank = float(str(config["r"])) ** (0.5 if config.get("use_rslora") else 1)
        product = float(str(alpha)) / rank * b.double() @ a.double()
        added[path] = product.T if "transformer" in path or "embed" in path else product
    write(folder / "adapter", {**config, "target_modules": list(shapes)}, stored)
    return {
        path: model.get_submodule(path).weight.detach().double() + product
        for path, product in added.items()
    }


def write(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], **config})
    )


def llama(folder: Path) -> Path:
    make, config, shapes = FORMS["llama"]
    save(folder, make, config, shapes)
    return folder


def beside(folder: Path) -> Path:
    """The same with the adapter in the folder of the weights."""
    llama(folder)
    for file in (folder / "adapter").iterdir():
        file.rename(folder / file.name)
    return folder


@pytest.mark.parametrize("weights", ["whole", "layers"])
@pytest.mark.parametrize("form", FORMS)
def test_merged_weights_are_the_formula(form: str, weights: str, tmp_path: Path) -> None:
    expected = save(tmp_path, *FORMS[form])
    checkpoint = load_checkpoint(
        tmp_path, adapter=tmp_path / "adapter", weights=weights, dtype="float64"
    )
    plain = dict(build(FORMS[form][0]).double().base_model.named_parameters())
    with resident(checkpoint.model):
        found = {
            name: parameter.detach().clone()
            for name, parameter in checkpoint.model.named_parameters()
        }
    inside = {
        path.partition(".")[2] + ".weight": weight
        for path, weight in expected.items()
        if path != "lm_head"
    }
    assert found.keys() == plain.keys()
    for name, weight in found.items():
        assert torch.allclose(weight, inside.get(name, plain[name]), rtol=1e-14, atol=1e-14)
        assert (name in inside) == bool((weight - plain[name]).abs().max() > 0.1)


def test_whole_and_layers_are_the_same_numbers(tmp_path: Path) -> None:
    make, config, shapes = FORMS["llama"]
    save(tmp_path, make, config, {**shapes, "model.embed_tokens": (60, 24)})
    # copies: older safetensors map the file, which is written anew below
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for side in "AB":  # PEFT's names for tables of embeddings
        stored[f"base_model.model.model.embed_tokens.lora_embedding_{side}"] = stored.pop(
            f"base_model.model.model.embed_tokens.lora_{side}.weight"
        )
    stored["base_model.model.model.norm.weight"] = torch.rand(24)  # trained as a whole
    write(tmp_path / "adapter", config, stored)
    models = [
        load_checkpoint(tmp_path, adapter=str(tmp_path / "adapter"), weights=weights).model
        for weights in ("whole", "layers")
    ]
    with torch.no_grad():
        outputs = [model(IDS).last_hidden_state for model in models]
    plain = load_checkpoint(tmp_path).model
    with torch.no_grad():
        plain.embed_tokens.weight += (
            8
            / 3
            * (
                stored["base_model.model.model.embed_tokens.lora_embedding_B"]
                @ stored["base_model.model.model.embed_tokens.lora_embedding_A"]
            ).T
        )
        for i, part in ((0, "q_proj"), (1, "v_proj")):
            stem = f"base_model.model.model.layers.{i}.self_attn.{part}.lora_"
            plain.layers[i].self_attn.get_submodule(part).weight += (
                8 / 3 * stored[stem + "B.weight"] @ stored[stem + "A.weight"]
            )
        plain.norm.weight.copy_(stored["base_model.model.model.norm.weight"])
    assert torch.equal(*outputs)
    assert torch.allclose(outputs[0], plain(IDS).last_hidden_state, atol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("form", FORMS)
def test_peft_computes_the_same(form: str, tmp_path: Path) -> None:
    import peft

    save(tmp_path, *FORMS[form])
    model = (
        peft.PeftModel.from_pretrained(build(FORMS[form][0]), tmp_path / "adapter").double().eval()
    )
    with torch.no_grad():
        model.set_attn_implementation("eager")
        theirs = model.get_base_model().base_model(IDS).last_hidden_state
        mine = (
            load_checkpoint(tmp_path, adapter=tmp_path / "adapter", dtype="float64")
            .model(IDS)
            .last_hidden_state
        )
    assert torch.allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("weights", ["whole", "layers"])
def test_an_adapter_beside_the_weights_is_refused_unless_it_is_asked_for(
    weights: str, tmp_path: Path
) -> None:
    folder = str(beside(tmp_path))
    with pytest.raises(
        CheckpointError,
        match=rf"holds an adapter beside its weights .*adapter='{folder}' merges it, "
        r"adapter='none' leaves it out",
    ):
        load_checkpoint(folder, weights=weights)
    without, merged = (
        load_checkpoint(folder, weights=weights, adapter=False),
        load_checkpoint(folder, weights=weights, adapter=folder),
    )
    assert without.revision == merged.revision.partition("+")[0]
    assert without.notes == [
        f"the adapter beside the weights of {folder} (adapter_config.json) is left out, as was "
        "asked"
    ]
    with torch.no_grad():
        assert not torch.allclose(
            without.model(IDS).last_hidden_state, merged.model(IDS).last_hidden_state, rtol=1e-2
        )


@pytest.mark.parametrize(
    "weights", marked(["whole", "layers"], {"whole": "adapters that name no base model fail"})
)
def test_the_numbers_do_not_depend_on_whether_peft_is_installed(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = beside(tmp_path)
    plain = load_checkpoint(folder, weights=weights, adapter="none").model(IDS).last_hidden_state
    for module in (auto_factory, peft_integration):  # as where it is, to transformers' knowledge
        monkeypatch.setattr(module, "is_peft_available", lambda: True)
    assert torch.equal(
        load_checkpoint(folder, weights=weights, adapter="none").model(IDS).last_hidden_state, plain
    )


def test_runs_say_with_which_adapter_and_are_found_again(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    adapter = folder / "adapter"
    inputs = {"input_ids": IDS}
    run = lb.compare(folder, inputs, adapter=adapter, bounds=["lipbound"], progress=False)
    plain = lb.compare(folder, inputs, bounds=["lipbound"], progress=False)
    assert not np.allclose(run["exact"], plain["exact"], rtol=1e-2)
    assert run.attrs["model"] == f"{folder} with adapter {adapter}"
    assert run.attrs["revision"].startswith(plain.attrs["revision"] + "+sha256:")
    assert run.attrs["source"]["adapter"] == str(adapter)
    assert lb.verify(run, data=inputs, places=2).ok
    stored = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: 2 * tensor for name, tensor in stored.items()}, adapter / "adapter_model.safetensors"
    )
    again = lb.verify(run, data=inputs, places=2)
    assert any("not the recorded weights" in problem for problem in again.problems)


def test_command_line_and_sweeps_take_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("model: builtin:gpt2\nadapter: false\n")
    assert next(iter(planned_runs(file).values()))["adapter"] is False
    folder = beside(tmp_path / "model")
    status, _, said = call(capsys, monkeypatch, "compare", folder, "--data", "the ferry")
    assert status == 2
    assert f"adapter='{folder}'" in said
    status, _, said = call(
        capsys,
        monkeypatch,
        "compare",
        folder,
        "--adapter",
        "none",
        "--data",
        "the ferry",
        "--max-length",
        8,
    )
    assert status == 2
    assert "has no files of its tokenizer" in said


def test_other_adapters_are_refused(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    adapter = folder / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())

    def says(**changes: object) -> str:
        (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(folder, adapter=adapter)
        return str(caught.value)

    assert 'says peft_type: "IA3", which is not LoRA' in says(peft_type="IA3")
    assert "use_dora: true, which is not LoRA or more than a product" in says(use_dora=True)
    assert 'init_lora_weights: "pissa"' in says(init_lora_weights="pissa")
    assert "something_new: 3" in says(something_new=3)
    stored = load_file(adapter / "adapter_model.safetensors")
    write(
        adapter,
        config,
        {name.replace("layers.1", "layers.9"): tensor for name, tensor in stored.items()},
    )
    assert (
        "changes model.layers.9.self_attn.v_proj.lora_A.weight, which LlamaModel does not have"
        in says()
    )
    write(
        adapter,
        config,
        {
            name: tensor[:, :-1].contiguous() if "A.weight" in name else tensor
            for name, tensor in stored.items()
        },
    )
    assert (
        "is for another model: its part for layers.0.self_attn.q_proj.weight has shape (24, 23), "
        "that of the model has (24, 24)" in says()
    )
    (adapter / "adapter_model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    assert "adapter_model.safetensors is a pointer of Git LFS" in says()
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no weights" in says()
    for wrong, sentence in (
        (3, "adapter is 3; give the directory"),
        (folder, "there is no adapter_config.json in it"),
        ("./nowhere", "there is no directory"),
    ):
        with pytest.raises(lb.LipboundError, match=sentence):
            load_checkpoint(folder, adapter=wrong)  # type: ignore[arg-type]


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    write(
        folder / "adapter",
        {"r": 3, "base_model_name_or_path": "owner/base"},
        load_file(folder / "adapter" / "adapter_model.safetensors"),
    )
    with pytest.raises(
        CheckpointError,
        match="is an adapter of owner/base, not a model; give owner/base as the model, with "
        "adapter=",
    ):
        load_checkpoint(folder / "adapter")
    # as training scripts leave it
    (folder / "adapter" / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"is an adapter of owner/base, not a model"):
        load_checkpoint(folder / "adapter")


def test_an_adapter_of_another_model_is_told(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    (folder / "adapter" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "owner/base"})
    )
    with pytest.warns(Notice, match="says that it was trained on owner/base; it is merged into"):
        checkpoint = load_checkpoint(folder, adapter=folder / "adapter")
    assert len(checkpoint.notes) == 1


def test_a_model_in_memory_takes_no_adapter(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"adapter .* was given for a model in memory; merge it"
    ):
        load_checkpoint(
            build(lambda: tf.BertModel(tf.BertConfig(**TEXT))), adapter=folder / "adapter"
        )

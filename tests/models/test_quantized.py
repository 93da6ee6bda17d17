"""Checkpoints whose configuration says that they were quantised: turned back exactly, or refused by
name."""

import json

import torch
from safetensors.torch import load_file, save_file
from support.checks import close, refused
from support.models import IDS, LLAMA, build, inputs_for, model_of

import lipbound as lb


def save_fp8(folder, block=4):
    """A Llama with projections in float8 and a scale for every block; returns what its weights
    stand for."""
    build(model_of("Llama", **LLAMA, **IDS)).save_pretrained(folder)
    stored, stand_for = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "proj" not in name:
            # a copy: older safetensors map the file, which is written anew below
            stored[name] = stand_for[name] = weight.clone()
            continue
        tall, wide = (-(-size // block) for size in weight.shape)
        scale, stand_for[name] = torch.empty(tall, wide), torch.empty_like(weight)
        stored[name] = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for i in range(tall):
            for j in range(wide):
                part = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scale[i, j] = weight[part].abs().max() / torch.finfo(torch.float8_e4m3fn).max
                stored[name][part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                stand_for[name][part] = stored[name][part].float() * scale[i, j]
        stored[f"{name}_scale_inv"] = scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    say(folder, quant_method="fp8", weight_block_size=[block, block], activation_scheme="dynamic")
    return stand_for


def say(folder, **quantization):
    """Write into a folder's configuration how its weights were quantised."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def test_float8_is_turned_back_exactly(tmp_path):
    expected = save_fp8(tmp_path)
    checkpoint = lb.load_checkpoint(tmp_path)
    close(checkpoint.model.state_dict(), expected, 0)
    ds = lb.compare(tmp_path, inputs_for(checkpoint.model), bounds=["yudin"], progress=False)
    assert ds.attrs["quantization"] == "fp8"
    assert "(LlamaModel, fp8, sha256:" in lb.plots.caption(ds)


NOT_TURNED = "were quantized with {}, which transformers does not turn back"
METHODS = {name: NOT_TURNED.format(name) for name in ("gptq", "awq", "quanto", "unheard-of")}
METHODS |= {"mxfp4": "unused when it turned back what mxfp4 quantized"}  # whose scales others are


def test_what_is_not_turned_back_is_refused_by_name(tmp_path):
    save_fp8(tmp_path, block=8)  # keys have 12 rows
    words = "k_proj.weight of ", " is no whole number of quantized blocks of 8 x 8"
    refused(lambda: lb.load_checkpoint(tmp_path), *words, error=lb.errors.CheckpointError)
    for method, said in METHODS.items():
        say(tmp_path, quant_method=method, bits=4)
        refused(lambda: lb.load_checkpoint(tmp_path), said, error=lb.errors.CheckpointError)


def test_numbers_of_one_byte_in_memory_are_refused():
    model = build(model_of("Llama", **LLAMA, **IDS))
    model.layers[0].self_attn.q_proj.to(torch.float8_e4m3fn)
    words = "q_proj.weight is float8_e4m3fn, ", " model.dequantize()"
    refused(lambda: lb.load_checkpoint(model), *words, error=lb.errors.CheckpointError)

"""Model family by model family: what is captured, and what is measured on it, against the model's
own attention module."""

from pathlib import Path

import pytest
import torch
from support.models import AFFINE, MODERN, build, inputs_for, own_heads
from support.modules import norms
from support.oracles import capture_error
from support.reference import dense_jacobian
from support.versions import marked

import lipbound as lb
from lipbound.models.capture.capture import Capturer, capture

NORMALISED = ("Qwen 3", "Gemma 3", "Phi, q/k-norm", "OLMo 2", "Cohere", "Llama 4")
HAS = {
    **{name: {"rotation", "qk_norm"} for name in (*NORMALISED, "StableLM, q/k-norm")},
    **{"Gemma 2": {"rotation", "cap"}, "gpt-oss": {"rotation", "sinks"}},
    **{"GPTBigCode": set(), "T5 encoder": set()},
}
ALL = {**AFFINE, **MODERN}
DENSE = ("bert", "roberta", "gpt2", "vit", "dinov2", "albert", "opt", *MODERN)
COMMON = ("bert", "gpt2", "vit", "opt", "Llama, YaRN", "Mistral", "Qwen 3", "Gemma 2")
COMMON += ("Phi, q/k-norm", "gpt-oss", "ModernBERT", "T5 encoder")
"""One of every kind of attention among them."""


UNBUILT = dict.fromkeys(
    ("Phi", "Phi, q/k-norm", "StableLM, q/k-norm"), "configurations without pad_token_id fail"
)
"""Families that older versions of transformers do not build."""


@pytest.mark.parametrize("family", marked(MODERN, UNBUILT))
def test_captured(family: str) -> None:
    model = build(MODERN[family])
    layers = Capturer(model).run(inputs_for(model))
    assert len(layers) == 2
    for layer in layers:
        assert layer.error < capture_error(layer.attention)
        assert layer.attention.w_o is not None
        found = layer.attention.variants
        # its layers of full attention are not turned
        full = family == "Cohere 2" and layer.index == 1
        assert found == (set() if full else HAS.get(family, {"rotation"}))
    if "sliding_window" in model.config.to_dict() and model.config.sliding_window == 4:
        p = layers[0].attention.p
        assert bool((p[..., 8, :4] == 0).all())  # the window hides what is farther


@pytest.mark.each_value(family=COMMON)
@pytest.mark.parametrize(
    "family", marked(DENSE, UNBUILT | {"T5 encoder": "the softmax of its module is in float32"})
)
def test_jacobian_is_that_of_the_models_own_module(family: str) -> None:
    """Dense SVD of autograd through the model's eager attention module, in float64, against ours;
    every sound bound is above it."""
    model = build(ALL[family]).double()
    att, heads = own_heads(model, 1)
    norm = lb.spectral_norm(att, tol=1e-9).lower[0]
    sigma = norms(heads, att.x[0])
    torch.testing.assert_close(norm, sigma, rtol=1e-6, atol=0)
    own = [torch.linalg.matrix_norm(dense_jacobian(att, 0, h), 2) for h in range(att.heads)]
    torch.testing.assert_close(torch.stack(own), sigma, rtol=1e-6, atol=0)
    for name in lb.bounds.names():
        bound = lb.bounds.get(name)
        if bound.map == "head" and bound.applies(att):
            value, sound = bound(att)[0], bound.sound(att)[0]
            assert bool((value[sound] >= sigma[sound] * (1 - 1e-6)).all()), name
    assert lb.bounds.get("lipbound").applies(att)


PADDED = ("bert", "roberta", "gpt2", "opt", "distilbert")
PADDED += ("Llama", "Qwen 3", "Gemma 2", "gpt-oss", "OLMo 2")


@pytest.mark.parametrize("family", PADDED)
def test_padding_is_left_out(family: str) -> None:
    model = build(ALL[family])
    batch = inputs_for(model, padded=True)
    short = capture(model, {name: t[1:, :6] for name, t in batch.items()})
    for padded, alone in zip(capture(model, batch), short, strict=True):
        assert padded.lengths.tolist() == [9, 6]
        torch.testing.assert_close(padded.out[1:, :, :6], alone.out, rtol=1e-4, atol=1e-5)
        mine, its = (lb.spectral_norm(att, tol=1e-6).lower for att in (padded, alone))
        torch.testing.assert_close(mine[1:], its, rtol=1e-4, atol=0)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "gpt-oss")]


@pytest.mark.parametrize("family", ["Qwen 3", "Gemma 2", *SLOW])
def test_compare(family: str) -> None:
    model = build(MODERN[family])
    ds = lb.compare(model, inputs_for(model), progress=False)
    assert set(ds.attrs["variants"]) == HAS.get(family, {"rotation"})
    assert "lipbound" in ds.attrs["bounds"]
    assert "kim" not in ds
    assert ds.attrs["not_applicable"]["kim"].startswith("does not cover rotary position embeddings")
    assert ("yudin" in ds) == (family in ("Llama", "Gemma 2"))
    assert all(entry["broken"] == 0 for entry in ds.attrs["audit"].values())
    assert not (set(ds.attrs["bounds"]) & set(ds.attrs["not_applicable"]))
    assert "rotary position embeddings" in lb.tables.methods(ds, "text")
    assert "left out (Kim 2021" in lb.tables.methods(ds, "text")
    for format in ("text", "markdown", "latex"):
        # sentences of LaTeX begin with a capital
        assert "eft out, since the statement does not cover" in lb.tables.render(ds, format)
    with pytest.raises(lb.LipboundError, match=r"'kim' does not cover rotary .*leave it out"):
        lb.compare(model, inputs_for(model), bounds=["kim", "lipbound"], progress=False)


def test_a_finished_run_is_taken_up(tmp_path: Path) -> None:
    """Although the bounds that were asked for are more than those that apply."""
    model = build(MODERN["Mistral"])
    kwargs = {"out": tmp_path / "run", "resume": True, "progress": False}
    first = lb.compare(model, inputs_for(model), **kwargs)
    assert lb.compare(model, inputs_for(model), **kwargs)["exact"].equals(first["exact"])

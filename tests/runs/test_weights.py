"""Numbers of weights alone, against those read off a forward pass."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers as tf
from support.commands import refused, said
from support.models import AFFINE, GPT2, IDS, LLAMA, MODERN, TEXT, build, inputs_for, model_of
from support.versions import marked

import lipbound as lb
from lipbound.errors import CaptureError, CheckpointError, StoreError
from lipbound.models import weight_files
from lipbound.models.head_weights import FAMILIES
from lipbound.schema import OF_WEIGHTS

OTHERS = {"Phi 3": model_of("Phi3", **LLAMA, **IDS)}
KNOWN = ("bert", "roberta", "distilbert", "gpt2", "gpt2 scaled by layer", "opt", "vit", "Llama")
KNOWN = (*KNOWN, "Llama 3", "Mistral", "Qwen 2", "Qwen 3", "Gemma", "Gemma 2", "Gemma 3", "Phi")
KNOWN = (*KNOWN, "Phi 3")
LACKING = {"gpt2 scaled by layer": "GPT-2 scales in the function it calls"}


@pytest.mark.parametrize("name", marked(KNOWN, LACKING))
def test_families_are_read_as_by_a_forward_pass(name, tmp_path):
    model = build((AFFINE | MODERN | OTHERS)[name])
    inputs = inputs_for(model)
    ds = lb.compare(model, inputs, bounds="none", extras=OF_WEIGHTS, progress=False)
    found = lb.weight_norms(model)
    model.save_pretrained(tmp_path / "model")
    stored = lb.weight_norms(tmp_path / "model")
    for one in OF_WEIGHTS:
        np.testing.assert_allclose(found[one][0], ds[one][0], rtol=2e-6)
        np.testing.assert_allclose(stored[one], found[one], rtol=1e-12)
    assert found["layer_name"].values.tolist() == ds["layer_name"].values.tolist()


def test_every_family_is_tested():
    models = [build((AFFINE | MODERN | OTHERS)[name]) for name in KNOWN]
    assert {model.config.model_type for model in models} == {*FAMILIES}


def not_read(model, *words, error=CaptureError):
    refused(partial(lb.weight_norms, model), *words, error=error)


@pytest.mark.parametrize("name", ["electra", "GPT-NeoX", "OLMo 2", "T5 encoder"])
def test_others_are_refused(name):
    model = build((AFFINE | MODERN)[name])
    not_read(model, "weights are found by name", "compare(")


def test_gpt2_of_older_transformers_does_not_say_its_factor():
    """Which its function takes from the width of heads, and from more where its config says so."""

    def older(**options):
        model = build(model_of("GPT2", **GPT2, **options))
        for block in model.h:
            vars(block.attn).pop("scaling", None)
        return lb.weight_norms(model)

    found = older()
    w = build(AFFINE["gpt2"]).h[1].attn.c_attn.weight.detach().double().split(6, 1)
    for head in range(4):  # of 24 dimensions
        true = torch.linalg.matrix_norm(w[head] @ w[4 + head].mT, 2) / 6**0.5
        assert float(found["wqk_norm"][0, 1, head]) == pytest.approx(float(true), rel=2e-6)
    for what in ({"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}):
        refused(partial(older, **what), "does not say", "take compare", error=CaptureError)


def test_what_is_no_plain_weight_is_refused(tmp_path):
    crossed = tf.BertModel(tf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True))
    not_read(crossed, "add_cross_attention")
    not_read(torch.nn.Linear(2, 2), "and this is Linear")
    not_read(build(MODERN["Phi, q/k-norm"]), "phi with qk_layernorm", "compare(")
    model = build(MODERN["Llama"])
    torch.nn.utils.parametrizations.weight_norm(model.layers[1].self_attn.k_proj)
    not_read(model, "layers.1.self_attn", "plain linear")
    hooked = build(MODERN["Llama"])
    part = hooked.layers[1].self_attn
    for module, words in ((part, "hooks of its own"), (part.o_proj, "has hooks on Linear")):
        hook = module.register_forward_hook(lambda *_: None)
        not_read(hooked, "layers.1.self_attn", words)
        hook.remove()
    part.__class__ = type("Own", (type(part),), {"__module__": "mine"})
    not_read(hooked, "(Own) is not as transformers")
    model = build(AFFINE["gpt2"])
    with torch.no_grad():
        model.h[1].attn.c_proj.weight[0, 0] = torch.nan
    not_read(model, "h.1.attn", "NaN", error=CheckpointError)
    not_read("no-such-folder/x/y", "no directory", error=CheckpointError)


def test_one_layer_is_in_memory_at_a_time(tmp_path, monkeypatch):
    build(MODERN["Llama"]).save_pretrained(tmp_path / "model")
    most, held = 0, 0
    hold, release = weight_files.WeightOffloader.hold, weight_files.WeightOffloader.release

    def holds(self, *args, **more):
        nonlocal most, held
        hold(self, *args, **more)
        held += 1
        most = max(most, held)

    def releases(self, module):
        nonlocal held
        held -= self.users > 0
        release(self, module)

    monkeypatch.setattr(weight_files.WeightOffloader, "hold", holds)
    monkeypatch.setattr(weight_files.WeightOffloader, "release", releases)
    lb.weight_norms(tmp_path / "model")
    assert 0 < most <= 4  # linear maps of one attention layer
    assert held == 0


def test_the_model_stays_and_a_training_has_no_hash():
    model = build(AFFINE["gpt2"]).half()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ds = lb.weight_norms(model)
    assert ds.attrs["revision"].startswith("sha256:")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    wide = lb.weight_norms(build(AFFINE["gpt2"]).half().double())
    np.testing.assert_array_equal(ds["wqk_norm"], wide["wqk_norm"])
    assert lb.weight_norms(model.train()).attrs["revision"] == "in training"
    assert model.training


def test_it_is_a_run(tmp_path):
    path = tmp_path / "weights.zarr"
    assert "Norm of W_Q W_K^T" in said(f"weights builtin:gpt2 --out {path}")
    ds = lb.load(path, damaged="refuse")
    assert ds["exact"].isnull().all()
    assert "of weights" in lb.tables.render(ds)
    table = lb.tables.breakdown(ds, "head", values="value")
    assert len(table) == ds["wqk_norm"].size
    np.testing.assert_allclose(table["wov_norm"], ds["wov_norm"].values.ravel())
    for format in ("latex", "markdown", "csv"):
        assert lb.tables.render(ds, format, by="layer")
    drawn = lb.plots.heatmaps(ds, tmp_path / "weights.pdf").axes
    labels = [ds[name].attrs["label"] for name in OF_WEIGHTS]
    assert [axes.get_title() for axes in drawn if axes.get_title()] == labels
    caption = (tmp_path / "weights.caption.txt").read_text(encoding="utf-8")
    assert "Lipschitz" not in caption + lb.cite(ds, "text")
    info = json.loads(said(f"info {path} --json"))
    of_norms = ("norm", "method", "tol", "delta", "seed", "exact from", "not converged")
    assert [info[name] for name in of_norms] == [None] * len(of_norms)
    assert info["model"] == "builtin:gpt2"
    refused(partial(lb.verify, path), "of weights alone", error=StoreError)
    refused(partial(lb.weight_norms, "builtin:gpt2", out=path), "exists already", error=StoreError)

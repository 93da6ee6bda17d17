"""Extras between the norms of a monitor, and logits of the batches that a model is trained on."""

import copy
import gc
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from support import trainers
from support.commands import refused
from support.models import AFFINE, GPT2, MODERN, build, inputs_for
from support.trainers import IDS, NO_DROPOUT, train
from support.versions import newer_torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

import lipbound as lb
from lipbound.errors import Notice
from lipbound.models.training import largest_logits
from lipbound.reporting.labels import run_caption, step_words
from lipbound.runs.checksums import edited
from lipbound.schema import OF_WEIGHTS

NAMES = [*OF_WEIGHTS, "batch_logit"]
WATCHED = newer_torch("2.5", "batch_logit is not seen")


def of_gpt2(model):
    """Extras of the weights of GPT-2's heads by float64 SVD, (layers, heads) each."""
    width, heads = GPT2["n_embd"], GPT2["n_head"]
    found = {name: [] for name in OF_WEIGHTS}
    for block in model.transformer.h:
        weights = block.attn.c_attn.weight.detach().double().split(width, 1)
        q, k, v = (w.unflatten(1, (heads, -1)).transpose(0, 1).numpy() for w in weights)
        o = block.attn.c_proj.weight.detach().double().unflatten(0, (heads, -1)).numpy()
        qk = q @ k.transpose(0, 2, 1) / (width // heads) ** 0.5
        for which, product in (("wqk", qk), ("wov", v @ o)):
            values = np.linalg.svd(product, compute_uv=False)
            found[f"{which}_norm"].append(values[:, 0])
            found[f"{which}_stable_rank"].append((values**2).sum(1) / values[:, 0] ** 2)
    return {name: np.stack(one) for name, one in found.items()}


def test_extras_between_norms_are_those_of_the_weights(tmp_path):
    model, path, truth = trainers.decoder(**NO_DROPOUT).train(), tmp_path / "run.zarr", []
    logged = {}
    expected = []
    how = {"extras": list(OF_WEIGHTS), "log": lambda said, at: logged.__setitem__(at, said)}
    monitor = lb.Monitor(model, IDS, every=3, extras_every=1, out=path, bounds=["lipbound"], **how)

    def before(step):
        monitor.step(step)
        truth.append(of_gpt2(model))
        if step == 6:
            alone = lb.Monitor(model, IDS, every=3, extras=list(OF_WEIGHTS), bounds=["lipbound"])
            expected.append(alone.step(6))

    train(model, 9, before)
    run = monitor.run
    assert run["step"].values.tolist() == list(range(9))
    for step in range(9):
        at = run.sel(step=step)
        for name in OF_WEIGHTS:
            both = np.broadcast_to(truth[step][name], at[name].shape)
            np.testing.assert_allclose(at[name], both, rtol=2e-6)
        for name in ("exact", "lipbound", "entropy"):
            assert bool(at[name].notnull().all()) == (step % 3 == 0)
            assert bool(at[name].isnull().all()) == (step % 3 > 0)
        assert not at["exact_converged"].values[at["exact"].isnull().values].any()
        first = float(truth[step]["wqk_norm"][0].max())
        assert logged[step]["lipbound/layer_0/wqk_norm_max"] == pytest.approx(first, rel=2e-6)
        assert ("lipbound/layer_0/exact_max" in logged[step]) == (step % 3 == 0)
    assert run.sel(step=6).drop_attrs().equals(expected[0].drop_attrs())
    assert edited(run) is False
    stored = lb.load(path, damaged="refuse")  # up to the last norms
    assert stored.identical(run.isel(step=slice(0, 7)).assign_attrs(stored.attrs))
    assert monitor.step(9) is not None
    assert lb.load(path, damaged="refuse").identical(monitor.run)


def test_what_is_shown_says_which_steps_have_norms(tmp_path):
    model = trainers.decoder(**NO_DROPOUT).train()
    monitor = lb.Monitor(model, IDS, every=4, extras_every=1, extras=["wqk_norm"])
    train(model, 7, monitor.step)
    run = monitor.run
    assert step_words(run) == "at 7 steps of training from 0 to 6 (with norms at 2 of them)"
    assert "after 4 steps of training" in run_caption(run)  # the last that has norms
    assert lb.tables.render(run) == lb.tables.render(run.sel(step=4))
    assert "no exact norms" in run_caption(run.sel(step=5))
    axes = lb.plots.over_steps(run)
    assert [line.get_xdata().tolist() for line in axes.lines] == [[0, 4]] * 2
    shown = lb.tables.render(run)
    assert "norm of W_Q W_K^T times the factor of the scores: median" in shown
    assert "before the softmax" not in shown  # a statistic that is there, and no extra


@WATCHED
def test_extras_are_drawn_over_steps_and_of_batches_not_verified(tmp_path):
    model = trainers.decoder(**NO_DROPOUT).train()
    asked = {"extras": [*NAMES, "frobenius", "qk_clip"], "tau": 1e-3, "every": 2}
    monitor = lb.Monitor(model, IDS, extras_every=1, **asked)
    train(model, 5, monitor.step)
    run, single = monitor.run, monitor.run.sel(step=4)
    for name, variable, reduced in (
        ("wqk_norm", "wqk_norm", lambda values: np.exp(np.log(values).mean(1))),
        ("frobenius", "jacobian_frobenius", lambda values: np.exp(np.log(values).mean(1))),
        ("batch_logit", "batch_logit", lambda values: values.max(1)),
        ("qk_clip", "qk_clip", lambda values: values.min(1)),
    ):
        axes = lb.plots.over_steps(run, name, tmp_path / f"{name}.svg")
        for layer, line in enumerate(axes.lines):
            there = run[variable].sel(layer=layer).dropna("step", how="all")
            assert list(line.get_xdata()) == there["step"].values.tolist()
            values = there.transpose("step", ...).values.reshape(len(there), -1)
            np.testing.assert_allclose(line.get_ydata(), reduced(values), rtol=1e-12)
        assert (axes.get_yscale() == "log") == (name in ("wqk_norm", "frobenius"))
    told = (tmp_path / "qk_clip.caption.txt").read_text()
    assert all(words in told for words in ("minimum over", f"layers x {run.sizes['head']} heads"))
    model = trainers.decoder(**NO_DROPOUT)  # as at the last norms
    train(model.train(), 4)
    found = lb.verify(single, model=model, data=IDS)
    assert found.ok, found
    assert "batch_logit" not in found.table.index
    assert found.notes[-1].endswith("of batches of the training, and cannot be computed again")


def test_steps_that_come_again_are_replaced_and_alarms_are_told(tmp_path):
    model = trainers.decoder(**NO_DROPOUT).train()
    how = {"extras": ["wqk_norm"], "threshold": {"wqk_norm": 1e3, "exact": 1e9}}
    monitor = lb.Monitor(model, IDS, steps=[0, 5], extras_every=2, out=tmp_path / "a.zarr", **how)
    for step in (0, 1, 2, 4):
        monitor.step(step)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight *= 1e3
    again = "1 of 3 measured steps, from 4 on, come again"
    risen = r"wqk_norm has risen above 1000 at step 4: .* in layer 1"
    with pytest.warns(Notice, match=again), pytest.warns(Notice, match=risen):
        monitor.step(4)
    monitor.step(5)
    ds = lb.load(tmp_path / "a.zarr", damaged="refuse")
    assert ds["step"].values.tolist() == [0, 2, 4, 5]
    assert float(ds["wqk_norm"].sel(step=4).max()) > 1e3 > float(ds["wqk_norm"].sel(step=2).max())


@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "added", "window"])
def test_largest_logits_are_those_of_allowed_pairs(tokens, kind):
    draw = torch.Generator().manual_seed(tokens)
    q = torch.randn(2, 4, tokens, 8, generator=draw)
    k = torch.randn(2, 2, tokens, 8, generator=draw)
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[1, : tokens // 3] = False  # padding at the left
    allowed = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
    if kind in ("causal", "window"):
        allowed &= torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if kind == "window":
        allowed &= torch.ones(tokens, tokens, dtype=torch.bool).triu(-5)
    if kind in ("bool", "added", "window"):
        allowed &= real[:, None, None]
    mask = None if kind in ("none", "causal") else allowed
    if kind == "added":
        lowest = torch.finfo(torch.float32).min
        mask = 0.3 * torch.rand(allowed.shape, generator=draw)  # position biases do not count
        mask = mask.masked_fill(~allowed, lowest)
    found = largest_logits(q, k, mask, 0.5, kind == "causal")
    rows = real if mask is not None else torch.ones_like(real)
    scores = 0.5 * np.einsum("shid,shjd->shij", q.double(), k.double().repeat_interleave(2, 1))
    counted = np.broadcast_to((allowed & rows[:, None, :, None]).numpy(), scores.shape)
    expected = np.where(counted, scores, -np.inf).max((0, 2, 3))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


TEXT_MODELS = ("gpt2", "bert", "Llama", "Qwen 3")


@WATCHED
@pytest.mark.parametrize(
    ("name", "padded"), [("vit", False), *itertools.product(TEXT_MODELS, (False, True))]
)
def test_logits_of_batches_are_those_of_a_capture(name, padded):
    """Which reads them off weights and inputs in float64; here without dropout."""
    model = build((AFFINE | MODERN)[name])
    inputs = dict(inputs_for(model))
    if padded:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :2] = 0
        inputs["attention_mask"] = mask
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.set_attn_implementation("sdpa")
    logits = (att.statistics()["largest_logit"] for att in lb.capture(model, inputs))
    expected = torch.stack([one.amax(0) for one in logits])
    monitor = lb.Monitor(model, inputs, every=2, extras="batch_logit")
    monitor.step(1)
    model.train()
    with torch.no_grad():
        model(**inputs)
    model.eval()
    # does not count
    model(**inputs | {one: t.flip(-1) for one, t in inputs.items() if "ids" in one})
    ds = monitor.step(2)
    for sample in range(ds.sizes["sample"]):
        np.testing.assert_allclose(ds["batch_logit"][sample], expected, rtol=1e-4, atol=1e-6)


@WATCHED
def test_a_training_does_not_notice_that_its_logits_are_seen():
    alone, watched = (trainers.decoder().train() for _ in range(2))
    monitor = lb.Monitor(watched, IDS, every=5, extras_every=1, extras=NAMES)
    for model, before in ((alone, lambda step: None), (watched, monitor.step)):
        torch.manual_seed(1)
        train(model, 4, before)
    torch.testing.assert_close(watched.state_dict(), alone.state_dict(), rtol=0, atol=0)
    monitor.step(5)
    none = monitor.run["batch_logit"].isnull().all(("sample", "layer", "head"))
    assert none.values.tolist() == [True, False, False, False, False]
    copied = copy.deepcopy(watched)
    del monitor, before
    gc.collect()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    train(copied, 1)


@WATCHED
def test_what_cannot_be_watched():
    model = trainers.decoder().train()
    watch = partial(lb.Monitor, model, IDS)
    refused(partial(watch, extras_every=1), "extras_every needs extras among wqk_norm")
    refused(partial(watch, extras_every=0, extras="wqk_norm"), "extras_every is 0")
    refused(partial(lb.compare, "builtin:gpt2", extras="batch_logit"), "lb.Monitor alone has it")
    monitor = watch(every=1, extras="batch_logit")
    monitor.step(0)
    with pytest.warns(Notice, match="no pass in training mode was seen before step 1"):
        ds = monitor.step(1)
    assert bool(ds["batch_logit"].isnull().all())
    model.set_attn_implementation("eager")
    refused(partial(watch, extras="batch_logit"), "batch_logit needs attention 'sdpa'")


@WATCHED
def test_a_pass_that_fails_leaves_the_functions_of_attention_as_they_were():
    model = trainers.decoder()
    monitor, before = lb.Monitor(model, IDS, every=1, extras="batch_logit"), FUNCTIONS["sdpa"]
    monitor.step(0)

    def stop(*_):
        raise RuntimeError("stopped")

    model.transformer.h[0].attn.c_proj.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        model(IDS)
    assert FUNCTIONS["sdpa"] is before

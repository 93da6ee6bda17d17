"""Norms over the steps of a training: right at every step, the training unchanged, and a run that
can be read whatever happens to it."""

import copy
import functools
import random
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
import xarray as xr
import zarr
from filelock import FileLock, Timeout
from support import trainers
from support.commands import refused
from support.models import AFFINE, GPT2, build, inputs_for
from support.modules import own_norms
from support.trainers import IDS, NO_DROPOUT, RATE, decoder, train
from support.versions import newer_torch
from torch import nn

import lipbound as lb
from lipbound.errors import DamagedRunWarning, Notice, StoreError
from lipbound.runs.checksums import edited
from lipbound.runs.monitor import logged_numbers
from lipbound.runs.store import at_step
from lipbound.schema import STATISTICS


def own(model):
    """Norms by float64 SVD of the autograd Jacobian of the model's own eager attention, and what
    that says of itself: (samples, layers, heads) each."""
    exact, logit = torch.zeros(2, 2, 4).double(), torch.zeros(2, 2, 4).double()
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    eager, inputs = copy.deepcopy(model).double().eval(), {"input_ids": IDS}
    layers = lb.capture(eager, inputs)
    for s, i in np.ndindex(2, 2):
        att = layers[i]
        exact[s, i] = own_norms(eager, f"transformer.h.{i}.attn", inputs, att, s)
        scores = (att.scale * att.q[s] @ att.k[s].mT).masked_fill(hidden, -torch.inf)
        logit[s, i] = scores.amax((-1, -2))
    with torch.no_grad():
        p = torch.stack(eager(IDS, output_attentions=True).attentions, 1)
    entropy, first = torch.special.entr(p).sum(-1).mean(-1), p[..., 0].mean(-1)
    found = dict(zip(("exact", *STATISTICS), (exact, logit, entropy, first), strict=True))
    return {name: value.numpy() for name, value in found.items()}


def test_every_step_has_the_numbers_of_its_weights():
    model, truth = decoder(), {}
    monitor = lb.Monitor(model, IDS, every=3, bounds=["lipbound"], delta=1e-6)

    def before(step):
        if monitor.step(step) is not None:
            truth[step] = own(model)

    train(model, 7, before)
    run = monitor.run
    assert run["exact"].dims == ("step", "sample", "layer", "head")
    assert run["step"].values.tolist() == [0, 3, 6] == list(truth)
    for step, exact in truth.items():
        ds = run.sel(step=step)
        assert (ds["exact"].values <= exact["exact"] * (1 + 1e-6)).all()  # float32 weights' inputs
        assert (ds["exact"].values >= exact["exact"] * (1 - 2e-3)).all()
        assert (ds["exact_upper"].values >= exact["exact"] * (1 - 1e-6)).all()
        assert (ds["lipbound"].values >= exact["exact"] * (1 - 1e-6)).all()
        for name in STATISTICS:
            np.testing.assert_allclose(ds[name].values, exact[name], rtol=1e-5, atol=1e-6)
    assert not np.allclose(truth[0]["exact"], truth[6]["exact"], rtol=0.01)  # it was trained


def test_a_training_does_not_notice(tmp_path):
    """Weights after steps with dropout are the same bit by bit, and all else is as it was."""
    alone, watched = decoder(), decoder()
    watched.transformer.h[0].ln_1.eval()
    watched.transformer.wpe.weight.requires_grad_(False)
    alone.transformer.wpe.weight.requires_grad_(False)
    torch.manual_seed(1)
    train(alone, 5)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    monitor = lb.Monitor(watched, IDS, every=1, out=tmp_path / "run.zarr", bounds="default")
    before = [module.training for module in watched.modules()]
    train(watched, 5, monitor.step)
    torch.testing.assert_close(watched.state_dict(), alone.state_dict(), rtol=0, atol=0)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert [module.training for module in watched.modules()] == before
    assert watched.config._attn_implementation == alone.config._attn_implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    assert all(p.grad is None for p in watched.parameters())
    assert torch.is_grad_enabled()


def test_a_step_does_not_depend_on_others():
    model = decoder()
    often, once = (lb.Monitor(model, IDS, every=k, seed=3) for k in (1, 4))
    train(model, 5, lambda step: (often.step(step), once.step(step)))
    assert often.run.sel(step=4).equals(once.run.sel(step=4))


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_later_steps_are_those_of_a_new_monitor(name):
    """Of plain layers less is looked for after the first step."""
    model = build(AFFINE[name])
    monitor = lb.Monitor(model, inputs_for(model), every=1)
    monitor.step(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    mine, new = monitor.step(1), lb.Monitor(model, inputs_for(model), every=1).step(1)
    assert mine.drop_attrs().equals(new.drop_attrs())
    assert mine.attrs["capture_error"] < 1e-4


class Adapted(tf.pytorch_utils.Conv1D):
    """A linear map with something beside its weight, which is nothing at first."""

    more = 0.0

    def forward(self, x):
        return super().forward(x) + self.more * x.sum(-1, keepdim=True)


def test_weights_of_known_names_that_are_not_all():
    model = decoder()
    linear = model.transformer.h[0].attn.c_attn
    linear.__class__ = Adapted
    monitor = lb.Monitor(model, IDS, every=1)
    linear.more = 0.3
    mine, new = monitor.step(0), lb.Monitor(model, IDS, every=1).step(0)
    np.testing.assert_array_equal(mine["exact"], new["exact"])
    linear.more = 0.0
    assert not np.allclose(mine["exact"], monitor.step(1)["exact"], rtol=0.01)


def test_a_layer_is_one_number():
    model = decoder()
    ds, each = lb.Monitor(model, IDS, map="layer", layers=[1]).step(0), lb.Monitor(model, IDS)
    assert ds["exact"].dims == ("sample", "layer")
    assert ds["layer"].values.tolist() == [1]
    heads = each.step(0)
    for name, over in zip(STATISTICS, ("max", "mean", "mean"), strict=True):
        of_heads = getattr(heads[name].sel(layer=[1]), over)("head")
        np.testing.assert_allclose(ds[name].values, of_heads.values, rtol=1e-12)


def test_a_norm_of_tokens_is_that_of_a_run():
    model, how = decoder(), {"norm": "every-token", "bounds": "none"}
    ds, run = lb.Monitor(model, IDS, **how).step(0), lb.compare(model.eval(), IDS, **how)
    np.testing.assert_allclose(ds["exact"], run["exact"], rtol=2e-3)
    np.testing.assert_allclose(ds["exact_upper"], run["exact_upper"], rtol=2e-3)


def test_half_precision_is_measured_in_a_copy():
    model = decoder().to(torch.bfloat16)
    with pytest.warns(Notice, match="a copy of it in float32 is measured"):
        monitor = lb.Monitor(model, IDS)
    with torch.no_grad():  # the copy is made anew
        model.transformer.h[0].attn.c_attn.weight.mul_(3)
    wide = lb.Monitor(copy.deepcopy(model).float(), IDS).step(0)
    np.testing.assert_array_equal(monitor.step(0)["exact"].values, wide["exact"].values)
    assert model.dtype == torch.bfloat16


def test_wrappers_are_taken_off():
    model = decoder()
    bare, compiled = (lb.Monitor(one, IDS).step(0) for one in (model, torch.compile(model)))
    assert bare.drop_attrs().equals(compiled.drop_attrs())


# -- a run that grows ------------------------------------------------------------------------------


def grown(path, model, steps=3, **options):
    monitor = lb.Monitor(model, IDS, every=1, out=path, **options)
    train(model, steps, monitor.step)
    return monitor


def test_the_store_is_what_was_measured(tmp_path):
    path = tmp_path / "run.zarr"
    monitor = grown(path, decoder(), bounds=["lipbound", "yudin"])
    ds = lb.load(path)
    assert ds.identical(monitor.run)
    assert edited(ds) is False
    assert edited(ds.isel(step=1, layer=[0])) is False
    plain = xr.open_zarr(path)  # whoever reads it without lipbound
    np.testing.assert_array_equal(plain["exact"].values, ds["exact"].values)
    saved = lb.save(ds, tmp_path / "copy.nc")
    assert lb.load(saved)["exact"].equals(ds["exact"])


@pytest.mark.parametrize("when", ["arrays", "shapes"])
def test_a_write_that_fails_costs_one_step(tmp_path, monkeypatch, when):
    """In the middle of the arrays, or before the one file that shows them."""
    path, model = tmp_path / "run.zarr", decoder()
    monitor, there = grown(path, model), lb.load(path)
    left = [3]

    def fail(*args):
        raise OSError(28, "No space left on device")

    def some(self, key, value, put=zarr.Array.__setitem__):
        left[0] -= 1
        put(self, key, value) if left[0] else fail()

    with monkeypatch.context() as patch:
        if when == "arrays":
            patch.setattr(zarr.Array, "__setitem__", some)
        else:
            patch.setattr(zarr, "consolidate_metadata", fail)
        with pytest.warns(Notice, match=r"step 3 .* could not be written .*: No space left"):
            assert monitor.step(3) is None
    seen = lb.load(path, damaged="refuse")
    assert seen.drop_attrs().identical(there.drop_attrs())
    assert monitor.step(4) is not None
    assert lb.load(path)["step"].values.tolist() == [0, 1, 2, 4]
    assert lb.load(path, damaged="refuse").identical(monitor.run)


def test_resumed_runs_append_and_replace(tmp_path):
    path, model = tmp_path / "run.zarr", decoder()
    grown(path, model)
    again = lb.Monitor(model, IDS, every=1, out=path, resume=True)
    again.step(3)
    assert lb.load(path)["step"].values.tolist() == [0, 1, 2, 3]
    with pytest.warns(Notice, match="2 of 4 measured steps, from 2 on, come again"):
        again.step(2)
    ds = lb.load(path, damaged="refuse")
    assert ds["step"].values.tolist() == [0, 1, 2]
    assert ds.identical(again.run)
    with pytest.warns(Notice, match="3 of 3 measured steps"):
        again.step(0)
    assert lb.load(path)["step"].values.tolist() == [0]


def test_another_run_is_not_resumed(tmp_path):
    path, model = tmp_path / "run.zarr", decoder()
    grown(path, model)
    other = lb.save(at_step(lb.load(path)), tmp_path / "other.zarr")
    odd = decoder(scale_attn_by_inverse_layer_idx=True)
    for change, words in (
        ({"resume": False}, "exists already; resume=True appends to it"),
        ({"probe": IDS + 1}, "data_fingerprint was sha256"),
        ({"model": odd}, "configuration was sha256"),
        ({"tol": 0.01}, "tol was 0.001 and is now 0.01"),
        ({"bounds": ["lipbound"]}, "bounds was [] and is now ['lipbound']"),
        ({"layers": [0]}, "layers was [0, 1] and is now [0]"),
        ({"out": other}, "is not a run over steps of training"),
    ):
        options = {"model": model, "probe": IDS, "out": path, "resume": True} | change
        refused(functools.partial(lb.Monitor, **options), words, error=StoreError)


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("there", [False, True])
def test_a_second_process_is_refused(tmp_path, there):
    """Before there is a run, and of one that it would resume; this process may go on with its
    own."""
    path, model, lock = tmp_path / "run.zarr", decoder(), tmp_path / ".run.zarr.lock"
    if there:
        grown(path, model)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], **pipes) as other:
        assert other.stdout.readline() == "held\n"
        call = functools.partial(lb.Monitor, model, IDS, out=path, resume=there)
        refused(call, "another process is filling ", "run.zarr at this", error=StoreError)
        other.communicate("")
    first = lb.Monitor(model, IDS, out=path, resume=there)
    lb.Monitor(model, IDS, out=path, resume=True).step(100)
    with pytest.raises(Timeout):
        FileLock(lock).acquire(timeout=0)
    assert lb.load(path)["step"].values.tolist() == [0, 1, 2, 100][-4 if there else -1 :]
    del first


def test_of_several_monitors_of_a_store_the_last_writes(tmp_path):
    """A cell of a notebook that is run again makes another one; the former no longer writes."""
    path, model = tmp_path / "run.zarr", decoder()
    first, second = (lb.Monitor(model, IDS, every=1, out=path) for _ in range(2))
    with pytest.warns(Notice, match=r"step 0 .* a later monitor has taken over .*run\.zarr; give"):
        assert first.step(0) is None
    second.step(1)
    third = lb.Monitor(model, IDS, every=1, out=path, resume=True)
    third.step(2)
    for one in (first, second):
        with pytest.warns(Notice, match="a later monitor has taken over"):
            assert one.step(3) is None
    assert lb.load(path)["step"].values.tolist() == [1, 2]


def test_of_several_processes_the_first_writes(tmp_path, monkeypatch):
    path, model = tmp_path / "run.zarr", decoder()
    first = grown(path, model)
    monkeypatch.setattr("lipbound.runs.monitor._other_process", lambda: True)
    other = lb.Monitor(model, IDS, every=1, out=path)  # what the first one wrote already
    assert other.step(3) is None
    assert lb.load(path).identical(first.run)


@pytest.mark.parametrize("chosen", [None, [0, 1], [2]])
def test_layers_that_come_go_or_change_places_end_the_run(chosen, tmp_path):
    """No number is ever that of another layer; once the layers are back, it goes on."""
    config = tf.GPT2Config(**GPT2 | {"n_layer": 3}, bos_token_id=None, eos_token_id=None)
    model = build(lambda: tf.GPT2LMHeadModel(config)).train()
    extra = build(lambda: tf.GPT2LMHeadModel(config), seed=1).transformer.h[0]
    blocks = [*model.transformer.h, extra]
    monitor = lb.Monitor(model, IDS, every=1, layers=chosen, out=tmp_path / "run.zarr")
    first = monitor.step(0)
    for step, there in enumerate(((0, 2), (0, 1, 2, 3), (2, 0, 1), (3, 0, 1)), 1):
        model.transformer.h = nn.ModuleList(blocks[i] for i in there)
        model.config.n_layer = len(there)
        with pytest.warns(Notice, match=f"step {step} of the training was not measured or kept"):
            assert monitor.step(step) is None
    model.transformer.h, model.config.n_layer = nn.ModuleList(blocks[:3]), 3
    np.testing.assert_array_equal(monitor.step(5)["layer"], first["layer"])
    np.testing.assert_allclose(monitor.step(5)["exact"], first["exact"], rtol=2e-3)
    assert lb.load(tmp_path / "run.zarr", damaged="refuse")["step"].values.tolist() == [0, 5]


def test_adapters_may_be_put_on_after_a_monitor_was_made():
    """They stand inside the layers, which stay the same."""
    peft = pytest.importorskip("peft")
    model = decoder()
    monitor = lb.Monitor(model, IDS)
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, init_lora_weights=False)
    new = lb.Monitor(peft.get_peft_model(model, config), IDS)
    np.testing.assert_array_equal(monitor.step(0)["exact"], new.step(0)["exact"])


def test_a_step_is_verified_with_its_weights(tmp_path):
    run = grown(tmp_path / "run.zarr", decoder(), 1, bounds=["lipbound"]).run
    model = decoder()  # as it was before the first update
    for automatic in (False, True):
        found = lb.verify(run, model=model, data=IDS, automatic=automatic)
        assert found.ok, found.problems
        assert {one.variable for one in found.compared} >= {"exact", "lipbound", *STATISTICS}
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.mul_(2)
    assert not lb.verify(run, model=model, data=IDS).ok


def test_an_edited_step_is_told(tmp_path):
    path = tmp_path / "run.zarr"
    run = grown(path, decoder()).run
    words = "runs over steps of training are not put together"
    refused(lambda: lb.concat([run, run]), words, error=StoreError)
    values = zarr.open_group(path, mode="r+")["exact"]
    values[1, 0, 1, 2] = values[1, 0, 1, 2] * 2
    with pytest.warns(DamagedRunWarning, match="at sample 0 layer 1 are not those"):
        lb.load(path)


def test_weights_that_are_lost_do_not_end_a_training(tmp_path):
    model = decoder()
    monitor = lb.Monitor(model, IDS, every=1, out=tmp_path / "run.zarr")
    monitor.step(0)
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight.fill_(torch.nan)
    with pytest.warns(Notice, match="step 1 of the training was not measured or kept: "):
        assert monitor.step(1) is None
    model.load_state_dict(kept)
    monitor.step(2)
    assert lb.load(tmp_path / "run.zarr")["step"].values.tolist() == [0, 2]
    assert model.training


# -- logs and alarms -------------------------------------------------------------------------------


def test_logged_numbers_are_those_of_the_run():
    logged = []
    model = decoder()
    options = {"bounds": ["lipbound"], "per_head": True}
    monitor = lb.Monitor(model, IDS, every=2, log=lambda *said: logged.append(said), **options)
    train(model, 3, monitor.step)
    assert [step for _, step in logged] == [0, 2]
    for said, step in logged:
        ds = monitor.run.sel(step=step)
        for layer in range(2):
            one, place = ds.sel(layer=layer), f"lipbound/layer_{layer}"
            for name in ("exact", "lipbound"):
                assert said[f"{place}/{name}_max"] == float(one[name].max())
                mean = float(np.exp(np.log(one[name]).mean()))
                assert said[f"{place}/{name}_geomean"] == pytest.approx(mean)
            assert said[f"{place}/largest_logit_max"] == float(one["largest_logit"].max())
            assert said[f"{place}/entropy_mean"] == pytest.approx(float(one["entropy"].mean()))
            assert said[f"{place}/head_3/exact"] == float(one["exact"].sel(head=3).max())
        assert len(said) == 2 * (2 + 2 + 3 + 4 * 5)
    assert len(logged_numbers(monitor.run.sel(step=0), ["exact"])) == 2 * 2
    ds = monitor.run.sel(step=0).copy(deep=True)  # missing ones are not logged
    ds["exact"][:, 0] = np.nan
    ds["exact"][:, 1] = 0.0
    assert logged_numbers(ds, ["exact"]) == {"lipbound/layer_1/exact_max": 0.0}


def test_thresholds_are_told_when_they_are_crossed():
    model = decoder()
    weight = model.transformer.h[1].attn.c_attn.weight
    start = weight.detach().clone()
    limits = {"exact": 10.0, "largest_logit": 1e9}
    told, both = (lb.Monitor(model, IDS, every=1, threshold=one) for one in (10.0, limits))
    rising = []
    for step, factor in enumerate((1, 300, 400, 1, 300)):
        with torch.no_grad():
            weight.copy_(start * factor)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            told.step(step)
            both.step(step)
        rising.append([str(one.message) for one in seen if "risen above" in str(one.message)])
    assert list(map(len, rising)) == [0, 2, 0, 0, 2]
    for step in (1, 4):
        exact = told.run["exact"].sel(step=step)
        sample, layer, head = np.unravel_index(int(exact.argmax()), exact.shape)
        where = f"layer {layer}, head {head}, sample {sample}"
        message = f"exact has risen above 10 at step {step}: {float(exact.max()):.4g} in {where}"
        assert rising[step] == [message] * 2
    assert layer == 1


# -- Trainers --------------------------------------------------------------------------------------


def test_a_model_that_a_trainer_runs_under_autocast_is_measured_in_its_own_dtype(tmp_path):
    """Accelerate gives it a forward pass under autocast, which the model keeps for good."""
    model = decoder(**NO_DROPOUT)
    trainer = hf_trainer(model, tmp_path, 1, bf16=True)
    trainer.args.learning_rate = 0.0
    monitor = lb.Monitor(model, IDS, every=1).attach(trainer)
    before = lb.Monitor(model, IDS, every=1).step(0)
    norm = lb.network_norm(model, {"input_ids": IDS}).lower
    trainer.train()
    wrapped = vars(model)["forward"]
    for step in (0, 1):
        np.testing.assert_allclose(monitor.run["entropy"].sel(step=step), before["entropy"])
        np.testing.assert_allclose(monitor.run["exact"].sel(step=step), before["exact"], rtol=1e-3)
    torch.testing.assert_close(lb.network_norm(model, {"input_ids": IDS}).lower, norm)
    assert vars(model)["forward"] is wrapped


def hf_trainer(model, folder, steps, **options):
    usual = {"per_device_train_batch_size": 2, "learning_rate": RATE, "logging_steps": 2}
    model.accepts_loss_kwargs = False  # the mean over predicted tokens, as in the loop
    # every batch has both rows, in one order or the other
    rows = [{"input_ids": one, "labels": one} for one in IDS]
    usual |= {"max_steps": steps} | options
    return trainers.trainer_of(model, folder, rows, tf.Trainer, **usual)


def test_a_trainer_gives_the_numbers_of_a_plain_loop(tmp_path):
    plain, model = decoder(**NO_DROPOUT), decoder(**NO_DROPOUT)
    loop = lb.Monitor(plain, IDS, every=2)
    train(plain, 5, loop.step)
    trainer = hf_trainer(model, tmp_path, 4)
    monitor = lb.Monitor(model, IDS, every=2).attach(trainer)
    trainer.train()
    mine, theirs = monitor.run, loop.run
    assert mine["step"].values.tolist() == theirs["step"].values.tolist() == [0, 2, 4]
    for name in ("exact", *STATISTICS):
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4, atol=1e-5)
    history = trainer.state.log_history
    said = {one["step"]: one for one in history if "lipbound/layer_0/exact_max" in one}
    assert list(said) == [0, 2, 4]
    assert said[4]["lipbound/layer_0/exact_max"] == float(mine.sel(step=4, layer=0)["exact"].max())
    # what the Trainer logs itself is not lost
    assert [one["step"] for one in history if "loss" in one] == [2, 4]


@newer_torch("2.6", "the state of an optimiser is pickled, which transformers does not read")
def test_a_trainer_that_resumes_appends(tmp_path):
    run, options = tmp_path / "run.zarr", {"save_strategy": "steps", "save_steps": 2}
    first = decoder(**NO_DROPOUT)
    trainer = hf_trainer(first, tmp_path, 3, **options)
    lb.Monitor(first, IDS, every=1, out=run).attach(trainer)
    trainer.train()
    second = decoder(**NO_DROPOUT)
    trainer = hf_trainer(second, tmp_path, 5, **options)
    monitor = lb.Monitor(second, IDS, every=1, out=run, resume=True).attach(trainer)
    with pytest.warns(Notice, match="2 of 4 measured steps, from 2 on, come again"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert lb.load(run, damaged="refuse")["step"].values.tolist() == [0, 1, 2, 3, 4, 5]
    assert lb.load(run).identical(monitor.run)


def test_lightning_is_followed_step_by_step(monkeypatch):
    """A stand-in with the two hooks and the loggers that Lightning has."""
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Callback=object))
    model, logged = decoder(**NO_DROPOUT), list[int]()
    trainer = type("Trainer", (SimpleNamespace,), {"__module__": "lightning.pytorch.trainer"})()
    logger = SimpleNamespace(log_metrics=lambda numbers, step: logged.append(step))
    trainer.callbacks, trainer.loggers, trainer.global_step = [], [logger], 0
    monitor = lb.Monitor(model, IDS, every=2).attach(trainer)
    trainer.callbacks[0].on_train_start(trainer, model)
    for trainer.global_step in (1, 1, 2, 3, 4):
        trainer.callbacks[0].on_train_batch_end(trainer, model)
    assert monitor.run["step"].values.tolist() == logged == [0, 2, 4]


def test_one_pass_of_the_model_a_step():
    """The probe is verified when the monitor is made, against the model's own attention."""
    torch.manual_seed(0)
    model = decoder()
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    monitor = lb.Monitor(model, torch.tensor([[1, 2, 3, 4]]), every=1)
    made = len(passes)
    assert made >= 2
    for step in range(3):
        monitor.step(step)
    assert len(passes) == made + 3


def test_what_a_monitor_cannot_do():
    monitor = lb.Monitor(decoder(), IDS)
    refused(lambda: monitor.step(-1), "step is -1; it must be a whole number")
    refused(lambda: monitor.run, "nothing was measured yet")
    refused(lambda: monitor.attach(decoder()), "give a Trainer of transformers or of Lightning")

"""Penalties in a Trainer: the loss of a step whatever is accumulated, padding left out, and nothing
left undone without a word."""

import functools
import math
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as tf
from support import trainers
from support.commands import refused
from support.models import AFFINE, SEQ2SEQ, TEXT, build
from support.trainers import LENGTHS, NO_DROPOUT, SmallTrainer, decoder, texts, trainer_of
from support.versions import marked

from lipbound.errors import LipboundError, Notice
from lipbound.models.training import attention_layers, attention_probabilities
from lipbound.regularizers.penalties import (
    ExactNorm,
    JaSMin,
    LayerPenalty,
    SoundPenalty,
    Specformer,
)
from lipbound.regularizers.trainer import PenaltyMixin


def causal():
    """A model that takes ``num_items_in_batch``."""
    return decoder(**NO_DROPOUT)


def classifier():
    """A model that does not."""
    off = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0)
    sizes = {"dim": 24, "hidden_dim": 32, "n_layers": 2, "n_heads": 4}
    config = tf.DistilBertConfig(vocab_size=60, max_position_embeddings=40, **sizes, **off)
    model = build(lambda: tf.DistilBertForSequenceClassification(config))
    model.accepts_loss_kwargs = False
    return model


def accumulating(make, folder, steps=1, kind=SmallTrainer, **options):
    options |= {"per_device_train_batch_size": 4 // steps, "gradient_accumulation_steps": steps}
    return trainer_of(make(), folder, texts(make is classifier), kind, **options)


def step(trainer):
    """Loss of one step, and all parameters after it."""
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def mean_of(make, penalty):
    """The penalty text by text, without padding, averaged."""
    model, values = make(), []
    if isinstance(penalty, Specformer):
        return float(penalty(model).detach())
    context = attention_layers if isinstance(penalty, LayerPenalty) else attention_probabilities
    for one, length in zip(texts(make is classifier), LENGTHS, strict=True):
        with torch.no_grad(), context(model) as found:
            model(input_ids=one["input_ids"][None, :length])
        values.append(float(penalty(found)))
    return sum(values) / len(values)


PENALTIES = {**trainers.PENALTIES, "function": lambda: lambda found: JaSMin(reduce="mean")(found)}


@functools.cache
def plain_loss(make):
    """That of a step without a penalty."""
    with tempfile.TemporaryDirectory() as folder:
        return step(accumulating(make, Path(folder), kind=tf.Trainer))[0]


@pytest.mark.each_value
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("make", [causal, classifier])
def test_the_loss_does_not_depend_on_accumulation(make, name, tmp_path):
    """The loss of the Trainer and strength times the penalty of the texts one by one, however many
    are accumulated; the same step of the weights; and both terms are logged."""
    plain = plain_loss(make)
    expected, exact = mean_of(make, PENALTIES[name]()), None
    for steps in (1, 2, 4):
        trainer = accumulating(make, tmp_path, steps)
        trainer.penalty, trainer.strength = PENALTIES[name](), 0.5
        loss, parameters = step(trainer)
        assert loss - plain == pytest.approx(0.5 * expected, rel=1e-3)
        (logged,) = (entry for entry in trainer.state.log_history if "loss" in entry)
        assert logged["penalty"] == pytest.approx(expected, rel=1e-3)
        assert logged["task_loss"] == pytest.approx(plain, rel=1e-4)
        exact = parameters if exact is None else exact
        torch.testing.assert_close(parameters, exact, rtol=1e-3, atol=1e-4)


def test_logged_terms_are_means_over_the_steps_since_the_last_log(tmp_path):
    """Five steps of unequal numbers of batches, logged at every second: each entry adds up."""
    trainer = accumulating(causal, tmp_path, 4)
    trainer.args.max_steps, trainer.args.logging_steps = 5, 2
    trainer.args.gradient_accumulation_steps = 3  # of four batches an epoch: 3, 1, 3, 1, 3
    trainer.penalty, trainer.strength = JaSMin(), 0.5
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2
    assert entries[0]["penalty"] != entries[1]["penalty"]
    for entry in entries:
        total = entry["task_loss"] + 0.5 * entry["penalty"]
        assert total == pytest.approx(entry["loss"], rel=1e-5)


def test_gradient_checkpointing_and_compute_loss_func(tmp_path):
    losses, how = [], {"use_reentrant": False}
    for options in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": how}):
        trainer = accumulating(causal, tmp_path, 2, **options)
        trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: (
            outputs.logits.square().sum() / num_items_in_batch
        )
        trainer.penalty, trainer.strength = SoundPenalty(), 0.5
        losses.append(step(trainer))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=1e-4, atol=1e-5)


def test_evaluation_has_no_penalty(tmp_path):
    plain, trainer = accumulating(causal, tmp_path, kind=tf.Trainer), accumulating(causal, tmp_path)
    trainer.penalty, trainer.strength = JaSMin(), 0.5
    losses = [one.evaluate(texts())["eval_loss"] for one in (plain, trainer)]
    assert losses[0] == losses[1]


def test_the_wrong_side_of_trainer_is_refused():
    with pytest.raises(LipboundError, match=r"write class Wrong\(PenaltyMixin, Trainer\)"):
        type("Wrong", (tf.Trainer, PenaltyMixin), {})

    class Mine(PenaltyMixin):
        """A mixin of one's own."""

    class Right(Mine, tf.Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    assert issubclass(Right, tf.Trainer)


FORGOTTEN = [
    (JaSMin(), None, "has a penalty but no strength"),
    (JaSMin(), "1e-3", "strength is '1e-3'; it must be a finite number"),
    (JaSMin(), math.nan, "strength is nan"),
    (None, 1e-3, "but no penalty"),
    (JaSMin, 1e-3, "give JaSMin()"),
    ("jasmin", 1e-3, "give JaSMin()"),
    (lambda found: found, 1e-3, "must return a tensor with one number"),
    (lambda found: found[0], 1e-3, "a tensor of shape"),
]


def test_what_was_forgotten_or_makes_no_sense(tmp_path):
    trainer = accumulating(causal, tmp_path)
    for trainer.penalty, trainer.strength, words in FORGOTTEN:
        refused(trainer.train, words)


def test_no_penalty_is_told_unless_it_was_asked_for(tmp_path, recwarn):
    trainer = accumulating(causal, tmp_path)
    trainer.penalty, trainer.strength = JaSMin(), 0
    trainer.train()
    assert not [w for w in recwarn if issubclass(w.category, Notice)]
    with pytest.warns(Notice, match="neither penalty nor strength"):
        accumulating(causal, tmp_path).train()


def test_a_penalty_that_trains_nothing_is_told(tmp_path):
    trainer = accumulating(causal, tmp_path)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_(name == "transformer.ln_f.weight")
    trainer.penalty, trainer.strength = JaSMin(), 0.5
    with pytest.warns(Notice, match="depends on no parameter that is trained"):
        trainer.train()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_padding_does_not_count_in_any_penalty(name, side):
    """Half-padded texts and one that is all padding: what the valid tokens give alone."""
    model = build(AFFINE[name]).double()
    ids = torch.randint(3, 60, (3, 10), generator=torch.Generator().manual_seed(2))
    real = torch.arange(10) < torch.tensor([10, 5, 0])[:, None]
    real = real.flip(1) if side == "left" else real
    places = (real.long().cumsum(-1) - 1).clamp_min(0)
    penalties = [JaSMin(), JaSMin(reduce="mean"), JaSMin(2, "mean")]
    for penalty in (*penalties, SoundPenalty(), SoundPenalty("lipbound"), ExactNorm(tol=1e-10)):
        context = attention_layers if isinstance(penalty, LayerPenalty) else attention_probabilities
        with context(model) as found:
            model(ids, attention_mask=real.long(), position_ids=places)
        values = []
        for s in range(2):
            with context(model) as alone:
                model(ids[s : s + 1, real[s]])
            values.append(penalty(alone))
        mine, exact = penalty(found), torch.stack(values).mean()
        assert float(mine.detach()) == pytest.approx(float(exact.detach()), rel=1e-6)
        if not isinstance(penalty, LayerPenalty):
            assert float(penalty(list(found), real).detach()) == float(mine.detach())
        pair = gradient(model, mine), gradient(model, exact)
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-8)


def gradient(model, value):
    named = {n: p for n, p in model.named_parameters() if "embed" not in n and "wpe" not in n}
    weights = [p for n, p in named.items() if "weight" in n]
    return torch.autograd.grad(value, weights, materialize_grads=True)


@pytest.mark.parametrize("name", marked(["bart", "t5"], {"t5": "T5 calls no attention function"}))
def test_encoders_and_decoders_have_their_own_padding(name):
    """At equal lengths: encoder, decoder and cross-attention give what the two texts give alone."""
    model = build(SEQ2SEQ[name]).double()
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(2))
    others = ids.flip(1)
    real = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    own = torch.tensor([[1] * 6 + [0] * 2, [1] * 8])
    with torch.no_grad(), attention_probabilities(model) as found:
        model(ids, attention_mask=real, decoder_input_ids=others, decoder_attention_mask=own)
    assert len(found) == 3
    for penalty in (JaSMin(), JaSMin(reduce="mean")):
        values = []
        for s in range(2):
            inside = others[s : s + 1, own[s] > 0]
            with torch.no_grad(), attention_probabilities(model) as alone:
                model(ids[s : s + 1, real[s] > 0], decoder_input_ids=inside)
            values.append(penalty(alone))
        assert float(penalty(found)) == pytest.approx(float(torch.stack(values).mean()), rel=1e-5)


def test_nothing_but_padding():
    model, ids = build(AFFINE["bert"]), torch.ones(1, 4, dtype=torch.long)
    with attention_probabilities(model) as found, attention_layers(model) as layers:
        model(ids, attention_mask=0 * ids)
    assert float(JaSMin(0, "mean")(found)) == 0
    assert layers == []


def test_autocast_rounds_no_penalty():
    model = build(lambda: tf.BertModel(tf.BertConfig(**TEXT)))
    with attention_layers(model) as layers:
        model(torch.arange(3, 9)[None])
    fresh = lambda: Specformer(1, 1, 1)  # noqa: E731  # its power iteration goes on
    for make, given in ((SoundPenalty, layers), (ExactNorm, layers), (fresh, model)):
        exact = float(make()(given).detach())
        with torch.autocast("cpu", torch.bfloat16):
            assert float(make()(given).detach()) == pytest.approx(exact, rel=1e-6)

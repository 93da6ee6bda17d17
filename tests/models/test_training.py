"""Models in training: the same numbers inside the contexts as outside, whatever masks, padding,
wrappers and checkpoints there are."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import transformers as tf
from support.models import AFFINE, LLAMA, MODERN, SEQ2SEQ, build, inputs_for
from support.versions import newer_torch, newer_transformers
from torch import Tensor, nn

from lipbound.errors import CaptureError, Notice
from lipbound.models.training import attention_layers, attention_probabilities
from lipbound.regularizers.penalties import JaSMin

DOCUMENTS = torch.block_diag(torch.ones(5, 5), torch.ones(4, 4)).bool()[None, None]
"""Two documents in one text of nine tokens."""


def bert():
    return build(AFFINE["bert"])


def llama():
    return build(lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA)))


def added(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def watched(model, mask):
    """Probabilities of a batch, whose outputs are those of the model outside."""
    ids = inputs_for(bert())["input_ids"]
    outside = model(ids, attention_mask=mask).last_hidden_state
    with attention_probabilities(model) as found:
        inside = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-5)
    return found


MASKS = [
    DOCUMENTS.tril(),
    DOCUMENTS.expand(1, 4, 9, 9) & (torch.arange(9) > 0),
    pytest.param(DOCUMENTS.triu(1), marks=newer_torch("2.5", "outputs that are no NaN")),
]


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("mask", MASKS, ids=["causal", "heads", "blind"])
def test_masks_of_true_and_false_are_what_fused_attention_takes_them_for(make, mask):
    """True is where attention is allowed; the outputs are those of the model outside, also of
    tokens that see nothing ("blind")."""
    model = make()
    found = watched(model, mask)
    assert all(float(p.masked_fill(mask, 0).detach().max()) == 0 for p in found)
    for other in (added(mask), torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
        same = watched(model, other)
        rows = mask.any(-1).expand(len(found[0]), 4, -1)
        torch.testing.assert_close(found[0][rows], same[0][rows], rtol=1e-4, atol=1e-6)


@newer_transformers("T5 calls no attention function")
@pytest.mark.parametrize("mask", [None, DOCUMENTS, added(DOCUMENTS)], ids=["none", "bool", "added"])
def test_biases_of_relative_positions(mask):
    assert len(watched(build(MODERN["T5 encoder"]), mask)) == 2


LEFT = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
RIGHT = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_padding_is_known_for_every_layer(name, mask):
    model = llama() if name == "llama" else build(AFFINE[name])
    ids = inputs_for(bert())["input_ids"]
    pairs = (mask != 0)[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool).tril()
    with attention_probabilities(model) as found:
        for given in (mask, added(pairs), None):
            model(ids, attention_mask=given)
    assert all(v is not None and torch.equal(v, mask != 0) for v in found.valid[:4])
    assert found.valid[4:] == [None, None]
    assert found[1:3].valid == found.valid[1:3]


@pytest.mark.parametrize("name", ["bart", "marian"])
@pytest.mark.parametrize("length", [9, 7])
def test_padding_belongs_to_a_stream_of_tokens(name, length):
    """The encoder's is not the decoder's, also at equal lengths; cross-attention has the decoder's
    rows."""
    model, ids = build(SEQ2SEQ[name]), inputs_for(bert())["input_ids"]
    own = torch.ones(2, length, dtype=torch.long)
    own[0, -2:] = 0
    given = {"attention_mask": RIGHT, "decoder_input_ids": ids[:, :length]}
    with attention_probabilities(model) as found:
        model(ids, **given)
        model(ids, **given, decoder_attention_mask=own)
    seen = [None if v is None else v.long().tolist() for v in found.valid]
    assert seen == [RIGHT.tolist(), None, None, RIGHT.tolist(), own.tolist(), own.tolist()]


@newer_transformers("DiffLlama calls no attention function")
def test_a_layer_counts_once_however_often_it_calls():
    config = tf.DiffLlamaConfig(**LLAMA)
    model = build(lambda: tf.DiffLlamaModel(config))
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    ids = inputs_for(bert())["input_ids"]
    with attention_probabilities(model) as found:
        model(ids)
        model(ids)
    theirs = own(ids, output_attentions=True).attentions
    assert len(found) == 2 * len(theirs)
    expected = float(JaSMin()(list(theirs)).detach())
    assert float(JaSMin()(found[:2]).detach()) == pytest.approx(expected, rel=1e-5)
    model = bert()
    module = model.encoder.layer[1].attention.self
    once = module.forward
    module.forward = lambda *args, **kwargs: [once(*args, **kwargs) for _ in range(2)][1]
    refusal = pytest.raises(CaptureError, match="several times in one forward pass")
    with attention_layers(model, [0]), refusal, attention_layers(model):
        model(ids)


class Pictures(nn.Module):
    """Attention picture by picture, of pictures of several sizes laid end to end."""

    def __init__(self, config, sizes, is_causal):
        super().__init__()
        self.config, self.sizes, self.is_causal = config, sizes, is_causal

    def forward(self, hidden_states, *args, **kwargs):
        attention = tf.AttentionInterface()[self.config._attn_implementation]
        x = hidden_states.unflatten(-1, (4, 6)).transpose(1, 2)
        parts = [
            attention(self, part, part, part, None, scaling=1.0)[0]
            for part in x.split(self.sizes, 2)
        ]
        return torch.cat(parts, 1).flatten(2), None


def of_pictures(sizes, is_causal):
    model = bert()
    for layer in model.encoder.layer:
        layer.attention.self = Pictures(model.config, sizes, is_causal)
    return model


def test_no_mask_at_all_is_causal_where_fused_attention_makes_it_so():
    found = watched(of_pictures((9,), is_causal=True), None)
    assert all(float(p.triu(1).detach().max()) == 0 for p in found)


def test_pictures_of_one_pass_are_samples_of_one_layer():
    model = of_pictures((5, 4), is_causal=False)
    with attention_probabilities(model, layers=[1]) as found:
        model(inputs_for(bert())["input_ids"][:1])
    assert [tuple(p.shape) for p in found] == [(2, 4, 5, 5)]
    alone = JaSMin()([found[0][:1]]) + JaSMin()([found[0][1:, :, :4, :4]])
    torch.testing.assert_close(JaSMin()(found), alone / 2)


@pytest.mark.parametrize("chosen", [None, [1]])
@pytest.mark.parametrize("context", [attention_probabilities, attention_layers])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_have_the_same_gradients(reentrant, context, chosen):
    """Nothing is computed again, which is told."""
    model = bert().train()
    batch = inputs_for(model, padded=True)

    def penalty():
        torch.manual_seed(0)
        with context(model, chosen) as found:
            loss = model(**batch).last_hidden_state.square().mean()
        return loss + sum((t if isinstance(t, Tensor) else t.p).square().mean() for t in found)

    gradients = partial(torch.autograd.grad, inputs=[*model.parameters()], materialize_grads=True)
    plain = gradients(penalty())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with pytest.warns(Notice, match="gradient checkpointing is off while attention is watched"):
        value = penalty()
    torch.testing.assert_close(gradients(value), plain, rtol=1e-4, atol=1e-6)
    assert model.is_gradient_checkpointing
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_model_is_left_as_it_was(kind):
    model = bert().train()
    model.set_attn_implementation(kind)

    def hooks():
        return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]

    before = hooks()
    with attention_layers(model), attention_probabilities(model):
        model(**inputs_for(model))
    with pytest.raises(IndexError), attention_layers(model):
        model(torch.full((1, 9), 10**6))
    with pytest.raises(CaptureError), attention_layers(model):
        model(**inputs_for(model), attention_mask=DOCUMENTS.expand(2, 1, -1, -1).long())
    assert model.config._attn_implementation == kind
    assert hooks() == before
    assert model.training


def test_contexts_inside_each_other_and_models_side_by_side():
    first, second = bert(), llama()
    ids = inputs_for(first)["input_ids"]
    with attention_probabilities(first) as outer, attention_probabilities(second) as other:
        first(ids)
        with attention_probabilities(first), attention_probabilities(first) as twin:
            pass
        assert twin == []
        watched_again = attention_probabilities(first, layers=[1])
        with watched_again as inner, attention_layers(first, 0) as whole:
            first(ids)
            second(ids)
        first(ids)
    assert (len(outer), len(inner), len(whole), len(other)) == (6, 1, 1, 2)
    torch.testing.assert_close(outer[3], inner[0], rtol=0, atol=0)
    torch.testing.assert_close(outer[2], whole[0].p, rtol=1e-4, atol=1e-6)


def test_threads_keep_to_their_own_models():
    models = [bert(), build(AFFINE["bert"], seed=1)]
    ids = inputs_for(models[0])["input_ids"]
    alone = []
    for model in models:
        with attention_probabilities(model) as found:
            model(ids)
        alone.append(found)
    start = threading.Barrier(2)

    def run(model):
        start.wait()
        for _ in range(5):
            with attention_probabilities(model) as mine:
                model(ids)
        return mine

    with ThreadPoolExecutor(2) as pool:
        for found, expected in zip(pool.map(run, models), alone, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    assert all(model.config._attn_implementation == "sdpa" for model in models)


COMPILED = newer_torch("2.6", "running a compiled model as it is written")


WRAPPERS = [nn.DataParallel, pytest.param(partial(torch.compile, backend="eager"), marks=COMPILED)]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["data parallel", "compiled"])
def test_wrapped_models(wrap):
    model = bert()
    batch = inputs_for(model, padded=True)
    with attention_probabilities(model) as plain:
        model(**batch)
    wrapped = wrap(model)
    for _ in range(2):
        wrapped(**batch)
        with attention_probabilities(wrapped) as found, attention_layers(wrapped) as whole:
            wrapped(**batch)
        assert len(whole) == 2
        for p, q in zip(found, plain, strict=True):
            torch.testing.assert_close(p, q)


def test_copies_of_data_parallel_are_refused():
    model = bert()
    own = model.encoder.layer[0].attention.self
    copied = own._replicate_for_data_parallel()
    copied.query, copied.key, copied.value = own.query, own.key, own.value
    refusal = pytest.raises(CaptureError, match="DistributedDataParallel")
    with refusal, attention_probabilities(model):
        copied(torch.randn(1, 3, 24))


@pytest.mark.parametrize("bad", [nn.Linear(2, 2), "bert", None, nn.DataParallel(nn.Linear(2, 2))])
def test_what_is_no_transformers_model_is_refused(bad):
    for context in (attention_probabilities(bad), attention_layers(bad)):
        with pytest.raises(CaptureError, match="give a loaded transformers model"), context:
            pass


def test_layers_that_do_not_exist_and_masks_that_are_none():
    model, ids = bert(), inputs_for(bert())["input_ids"]
    for layers, mask, words in (
        ([7], None, r"layers \[7\] do not exist"),
        ([-1], None, "count from 0"),
        ("x", None, "give numbers from 0"),
        (None, DOCUMENTS.long().expand(2, -1, -1, -1), "mask of int64 numbers; give True where"),
    ):
        with pytest.raises(ValueError, match=words), attention_probabilities(model, layers):
            model(ids, attention_mask=mask)


@pytest.mark.parametrize("mode", ["autocast", "bfloat16", "float64"])
def test_layers_of_models_in_other_precisions(mode):
    """In half precision they are those of the float32 model up to its rounding, in float32."""
    model = bert()
    batch = inputs_for(model, padded=True)
    with attention_layers(model) as exact:
        model(**batch)
    model = model.to(torch.float32 if mode == "autocast" else getattr(torch, mode))
    half = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
    with half, attention_layers(model) as found:
        model(**batch)
    assert {att.dtype for att in found} == {torch.float64 if mode == "float64" else torch.float32}
    limit = 1e-5 if mode == "float64" else 0.1
    torch.testing.assert_close(found[0].out.float(), exact[0].out, rtol=0, atol=limit)
    assert found[0].p.requires_grad


def test_cross_attention_is_no_self_attention():
    model, ids = build(SEQ2SEQ["bart"]), inputs_for(bert())["input_ids"]
    refusal = pytest.raises(CaptureError, match="does more to its keys than project its input")
    with refusal, attention_layers(model, [2]):
        model(ids, decoder_input_ids=ids.flip(1))


def test_one_module_as_several_layers():
    """Each choice takes the input of its own pass."""
    model = build(AFFINE["albert"])
    batch = inputs_for(model)
    with attention_layers(model) as both:
        model(**batch)
    with attention_layers(model, [1]) as second:
        model(**batch)
    torch.testing.assert_close(second[0].x, both[1].x)


@pytest.mark.parametrize("name", ["gpt-oss", "Gemma 2"])
def test_sinks_and_caps_are_refused_in_layers_that_were_not_chosen_too(name):
    model = build(MODERN[name])
    refusal = pytest.raises(CaptureError, match="penalties do not support")
    with refusal, attention_probabilities(model, [1]):
        model(**inputs_for(model))

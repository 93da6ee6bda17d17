"""Whole networks: against the dense Jacobian of the model itself, float64."""

from functools import partial

import pytest
import torch
import transformers as tf
from support.checks import close, normal, refused
from support.models import BART, GPT2, IMAGE, TEXT, build, inputs_for, wide

from lipbound.analysis.network import NetworkJacobian, blocks, network_norm
from lipbound.linalg.operators import Transposed

MODELS = {
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**IMAGE, num_labels=5)),
    "bert": lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
}


def through(layers, x):
    x = x[None]
    for layer in layers:
        x = y[0] if isinstance(y := layer(x), tuple) else y
        x = x if x.ndim == 3 else x[None]
    return x


def own(model, name, inputs, s):
    """The network after its embeddings, taken apart by hand, for one sample, and its
    input there."""

    if name == "vit":
        vit = model.vit
        layers = vit.layers if hasattr(vit, "layers") else vit.encoder.layer
        x = vit.embeddings(inputs["pixel_values"])[s]
        return lambda x: model.classifier(vit.layernorm(through(layers, x))[:, 0])[0], x
    if name == "bert":
        bert = model.bert
        x = bert.embeddings(input_ids=inputs["input_ids"])[s]
        return lambda x: model.classifier(bert.pooler(through(bert.encoder.layer, x)))[0], x
    places = model.transformer.wpe(torch.arange(inputs["input_ids"].shape[1]))
    x = model.transformer.wte(inputs["input_ids"])[s] + places
    return lambda x: model(inputs_embeds=(x - places)[None]).logits[0], x


@pytest.mark.parametrize("name", list(MODELS))
def test_norm_is_that_of_the_dense_jacobian(name):
    model = build(MODELS[name]).double()
    inputs = wide(inputs_for(model))
    norm = network_norm(model, inputs, tol=1e-8, batch=1 if name == "bert" else 16)
    certified = network_norm(model, inputs, tol=1e-6, delta=1e-6)
    model.set_attn_implementation("eager")
    for s in range(2):
        f, x = own(model, name, inputs, s)
        dense = torch.func.jacrev(f)(x.detach())
        exact = float(torch.linalg.matrix_norm(dense.reshape(-1, x.numel()), 2))
        assert float(norm.lower[s]) == pytest.approx(exact, rel=1e-6)
        assert exact <= float(certified.upper[s]) * (1 + 1e-9)
    assert bool(norm.converged.all())


@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, 1), (0, 1)])
def test_blocks_against_their_own_modules(start, end):
    model = build(MODELS["vit"]).double()
    inputs = wide(inputs_for(model))
    norm = network_norm(model, inputs, start=start, end=end, tol=1e-9)
    own_blocks, seen = blocks(model)[start : end + 1], []
    hook = own_blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    dense = torch.stack([torch.func.jacrev(partial(through, own_blocks))(x)[0] for x in seen[0]])
    close(norm.lower, torch.linalg.matrix_norm(dense.flatten(3).flatten(1, 2), 2), 1e-7)


def test_padding_is_held_fixed():
    model = build(lambda: tf.BertModel(tf.BertConfig(**TEXT))).double()
    padded = inputs_for(model, padded=True)
    short = {name: padded[name][1:, :6] for name in ("input_ids", "attention_mask")}
    options = {"end": "last_hidden_state", "tol": 1e-8}
    mine, alone = (network_norm(model, given, **options).lower for given in (padded, short))
    assert float(mine[1]) == pytest.approx(float(alone[0]), rel=1e-7)


def test_batches_and_float32_agree():
    model = build(MODELS["vit"])
    inputs = {"pixel_values": normal(0, torch.float32)(5, 3, 16, 16)}
    all_at_once, in_pieces = (network_norm(model, inputs, batch=b).lower for b in (16, 2))
    close(all_at_once, in_pieces, 1e-5)
    exact = network_norm(model.double(), {"pixel_values": inputs["pixel_values"].double()}).lower
    close(all_at_once, exact, 1e-4)


def test_reverse_mode_alone_will_do():
    """Operations without a forward derivative: products with J by differentiating those
    with J^T."""

    class Cube(torch.autograd.Function):
        """A cube without forward mode."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, y):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * y

    x, z = normal(0)(2, 3, 4), normal(1)(2, 3, 4)
    op = NetworkJacobian(lambda x: Cube.apply(x), x)
    part = Transposed(op).select(torch.tensor([1])).jvp(z[1:])
    for found in (op.jvp(z), op.vjp(z), torch.cat([op.jvp(z)[:1], part])):
        close(found, 3 * x**2 * z)
    assert op.dense().shape == (2, 12, 12)


def test_bad_ends():
    model = build(MODELS["vit"])
    for options, words in (
        ({"start": 2}, "or the number of a block, of which this model has 2"),
        ({"end": 2}, "or the number of a block"),
        ({"start": 1, "end": 0}, "end at 1 or later"),
        ({"end": "pooler"}, "give 'logits'"),
        ({"end": "last_hidden_state"}, "has no last_hidden_state"),
    ):
        call = partial(network_norm, model, inputs_for(model), **options)
        refused(call, words)


def test_an_encoders_padding_is_not_the_decoders():
    """From the encoder's embeddings to the decoder's outputs, which have as many tokens, none of
    them padding."""
    model = build(lambda: tf.BartModel(tf.BartConfig(**BART))).double()
    ids = torch.arange(3, 9)[None]
    inputs = {"input_ids": ids, "decoder_input_ids": ids + 9}
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0]])
    model.set_attn_implementation("eager")
    entered = []

    def outputs(x):
        def enter(module, args):
            entered.append(args[0])
            whole = args[0] if x is None else torch.cat([x, entered[0][0, 3:]])[None]
            return (whole, *args[1:])

        hook = model.encoder.layers[0].register_forward_pre_hook(enter)
        value = model(**inputs, use_cache=False).last_hidden_state
        hook.remove()
        return value

    outputs(None)
    jacobian = torch.autograd.functional.jacobian(outputs, entered[0][0, :3].detach())
    expected = float(torch.linalg.matrix_norm(jacobian.reshape(6 * 24, 3 * 24), 2))
    found = network_norm(model, inputs, end="last_hidden_state", tol=1e-8).lower
    assert float(found) == pytest.approx(expected, rel=1e-6)

"""Penalties: values by full sort, gradients by finite differences, and how they sit in a training
loop."""

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close, given_parts, normal, refused, slopes
from support.layers import changed
from support.models import AFFINE, TEXT, build, inputs_for
from support.oracles import oracle
from support.strategies import examples
from support.variants import layer

from lipbound.attention.layer import Attention
from lipbound.bounds import get
from lipbound.errors import CaptureError
from lipbound.models.capture.capture import capture
from lipbound.models.training import attention_layers, attention_probabilities, projections
from lipbound.regularizers.penalties import ExactNorm, JaSMin, SoundPenalty, Specformer


def difference(weight, value, step=1e-6):
    """Derivative of a value by a weight along a random direction, and the central difference."""
    (gradient,) = torch.autograd.grad(value(), weight)
    here, along, sides = weight.detach().clone(), normal()(*weight.shape), []
    for move in (step, -step):
        weight.data = here + move * along
        sides.append(float(value().detach()))
    weight.data = here
    return float((gradient * along).sum()), (sides[0] - sides[1]) / (2 * step)


def by_sort(attentions, k, reduce):
    """Equations (8) and (9) as they are written, from sorted rows, in float64."""
    total = torch.tensor(0.0, dtype=torch.float64)
    for p in attentions:
        x = p.double().sort(-1, descending=True).values
        x = torch.cat([x, torch.zeros_like(x[..., :1])], -1)

        def g(i, x=x):
            return x[..., i - 1] * (1 - x[..., i - 1] + x[..., i])

        rows = g(1).log() if k == 0 else (g(1) / (g(k) + 1e-6)).log()
        total = total + (rows.amax(-1) if reduce == "max" else rows.mean(-1)).sum() / len(p)
    return total


def rows(seed, n=7, spread=1.0):
    """Attention of 2 samples x 3 heads."""
    return torch.softmax(spread * normal(seed)(2, 3, n, n), -1)


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 9),
    spread=st.floats(0.01, 6),
    k=st.sampled_from([0, 2, 3, 5]),
    reduce=st.sampled_from(["max", "mean"]),
)
def test_value_is_that_of_the_equations(seed, n, spread, k, reduce):
    attentions = [rows(seed, n, spread), rows(seed + 1, n, spread)]
    if k > n:
        refused(lambda: JaSMin(k, reduce)(attentions), "give k at most")
        return
    expected = float(by_sort(attentions, k, reduce))
    assert float(JaSMin(k, reduce)(attentions)) == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.each_value
@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("k", [0, 2, 4])
def test_gradient_by_finite_differences(k, reduce):
    penalty, logits = JaSMin(k, reduce), normal(3)(2, 1, 5, 5).requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda z: penalty([torch.softmax(z, -1)]), logits)


@examples(40)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 9),
    k=st.sampled_from([0, 2, 3, 9]),
    reduce=st.sampled_from(["max", "mean"]),
)
def test_gradient_by_automatic_differentiation_of_the_full_sort(seed, n, k, reduce):
    """The derivative is written by hand; up to multiples of ones, which move rows off the simplex:
    where 1 is written for a row's sum differs."""
    k = min(k, n) if n > 1 else 0
    p = rows(seed, n, 2.0).requires_grad_()
    values = JaSMin(k, reduce)([p]), by_sort([p], k, reduce)
    mine, theirs = (torch.autograd.grad(value, p)[0] for value in values)
    for g in (mine, theirs):
        g -= g.mean(-1, keepdim=True)
    if n > 1:
        close(mine, theirs, 1e-6, 1e-9)


def test_near_one_hot_rows_in_float32():
    """Where 1 - p_(1) cancels, the logarithm is still right, and exactly one-hot rows give finite
    values and gradients."""
    z = torch.tensor([[0.0, -20.0, -21.0]], dtype=torch.float64)
    exact = float(by_sort([torch.softmax(z, -1)[None, None]], 0, "mean"))
    z32 = z.float().requires_grad_()
    value = JaSMin(0, "mean")([torch.softmax(z32, -1)[None, None]])
    assert float(value.detach()) == pytest.approx(exact, rel=1e-5)
    hot = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], requires_grad=True)
    for k, reduce in ((0, "max"), (0, "mean"), (2, "mean")):
        loss = JaSMin(k, reduce)([hot])
        (gradient,) = torch.autograd.grad(loss, hot)
        assert bool(torch.isfinite(loss))
        assert bool(torch.isfinite(gradient).all())


SEPARATE = ["bert", "electra", "distilbert", "albert", "gpt2", "opt", "vit", "deit", "dinov2"]
SEPARATE += ["clip text", "siglip vision"]


@pytest.mark.parametrize("name", SEPARATE)
def test_projections_are_those_found_by_probing(name):
    model = build(AFFINE[name])
    every = capture(model, inputs_for(model))
    layers = [one for one in every if isinstance(one, Attention) and one.kind == "self"]
    found = projections(model)
    for i, att in enumerate(layers):
        mine = found[i if len(found) == len(layers) else 0]
        scaling = att.d**-0.5 if name == "opt" else 1.0  # which scales its queries, not its scores
        for w, exact in zip(mine.w, (att.w_q / scaling, att.w_k, att.w_v), strict=True):
            close(w, exact, 1e-4, 1e-5)
        for b, shift in zip(mine.b[1:], (att.b_k, att.b_v), strict=True):
            close(b, torch.zeros_like(b) if shift is None else shift, 1e-4, 1e-5)


def test_other_queries_are_refused():
    model = build(AFFINE["opt"])
    with pytest.raises(CaptureError, match="does more to its queries"), attention_layers(model):
        model(**inputs_for(model))


def test_specformer_against_singular_values():
    model = build(AFFINE["bert"]).double()
    penalty = Specformer(1.0, 0.5, 0.25, steps=50)

    def value():
        return [penalty(model) for _ in range(8)][-1]

    pairs = [pair for p in projections(model) for pair in zip(p.w, (1.0, 0.5, 0.25), strict=True)]
    expected = sum(f * float((torch.linalg.matrix_norm(w, 2) ** 2).sum()) for w, f in pairs)
    assert float(value()) == pytest.approx(expected, rel=1e-4)
    mine, exact = difference(model.encoder.layer[0].attention.self.query.weight, value)
    assert mine == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_probabilities_are_the_models_own(name):
    model = build(AFFINE[name])
    inputs = inputs_for(model, padded=name == "bert")
    with attention_probabilities(model) as found:
        mine = model(**inputs).last_hidden_state
    layers = capture(model, inputs)
    assert len(found) == len(layers)
    for p, att in zip(found, layers, strict=True):
        real = torch.ones_like(p[..., :1]) if att.valid is None else att.valid[:, None, :, None]
        close(p * real, att.p * real, 1e-4, 1e-6)
        assert p.requires_grad
    fused = model(**inputs).last_hidden_state  # outside: torch's fused attention
    close(mine[:, :6], fused[:, :6], 1e-4, 1e-5)
    with attention_probabilities(model, layers=[1]) as second:
        model(**inputs)
    close(list(second), [found[1]], 1e-5, 1e-6)


def test_probabilities_are_those_before_dropout_and_in_float32():
    config = tf.BertConfig(**TEXT, attention_probs_dropout_prob=0.5)
    model = build(lambda: tf.BertModel(config)).train()
    for half in (False, True):
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
        with autocast, attention_probabilities(model) as found:
            model(**inputs_for(model))
        for p in found:
            close(p.sum(-1), torch.ones(p.shape[:-1]), 1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_penalties_of_layers_are_means_of_logarithms_and_have_their_gradient(name):
    """Of our bound."""
    model = build(AFFINE[name]).double()
    inputs = inputs_for(model, padded=name == "bert")
    for penalty, each in ((SoundPenalty("lipbound"), get("lipbound")), (ExactNorm(1e-12), oracle)):

        def value(penalty=penalty):
            with attention_layers(model) as layers:
                model(**inputs)
            return penalty(layers)

        expected = sum(each(att).log().sum(-1).mean() for att in capture(model, inputs))
        assert float(value()) == pytest.approx(float(expected), rel=1e-4)
        mine, exact = difference(next(iter(projections(model)[0].module.parameters())), value)
        assert mine == pytest.approx(exact, rel=2e-2, abs=1e-6)


# -- the penalty on exact norms --------------------------------------------------------------------

KINDS = (
    *(((), mask) for mask in ("none", "causal", "padded", "offsets")),
    *((("rotation",), mask) for mask in ("none", "causal")),
    *(((name,), "causal") for name in ("norm", "cap", "sinks", "values")),
    (("together", "rotation"), "none"),
)


def keys_shared(att):
    """The layer with the first head's keys and values in all of its heads."""
    names = ("w_k", "w_v", "b_k", "b_v")
    first = {name: t for name, t in given_parts(att).items() if name in names}
    return changed(att, **{name: t[:1].expand(t.shape) for name, t in first.items()})


@pytest.mark.parametrize("grouped", [False, True], ids=["own keys", "grouped"])
@pytest.mark.parametrize(("has", "mask"), KINDS)
def test_derivative_is_the_difference_of_dense_norms(has, mask, grouped):
    """Eleven kinds, with and without shared keys: 264 heads, at a random direction each."""
    made, norms = keys_shared if grouped else changed, ExactNorm(tol=1e-12).norms
    for seed in (0, 1):
        att = layer(seed, frozenset(has), mask=mask)
        exact = oracle(made(att)).flatten()
        close(norms(made(att)).detach().flatten(), exact, 1e-7)
        value, reference = (lambda one: norms(made(one))), (lambda one: oracle(made(one)))
        found, expected = slopes(value, att, 1e-5, seed=seed, reference=reference)
        # a derivative near zero is compared at the scale of the norm
        size = torch.maximum(expected.abs(), 1e-2 * exact)
        assert bool(((found - expected).abs() <= 1e-4 * size).all())

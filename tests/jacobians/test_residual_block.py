"""Attention with residual connection and layer normalisation, against dense autograd Jacobians and
the model's own modules."""

from functools import partial

import castin_inputs
import mpmath as mp
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close, near, normal, refused
from support.layers import causal, changed, random_attention
from support.models import AFFINE, build, inputs_for
from support.oracles import assert_encloses
from support.reference import head_function
from support.strategies import examples

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser, ResidualContext
from lipbound.bounds.whole_layer_rules import whole_layer
from lipbound.errors import AttentionError
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.maps import BLOCKS, LayerJacobian, block_bound
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.capture.capture import Capturer, capture

PRE = ("gpt2", "opt", "vit", "clip text", "siglip vision")
POST = ("bert", "roberta", "electra", "distilbert", "albert")


def attention_of(att: Attention, x: torch.Tensor, s: int) -> torch.Tensor:
    """The layer as a function of its input, without output bias, for one sample."""
    heads = (head_function(att, s, h)(x) @ att.w_o[h] for h in range(att.heads))
    return torch.stack(list(heads)).sum(0)


def normalise(x: torch.Tensor, norm: Normaliser) -> torch.Tensor:
    """LayerNorm or RMSNorm from the definition."""
    y = x - x.mean(-1, keepdim=True) if norm.centred else x
    y = norm.weight * y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return y if norm.bias is None else y + norm.bias


def around(att: Attention, residual: str, centred: bool) -> Attention:
    """A layer with random normalisation around it, consistent with its input."""
    draw, width = normal(), att.x.shape[2]
    weight, bias, h = draw(width), draw(width), 3 * draw(*att.x.shape)
    norm = Normaliser(h, weight, bias, eps=1e-3, centred=centred)
    found = changed(att, x=norm.out) if residual == "pre" else changed(att)
    if residual == "pre":
        found.surroundings = ResidualContext(norm, "pre")
    else:
        out = torch.stack([attention_of(found, found.x[s], s) for s in range(found.samples)])
        after = Normaliser(found.x + out, weight, bias, eps=1e-3, centred=centred)
        found.surroundings = ResidualContext(None, "post", after)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kind", ["plain", "biases", "causal", "one_token", "sharp", "wide_values"])
@pytest.mark.parametrize("map", list(BLOCKS))
def test_norm_is_that_of_the_dense_jacobian(map: str, kind: str, centred: bool) -> None:
    att = around(random_attention(kind), "pre" if map == "pre_norm" else "post", centred)
    before, after = att.surroundings.fed_by, att.surroundings.followed_by

    def block(h: torch.Tensor, s: int) -> torch.Tensor:
        y = h + attention_of(att, normalise(h, before) if map == "pre_norm" else h, s)
        return normalise(y, after) if map == "post_norm" else y

    inputs = before.x if map == "pre_norm" else att.x
    each = (torch.func.jacrev(partial(block, s=s))(h) for s, h in enumerate(inputs))
    exact = torch.stack([norm_of(j) for j in each])
    assert_encloses(att, spectral_norm(att, map=map, tol=1e-7), exact, 1e-7, map)
    assert bool((whole_layer(att, "lipbound", map=map) >= exact * (1 - 1e-9)).all())


def norm_of(jacobian: torch.Tensor) -> torch.Tensor:
    """Of a Jacobian (N, D, N, D)."""
    return torch.linalg.matrix_norm(jacobian.flatten(2).flatten(0, 1), 2)


def test_certificate_and_vjp_fit() -> None:
    att = around(random_attention("biases"), "pre", True)
    op = LayerJacobian(att, HeadJacobian(att), "pre_norm")
    draw = normal()
    x, y = draw(op.batch, *op.in_shape), draw(op.batch, *op.in_shape)
    close((op.jvp(x) * y).sum((-1, -2)), (x * op.vjp(y)).sum((-1, -2)), 1e-7)
    near(op.select(torch.tensor([1])).jvp(x[1:]), op.jvp(x)[1:], 1e-12)
    near(op.double().jvp(x), op.jvp(x), 1e-12)
    norm = spectral_norm(att, map="pre_norm", delta=1e-6, tol=1e-6)
    dense = spectral_norm(att, map="pre_norm", method="dense")
    assert bool((norm.upper >= dense.lower * (1 - 1e-12)).all())


def test_padding_takes_no_part() -> None:
    att = random_attention("padded")
    norm = spectral_norm(att, map="residual", tol=1e-9).lower
    for s in range(att.samples):
        alone = spectral_norm(att.unpadded(s), map="residual", tol=1e-9).lower
        close(norm[s], alone[0], 1e-8)
    empty = changed(att, x=0 * att.x, w_v=0 * att.w_v)
    close(spectral_norm(empty, map="residual").lower, torch.ones(2, dtype=torch.float64), 1e-7)


@pytest.mark.parametrize("name", [*PRE, *POST])
def test_surroundings_are_found_in_models(name: str) -> None:
    """Against the Jacobian of the model's own block, taken apart at the modules where the numbers
    were found."""
    model = build(AFFINE[name]).double()
    found = capture(model, inputs_for(model), around=True)
    layers = [att for att in found if isinstance(att, Attention) and att.kind == "self"]
    for att in layers:
        # two families project their normalised embeddings once more
        if att.surroundings.fed_by is None:
            assert name in ("electra", "albert")
            assert att is layers[0]
        else:
            close(att.surroundings.fed_by.out, att.x, 1e-6, 1e-6)
        assert att.surroundings.residual == ("pre" if name in PRE else "post")
        assert (att.surroundings.followed_by is not None) == (name in POST)
        map, other = ("pre_norm", "post_norm") if name in PRE else ("post_norm", "pre_norm")
        assert bool((spectral_norm(att, map=map).lower > 0).all())
        refused(partial(spectral_norm, att, map=other), "is not known to be", error=AttentionError)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_blocks_against_the_modules_of_the_model(name: str) -> None:
    model = build(AFFINE[name]).double()
    layers = capture(model, inputs_for(model), around=True)
    model.set_attn_implementation("eager")
    for k, att in enumerate(layers):
        if name == "bert":
            map, inputs, attention = "post_norm", att.x, model.encoder.layer[k].attention
            own = partial(lambda attention, x: attention(x[None])[0][0], attention)
        else:
            map, inputs = "pre_norm", att.surroundings.fed_by.x

            def own(h: torch.Tensor, block: torch.nn.Module = model.h[k]) -> torch.Tensor:
                mask = causal(len(h))[None, None]
                return h + block.attn(block.ln_1(h[None]), attention_mask=mask)[0][0]

        exact = torch.stack([norm_of(torch.func.jacrev(own)(x)) for x in inputs])
        close(spectral_norm(att, map=map, tol=1e-9).lower, exact, 1e-6)


def test_layer_scale_is_not_taken_for_a_residual() -> None:
    model = build(AFFINE["dinov2"])
    for layer in model.encoder.layer:
        torch.nn.init.constant_(layer.layer_scale1.lambda1, 0.5)
    for layer in Capturer(model, around=True).run(inputs_for(model)):
        assert layer.attention.surroundings.residual is None


def test_rms_norm_is_found() -> None:
    class Small(tf.BertModel):
        """BERT with RMSNorm in the place of LayerNorm."""

        def __init__(self, config: tf.BertConfig):
            super().__init__(config)
            for layer in self.encoder.layer:
                layer.attention.output.LayerNorm = torch.nn.RMSNorm(config.hidden_size, eps=1e-6)

    model = build(lambda: Small(AFFINE["bert"]().config))
    for layer in Capturer(model, around=True).run(inputs_for(model)):
        followed = layer.attention.surroundings.followed_by
        assert not followed.centred


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(2, 9),
    centred=st.booleans(),
    size=st.floats(0, 10),
    alone=st.booleans(),
)
def test_ellipsoid_radius(seed: int, width: int, centred: bool, size: float, alone: bool) -> None:
    """Above the outputs at many inputs, and attained up to a gradient ascent from the
    best of them."""
    draw = normal(seed)
    weight, bias = draw(width), None if alone else size * draw(width)
    radius = castin_inputs.ellipsoid_radius(weight, bias, centred=centred)
    out = Normaliser(draw(1, 200, width), weight, bias, centred=centred).out
    assert float(out.norm(dim=-1).amax()) <= radius * (1 + 1e-9)
    most = weight.abs().amax() + (0.0 if bias is None else bias.abs().amax())
    assert radius <= width**0.5 * float(most) * (1 + 1e-9)  # Lemma 3.3 of Emadi 2026
    z = draw(50, width)
    b = torch.zeros(width, dtype=torch.float64) if bias is None else bias
    for _ in range(3000):  # power-like ascent of a convex function over the sphere
        before, z = z, weight * (weight * z + b)
        z = z - z.mean(-1, keepdim=True) if centred else z
        z = z / z.norm(dim=-1, keepdim=True).clamp_min(1e-300) * width**0.5
        if float((z - before).abs().amax()) < 1e-12:  # a fixed point
            break
    best = float((weight * z + b).norm(dim=-1).amax())
    assert best <= radius * (1 + 1e-9)
    assert best >= radius * (1 - 1e-2)


def test_needs() -> None:
    att = random_attention("plain", w_o=False)
    refused(partial(spectral_norm, att, map="residual"), "output projection", error=AttentionError)
    refused(lambda: Normaliser(torch.zeros(1, 2, 3), torch.ones(4)), "weight has shape")
    bound = block_bound(random_attention("plain"), torch.ones(2), "residual")
    close(bound, torch.full((2,), 2.0), 1e-12)


@pytest.mark.parametrize("power", [-900, -600, 550, 900])
def test_norms_of_tokens_whose_squares_leave_the_range(power: int) -> None:
    att = around(random_attention("plain"), "post", True)
    norm = att.surroundings.followed_by
    bare = Normaliser(norm.x, norm.weight)
    far = Normaliser(norm.x * 2.0**power, norm.weight)
    close(far.norms * 2.0**power, bare.norms, 1e-12)
    close(far.unit, bare.unit, 1e-12)
    contexts = (ResidualContext(residual="post", followed_by=one) for one in (far, bare))
    both = with_far, with_bare = [att.with_parts(surroundings=one) for one in contexts]
    bound, expected = (whole_layer(one, "lipbound", map="post_norm") for one in both)
    close(bound * 2.0**power, expected, 1e-11)
    enclosed = spectral_norm(with_far, map="post_norm", delta=1e-6)
    exact = spectral_norm(with_bare, map="post_norm", method="dense")
    assert bool((enclosed.lower * 2.0**power <= exact.upper).all())
    assert bool((enclosed.upper * 2.0**power >= exact.lower).all())
    assert not bool(enclosed.converged.any())


def test_norms_of_long_tokens_count_their_rounding() -> None:
    """Tokens that are 1e16 times longer than their deviations, against 300 bits."""
    steps = torch.tensor([0.0, 2, 1, 1, 1, 1], dtype=torch.float64)
    x = 124765.390625 + steps * 2.0**-36  # neighbouring numbers
    norm = Normaliser(x[None, None], torch.ones(6, dtype=torch.float64), eps=0.0)
    with mp.workprec(300):
        exact = [mp.mpf(float(entry)) for entry in x]
        mean = mp.fsum(exact) / 6
        size = mp.sqrt(mp.fsum((entry - mean) ** 2 for entry in exact) / 6)
        ratio = mp.mpf(float(norm.norms[0, 0])) * size
    assert 1 <= ratio < 1 + 1e-9

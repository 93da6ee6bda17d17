"""Attention with residual connection and layer normalisation, against dense autograd Jacobians and
the model's own modules."""

import mpmath as mp
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from support.layers import random_attention
from support.models import AFFINE, build, inputs_for
from support.strategies import examples

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser, ResidualContext, ellipsoid_radius
from lipbound.bounds.whole_layer_rules import whole_layer
from lipbound.errors import AttentionError
from lipbound.jacobians.maps import BLOCKS, BlockJacobian, block_bound
from lipbound.jacobians.prepared_map import PreparedMap
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.capture.capture import Capturer, capture

PRE = ("gpt2", "opt", "vit", "clip text", "siglip vision")
POST = ("bert", "roberta", "electra", "distilbert", "albert")


def attention_of(att: Attention, x: torch.Tensor, s: int) -> torch.Tensor:
    """The layer as a function of its input, without output bias, for one sample."""
    total = torch.zeros_like(x)
    for h in range(att.heads):
        q, k, v = (
            x @ w[h] + (0 if b is None else b[h])
            for w, b in ((att.w_q, att.b_q), (att.w_k, att.b_k), (att.w_v, att.b_v))
        )
        scores = att.scale * q @ k.mT
        if att.mask is not None:
            scores = scores + att.mask.expand(att.samples, att.heads, att.tokens, att.tokens)[s, h]
        assert att.w_o is not None
        total = total + torch.softmax(scores, -1) @ v @ att.w_o[h]
    return total


def normalise(x: torch.Tensor, norm: Normaliser) -> torch.Tensor:
    """LayerNorm or RMSNorm from the definition."""
    y = x - x.mean(-1, keepdim=True) if norm.centred else x
    y = norm.weight * y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return y if norm.bias is None else y + norm.bias


def around(att: Attention, residual: str, centred: bool, seed: int = 0) -> Attention:
    """A layer with random normalisation around it, consistent with its input."""
    g = torch.Generator().manual_seed(seed)
    width = att.x.shape[2]
    weight, bias = (
        torch.randn(width, generator=g, dtype=torch.float64),
        torch.randn(width, generator=g, dtype=torch.float64),
    )
    h = 3 * torch.randn(att.x.shape, generator=g, dtype=torch.float64)
    norm = Normaliser(h, weight, bias, eps=1e-3, centred=centred)
    x = norm.out if residual == "pre" else att.x
    found = Attention(
        x,
        att.w_q,
        att.w_k,
        att.w_v,
        b_q=att.b_q,
        b_k=att.b_k,
        b_v=att.b_v,
        w_o=att.w_o,
        mask=att.mask,
    )
    if residual == "pre":
        found.surroundings = ResidualContext(norm, "pre")
    else:
        out = torch.stack([attention_of(found, found.x[s], s) for s in range(found.samples)])
        found.surroundings = ResidualContext(
            None, "post", Normaliser(found.x + out, weight, bias, eps=1e-3, centred=centred)
        )
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kind", ["plain", "biases", "causal", "one_token", "sharp", "wide_values"])
@pytest.mark.parametrize("map", list(BLOCKS))
def test_norm_is_that_of_the_dense_jacobian(map: str, kind: str, centred: bool) -> None:
    att = around(random_attention(kind), "pre" if map == "pre_norm" else "post", centred)
    norm, error = spectral_norm(att, map=map, tol=1e-9), PreparedMap(att, map).roundoff.tensors
    bound = whole_layer(att, "lipbound", map=map)
    for s in range(att.samples):
        before, after = att.surroundings.fed_by, att.surroundings.followed_by

        def block(
            h: torch.Tensor,
            s: int = s,
            before: Normaliser | None = before,
            after: Normaliser | None = after,
        ) -> torch.Tensor:
            x = normalise(h, before) if map == "pre_norm" and before is not None else h
            y = h + attention_of(att, x, s)
            return normalise(y, after) if map == "post_norm" and after is not None else y

        at = before.x[s] if map == "pre_norm" and before is not None else att.x[s]
        dense = torch.func.jacrev(block)(at).flatten(2).flatten(0, 1)
        exact = torch.linalg.matrix_norm(dense, 2)
        assert -1e-12 <= float(1 - norm.lower[s] / exact) <= 1e-7 + 3 * float(error[s] / exact)
        assert float(bound[s]) >= float(exact) * (1 - 1e-9)


def test_certificate_and_vjp_fit() -> None:
    att = around(random_attention("biases"), "pre", True)
    op = BlockJacobian(att, "pre_norm")
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(op.batch, *op.in_shape, generator=g, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close((op.jvp(x) * y).sum((-1, -2)), (x * op.vjp(y)).sum((-1, -2)))
    part = op.select(torch.tensor([1]))
    torch.testing.assert_close(part.jvp(x[1:]), op.jvp(x)[1:])
    torch.testing.assert_close(op.double().jvp(x), op.jvp(x))
    norm = spectral_norm(att, map="pre_norm", delta=1e-6, tol=1e-6)
    assert bool(
        (norm.upper >= spectral_norm(att, map="pre_norm", method="dense").lower * (1 - 1e-12)).all()
    )


def test_padding_takes_no_part() -> None:
    att = random_attention("padded")
    norm = spectral_norm(att, map="residual", tol=1e-9).lower
    for s in range(att.samples):
        torch.testing.assert_close(
            norm[s],
            spectral_norm(att.unpadded(s), map="residual", tol=1e-9).lower[0],
            rtol=1e-8,
            atol=0,
        )
    empty = Attention(
        0 * att.x, 0 * att.w_q, 0 * att.w_k, 0 * att.w_v, w_o=att.w_o, valid=att.valid
    )
    torch.testing.assert_close(
        spectral_norm(empty, map="residual").lower, torch.ones(2, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", [*PRE, *POST])
def test_surroundings_are_found_in_models(name: str) -> None:
    """Against the Jacobian of the model's own block, taken apart at the modules where the numbers
    were found."""
    model = build(AFFINE[name]).double()
    found = capture(model, inputs_for(model), around=True)
    layers = [att for att in found if isinstance(att, Attention) and att.kind == "self"]
    for att in layers:
        assert att.surroundings is not None
        if (
            att.surroundings.fed_by is None
        ):  # two families project their normalised embeddings once more
            assert name in ("electra", "albert")
            assert att is layers[0]
        else:
            torch.testing.assert_close(att.surroundings.fed_by.out, att.x, rtol=1e-6, atol=1e-6)
        assert att.surroundings.residual == ("pre" if name in PRE else "post")
        assert (att.surroundings.followed_by is not None) == (name in POST)
        map = "pre_norm" if name in PRE else "post_norm"
        assert bool((spectral_norm(att, map=map).lower > 0).all())
        with pytest.raises(AttentionError, match="is not known to be"):
            spectral_norm(att, map="post_norm" if name in PRE else "pre_norm")


def test_block_of_a_bert_layer_against_its_own_module() -> None:
    model = build(AFFINE["bert"]).double()
    inputs = inputs_for(model)
    layers = capture(model, inputs, around=True)
    model.set_attn_implementation("eager")
    for att, layer in zip(layers, model.encoder.layer, strict=True):
        for s in range(att.samples):
            dense = torch.func.jacrev(lambda x, layer=layer: layer.attention(x[None])[0][0])(
                att.x[s]
            )
            exact = torch.linalg.matrix_norm(dense.flatten(2).flatten(0, 1), 2)
            torch.testing.assert_close(
                spectral_norm(att, map="post_norm", tol=1e-9).lower[s], exact, rtol=1e-6, atol=0
            )


def test_block_of_a_gpt2_layer_against_its_own_modules() -> None:
    model = build(AFFINE["gpt2"]).double()
    layers = capture(model, inputs_for(model), around=True)
    model.set_attn_implementation("eager")
    for att, block in zip(layers, model.h, strict=True):
        mask = torch.full((att.tokens, att.tokens), -torch.inf, dtype=torch.float64).triu(1)[
            None, None
        ]

        def own(
            h: torch.Tensor, block: torch.nn.Module = block, mask: torch.Tensor = mask
        ) -> torch.Tensor:
            return h + block.attn(block.ln_1(h[None]), attention_mask=mask)[0][0]

        for s in range(att.samples):
            dense = torch.func.jacrev(own)(att.surroundings.fed_by.x[s])
            exact = torch.linalg.matrix_norm(dense.flatten(2).flatten(0, 1), 2)
            torch.testing.assert_close(
                spectral_norm(att, map="pre_norm", tol=1e-9).lower[s], exact, rtol=1e-6, atol=0
            )


def test_layer_scale_is_not_taken_for_a_residual() -> None:
    model = build(AFFINE["dinov2"])
    for layer in model.encoder.layer:
        torch.nn.init.constant_(layer.layer_scale1.lambda1, 0.5)
    for layer in Capturer(model, around=True).run(inputs_for(model)):
        assert layer.attention.surroundings is not None
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
        assert followed is not None
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
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, generator=g, dtype=torch.float64)
    bias = None if alone else size * torch.randn(width, generator=g, dtype=torch.float64)
    radius = ellipsoid_radius(weight, bias, centred=centred)
    x = torch.randn(1, 200, width, generator=g, dtype=torch.float64)
    out = Normaliser(x, weight, bias, centred=centred).out
    assert float(out.norm(dim=-1).amax()) <= radius * (1 + 1e-9)
    z = torch.randn(50, width, generator=g, dtype=torch.float64)
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
    with pytest.raises(AttentionError, match="output projection"):
        spectral_norm(att, map="residual")
    with pytest.raises(AttentionError, match="weight has shape"):
        Normaliser(torch.zeros(1, 2, 3), torch.ones(4))
    torch.testing.assert_close(
        block_bound(random_attention("plain"), torch.ones(2), "residual"),
        torch.full((2,), 2.0),
        rtol=1e-12,
        atol=0,
    )


@pytest.mark.parametrize("power", [-900, -600, 550, 900])
def test_norms_of_tokens_whose_squares_leave_the_range(power: int) -> None:
    att = around(random_attention("plain"), "post", True)
    norm = att.surroundings.followed_by
    assert norm is not None
    bare = Normaliser(norm.x, norm.weight)
    far = Normaliser(norm.x * 2.0**power, norm.weight)
    torch.testing.assert_close(far.norms * 2.0**power, bare.norms, rtol=1e-12, atol=0)
    torch.testing.assert_close(far.unit, bare.unit, rtol=1e-12, atol=0)
    with_far = att.with_parts(surroundings=ResidualContext(residual="post", followed_by=far))
    bound = whole_layer(with_far, "lipbound", map="post_norm")
    with_bare = att.with_parts(surroundings=ResidualContext(residual="post", followed_by=bare))
    expected = whole_layer(with_bare, "lipbound", map="post_norm")
    torch.testing.assert_close(bound * 2.0**power, expected, rtol=1e-11, atol=0)
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

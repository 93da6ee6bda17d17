"""Rotary position embeddings: exact norms and our bounds against dense Jacobians, and against
Llama's own attention module."""

import math

import castin_inputs
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from support.layers import causal
from support.oracles import oracle
from support.strategies import examples
from support.variants import layer
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

import lipbound as lb
from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.attention.layer import Attention
from lipbound.attention.variants.rotary import Rotation, turned
from lipbound.errors import AttentionError, LipboundError
from lipbound.jacobians.rounding import tensor_error
from lipbound.jacobians.spectral_norm import l2_spectral_norm

ROTARY = frozenset({"rotation"})


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_are_turned_alike_with_and_without_derivatives(r: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(r)
    for x, angles in (
        ((2, 3, 5, 6), (5, r)),
        ((1, 4, 6), (5, 1, r)),
        ((5, 4, 6), (5, 1, r)),
        ((0, 5, 6), (5, r)),
    ):
        y, a = (
            torch.randn(x, generator=g, dtype=dtype),
            torch.randn(angles, generator=g, dtype=dtype),
        )
        before = y.clone()
        with torch.no_grad():
            found = turned(y, a.cos(), a.sin())
        assert torch.equal(y, before)
        torch.testing.assert_close(found, turned(y, a.cos(), a.sin()))


@pytest.mark.slow
@examples(60)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 7),
    d=st.integers(2, 6),
    d_v=st.integers(1, 5),
    part=st.floats(0, 1),
    factor=st.sampled_from([1.0, 1.3]),
    others=st.fixed_dictionaries(
        {
            "mask": st.sampled_from(["none", "causal", "padded"]),
            "scale": st.sampled_from([1e-3, 0.1, 1.0, 10.0, 100.0]),
            "biases": st.booleans(),
            "same": st.booleans(),
        }
    ),
)
def test_exact_norms_and_bounds(
    seed: int, n: int, d: int, d_v: int, part: float, factor: float, others: dict
) -> None:
    """60 shapes x 15 heads."""
    att = layer(seed, ROTARY, n=n, d=d, d_v=d_v, samples=3, heads=5, **others)
    g, r = torch.Generator().manual_seed(seed), max(1, round(part * (d // 2)))
    turn = Rotation.of_angles(3 * torch.randn(n, r, generator=g))
    att = att.with_parts(rotation=Rotation(factor * turn.cos, factor * turn.sin))
    exact = oracle(att)
    slack = 3 * tensor_error(att) + 1e-9 * exact
    norm = lb.spectral_norm(att, tol=1e-10).lower
    assert bool(((norm - exact).abs() <= 1e-8 * exact + slack).all())
    for name in ("lipbound", "lipbound_block"):
        value = lb.bounds.get(name)(att)
        assert bool((value >= exact * (1 - 1e-9)).all()), name
        assert bool(lb.bounds.get(name).sound(att).all())


def test_terms_of_turned_heads() -> None:
    att = layer(5, ROTARY, mask="padded")
    assert lb.bounds.get("lipbound").terms(att) is None
    assert lb.bounds.get("kim").terms(att) is None
    assert set(lb.bounds.get("castin_bias").terms(att)) == {"values", "softmax"}


def test_no_rotation_is_the_plain_layer() -> None:
    """By angles of zero, our bounds are at most those of plain layers plus what the rotary form
    loses, and exact norms agree."""
    zero = Rotation.of_angles(torch.zeros(6, 2))
    plain, turned = (layer(7, ROTARY, n=6).with_parts(rotation=r) for r in (None, zero))
    torch.testing.assert_close(
        lb.spectral_norm(plain, tol=1e-10).lower,
        lb.spectral_norm(turned, tol=1e-10).lower,
        rtol=1e-9,
        atol=0,
    )
    torch.testing.assert_close(
        lb.bounds.get("lipbound_block")(plain),
        lb.bounds.get("lipbound_block")(turned),
        rtol=0.01,
        atol=0,
    )
    assert bool((lb.bounds.get("lipbound")(turned) <= 1.5 * lb.bounds.get("lipbound")(plain)).all())


def test_llamas_own_module() -> None:
    """The same map, and norm, as the attention module of transformers, shared keys included."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        max_position_embeddings=32,
    )
    config._attn_implementation = "sdpa"  # eager attention takes its softmax in float32
    module = LlamaAttention(config, 0).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    n, d = 6, 4
    x = torch.randn(1, n, 16, dtype=torch.float64)
    cos, sin = (t.double() for t in LlamaRotaryEmbedding(config)(x, torch.arange(n)[None]))
    mask = causal(n)[None, None]

    def heads(linear: torch.nn.Linear) -> tuple[Tensor, Tensor]:
        w, b = linear.weight.view(-1, d, 16).mT, linear.bias.view(-1, d)
        groups = 4 // len(w)
        return w.repeat_interleave(groups, 0).detach(), b.repeat_interleave(groups, 0).detach()

    (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
        heads(p) for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    w_o = module.o_proj.weight.mT.reshape(4, d, 16).detach()
    turn = Rotation(cos[0, :, : d // 2], sin[0, :, : d // 2])
    own = {"b_q": b_q, "b_k": b_k, "b_v": b_v, "w_o": w_o, "scale": module.scaling}
    att = Attention(x, w_q, w_k, w_v, mask=mask, rotation=turn, **own)

    def whole(tokens: Tensor) -> Tensor:
        return module(tokens[None], position_embeddings=(cos, sin), attention_mask=mask)[0][0]

    mine = torch.einsum("shnv,hvo->sno", att.out, att.w_o)[0]
    torch.testing.assert_close(mine + module.o_proj.bias, whole(x[0]), rtol=1e-10, atol=1e-10)
    jacobian = torch.autograd.functional.jacobian(whole, x[0]).reshape(n * 16, n * 16)
    exact = float(torch.linalg.matrix_norm(jacobian, 2))
    assert float(lb.spectral_norm(att, map="layer", tol=1e-10).lower) == pytest.approx(
        exact, rel=1e-8
    )
    assert bool((lb.bounds.get("lipbound")(att) <= 2 * lb.spectral_norm(att, tol=1e-9).lower).all())


def test_what_does_not_know_of_rotations_refuses_them() -> None:
    att = layer(1, ROTARY)
    for name in lb.bounds.names():
        if not lb.bounds.get(name).applies(att):
            with pytest.raises(AttentionError, match="does not cover rotary"):
                lb.bounds.get(name)(att)
    for call in (
        lambda: adversarial_inputs.lower_bound(att, 4, 1.0),
        lambda: castin_inputs.large_radius_limit(att),
        lambda: mean_field.weighted_norm(att, torch.full((2, 5), 0.2, dtype=torch.float64)),
        lambda: mean_field.query_block_norms(att),
        lambda: l2_spectral_norm(att),
        lambda: lb.bounds.get("castin_bias").over_ball(att, 0.1),
    ):
        with pytest.raises(AttentionError, match="does not cover rotary"):
            call()


def test_bad_rotations() -> None:
    for cos, sin in (
        (torch.ones(3), torch.ones(3)),
        (torch.ones(3, 2), torch.ones(3, 1)),
        (torch.full((3, 2), math.nan), torch.ones(3, 2)),
    ):
        with pytest.raises(LipboundError, match=r"must be \(N, r\)|NaN or infinite"):
            Rotation(cos, sin)
    att = layer(1, ROTARY)
    for bad in (Rotation.of_angles(torch.zeros(4, 2)), Rotation.of_angles(torch.zeros(5, 3))):
        with pytest.raises(AttentionError, match="it must be of 5 tokens and turn at most 4"):
            att.with_parts(rotation=bad)

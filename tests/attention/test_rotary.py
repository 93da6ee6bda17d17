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
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

import lipbound as lb
from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.attention.layer import Attention
from lipbound.attention.variants.rotary import Rotation, turned
from lipbound.bounds.registry import get
from lipbound.errors import AttentionError, LipboundError
from lipbound.jacobians.rounding import tensor_error
from lipbound.jacobians.spectral_norm import l2_spectral_norm
from lipbound.reporting.page.details import of_layer


def rotary(
    seed: int,
    n: int = 5,
    d: int = 4,
    d_v: int = 3,
    r: int = 2,
    scale: float = 1.0,
    factor: float = 1.0,
    kind: str = "biases",
    samples: int = 2,
    heads: int = 3,
) -> Attention:
    """A small layer."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    turn = Rotation.of_angles(3 * draw(n, r))
    turn = Rotation(factor * turn.cos, factor * turn.sin)
    extra: dict = (
        {"b_q": draw(heads, d), "b_k": 3 * draw(heads, d), "b_v": 5 * draw(heads, d_v)}
        if kind != "plain"
        else {}
    )
    if kind == "causal":
        extra["mask"] = causal(n)
    if kind == "padded":
        extra["valid"] = (
            torch.arange(n) < torch.tensor([n, max(1, n - 2)] * samples)[:samples, None]
        )
    x = scale * draw(samples, n, 7)
    if kind == "repeated":
        x[:, 1:] = x[:, :1]
    return Attention(
        x,
        draw(heads, 7, d),
        draw(heads, 7, d),
        draw(heads, 7, d_v),
        w_o=draw(heads, d_v, 7),
        rotation=turn,
        **extra,
    )


KINDS = ("plain", "biases", "causal", "padded", "repeated")


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
    scale=st.sampled_from([1e-3, 0.1, 1.0, 10.0, 100.0]),
    factor=st.sampled_from([1.0, 1.3]),
    kind=st.sampled_from(KINDS),
)
def test_exact_norms_and_bounds(
    seed: int, n: int, d: int, d_v: int, part: float, scale: float, factor: float, kind: str
) -> None:
    """60 shapes x 15 heads."""
    att = rotary(
        seed, n, d, d_v, max(1, round(part * (d // 2))), scale, factor, kind, samples=3, heads=5
    )
    exact = oracle(att)
    slack = 3 * tensor_error(att) + 1e-9 * exact
    assert bool(
        ((lb.spectral_norm(att, tol=1e-10).lower - exact).abs() <= 1e-8 * exact + slack).all()
    )
    for name in ("lipbound", "lipbound_block"):
        value = lb.bounds.get(name)(att)
        assert bool((value >= exact * (1 - 1e-9)).all()), name
        assert bool(lb.bounds.get(name).sound(att).all())


def test_parts_of_attention_keep_the_rotation() -> None:
    att = rotary(5, kind="padded")
    whole = oracle(att)
    torch.testing.assert_close(oracle(att.select(slice(1, 2), slice(1, 3))), whole[1:, 1:])
    torch.testing.assert_close(oracle(att.unpadded(1)), whole[1:])
    single = att._map(lambda t: t.float() if t.is_floating_point() else t)
    torch.testing.assert_close(
        lb.spectral_norm(single, tol=1e-6).lower, whole.double(), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(oracle(single.double()), whole, rtol=1e-4, atol=0)
    found = of_layer(att.unpadded(0), "head", ["lipbound"])
    assert sum(found.parts.values()) == pytest.approx(1)
    assert get("lipbound").terms(att) is None
    assert get("kim").terms(att) is None
    assert set(get("castin_bias").terms(att)) == {"values", "softmax"}


def test_no_rotation_is_the_plain_layer() -> None:
    """By angles of zero, our bounds are at most those of plain layers plus what the rotary form
    loses, and exact norms agree."""
    still = rotary(7, n=6)
    zero = Rotation.of_angles(torch.zeros(6, 2))
    plain, turned = (
        Attention(
            still.x,
            still.w_q,
            still.w_k,
            still.w_v,
            b_q=still.b_q,
            b_k=still.b_k,
            b_v=still.b_v,
            rotation=r,
        )
        for r in (None, zero)
    )
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
    att = Attention(
        x,
        w_q,
        w_k,
        w_v,
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        w_o=w_o,
        scale=module.scaling,
        mask=mask,
        rotation=Rotation(cos[0, :, : d // 2], sin[0, :, : d // 2]),
    )

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
    att = rotary(1)
    for name in lb.bounds.names():
        if not lb.bounds.get(name).applies(att):
            with pytest.raises(AttentionError, match="does not cover rotary"):
                lb.bounds.get(name)(att)
    for call in (
        lambda: adversarial_inputs.lower_bound(att, 4, 1.0),
        lambda: castin_inputs.large_radius_limit(att),
        lambda: castin_inputs.weighted_norm(att, torch.full((2, 5), 0.2, dtype=torch.float64)),
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
    att = rotary(1)
    for bad in (Rotation.of_angles(torch.zeros(4, 2)), Rotation.of_angles(torch.zeros(5, 3))):
        with pytest.raises(AttentionError, match="it must be of 5 tokens and turn at most 4"):
            Attention(att.x, att.w_q, att.w_k, att.w_v, rotation=bad)

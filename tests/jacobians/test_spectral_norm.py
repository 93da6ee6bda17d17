import math
from typing import Any

import pytest
import torch
from support.layers import random_attention
from support.oracles import encloses, oracle
from support.reference import dense_jacobian, head_function

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.attention.variants.rotary import Rotation
from lipbound.errors import LipboundError
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.l2_attention import L2HeadJacobian
from lipbound.jacobians.prepared_map import PreparedMap
from lipbound.jacobians.rounding import tensor_error
from lipbound.jacobians.spectral_norm import l2_spectral_norm, spectral_norm
from lipbound.linalg import enclose
from lipbound.linalg.certificates import log_inverse_epsilon
from lipbound.linalg.enclose import _quotients
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import AutogradJacobian


@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_norms_match_the_oracle(att: Attention, method: str) -> None:
    norm, exact, error = (
        spectral_norm(att, method=method, tol=1e-10),
        oracle(att),
        tensor_error(att),
    )
    assert norm.lower.shape == norm.steps.shape == (2, 3)
    assert norm.lower.dtype == torch.float64
    assert encloses(norm, exact, 1e-9, error)
    assert bool((norm.converged | (error > 1e-11 * exact)).all())


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_enclosures_hold_the_oracle(kind: str, method: str, dtype: torch.dtype) -> None:
    att = random_attention(kind, dtype=dtype)
    norm, exact, error = (
        spectral_norm(att, method=method, tol=1e-6, delta=1e-10),
        oracle(att),
        tensor_error(att),
    )
    assert encloses(norm, exact, 1e-6, error)
    assert bool((norm.converged | (error > 1e-7 * exact)).all())


def test_power_iteration_approaches_from_below(att: Attention) -> None:
    exact = oracle(att)
    norm = spectral_norm(att, method="power", tol=0, max_steps=300)
    assert bool((norm.lower <= exact * (1 + 1e-12)).all())
    assert bool((norm.lower >= 0.98 * exact).all())
    assert bool(norm.error.isnan().all())


def test_power_iteration_stops_on_an_absolute_change() -> None:
    att = random_attention("plain")
    small = Attention(att.x, att.w_q, att.w_k, att.w_v * 1e-6)
    # the papers' rule depends on scale
    assert int(spectral_norm(small, method="power", tol=1e-4).steps.max()) == 2
    assert bool(spectral_norm(small, tol=1e-7).converged.all())
    torch.testing.assert_close(
        spectral_norm(small, tol=1e-9).lower, oracle(small), rtol=1e-8, atol=0
    )


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-8])
def test_the_error_asked_for_is_the_error_delivered(att: Attention, tol: float) -> None:
    norm, exact, error = spectral_norm(att, tol=tol), oracle(att), tensor_error(att)
    assert encloses(norm, exact, tol, error)
    assert bool((norm.error <= tol + 2 * error / exact).all())


def test_float32_agrees_to_rounding(kind: str) -> None:
    att = random_attention(kind, dtype=torch.float32)
    torch.testing.assert_close(spectral_norm(att, tol=1e-6).lower, oracle(att), rtol=2e-5, atol=0)


def test_head_out_is_the_norm_with_the_output_projection(att: Attention) -> None:
    norm, unit = (
        spectral_norm(att, map="head_out", tol=1e-10, vectors=True),
        2.0 ** PreparedMap(att, "head_out").exponents,
    )
    for s in range(att.samples):
        for h in range(att.heads):
            head = dense_jacobian(att, s, h)
            n = len(head) // att.d_v
            full = torch.einsum("nvk,vo->nok", head.view(n, att.d_v, -1), att.w_o[h]).reshape(
                n * att.w_o.shape[2], -1
            )
            error = 3 * float(
                PreparedMap(att, "head_out").roundoff.tensors.view(2, 3)[s, h] * unit[h]
            )
            assert (
                abs(float(norm.lower[s, h]) - float(torch.linalg.svdvals(full)[0]))
                <= 1e-9 * float(norm.lower[s, h]) + error
            )
    assert norm.left.shape == (2, 3, att.tokens, att.w_o.shape[2])


@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_singular_pair(att: Attention, method: str) -> None:
    norm = spectral_norm(att, method=method, tol=1e-13, vectors=True)
    assert norm.left.shape == (2, 3, att.tokens, att.d_v)
    assert norm.right.shape == att.x[:, None].expand(-1, 3, -1, -1).shape
    torch.testing.assert_close(
        norm.right.flatten(2).norm(dim=-1), torch.ones(2, 3, dtype=torch.float64)
    )
    for h in range(3):
        image = dense_jacobian(att, 0, h) @ norm.right[0, h].flatten()
        torch.testing.assert_close(
            image,
            norm.lower[0, h] * norm.left[0, h].flatten(),
            rtol=0,
            atol=1e-5 * float(norm.lower[0, h]),
        )


def test_padded_tokens_carry_no_singular_vectors() -> None:
    norm = spectral_norm(random_attention("padded"), vectors=True)
    assert not norm.left[1, :, 4:].any()
    assert not norm.right[1, :, 4:].any()


def test_zero_operator_and_exhausted_spaces() -> None:
    x, w = torch.ones(1, 4, 3, dtype=torch.float64), torch.ones(2, 3, 2, dtype=torch.float64)
    zero = Attention(x, w, w, w * 0)
    for method in ("lanczos", "power", "dense"):
        norm = spectral_norm(zero, method=method)
        assert norm.lower.tolist() == [[0.0, 0.0]]
        assert bool(norm.converged.all())
    rank_one = spectral_norm(Attention(x, w, w, w), tol=1e-12)
    torch.testing.assert_close(rank_one.lower, oracle(Attention(x, w, w, w)), rtol=1e-11, atol=0)


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1.0, 1e6, 1e15])
def test_float32_keeps_its_range(size: float) -> None:
    att = random_attention("plain", dtype=torch.float32)
    scaled = Attention(att.x, att.w_q, att.w_k, att.w_v * size)
    torch.testing.assert_close(
        spectral_norm(scaled, tol=1e-6).lower, oracle(scaled), rtol=2e-5, atol=0
    )


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_huge_and_tiny_inputs(size: float) -> None:
    att = random_attention("plain")
    scaled = Attention(att.x * size, att.w_q, att.w_k, att.w_v)
    assert encloses(spectral_norm(scaled, tol=1e-10), oracle(scaled), 1e-8, tensor_error(scaled))


@pytest.mark.parametrize("delta", [None, 1e-6])
@pytest.mark.parametrize("size", [1e-37, 1e-25, 1e-8, 1e8, 1e30])
def test_squares_that_leave_the_range_of_float32(size: float, delta: float | None) -> None:
    op = AutogradJacobian(lambda x: size * x, torch.ones(4))
    norm = operator_norm(op, delta=delta)
    assert float(norm.lower) == pytest.approx(size, rel=1e-5)
    assert bool(norm.converged.all())


def test_overflow_is_a_sentence() -> None:
    op = AutogradJacobian(lambda x: 1e30 * (1e30 * x), torch.ones(4))
    with pytest.raises(LipboundError, match="float64"):
        operator_norm(op)


def test_unconverged_is_said() -> None:
    norm = spectral_norm(random_attention("plain"), tol=1e-14, max_steps=2)
    assert not bool(norm.converged.any())
    assert bool((norm.error > 0).all())
    assert bool((norm.steps == 2).all())


def test_batches_do_not_change_results() -> None:
    att = random_attention("biases")
    whole = spectral_norm(att, seed=[5, 6])
    torch.testing.assert_close(
        spectral_norm(att.select(slice(1, 2)), seed=[6]).lower, whole.lower[1:], rtol=1e-12, atol=0
    )


def test_l2_norms_match_dense() -> None:
    att = random_attention("causal")
    reference = torch.linalg.svdvals(L2HeadJacobian(att).dense())[:, 0].view(2, 3)
    torch.testing.assert_close(l2_spectral_norm(att, tol=1e-11).lower, reference, rtol=1e-9, atol=0)


def test_l2_norms_of_masked_layers_in_float32() -> None:
    for kind in ("causal", "padded"):
        torch.testing.assert_close(
            l2_spectral_norm(random_attention(kind, dtype=torch.float32)).lower,
            l2_spectral_norm(random_attention(kind)).lower,
            rtol=1e-3,
            atol=0,
        )


def test_any_callable() -> None:
    att = random_attention("window")
    norm = operator_norm(AutogradJacobian(head_function(att, 1, 2), att.x[1]), tol=1e-11)
    torch.testing.assert_close(norm.lower[0], oracle(att)[1, 2], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map": "heda"}, "did you mean 'head'"),
        ({"method": "lanzcos"}, "did you mean 'lanczos'"),
        ({"tol": math.nan}, "tol is nan"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"seed": [1, 2, 3, 4]}, "4 seeds"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(LipboundError, match=message):
        spectral_norm(random_attention("plain"), **options)


def test_dense_refuses_what_does_not_fit() -> None:
    big = Attention(torch.ones(1, 600, 200), *(torch.ones(1, 200, 64) for _ in range(3)))
    with pytest.raises(LipboundError, match="method='lanczos'"):
        spectral_norm(big, method="dense")


def test_dense_encloses() -> None:
    att = random_attention("biases")
    norm = spectral_norm(att, method="dense")
    assert bool((norm.lower <= oracle(att)).all())
    assert bool((oracle(att) <= norm.upper).all())
    assert encloses(norm, oracle(att), 1e-11, tensor_error(att))
    assert operator_norm(HeadJacobian(att), method="dense").lower.shape == (6,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exhausted_spaces_are_not_taken_for_convergence(dtype: torch.dtype) -> None:
    """One token, values diag(1, ..., 1, 1 + g): the Krylov space ends on rounding before it has
    found the last direction."""
    d, g, tol = 100, 3e-5, 1e-6
    w_v = torch.eye(d, dtype=dtype)
    w_v[-1, -1] += g
    zero = torch.zeros(1, d, 1, dtype=dtype)
    att = Attention(torch.ones(40, 1, d, dtype=dtype), zero, zero, w_v[None])
    norm = spectral_norm(att, tol=tol)
    exact = float(w_v[-1, -1].double())
    wrong = norm.converged & ((1 - norm.lower / exact).abs() > tol)
    assert not bool(wrong.any())
    certified = spectral_norm(att, tol=1e-4, delta=1e-10)
    assert bool((certified.upper >= exact * (1 - 1e-12)).all())
    assert bool((certified.upper / certified.lower <= 1 + 1e-4).all())
    assert bool(certified.converged.all())


def test_subnormal_values_are_measured() -> None:
    att = random_attention("plain", dtype=torch.float32)
    tiny = Attention(att.x, att.w_q, att.w_k, att.w_v * 1e-36)
    torch.testing.assert_close(spectral_norm(tiny, tol=1e-5).lower, oracle(tiny), rtol=1e-4, atol=0)


def test_saturated_attention_in_float32() -> None:
    """Logits of hundreds: P comes from float64 scores, so what is left is the rounding that is
    reported."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 48, 32, generator=g)
    w_q, w_k, w_v = (torch.randn(4, 32, 8, generator=g) for _ in range(3))
    att = Attention(x, 10 * w_q, w_k, w_v)
    exact = spectral_norm(att.double(), tol=1e-8).lower
    difference = (spectral_norm(att, tol=1e-5).lower - exact).abs()
    assert bool((difference <= 2e-5 * exact + tensor_error(att)).all())


@pytest.mark.parametrize("offset", ["x", "b_k", "b_v"])
def test_common_offsets_cost_no_digits(offset: str) -> None:
    """Keys and values matter through differences alone: offsets of 1e4 in float32 leave norms and
    bounds where they are."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 24, 16, generator=g) + (1e3 if offset == "x" else 0.0)
    w = [torch.randn(3, 16, 4, generator=g) * 0.3 for _ in range(3)]
    att = Attention(
        x,
        *w,
        scale=0.01,
        **{name: torch.full((3, 4), 1e4) for name in ("b_k", "b_v") if name == offset},
    )
    exact = torch.stack(
        [
            torch.linalg.matrix_norm(dense_jacobian(att.double(), s, h), 2)
            for s in range(2)
            for h in range(3)
        ]
    ).view(2, 3)
    error = (spectral_norm(att, tol=1e-6).lower / exact - 1).abs().max()
    assert float(error) <= 3e-6
    for name in ("lipbound", "lipbound_block"):
        assert bool((bounds.get(name)(att) >= exact * (1 - 1e-6)).all())


def test_tiny_values_do_not_vanish() -> None:
    """Bounds are linear in values, as norms are."""
    att = random_attention("plain")
    tiny = Attention(att.x, att.w_q, att.w_k, att.w_v * 1e-55)
    for name in ("lipbound", "lipbound_block"):
        torch.testing.assert_close(
            bounds.get(name)(tiny), bounds.get(name)(att) * 1e-55, rtol=1e-9, atol=0
        )
    torch.testing.assert_close(
        bounds.over_ball(tiny, 0.1), bounds.over_ball(att, 0.1) * 1e-55, rtol=1e-6, atol=0
    )


def test_certificates_honour_vanishing_failure_probabilities() -> None:
    """log(1/eps) is continuous where the closed form takes over, and goes on growing."""
    for n in (3, 100, 6000):
        assert log_inverse_epsilon(n, 0.99e-100) - log_inverse_epsilon(
            n, 1.01e-100
        ) == pytest.approx(math.log(1.01 / 0.99), rel=1e-6)
        assert log_inverse_epsilon(n, 1e-200) - log_inverse_epsilon(n, 1e-100) == pytest.approx(
            100 * math.log(10), rel=1e-6
        )


@pytest.mark.parametrize("estimate", [False, True])
@pytest.mark.parametrize("kind", ["biases", "rope"])
def test_lower_ends_are_lengths_of_transposed_products_less_rounding(
    kind: str, estimate: bool
) -> None:
    """Of any vector, of whatever length: never above the norm, and at the top singular vector
    hardly below it, also where lengths are taken from products with W^T W. Of vectors that say
    nothing, zero."""
    att = random_attention(kind)
    measured = PreparedMap(att, "head", estimate=estimate)
    op, roundoff = measured.op, measured.roundoff
    u, s, _ = torch.linalg.svd(op.dense())
    lost = 2 * (roundoff.products + roundoff.tensors) + 1e-12 * s[:, 0]
    with torch.no_grad():
        low, size, top, image = _quotients(op, roundoff, 7 * u[..., 0])
        assert bool((low <= s[:, 0]).all())
        assert bool((low >= s[:, 0] - lost).all())
        by_squares = _quotients(op, roundoff, 7 * u[..., 0], 1e-4)[0]
        assert bool((by_squares <= s[:, 0]).all())
        assert bool((by_squares >= s[:, 0] - lost - 2 * op.length(image)[1]).all())
        assert bool((op.length(image)[1] <= 1e-8 * s[:, 0]).all())
        torch.testing.assert_close(top.norm(dim=1), torch.ones_like(low))
        torch.testing.assert_close(op.length(image)[0], s[:, 0])
        torch.testing.assert_close(size, s[:, 0])
        other = torch.randn(
            u.shape[:2], generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        for vectors in (other, other * 1e200, other * 1e-200):
            assert bool((_quotients(op, roundoff, vectors)[0] < s[:, 0]).all())
        for vectors in (torch.zeros_like(other), other * torch.nan, other * torch.inf):
            assert bool((_quotients(op, roundoff, vectors)[0] == 0).all())


@pytest.mark.parametrize("rotated", [False, True])
def test_one_random_start_carries_a_certificate_of_a_usual_head(
    rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 tokens, width 32, 1e-7 a norm: what rounding may have hidden is known well enough. Of
    smaller probabilities it is not."""
    g, width = torch.Generator().manual_seed(0), 32
    extra = (
        {"rotation": Rotation.of_angles(torch.randn(128, width // 2, generator=g))}
        if rotated
        else {}
    )
    x, w = (
        torch.randn(1, 128, 256, generator=g),
        [torch.randn(2, 256, width, generator=g) * 0.06 for _ in range(3)],
    )
    att, runs, run = Attention(x, *w, **extra), [], enclose.Runs

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(enclose, "Runs", counted)
    for delta, starts in ((1e-7, 1), (1e-12, 2)):
        runs.clear()
        norm = spectral_norm(att, tol=1e-3, delta=2 * delta)
        assert bool(norm.converged.all())
        assert len(runs) == starts
    exact = spectral_norm(att.double(), tol=1e-10)
    assert bool((norm.lower <= exact.lower * (1 + 1e-9)).all() & (norm.upper >= exact.lower).all())


@pytest.mark.parametrize("method", ["lanczos"])
@pytest.mark.parametrize("sink", [60.0, 95.0, 100.0, 103.0])
def test_a_head_that_vanishes_in_float32_leaves_the_others_alone(method: str, sink: float) -> None:
    """Its recurrence goes on after its end, on what underflow has left, while theirs do not end."""
    for tokens in (2, 5, 40):
        g = torch.Generator().manual_seed(tokens)
        tensors = (
            torch.randn(shape, generator=g)
            for shape in [(1, tokens, 6), (2, 6, 4), (2, 6, 4), (2, 6, 4)]
        )
        att = Attention(*tensors, sinks=torch.tensor([sink, -3.0]))
        norm, exact = (
            spectral_norm(att, method=method, tol=1e-8),
            spectral_norm(att, method="dense"),
        )
        # rounding takes a tenth of the first
        assert float(norm.lower[0, 0]) <= float(exact.upper[0, 0])
        torch.testing.assert_close(norm.lower[0, 1], exact.lower[0, 1], rtol=1e-8, atol=0)


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_autocast_changes_nothing(method: str) -> None:
    att = random_attention("plain", 0, dtype=torch.float32)
    plainly = spectral_norm(att, method=method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = spectral_norm(att, method=method)
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(under.lower, plainly.lower, rtol=0, atol=0)


@pytest.mark.parametrize("map", ["heads", "layer"])
def test_whole_layers_of_extreme_scales_are_those_of_ordinary_ones(map: str) -> None:
    """Powers of two that cancel, or that the norm is multiplied with."""
    g = torch.Generator().manual_seed(0)
    x, q, k, v = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((1, 4, 5), (2, 5, 3), (2, 5, 3), (2, 5, 3))
    )
    o = torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    plain = spectral_norm(Attention(x, q, k, v, w_o=o), map=map, delta=1e-6)
    turned = Attention(x, q * 2.0**190, k * 2.0**-190, v, w_o=o)
    tiny = Attention(x, q, k, v, w_o=o * 2.0**-190)
    for att, exponent in ((turned, 0), (tiny, 0 if map == "heads" else -190)):
        found = spectral_norm(att, map=map, delta=1e-6)
        assert found.converged.all()
        assert torch.equal(found.lower, plain.lower * 2.0**exponent)
        assert torch.equal(found.upper, plain.upper * 2.0**exponent)

"""Norms of every map by every method against dense autograd Jacobians: lower ends not above, upper
ends not below, no further off than asked for."""

import gc
import math
from functools import partial

import pytest
import torch
from support.checks import close, normal, refused
from support.hard_heads import FAMILIES
from support.layers import changed, in_units, random_attention
from support.oracles import allowance, assert_encloses, dense_norms, matrices, oracle
from support.reference import head_function

import lipbound as lb
from lipbound.attention.variants.rotary import Rotation
from lipbound.jacobians.spectral_norm import l2_spectral_norm, spectral_norm
from lipbound.linalg.certificates import log_inverse_epsilon
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import AutogradJacobian

METHODS = pytest.mark.parametrize("method", ["lanczos", "dense"])
WHOLE = pytest.mark.parametrize("map", ["heads", "layer"])


def measured(att: lb.Attention, tol: float, map: str = "head", **options) -> lb.Norm:
    """A norm that is what it should be."""
    norm = spectral_norm(att, map=map, tol=tol, **options)
    assert_encloses(att, norm, oracle(att, map), tol, map)
    return norm


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@METHODS
def test_enclosures_hold_the_oracle(kind: str, method: str, dtype: torch.dtype) -> None:
    measured(random_attention(kind, dtype=dtype), 1e-6, method=method, delta=1e-10)


@pytest.mark.each_value
@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-8])
def test_the_error_asked_for_is_the_error_delivered(att: lb.Attention, tol: float) -> None:
    norm = measured(att, tol)
    assert bool((norm.error <= tol + 2 * allowance(att) / oracle(att)).all())


def test_float32_numbers_count_as_they_are(kind: str) -> None:
    att = random_attention(kind, dtype=torch.float32)
    close(measured(att, 1e-6).lower, oracle(att), 2e-5)


def test_head_out_is_the_norm_with_the_output_projection(att: lb.Attention) -> None:
    norm = measured(att, 1e-9, "head_out", vectors=True)
    assert norm.left.shape == (2, 3, att.tokens, att.w_o.shape[2])


@pytest.mark.each_value
@WHOLE
@METHODS
def test_norms_of_layers_match_the_oracle(att: lb.Attention, map: str, method: str) -> None:
    norm = measured(att, 1e-8, map, method=method, vectors=True)
    assert norm.lower.shape == norm.steps.shape == (2,)
    assert norm.left.shape == (2, att.tokens, att.heads * att.d_v if map == "heads" else 9)
    assert norm.right.shape == att.x.shape
    image = matrices(att, 0, map)[0] @ norm.right[0].flatten()
    assert float(image.norm() / oracle(att, map)[0]) == pytest.approx(1, rel=1e-6)


@pytest.mark.each_value
@WHOLE
def test_float32_layers(kind: str, map: str) -> None:
    measured(random_attention(kind, dtype=torch.float32), 1e-3, map, delta=1e-10)


@METHODS
def test_norms_and_singular_pairs_match_the_oracle(att: lb.Attention, method: str) -> None:
    norm = measured(att, 1e-10, method=method)
    assert norm.lower.shape == norm.steps.shape == (2, 3)
    assert norm.lower.dtype == torch.float64
    norm = spectral_norm(att, method=method, tol=1e-13, vectors=True)
    assert norm.left.shape == (2, 3, att.tokens, att.d_v)
    assert norm.right.shape == (2, 3, *att.x.shape[1:])
    close(norm.right.flatten(2).norm(dim=-1), torch.ones(2, 3, dtype=torch.float64), 1e-7)
    for h, j in enumerate(matrices(att, 0)):
        difference = j @ norm.right[0, h].flatten() - norm.lower[0, h] * norm.left[0, h].flatten()
        assert float(difference.abs().max()) <= 1e-5 * float(norm.lower[0, h])
    if att.valid is not None:  # padded tokens carry none
        assert not norm.left[~att.valid[:, None].expand(2, 3, -1)].any()
        assert not norm.right[~att.valid[:, None].expand(2, 3, -1)].any()


def test_power_iteration_approaches_from_below(att: lb.Attention) -> None:
    exact, norm = oracle(att), spectral_norm(att, method="power", tol=0, max_steps=300)
    assert bool(((norm.lower <= exact * (1 + 1e-12)) & (norm.lower >= 0.98 * exact)).all())
    assert bool(norm.error.isnan().all())


def test_power_iteration_stops_on_an_absolute_change() -> None:
    """The papers' rule depends on scale."""
    att = random_attention("plain")
    small = changed(att, w_v=att.w_v * 1e-6)
    assert int(spectral_norm(small, method="power", tol=1e-4).steps.max()) == 2
    measured(small, 1e-8)


@pytest.mark.parametrize("family", ["sinks", "sinks_take_all"])
def test_power_iteration_of_heads_whose_squares_vanish(family: str) -> None:
    """Norms of 1e-85, of whose squares a vector was divided by nothing, came out as 1e53."""
    att = FAMILIES[family](torch.Generator().manual_seed(7), torch.float64)
    power, enclosed = spectral_norm(att, method="power"), spectral_norm(att, delta=1e-6)
    assert bool((power.lower <= enclosed.upper).all())


def test_zero_operator_and_exhausted_spaces() -> None:
    x, w = torch.ones(1, 4, 3, dtype=torch.float64), torch.ones(2, 3, 2, dtype=torch.float64)
    for options in ({}, {"delta": 1e-6}, {"method": "power"}, {"method": "dense"}):
        norm = spectral_norm(lb.Attention(x, w, w, w * 0), **options)
        assert norm.lower.tolist() == [[0.0, 0.0]]
        assert bool(norm.converged.all())
    measured(lb.Attention(x, w, w, w), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exhausted_spaces_are_not_taken_for_convergence(dtype: torch.dtype) -> None:
    """One token, values diag(1, ..., 1, 1 + g): the Krylov space ends on rounding before it has
    found the last direction."""
    d, tol = 100, 1e-6
    w_v = torch.eye(d, dtype=dtype)
    w_v[-1, -1] += 3e-5
    zero = torch.zeros(1, d, 1, dtype=dtype)
    att, exact = lb.Attention(torch.ones(40, 1, d, dtype=dtype), zero, zero, w_v[None]), w_v[-1, -1]
    exact = float(exact.double())
    norm = spectral_norm(att, tol=tol)
    assert not bool((norm.converged & ((1 - norm.lower / exact).abs() > tol)).any())
    certified = spectral_norm(att, tol=1e-4, delta=1e-10)
    assert bool((certified.upper >= exact * (1 - 1e-12)).all())
    assert bool((certified.upper / certified.lower <= 1 + 1e-4).all())
    assert bool(certified.converged.all())


# -- sizes -----------------------------------------------------------------------------------------


SMALL_AND_LARGE = [("w_v", size, torch.float32) for size in (1e-36, 1e-20, 1e-6, 1.0, 1e6, 1e15)]
SMALL_AND_LARGE += [("x", size, torch.float64) for size in (1e-6, 1e6)]


@pytest.mark.parametrize(("part", "size", "dtype"), SMALL_AND_LARGE)
def test_small_and_large_numbers(part: str, size: float, dtype: torch.dtype) -> None:
    """Subnormal values included."""
    att = random_attention("plain", dtype=dtype)
    tol = 1e-6 if dtype == torch.float32 else 1e-8
    measured(changed(att, **{part: getattr(att, part) * size}), tol)


POWERS = {
    "a large scale": {"scale": 190, "w_q": -190},
    "a small scale": {"scale": -190, "w_q": 100, "w_k": 90},
    "large queries": {"w_q": 190, "w_k": -190},
    "large values": {"w_v": 180, "w_o": -190},
    "small values": {"w_v": -150, "w_o": -140},
}
"""By which powers of two tensors of a layer are multiplied, such that scores stay as they are."""


@pytest.mark.each_value
@WHOLE
@pytest.mark.parametrize("powers", POWERS)
def test_layers_of_extreme_sizes_have_the_numbers_of_ordinary_ones(powers: str, map: str) -> None:
    """What is multiplied by powers of two has the same norms, but for such a power."""
    by, near = POWERS[powers], random_attention("plain")
    far = in_units(near, **by)
    unit = 2.0 ** (by.get("w_v", 0) + (by.get("w_o", 0) if map == "layer" else 0))
    exact = oracle(near, map) * unit
    for method in ("lanczos", "dense"):
        norm = spectral_norm(far, map=map, method=method, tol=1e-6, delta=1e-6)
        close(norm.lower, exact, 2e-6)
        close(norm.upper, exact, 2e-6)
    for kind in ("every-token", "one-token", "output-token"):
        found, expected = (lb.token_norm(att, kind, map=map) for att in (far, near))
        assert bool((found.lower <= expected.upper * unit * (1 + 1e-9)).all())
        assert bool((found.upper >= expected.lower * unit * (1 - 1e-9)).all())
        assert bool(found.converged.all())


def test_residual_blocks_of_a_large_scale() -> None:
    near = random_attention("plain")
    far = in_units(near, w_q=-190, scale=190)
    norm = spectral_norm(far, map="residual", delta=1e-6, tol=1e-6)
    exact = spectral_norm(near, map="residual", method="dense").lower
    close(norm.lower, exact, 2e-6)
    close(norm.upper, exact, 2e-6)


@METHODS
@pytest.mark.parametrize("sink", [370.0, 745.0, 1500.0])
def test_heads_beside_each_other_that_attend_to_sinks(sink: float, method: str) -> None:
    """Probabilities, or their squares, underflow: the norm is tiny, but it is not zero."""
    att = changed(random_attention("plain"), sinks=torch.full((3,), sink, dtype=torch.float64))
    for delta in (1e-6, None):
        norm = spectral_norm(att, map="heads", method=method, delta=delta)
        assert bool((norm.upper > 0).all())
        assert sink < 740 or not bool(norm.converged.any())


@pytest.mark.parametrize("sink", [60.0, 95.0, 100.0, 103.0])
def test_a_head_that_vanishes_in_float32_leaves_the_others_alone(sink: float) -> None:
    """Its recurrence goes on after its end, on what underflow has left, while theirs do not end."""
    for tokens in (2, 5, 40):
        draw = normal(tokens, torch.float32)
        tensors = draw(1, tokens, 6), draw(2, 6, 4), draw(2, 6, 4), draw(2, 6, 4)
        att = lb.Attention(*tensors, sinks=torch.tensor([sink, -3.0]))
        norm, exact = spectral_norm(att, tol=1e-8), spectral_norm(att, method="dense")
        # rounding takes a tenth of the first
        assert float(norm.lower[0, 0]) <= float(exact.upper[0, 0])
        close(norm.lower[0, 1], exact.lower[0, 1], 1e-8)


@pytest.mark.parametrize("offset", ["x", "b_k", "b_v"])
def test_common_offsets_cost_no_digits(offset: str) -> None:
    """Keys and values matter through differences alone: offsets of 1e4 in float32 leave norms and
    bounds where they are."""
    draw = normal(1, torch.float32)
    x = draw(2, 24, 16) + (1e3 if offset == "x" else 0.0)
    w = [draw(3, 16, 4) * 0.3 for _ in range(3)]
    more = {} if offset == "x" else {offset: torch.full((3, 4), 1e4)}
    att = lb.Attention(x, *w, scale=0.01, **more)
    exact = oracle(att)
    assert float((spectral_norm(att, tol=1e-6).lower / exact - 1).abs().max()) <= 3e-6
    for name in ("lipbound", "lipbound_block"):
        assert bool((lb.bounds.get(name)(att) >= exact * (1 - 1e-6)).all())


# -- other operators, options, and parts of a search -----------------------------------------------


def test_l2_norms_match_dense(kind: str) -> None:
    exact = dense_norms(random_attention(kind), "l2")
    close(l2_spectral_norm(random_attention(kind), tol=1e-11).lower, exact, 1e-9, 1e-12)
    close(l2_spectral_norm(random_attention(kind, dtype=torch.float32)).lower, exact, 1e-3, 1e-12)
    att = random_attention(kind)
    trained = att.with_parts(w_q=att.w_q.clone().requires_grad_())
    assert torch.equal(l2_spectral_norm(trained).lower, l2_spectral_norm(att).lower)


def test_any_callable() -> None:
    att = random_attention("window")
    norm = operator_norm(AutogradJacobian(head_function(att, 1, 2), att.x[1]), tol=1e-11)
    close(norm.lower[0], oracle(att)[1, 2])
    dense = operator_norm(lb.HeadJacobian(att), method="dense")
    close(dense.lower.view(2, 3), oracle(att))


@pytest.mark.parametrize("delta", [None, 1e-6])
@pytest.mark.parametrize("size", [1e-37, 1e-25, 1e-8, 1e8, 1e30])
def test_squares_that_leave_the_range_of_float32(size: float, delta: float | None) -> None:
    op = AutogradJacobian(lambda x: size * x, torch.ones(4))
    norm = operator_norm(op, delta=delta)
    close(norm.lower, torch.tensor([size], dtype=torch.float64), 1e-5)
    assert bool(norm.converged.all())


@pytest.mark.parametrize(
    ("factors", "word"), [((1e30, 1e30), "float64"), ((1e-30, 1e-12), "underflow")]
)
def test_what_leaves_the_range_is_a_sentence(factors: tuple[float, float], word: str) -> None:
    op = AutogradJacobian(lambda x: factors[0] * (factors[1] * x), torch.ones(4))
    refused(partial(operator_norm, op), word)


def test_unconverged_is_said() -> None:
    norm = spectral_norm(random_attention("plain"), tol=1e-14, max_steps=2)
    assert not bool(norm.converged.any())
    assert bool((norm.error > 0).all())
    assert bool((norm.steps == 2).all())


def test_what_a_layer_lacks_or_does_not_fit_is_refused() -> None:
    att = random_attention("plain", w_o=False)
    refused(partial(spectral_norm, att, map="layer"), "map='heads'")
    refused(partial(lb.bounds.whole_layer, att, "yudin"), "map='heads'")
    big = lb.Attention(torch.ones(1, 600, 200), *(torch.ones(1, 200, 64) for _ in range(3)))
    refused(partial(spectral_norm, big, method="dense"), "method='lanczos'")


def test_certificates_honour_vanishing_failure_probabilities() -> None:
    """log(1/eps) is continuous where the closed form takes over, and goes on growing."""
    for n in (3, 100, 6000):
        for small, large in ((0.99e-100, 1.01e-100), (1e-200, 1e-100)):
            difference = log_inverse_epsilon(n, small) - log_inverse_epsilon(n, large)
            assert difference == pytest.approx(math.log(large / small), rel=1e-6)


@pytest.mark.parametrize("rotated", [False, True])
def test_one_random_start_carries_a_certificate_of_a_usual_head(rotated: bool) -> None:
    """128 tokens, width 32, 1e-7 a norm: what rounding may have hidden is known well enough. Of
    smaller probabilities it is not, and a second start takes as many steps again."""
    draw, width = normal(0, torch.float32), 32
    turn = Rotation.of_angles(draw(128, width // 2)) if rotated else None
    w = [0.06 * draw(2, 256, width) for _ in range(3)]
    att = lb.Attention(draw(1, 128, 256), *w, rotation=turn)
    exact, steps = spectral_norm(att.double(), tol=1e-10).lower, []
    for delta in (2e-7, 2e-14):
        norm = spectral_norm(att, tol=1e-3, delta=delta)
        assert bool(norm.converged.all())
        assert bool(((norm.lower <= exact * (1 + 1e-9)) & (norm.upper >= exact)).all())
        steps.append(norm.steps)
    assert bool((steps[1] > 1.2 * steps[0]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_made_for_a_call_is_freed_with_the_layer(dtype: torch.dtype) -> None:
    """By Python itself: its garbage collector does not know how much memory tensors take."""
    calls = [lb.bounds.get(name) for name in lb.bounds.names()]
    calls += [partial(spectral_norm, **how) for how in ({}, {"delta": 1e-6}, {"map": "layer"})]
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for call in calls:
            call(random_attention("biases", dtype=dtype))
        gc.collect()
        left = [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def test_batches_do_not_change_results():
    att = random_attention("biases")
    whole = lb.spectral_norm(att, seed=[5, 6])
    close(lb.spectral_norm(att.select(slice(1, 2)), seed=[6]).lower, whole.lower[1:], 1e-12)

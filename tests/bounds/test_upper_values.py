"""Our bounds as they are printed: never below the norm of the given numbers in 60 digits, whatever
their sizes, and with their own derivatives."""

import math
from collections.abc import Callable
from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import HARD, changed, random_attention
from support.oracles import oracle
from support.strategies import examples, part
from support.variants import layer
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.attention.variants.rotary import Rotation
from lipbound.bounds.ours import block_norms, pairwise, pairwise_variants
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg import matrix_norms

OURS = ("lipbound", "lipbound_block")
DIGITS = 60


def exact_norm(att: Attention) -> float:
    """Of the first head at the first input, a plain one, from the quotient rule of the softmax in
    60 digits; rounded down."""
    with mpmath.workdps(DIGITS):

        def numbers(t: Tensor) -> mpmath.matrix:
            return mpmath.matrix(t.double().tolist())

        x, w_q, w_k, w_v = (numbers(t[0]) for t in (att.x, att.w_q, att.w_k, att.w_v))
        n, width, d, d_v = x.rows, x.cols, w_q.cols, w_v.cols
        b_q = mpmath.zeros(1, d) if att.b_q is None else numbers(att.b_q[:1])
        q, k, v = x * w_q + mpmath.ones(n, 1) * b_q, x * w_k, x * w_v
        mask = torch.zeros(n, n) if att.mask is None else att.mask.expand(1, 1, n, n)[0, 0]
        rows = []
        for i in range(n):
            seen = [j for j in range(n) if float(mask[i, j]) > -1e30]
            s = {
                j: mpmath.mpf(att.scale) * sum(q[i, e] * k[j, e] for e in range(d))
                + mpmath.mpf(float(mask[i, j]))
                for j in seen
            }
            top = max(s.values())
            weight = {j: mpmath.exp(s[j] - top) for j in seen}
            total = sum(weight.values())
            p = {j: w / total for j, w in weight.items()}
            o = [sum(p[j] * v[j, a] for j in seen) for a in range(d_v)]
            block = mpmath.zeros(d_v, n * width)
            for j in seen:
                for a in range(d_v):
                    lever = p[j] * mpmath.mpf(att.scale) * (v[j, a] - o[a])
                    for c in range(width):
                        block[a, j * width + c] += p[j] * w_v[c, a] + lever * sum(
                            w_k[c, e] * q[i, e] for e in range(d)
                        )
                        block[a, i * width + c] += lever * sum(
                            w_q[c, e] * k[j, e] for e in range(d)
                        )
            rows += [block[a, :] for a in range(d_v)]
        j = mpmath.matrix([list(row) for row in rows])
        y = mpmath.matrix([mpmath.mpf(1 + (7 * i) % 5) for i in range(j.rows)])
        gram = j * j.T
        for _ in range(400):
            z = gram * y
            y, before = z / mpmath.norm(z), y
            if mpmath.norm(y - before) < mpmath.mpf(10) ** -15:
                break
        return float(mpmath.norm(j.T * y) * (1 - mpmath.mpf(2) ** -52))


def one_key_for_all(dtype: torch.dtype, tokens: int = 32, pull: float = 10.0) -> Attention:
    """Every row attends to one key, as in a head with an attention sink."""
    x = torch.tensor([[1.0, 0, 1]] + [[-0.3, 0, 0]] * (tokens - 1), dtype=dtype)[None]
    w_k, w_v = (torch.tensor(w, dtype=dtype).view(1, 3, 1) for w in ((0.0, 100, 1), (1.0, 0, 0)))
    return Attention(
        x, torch.zeros_like(w_k), w_k, w_v, b_q=torch.full((1, 1), pull, dtype=dtype), scale=1.0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pull", [6.0, 10.0, 14.0])
def test_heads_that_attend_to_one_key(dtype: torch.dtype, pull: float) -> None:
    att = one_key_for_all(dtype, 12, pull)
    norm = exact_norm(att)
    for name in OURS:
        assert float(bounds.get(name)(att)) >= norm, name


def far_from_zero(seed: int, dtype: torch.dtype, size: float) -> Attention:
    """Two pairs of tokens that do not see each other, far from zero together."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 4, 2, generator=g)
    x[:, :2] += size * torch.randn(2, generator=g)
    w_q, w_k, w_v = (torch.randn(1, 2, 1, generator=g) for _ in range(3))
    pairs = torch.kron(torch.eye(2), torch.ones(2, 2))
    mask = torch.zeros(4, 4).masked_fill(pairs == 0, -math.inf)
    return Attention(*(t.to(dtype) for t in (x, w_q, w_k, w_v)), mask=mask.to(dtype), scale=1.0)


@pytest.mark.each_value
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_far_from_zero(size: float, dtype: torch.dtype) -> None:
    for seed in range(part(15)):
        att = far_from_zero(seed, dtype, size)
        norm = exact_norm(att)
        for name in OURS:
            assert float(bounds.get(name)(att)) >= norm, (seed, name)


@pytest.mark.parametrize("sharp", [1.0, 30.0, 1e3, 1e6])
def test_saturated_float32_heads(sharp: float) -> None:
    for seed in range(part(8, 2)):
        att = random_attention("biases", seed, torch.float32).select(slice(0, 1), slice(0, 1))
        att = changed(
            att,
            x=att.x[:, :4, :3],
            w_q=sharp * att.w_q[:, :3],
            w_k=att.w_k[:, :3],
            w_v=att.w_v[:, :3],
            w_o=None,
        )
        norm = exact_norm(att)
        for name in OURS:
            assert float(bounds.get(name)(att)) >= norm, (seed, name)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [-180, -130, -40, 40, 130, 180])
def test_extreme_sizes_that_cancel(power: int) -> None:
    """x times a number, W_Q and W_K divided by it: the same head."""
    att = random_attention("plain")
    s, norm = 2.0**power, oracle(att)
    there = changed(att, x=att.x * s, w_q=att.w_q / s, w_k=att.w_k / s)
    for name in OURS:
        value = bounds.get(name)(there)
        assert bool((value >= norm).all()), name
        torch.testing.assert_close(value, bounds.get(name)(att), rtol=1e-9, atol=0)


Change = Callable[[Attention, float], tuple[Attention, float]]


def scaled_tie(att: Attention, s: float) -> tuple[Attention, float]:
    norms = {
        side: norm
        if norm is None or norm.over is None
        else replace(norm, over=(norm.over[0] / s, norm.over[1]))
        for side in ("norm_q", "norm_k")
        for norm in (getattr(att, side),)
    }
    b_v = None if att.b_v is None or att.sinks is None else att.b_v * s
    return changed(att, x=att.x * s, w_q=att.w_q / s, w_k=att.w_k / s, b_v=b_v, **norms), 1.0


def scaled_values(att: Attention, s: float) -> tuple[Attention, float]:
    return changed(att, w_v=att.w_v * s, b_v=None if att.b_v is None else att.b_v * s), s


def scaled_queries(att: Attention, s: float) -> tuple[Attention, float]:
    """Where nothing is normalised."""
    if att.norm_q is not None or att.norm_k is not None:
        return att, 1.0
    b_q, b_k = None if att.b_q is None else att.b_q * s, None if att.b_k is None else att.b_k / s
    return changed(att, w_q=att.w_q * s, b_q=b_q, w_k=att.w_k / s, b_k=b_k), 1.0


KINDS = st.sampled_from(
    (
        "plain",
        "biases",
        "causal",
        "window",
        "offsets",
        "padded",
        "wide_values",
        "duplicates",
        "flat",
        "no_query",
    )
)
VARIANTS = st.sampled_from(
    (
        (),
        ("rotation",),
        ("norm",),
        ("together", "rotation"),
        ("cap",),
        ("sinks",),
        ("rotation", "cap", "sinks"),
    )
)
SCALINGS = st.sampled_from((scaled_tie, scaled_values, scaled_queries))


def agree(att: Attention, other: Attention, factor: float) -> None:
    """But for the excess of norms of matrices of sizes: rounding may end them a step earlier."""
    rtol = block_norms.RTOL
    for name in OURS:
        before, after = bounds.get(name)(att), bounds.get(name)(other)
        assert bool(torch.isfinite(after).all()), name
        torch.testing.assert_close(
            after / factor, before, rtol=rtol, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@examples(30)
@given(
    kind=KINDS,
    has=VARIANTS,
    seed=st.integers(0, 10**6),
    change=SCALINGS,
    power=st.integers(-55, 55),
)
def test_sizes_do_not_matter_in_float64(
    kind: str, has: tuple[str, ...], seed: int, change: Change, power: int
) -> None:
    att = layer(seed, frozenset(has)) if has else random_attention(kind, seed)
    agree(att, *change(att, 10.0**power))


@examples(30)
@given(kind=KINDS, seed=st.integers(0, 10**6), change=SCALINGS, power=st.integers(-60, 60))
def test_sizes_do_not_matter_in_float32(kind: str, seed: int, change: Change, power: int) -> None:
    """By powers of two from 1e-18 to 1e18: others would round the given numbers."""
    att = random_attention(kind, seed, torch.float32)
    agree(att, *change(att, 2.0**power))


@examples(30)
@given(kind=KINDS, seed=st.integers(0, 10**6), shift=st.sampled_from((1.0, 100.0, 1e4)))
def test_what_all_keys_or_values_share_does_not_matter(kind: str, seed: int, shift: float) -> None:
    att = random_attention(kind, seed)
    if kind == "padded":  # the layer's own biases of keys and values stand for what they share
        shift = 0.0
    b_k, b_v = (torch.full_like(w[:, 0], shift) for w in (att.w_k, att.w_v))
    agree(
        att,
        changed(
            att,
            b_k=b_k if att.b_k is None else att.b_k + b_k,
            b_v=b_v if att.b_v is None else att.b_v + b_v,
        ),
        1.0,
    )


@examples(30)
@given(
    kind=st.sampled_from(("plain", "biases", "wide_values", "duplicates", "flat", "sharp")),
    seed=st.integers(0, 10**6),
)
def test_the_order_of_tokens_and_heads_does_not_matter(kind: str, seed: int) -> None:
    att = random_attention(kind, seed)
    if att.mask is not None:
        att = changed(att, mask=None)
    order = torch.randperm(att.tokens, generator=torch.Generator().manual_seed(seed))
    again = torch.tensor([2, 0, 2, 1])
    weights = {
        name: t[again]
        for name in ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_o")
        if (t := getattr(att, name)) is not None
    }
    other = changed(att, x=att.x[:, order], **weights)
    # kernels may round products at another place of the batch otherwise: norms of blocks, in
    # float32, by what Lemma 48 allows them
    same = att.d_v * (2 * att.x.shape[-1] + 2 * att.d_v + 20) * 2.0**-24
    for name in OURS:
        value = bounds.get(name)(other)
        # block norms are within 1e-4 in float32
        torch.testing.assert_close(value, bounds.get(name)(att)[:, again], rtol=2e-4, atol=0)
        torch.testing.assert_close(value[:, 0], value[:, 2], rtol=same, atol=0)


# -- what cannot be evaluated ----------------------------------------------------------------------


def test_scores_beyond_what_can_be_resolved() -> None:
    """One token, whose score does not matter; the other head is as it was."""
    att = random_attention("plain").select(slice(0, 1), slice(0, 2))
    att = changed(att, x=att.x[:, :1])
    there = changed(
        att,
        w_q=torch.stack([att.w_q[0] * 1e50, att.w_q[1]]),
        w_k=torch.stack([att.w_k[0] * 1e50, att.w_k[1]]),
    )
    for name in OURS:
        value = bounds.get(name)(there)
        assert float(value[0, 0]) >= float(torch.linalg.matrix_norm(att.w_v[0], 2))
        torch.testing.assert_close(value[:, 1], bounds.get(name)(att)[:, 1], rtol=1e-9, atol=0)


# -- derivatives -----------------------------------------------------------------------------------

PARTS = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are smooth enough for differences: norms to 1e-12, products in float64."""
    for module in (block_norms, pairwise, pairwise_variants):
        monkeypatch.setattr(module, "RTOL", 1e-12)
    monkeypatch.setattr(matrix_norms, "reproducible_float32", lambda: False)


def slopes(att: Attention, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Along one direction of everything the layer is made of: by derivatives, by differences of two
    steps, (samples, heads) each."""
    given = {key: t for key in PARTS if (t := getattr(att, key)) is not None}
    g = torch.Generator().manual_seed(1)
    direction = {
        key: t.abs().max() * torch.randn(t.shape, generator=g, dtype=t.dtype)
        for key, t in given.items()
    }

    def value(step: float) -> tuple[Tensor, list[Tensor]]:
        leaves = {key: (t + step * direction[key]).requires_grad_() for key, t in given.items()}
        return bounds.get(name)(changed(att, **leaves)), list(leaves.values())

    here, leaves = value(0.0)
    exact = torch.zeros_like(here)
    for s, h in torch.cartesian_prod(torch.arange(att.samples), torch.arange(att.heads)).tolist():
        found = torch.autograd.grad(here[s, h], leaves, retain_graph=True, materialize_grads=True)
        exact[s, h] = sum((a * b).sum() for a, b in zip(found, direction.values(), strict=True))

    def difference(step: float) -> Tensor:
        a, b, c, d = (value(k * step)[0].detach() for k in (1, -1, 2, -2))
        return (8 * (a - b) - (c - d)) / (12 * step)

    return exact.detach(), difference(1e-5), difference(1e-6)


def check_slopes(att: Attention, name: str) -> int:
    """How many heads are at smooth points; there the derivative is right to 1e-4."""
    exact, coarse, fine = slopes(att, name)
    size = bounds.get(name)(att)
    smooth = (coarse - fine).abs() <= 1e-5 * torch.maximum(fine.abs(), 1e-2 * size)
    assert bool(torch.isfinite(exact).all())
    assert bool(
        ((exact - fine).abs() <= 1e-4 * torch.maximum(fine.abs(), 1e-2 * size))[smooth].all()
    ), name
    return int(smooth.sum())


@pytest.mark.each_value
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", OURS)
def test_derivatives_at_smooth_points(kind: str, name: str, tight: None) -> None:
    assert check_slopes(random_attention(kind, 5), name) >= 4


@pytest.mark.each_value(has=[("norm",), ("together", "cap"), ("rotation", "cap", "sinks")])
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(
    "has", [("rotation",), ("norm",), ("together", "cap"), ("sinks",), ("rotation", "cap", "sinks")]
)
def test_derivatives_with_variants(has: tuple[str, ...], name: str, tight: None) -> None:
    assert check_slopes(layer(3, frozenset(has)), name) >= 4


@pytest.mark.parametrize("name", OURS)
def test_derivatives_of_longer_heads(name: str, tight: None) -> None:
    """Where the value stops long before the vector has converged."""
    g = torch.Generator().manual_seed(0)
    x, *w = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in [(1, 40, 12), (2, 12, 4), (2, 12, 4), (2, 12, 4)]
    )
    assert check_slopes(Attention(x, 0.3 * w[0], w[1], w[2]), name) == 2


@pytest.mark.each_value
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("sink", [30.0, 100.0, 800.0, 1e4])
def test_derivatives_of_saturated_sinks_are_numbers(name: str, sink: float) -> None:
    att = layer(7, frozenset({"sinks"}))
    leaves = {key: getattr(att, key).clone().requires_grad_() for key in PARTS}
    value = bounds.get(name)(
        changed(att, sinks=torch.full((3,), sink, dtype=torch.float64), **leaves)
    )
    assert bool(torch.isfinite(value).all())
    assert all(
        bool(torch.isfinite(t).all())
        for t in torch.autograd.grad(value.sum(), leaves.values(), materialize_grads=True)
    )


@pytest.mark.each_value
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("pull", [10.0, 100.0, 1e4])
def test_derivatives_of_heads_with_one_key_are_numbers(name: str, pull: float) -> None:
    att = one_key_for_all(torch.float64, 12, pull)
    leaves = {
        key: getattr(att, key).clone().requires_grad_() for key in ("x", "w_q", "w_k", "w_v", "b_q")
    }
    value = bounds.get(name)(changed(att, **leaves)).sum()
    assert all(
        bool(torch.isfinite(t).all())
        for t in torch.autograd.grad(value, leaves.values(), materialize_grads=True)
    )


def test_derivatives_at_ties_are_along_a_top_pair(tight: None) -> None:
    """Two groups of tokens that do not see each other, alike: the norm is the larger of two equal
    ones."""
    g = torch.Generator().manual_seed(0)
    half, *w = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in [(1, 3, 5), (1, 5, 2), (1, 5, 2), (1, 5, 2)]
    )
    mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(
        torch.kron(torch.eye(2), torch.ones(3, 3)) == 0, -math.inf
    )
    x = torch.cat([half, half], 1).requires_grad_()
    move = torch.randn(x.shape, generator=g, dtype=torch.float64)
    for name in OURS:
        (slope,) = torch.autograd.grad(bounds.get(name)(Attention(x, *w, mask=mask)).sum(), x)

        def of(part: Tensor, step: float, name: str = name) -> float:
            alone = (half + step * part).requires_grad_()
            return float(bounds.get(name)(Attention(alone, *w)).detach())

        single = [(of(part, 1e-6) - of(part, -1e-6)) / 2e-6 for part in move.split(3, 1)]
        along = float((slope * move).sum())
        assert min(single) - 1e-5 <= along <= max(single) + 1e-5


def nearly_nothing(case: str) -> Attention:
    """Layers with ordinary norms, some of whose numbers have squares that underflow."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    if case.startswith("rotary scores"):
        x, w_q, w_k, w_v = (draw(*shape) for shape in [(1, 8, 6), (1, 6, 4), (1, 6, 4), (1, 6, 4)])
        turn = Rotation.of_angles(torch.arange(8)[:, None] * torch.tensor([1.0, 0.1]))
        return Attention(x, w_q * float(case.split()[-1]), w_k, w_v, rotation=turn)
    x, *w = (draw(*shape) for shape in [(1, 3, 4), (1, 4, 4), (1, 4, 4), (1, 4, 4)])
    if case.endswith("mask"):
        steps = (torch.arange(3)[:, None] - torch.arange(3)).abs().double()
        return Attention(x, *w, mask=-400 * steps, cap=5.0 if case == "capped mask" else None)
    if case == "zero key":
        x[0, 0], x[0, 2] = 0, -x[0, 1]
        mask = torch.zeros(3, 3, dtype=torch.float64)
        mask[0, 1:] = -400
        return Attention(x, *w, mask=mask)
    x[0, 0] *= 1e-170
    return Attention(
        x, *w, rotation=Rotation.of_angles(draw(3, 2)) if case == "rotary tiny token" else None
    )


NEARLY = [
    *(f"rotary scores {f}" for f in (30, 100, 200, 300, 600)),
    "capped mask",
    "plain mask",
    "zero key",
    "tiny token",
    "rotary tiny token",
]


@pytest.mark.parametrize("case", NEARLY)
def test_what_nearly_vanishes_leaves_bounds_finite(case: str) -> None:
    att = nearly_nothing(case)
    exact = float(spectral_norm(att, method="dense").lower)
    for recorded in (False, True):
        x = att.x.clone().requires_grad_(recorded)
        for name in ("lipbound", "lipbound_block"):
            assert exact <= float(bounds.get(name)(att.with_parts(x=x))) <= 2 * exact


@pytest.mark.parametrize("has", [(), ("rotation",)])
def test_autocast_changes_nothing(has: tuple[str, ...]) -> None:
    plainly = bounds.evaluate(layer(3, frozenset(has)), ["lipbound", "lipbound_block"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = bounds.evaluate(layer(3, frozenset(has)), ["lipbound", "lipbound_block"])
    for name, value in plainly.items():
        torch.testing.assert_close(under[name], value, rtol=2e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [40, 640, 2000])
def test_one_token_and_a_sink_with_wide_values(width: int, dtype: torch.dtype) -> None:
    """J = p (1 + (1 - p) c) w for the logit c: known without a decomposition, and our bound is it
    but for rounding."""
    w = torch.full((width,), 2.0**-13.51, dtype=torch.float64)
    w[:7] = 7**-0.5
    w, one = w.to(dtype), torch.ones(1, 1, 1, dtype=dtype)
    for logit in (0.5, 1.0, 3.0):
        att = Attention(
            one,
            one * 0,
            one,
            w.view(1, 1, -1),
            b_q=one[0] * logit,
            scale=1.0,
            sinks=torch.tensor([logit], dtype=dtype),
        )
        exact = 0.5 * math.fsum(float(t) ** 2 for t in w) ** 0.5 * (1 + 0.5 * logit)
        found = bounds.evaluate(att, ["lipbound", "lipbound_block"])
        for value in found.values():
            assert exact <= float(value) <= exact * (1 + 5e-5)

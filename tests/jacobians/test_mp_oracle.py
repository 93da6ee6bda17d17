"""The oracle of 80 digits against float64 decompositions of autograd Jacobians, and against itself
in more digits."""

import itertools
import math
from decimal import Decimal

import mpmath
import numpy as np
import pytest
import torch
from support import hard_heads, judge, mp_oracle
from support.layers import changed
from support.oracles import dense_norms, oracle
from support.variants import MASKS, VARIANTS, layer

from lipbound.attention.layer import Attention
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation

COMBINATIONS = [
    frozenset(has)
    for size in range(5)
    for has in itertools.combinations(VARIANTS, size)
    if not {"norm", "together"} <= set(has)
    and not {"values", "latent"} <= set(has)
    and (size < 4 or not {"values", "latent", "gate"} & set(has))
]


def agree(att: Attention, exact: torch.Tensor, map: str = "head") -> None:
    for row, values in zip(mp_oracle.norms(att, map), exact.view(att.samples, -1), strict=True):
        assert [norm.value for norm in row] == pytest.approx(values.tolist(), rel=1e-12)
        assert all(norm.width < 2e-14 for norm in row)


def test_plain_heads_and_l2_attention(att: Attention) -> None:
    att = att.select(slice(1, 2))  # of "padded" the sample that is
    agree(att, oracle(att))
    agree(att, dense_norms(att, "l2"), "l2")


FEW = [has for has in COMBINATIONS if len(has) < 3]
SOME = tuple(hard_heads.FAMILIES)[::2]


@pytest.mark.each_value(has=FEW)
@pytest.mark.parametrize("has", COMBINATIONS, ids=lambda has: "-".join(sorted(has)) or "plain")
def test_variants(has: frozenset[str]) -> None:
    seed = COMBINATIONS.index(has)
    att = layer(seed, has, mask=MASKS[seed % len(MASKS)], samples=1, heads=2, n=4)
    agree(att, oracle(att))


def test_normalisation_without_eps() -> None:
    att = layer(3, frozenset({"norm"}), samples=1, heads=2, n=4)
    att = changed(att, norm_q=QKNorm(att.norm_q.gain, att.norm_q.bias, 0.0), norm_k=None)
    agree(att, oracle(att))


@pytest.mark.parametrize("map", ["head_out", "heads", "layer"])
def test_maps_with_output_projection(map: str) -> None:
    att = layer(2, frozenset({"rotation", "sinks"}), mask="padded", samples=2, heads=2, n=4)
    agree(att, oracle(att, map), map)


def test_equal_singular_values_are_enclosed() -> None:
    """Uniform attention to all tokens alike, repeated values: the closed form |W_V|."""
    eye = torch.eye(3, dtype=torch.float64)[None]
    norm = mp_oracle.norm(Attention(torch.zeros(1, 4, 3, dtype=torch.float64), eye, eye, 3 * eye))
    assert norm.lower <= 3 <= norm.upper
    assert norm.width < 2e-14


def test_numbers_beyond_float64() -> None:
    """A sink takes all but e^-800 of the probability."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    norm = mp_oracle.norm(Attention(0 * one, one, one, one, sinks=torch.tensor([800.0]).double()))
    with mp_oracle.exactly(600):
        expected = 1 / (1 + Decimal(800).exp())
        assert norm.lower <= expected <= norm.upper
        assert norm.upper / norm.lower - 1 < Decimal("1e-20")
    assert norm.value == 0.0


@pytest.mark.each_value(family=SOME)
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_errors_are_upper_values(family: str) -> None:
    """Each entry in 80 digits is as near that in 160 as is said; hard heads lose digits where
    others do not."""
    att = hard_heads.FAMILIES[family](torch.Generator().manual_seed(1), torch.float64)
    with mp_oracle.exactly(80):
        rough = mp_oracle.differentiated(att, 0, 0, "head")
    with mp_oracle.exactly(160):
        fine = mp_oracle.differentiated(att, 0, 0, "head")
        assert max(abs(rough.jacobian - fine.jacobian).flat) <= rough.error
        assert fine.error < rough.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_are_known_to_many_digits(dtype: torch.dtype) -> None:
    """Of every family, whatever its size: no comparison hangs on the oracle's own width."""
    for make in hard_heads.FAMILIES.values():
        norm = mp_oracle.norm(make(torch.Generator().manual_seed(2), dtype))
        assert norm.lower <= norm.upper
        assert norm.width < 2e-14 or norm.upper < Decimal("1e-330")
        assert not math.isnan(norm.value)


exp, tanh, root, number = (
    np.frompyfunc(f, 1, 1) for f in (mpmath.exp, mpmath.tanh, mpmath.sqrt, mpmath.mpf)
)


def numbers(t: torch.Tensor) -> np.ndarray:
    return number(t.double().numpy())


def linear(x: np.ndarray, w: torch.Tensor, b: torch.Tensor | None) -> np.ndarray:
    return x @ numbers(w) + (0 if b is None else numbers(b))


def normed(x: np.ndarray, y: np.ndarray, norm: QKNorm | None, head: int) -> np.ndarray:
    if norm is None:
        return y
    whole = y if norm.over is None else linear(x, *norm.over)
    size = root((whole**2).mean(1, keepdims=True) + mpmath.mpf(norm.eps))
    part = np.array(True) if norm.part is None else norm.part.numpy()
    bias = 0 if norm.bias is None else numbers(norm.bias[head])
    return numbers(norm.gain[head]) * y / np.where(part, size, 1) + bias


def turned(y: np.ndarray, turn: Rotation) -> np.ndarray:
    cos, sin, r = numbers(turn.cos), numbers(turn.sin), turn.cos.shape[1]
    a, b = y[:, :r], y[:, r : 2 * r]
    return np.concatenate([cos * a - sin * b, sin * a + cos * b, y[:, 2 * r :]], 1)


def forward(att: Attention, head: int, x: np.ndarray) -> np.ndarray:
    """The outputs of one head at other tokens than those of the first sample, which has no padding;
    written for numbers of any precision."""

    def own(w: torch.Tensor, b: torch.Tensor | None) -> np.ndarray:
        return linear(x, w[head], None if b is None else b[head])

    weights = ((att.w_q, att.b_q), (att.w_k, att.b_k), (att.w_v, att.b_v))
    norms = att.norm_q, att.norm_k, att.norm_v
    q, k, v = (normed(x, own(*w), norm, head) for w, norm in zip(weights, norms, strict=True))
    if att.rotation is not None:
        q, k = turned(q, att.rotation), turned(k, att.rotation)
    if (other := att.other_stream) is not None:
        assert other.valid is None or bool(other.valid[0].all()), "the layer is unpadded"
        held = (None if t is None else numbers(t[head, 0]) for t in (other.q, other.k, other.v))
        q, k, v = (y if t is None else t for y, t in zip((q, k, v), held, strict=True))
    scores = mpmath.mpf(att.scale) * (q @ k.T)
    if att.cap is not None:
        scores = att.cap * tanh(scores / att.cap)
    if att.mask is not None:
        every = att.mask.expand(att.samples, att.heads, len(q), len(k))
        scores = scores + numbers(every[0, head])
    top = scores.max(1, keepdims=True)
    weights = exp(scores - top)
    sink = mpmath.mpf("-inf" if att.sinks is None else float(att.sinks[head]))
    out = weights @ v / (weights.sum(1, keepdims=True) + exp(sink - top))
    return out if att.gate is None else out / (1 + exp(-own(att.gate.w, att.gate.b)))


@pytest.mark.each_value(family=SOME)
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_a_step_of_1e_minus_60(family: str) -> None:
    """Differences of outputs in 400 digits along a random direction, on heads where float64 cannot
    tell."""
    g = torch.Generator().manual_seed(3)
    att = hard_heads.FAMILIES[family](g, torch.float64).unpadded(0)
    size = float(att.x.abs().max()) or 1.0
    direction = torch.randint(-8, 9, att.x[0].shape, generator=g) * 1.0
    with mpmath.workdps(400):
        step = mpmath.mpf(size) * mpmath.mpf(10) ** -60
        x, along = numbers(att.x[0]), step * numbers(direction)
        expected = (forward(att, 0, x + along) - forward(att, 0, x - along)) / (2 * step)
        with mp_oracle.exactly(80):
            found = mp_oracle.differentiated(att, 0, 0, "head")
            product = np.tensordot(found.jacobian, mp_oracle.exact(direction), ([2, 3], [0, 1]))
        largest, error = mpmath.mpf(str(mp_oracle.norm(att).upper)), mpmath.mpf(str(found.error))
        away = abs(number(product.astype(str)) - expected)
        assert bool((away <= largest * mpmath.mpf("1e-30") + 1e3 * error).all())


def test_one_unit_in_the_last_place_is_a_miss() -> None:
    """One token, values times 3: the norm is 3."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    norm = mp_oracle.norm(Attention(one, one, one, 3 * one))
    assert judge.above(3.0, norm) == judge.below(3.0, norm) == 0
    assert 0 < judge.above(math.nextafter(3.0, 4.0), norm) < 1e-15
    assert 0 < judge.below(math.nextafter(3.0, 2.0), norm) < 1e-15
    worst = judge.above(math.nan, norm), judge.below(math.nan, norm), judge.below(0.0, norm)
    assert worst == (math.inf,) * 3
    assert judge.below(math.inf, norm) == judge.above(0.0, norm) == 0


def test_a_variant_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp_oracle, "KNOWN", mp_oracle.KNOWN - {"cap"})
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="does not know"):
        mp_oracle.norm(Attention(one, one, one, one, cap=1.0))

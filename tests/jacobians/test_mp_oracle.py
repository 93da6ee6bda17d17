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
from support.oracles import dense_norms, jacobians, oracle
from support.variants import MASKS, VARIANTS, layer

from lipbound.attention.layer import Attention
from lipbound.attention.variants.qk_norm import QKNorm

COMBINATIONS = [
    frozenset(has)
    for size in range(5)
    for has in itertools.combinations(VARIANTS, size)
    if not {"norm", "together"} <= set(has)
    and not {"values", "latent"} <= set(has)
    and (size < 4 or not {"values", "latent", "gate"} & set(has))
]


def agree(att: Attention, exact: torch.Tensor, map: str = "head", within: float = 1e-12) -> None:
    for row, expected in zip(mp_oracle.norms(att, map), exact.tolist(), strict=True):
        for norm, value in zip(
            row, expected if isinstance(expected, list) else [expected], strict=True
        ):
            assert norm.value == pytest.approx(value, rel=within)
            assert norm.width < 2e-14


def test_plain_heads(att: Attention) -> None:
    att = att.select(slice(1, 2))  # of "padded" the sample that is
    agree(att, oracle(att))


@pytest.mark.parametrize("has", COMBINATIONS, ids=lambda has: "-".join(sorted(has)) or "plain")
def test_variants(has: frozenset[str]) -> None:
    seed = COMBINATIONS.index(has)
    att = layer(seed, has, mask=MASKS[seed % len(MASKS)], samples=1, heads=2, n=4)
    agree(att, oracle(att))


def test_normalisation_without_eps() -> None:
    att = layer(3, frozenset({"norm"}), samples=1, heads=2, n=4)
    assert att.norm_q is not None
    att = changed(att, norm_q=QKNorm(att.norm_q.gain, att.norm_q.bias, 0.0), norm_k=None)
    agree(att, oracle(att))


def test_l2_attention(att: Attention) -> None:
    att = att.select(slice(1, 2))
    agree(att, dense_norms(att, "l2"), "l2")


@pytest.mark.parametrize("map", ["head_out", "heads", "layer"])
def test_maps_with_output_projection(map: str) -> None:
    att = layer(2, frozenset({"rotation", "sinks"}), mask="padded", samples=2, heads=2, n=4)
    assert att.w_o is not None
    expected = []
    for s in range(att.samples):
        j = jacobians(att, s)  # (n, heads, d_v, n D)
        projected = torch.einsum("nhvx,hvo->hnox", j, att.w_o)
        rows = {
            "head_out": projected.flatten(1, 2),
            "heads": j.flatten(0, 2)[None],
            "layer": projected.sum(0).flatten(0, 1)[None],
        }[map]
        expected.append(torch.linalg.svdvals(rows)[:, 0])
    agree(att, torch.stack(expected), map)


def test_equal_singular_values_are_enclosed() -> None:
    """Uniform attention to all tokens alike, repeated values: the closed form |W_V|."""
    eye = torch.eye(3, dtype=torch.float64)[None]
    norm = mp_oracle.norm(Attention(torch.zeros(1, 4, 3, dtype=torch.float64), eye, eye, 3 * eye))
    assert norm.lower <= 3 <= norm.upper
    assert norm.width < 2e-14


def test_numbers_beyond_float64() -> None:
    """A sink takes all but e^-800 of the probability."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    norm = mp_oracle.norm(
        Attention(0 * one, one, one, one, sinks=torch.tensor([800.0], dtype=torch.float64))
    )
    with mp_oracle.exactly(600):
        expected = 1 / (1 + Decimal(800).exp())
        assert norm.lower <= expected <= norm.upper
        assert norm.upper / norm.lower - 1 < Decimal("1e-20")
    assert norm.value == 0.0


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


def forward(
    att: Attention, sample: int, head: int, rows: list[list[mpmath.mpf]]
) -> list[mpmath.mpf]:
    """The outputs of one head, one after the other, at other tokens than the sample's; written for
    numbers of any precision."""
    n = len(rows)

    def numbers(t: torch.Tensor) -> mpmath.matrix:
        return mpmath.matrix(t.double().tolist())

    def linear(w: torch.Tensor, b: torch.Tensor | None) -> list[list[mpmath.mpf]]:
        y = mpmath.matrix(rows) * numbers(w)
        return [
            [y[i, k] + (0 if b is None else mpmath.mpf(float(b[k]))) for k in range(y.cols)]
            for i in range(n)
        ]

    def enter(
        w: torch.Tensor, b: torch.Tensor | None, norm: QKNorm | None
    ) -> list[list[mpmath.mpf]]:
        y = linear(w[head], None if b is None else b[head])
        if norm is not None:
            whole = y if norm.over is None else linear(*norm.over)
            part = [True] * len(y[0]) if norm.part is None else norm.part.tolist()
            sizes = [
                mpmath.sqrt(sum(e**2 for e in t) / len(t) + mpmath.mpf(norm.eps)) for t in whole
            ]
            gain, bias = (
                norm.gain[head].tolist(),
                [0.0] * len(y[0]) if norm.bias is None else norm.bias[head].tolist(),
            )
            y = [
                [
                    mpmath.mpf(g) * e / (size if one else 1) + mpmath.mpf(b)
                    for e, g, b, one in zip(row, gain, bias, part, strict=True)
                ]
                for row, size in zip(y, sizes, strict=True)
            ]
        for i, row in enumerate(y if att.rotation is not None and w is not att.w_v else []):
            assert att.rotation is not None
            r = att.rotation.cos.shape[1]
            for a in range(r):
                angle = mpmath.mpc(float(att.rotation.cos[i, a]), float(att.rotation.sin[i, a]))
                turned = mpmath.mpc(row[a], row[a + r]) * angle
                row[a], row[a + r] = turned.real, turned.imag
        return y

    q, k, v = (
        enter(att.w_q, att.b_q, att.norm_q),
        enter(att.w_k, att.b_k, att.norm_k),
        enter(att.w_v, att.b_v, att.norm_v),
    )
    other = att.other_stream
    if other is not None:
        real = 0 if other.valid is None else int((~other.valid[sample]).sum())
        assert not real, "the layer is unpadded"
        q, k, v = (
            own if given is None else numbers(given[head, sample]).tolist()
            for own, given in ((q, other.q), (k, other.k), (v, other.v))
        )
    mask = (
        None
        if att.mask is None
        else att.mask.expand(att.samples, att.heads, len(q), len(k))[sample, head].tolist()
    )
    outputs = []
    gate = att.gate
    logits = (
        None if gate is None else linear(gate.w[head], None if gate.b is None else gate.b[head])
    )
    for i in range(len(q)):
        scores = [mpmath.mpf(att.scale) * mpmath.fdot(q[i], k[j]) for j in range(len(k))]
        scores = (
            scores
            if att.cap is None
            else [att.cap * mpmath.tanh(score / att.cap) for score in scores]
        )
        scores = (
            scores
            if mask is None
            else [score + mpmath.mpf(added) for score, added in zip(scores, mask[i], strict=True)]
        )
        top = max(scores)
        weights = [mpmath.exp(score - top) for score in scores]
        total = sum(weights) + (
            0 if att.sinks is None else mpmath.exp(mpmath.mpf(float(att.sinks[head])) - top)
        )
        out = [mpmath.fdot(weights, [row[e] for row in v]) / total for e in range(att.d_v)]
        if logits is not None:
            out = [o / (1 + mpmath.exp(-y)) for o, y in zip(out, logits[i], strict=True)]
        outputs += out
    return outputs


@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_a_step_of_1e_minus_60(family: str) -> None:
    """Differences of outputs in 400 digits along a random direction, on heads where float64 cannot
    tell."""
    g = torch.Generator().manual_seed(3)
    att = hard_heads.FAMILIES[family](g, torch.float64).unpadded(0)
    size = float(att.x.abs().max()) or 1.0
    direction = (torch.randint(-8, 9, att.x[0].shape, generator=g) * 1.0).tolist()
    with mpmath.workdps(400):
        step = mpmath.mpf(size) * mpmath.mpf(10) ** -60
        ends = []
        for sign in (1, -1):
            x = [
                [mpmath.mpf(e) + sign * step * d for e, d in zip(row, along, strict=True)]
                for row, along in zip(att.x[0].tolist(), direction, strict=True)
            ]
            ends.append(forward(att, 0, 0, x))
        expected = [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]
        with mp_oracle.exactly(80):
            found = mp_oracle.differentiated(att, 0, 0, "head")
            product = np.tensordot(
                found.jacobian, mp_oracle.exact(torch.tensor(direction)), ([2, 3], [0, 1])
            ).flatten()
        largest, error = mpmath.mpf(str(mp_oracle.norm(att).upper)), mpmath.mpf(str(found.error))
        for value, e in zip(product, expected, strict=True):
            assert abs(mpmath.mpf(str(value)) - e) <= largest * mpmath.mpf("1e-30") + 1e3 * error


def test_one_unit_in_the_last_place_is_a_miss() -> None:
    """One token, values times 3: the norm is 3."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    norm = mp_oracle.norm(Attention(one, one, one, 3 * one))
    assert judge.above(3.0, norm) == judge.below(3.0, norm) == 0
    assert 0 < judge.above(math.nextafter(3.0, 4.0), norm) < 1e-15
    assert 0 < judge.below(math.nextafter(3.0, 2.0), norm) < 1e-15
    assert (
        judge.above(math.nan, norm)
        == judge.below(math.nan, norm)
        == judge.below(0.0, norm)
        == math.inf
    )
    assert judge.below(math.inf, norm) == judge.above(0.0, norm) == 0


def test_a_variant_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp_oracle, "KNOWN", mp_oracle.KNOWN - {"cap"})
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="does not know"):
        mp_oracle.norm(Attention(one, one, one, one, cap=1.0))

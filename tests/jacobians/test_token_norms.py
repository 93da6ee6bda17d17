"""Norms that tell tokens apart, against dense Jacobians of the definition, ascent from many starts,
a convex solver, and 80 digits."""

import itertools
import math
from decimal import Decimal

import pytest
import torch
from hypothesis import given
from support import hard_heads, judge, mp_oracle, token_oracle
from support.checks import close, normal
from support.layers import places
from support.mp_oracle import Differentiated
from support.strategies import HEADS, examples, layers, part
from support.variants import LINEAR, MASKS, layer

import lipbound as lb
from lipbound.jacobians.rounding import tensor_error
from lipbound.jacobians.token_norms import token_norm as module
from lipbound.jacobians.token_norms.token_norm import BLOCK_NORMS as NORMS
from lipbound.jacobians.token_norms.token_norm import token_norm, token_profile

MAPS = ("head", "head_out", "heads", "layer")
ROUNDING = 1e-11
"""Of dense float64 Jacobians and their norms, relatively."""


def truths(blocks):
    """Of dense blocks (i, j, r, D); what every token does to the worst output is not among them."""
    column, single = token_oracle.one(blocks)
    return {
        "one-token": float(column),
        "token-pair": float(single),
        "output-token": float(token_oracle.rows(blocks).amax()),
    }


def each(att, map):
    """Place and dense blocks of every head, or of the whole layer, at every sample."""
    for s in range(att.samples):
        for h, blocks in enumerate(token_oracle.blocks(att, s, map)):
            yield (s,) if map in ("heads", "layer") else (s, h), blocks


def check(att, map, heads=None, *, starts=8, samples=2):
    """All norms of a layer against the oracles."""
    found = {name: token_norm(att, name, map=map) for name in NORMS}
    error = tensor_error(att)
    for at, blocks in each(att, map):
        if at[0] >= samples:
            break
        if heads is not None and at[1] not in heads:
            continue
        # rounding of the oracle's own tensors is of the size of the program's
        loose = 2 * float(error[at].sum()) * blocks.shape[1]
        if att.w_o is not None and map not in ("head", "heads"):
            loose *= float(torch.linalg.matrix_norm(att.w_o.double()).sum())
        if not math.isfinite(loose):
            continue
        known = {name: (truth, truth) for name, truth in truths(blocks).items()}
        below = float(token_oracle.every_from_below(blocks, starts))
        known["every-token"] = below, float(token_oracle.every_from_above(blocks))
        for name, (below, above) in known.items():
            lower, upper = float(found[name].lower[at]), float(found[name].upper[at])
            most = above * (1 + 1e-3 + 1e-6) + 3 * loose + 1e-90
            assert below * (1 - ROUNDING) - loose <= upper <= most, (name, at)
            assert below * (1 - 1e-3) - 3 * loose <= lower + 1e-90, (name, at)
            assert lower <= above * (1 + ROUNDING) + loose + 1e-90, (name, at)


@examples(10)
@given(layers())
def test_dense_jacobians_of_small_layers(att):
    check(att, "head", range(0, HEADS, 3), starts=10)


SETS = [
    (),
    *((name,) for name in (*LINEAR, "values", "latent")),
    ("rotation", "norm", "cap"),
    ("rotation", "together", "sinks"),
]
EACH = itertools.product(enumerate(SETS), enumerate(MAPS))
PAIRED = [(has, map, MASKS[(i + j) % len(MASKS)]) for (i, has), (j, map) in EACH]
"""Every set of variants with every map, and every map with every mask."""


@pytest.mark.each_value
@pytest.mark.parametrize(("has", "map", "mask"), PAIRED)
def test_variants_masks_and_maps(has, map, mask):
    seed, has = MASKS.index(mask), frozenset(has)
    att = layer(seed, has, mask=mask, d_v=2 + seed % 3, biases=seed % 2 == 0)
    check(att, map, samples=1 + (mask == "padded"))


@pytest.mark.each_value
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize(("n", "d", "d_v"), [(1, 3, 2), (2, 1, 1), (7, 2, 6), (6, 6, 9)])
def test_shapes(n, d, d_v, map):
    check(layer(n, frozenset(), n=n, d=d, d_v=d_v), map)


def random_head(seed, head):
    """One of sixteen heads of seven tokens and four values."""
    draw, shapes = normal(seed), [(1, 7, 6), (16, 6, 2), (16, 6, 2), (16, 6, 4)]
    return lb.Attention(*(draw(*s) for s in shapes)).select(heads=slice(head, head + 1))


@pytest.mark.parametrize(("seed", "head"), [(8, 3), (20, 11)])
def test_what_weights_leave_open_is_told(seed, head):
    """Heads on which a matrix does better than every vector by 3 and 5 %: both ends hold, and how
    far they are apart is said."""
    att = random_head(seed, head)
    blocks = token_oracle.blocks(att, 0, "head")[0]
    norm, below = token_norm(att), float(token_oracle.every_from_below(blocks, 200))
    above = float(token_oracle.every_from_above(blocks))
    assert above > below * 1.02
    assert not bool(norm.converged.any())
    assert float(norm.error) == pytest.approx(float(norm.upper / norm.lower) - 1, rel=1e-9)
    assert below * (1 - 1e-6) <= float(norm.lower) <= below * (1 + 1e-9)
    assert below * (1 - 1e-9) <= float(norm.upper) <= above * (1 + 1e-3)
    assert bool(token_norm(att, tol=0.06).converged.all())


OTHERS = ("gates", "modern", "memory", "asking")
FAMILIES = [one for one in hard_heads.FAMILIES if one not in OTHERS]
"""Those whose heads have token norms."""


@pytest.mark.each_value(family=tuple(FAMILIES)[::3])
@pytest.mark.parametrize(
    ("family", "dtype"),
    list(zip(FAMILIES, itertools.cycle([torch.float32, torch.float64]), strict=False)),
)
def test_hard_heads_to_eighty_digits(family, dtype):
    """Nothing is allowed for rounding but that of the comparison."""
    att = judge.case(family, dtype, 7).select(slice(0, 2))
    found = {name: token_norm(att, name, vectors=True) for name in NORMS}
    for at in places(att):
        exact, _ = mp_oracle.resolved(att, *at)
        ends = {name: (n.lower[at].item(), n.upper[at].item()) for name, n in found.items()}
        check_digits(exact, ends)
        largest = max(*map(abs, exact.jacobian.flat), Decimal("1e-600"))
        unit = Decimal(1).scaleb(largest.adjusted())
        j = torch.tensor((exact.jacobian / unit).astype(float)).permute(0, 2, 1, 3)
        real = slice(None) if att.valid is None else att.valid[at[0]]
        pulled = torch.einsum("ijvx,iv->jx", j, found["every-token"].left[at].double()[real])
        reached = Decimal(float(torch.linalg.vector_norm(pulled, dim=-1).sum())) * unit
        lower, upper = map(Decimal, ends["every-token"])
        # the vector that is returned has the dtype of the layer
        assert lower <= reached * (1 + Decimal("1e-12" if dtype == torch.float64 else "1e-3"))
        below = Decimal(float(token_oracle.every_from_below(j, 5))) * unit
        assert below * (1 - Decimal("1e-13")) <= upper


def check_digits(exact, ends):
    """Columns, rows and blocks of a Jacobian (tokens, d_v, tokens, D) in 80 digits, against what
    was found of them."""
    j, n, d_v = exact.jacobian, len(exact.jacobian), exact.jacobian.shape[1]

    def norm(part):
        matrix = part.reshape(len(part) * d_v, -1)
        return mp_oracle.enclosed(Differentiated(matrix[None, :, None], exact.error))

    with mp_oracle.exactly(80):
        found = {
            "one-token": [norm(j[:, :, k]) for k in range(n)],
            "output-token": [norm(j[i : i + 1]) for i in range(n)],
            "token-pair": [norm(j[i : i + 1, :, k]) for i in range(n) for k in range(n)],
        }
    for name, several in found.items():
        assert ends[name][0] <= max(one.upper for one in several), name
        assert ends[name][1] >= max(one.lower for one in several), name


@examples(20)
@given(layers())
def test_norms_compare_as_they_must(att):
    """Each with each, and with the largest of a profile: the lower end of what is smaller is not
    above the upper end of what is larger."""
    att = att.select(heads=slice(0, part(HEADS, 3)))
    e, a, w, r = (token_norm(att, name) for name in NORMS)
    profile = token_profile(att)
    for norm, lower, upper in (
        (a, profile.lower, profile.upper),
        (r, profile.output_lower, profile.output_upper),
    ):
        assert bool((lower.amax(-1) <= norm.upper).all() and (norm.lower <= upper.amax(-1)).all())
    full = lb.spectral_norm(att, delta=1e-9)
    root = att.lengths.sqrt()[:, None] * (1 + 1e-12)
    pairs = [(w, r, 1), (r, e, 1), (e, r, root), (w, a, 1), (a, full, 1), (full, a, root)]
    pairs += [(r, full, 1), (full, r, root), (a, w, root), (e, w, root**2)]
    for number, (small, large, factor) in enumerate(pairs):
        assert bool((small.lower <= large.upper * factor).all()), number


@pytest.mark.each_value
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("name", NORMS)
def test_vectors_attain_what_they_are_said_to(name, map):
    att = layer(3, frozenset({"rotation"}), mask="padded")
    norm = token_norm(att, name, map=map, vectors=True)
    for at, blocks in each(att, map):
        real = torch.arange(att.tokens) < len(blocks)
        x, y = norm.right[at], norm.left[at]
        assert not x[~real].any()
        assert not y[~real].any()
        lengths = torch.linalg.vector_norm(x, dim=-1)
        whole = torch.linalg.vector_norm(lengths)
        sizes = {"every-token": lengths.amax(), "output-token": whole}
        assert float(sizes.get(name, lengths.sum())) == pytest.approx(1, abs=1e-12)
        image = torch.einsum("ijrx,jx->ir", blocks, x[real])
        moved = torch.linalg.vector_norm(image, dim=-1)
        reached = moved.amax() if name != "one-token" else torch.linalg.vector_norm(moved)
        assert float(reached) == pytest.approx(float(norm.lower[at]), rel=1e-8)
        assert float((image * y[real]).sum()) == pytest.approx(float(reached), rel=1e-10)
        assert float(torch.linalg.vector_norm(y)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("has", [(), ("rotation", "together", "sinks")], ids="+".join)
def test_profiles_of_dense_jacobians(has, map):
    att = layer(2, frozenset(has), mask="padded")
    profile = token_profile(att, map=map)
    for at, blocks in each(att, map):
        n, columns = len(blocks), blocks.transpose(0, 1).flatten(1, 2)
        for lower, upper, truth in (
            (profile.lower, profile.upper, torch.linalg.matrix_norm(columns, 2)),
            (profile.output_lower, profile.output_upper, token_oracle.rows(blocks)),
        ):
            assert bool((lower[at][:n] <= truth * (1 + ROUNDING)).all())
            assert bool((upper[at][:n] >= truth * (1 - ROUNDING)).all())
            close(lower[at][:n], upper[at][:n], 1e-7)
            assert not lower[at][n:].any()
            assert not upper[at][n:].any()


@pytest.mark.each_value
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("map", ["head", "layer"])
def test_chunks_change_nothing_but_rounding(name, map, monkeypatch):
    att = layer(5, frozenset({"rotation"}), n=6, heads=2, mask="causal")
    whole = token_norm(att, name, map=map)
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 1)
    monkeypatch.setitem(module.MATRIX_BYTES, "cpu", 1)
    parts = token_norm(att, name, map=map)
    assert whole.lower.shape == parts.lower.shape
    assert bool((whole.lower <= parts.upper).all() and (parts.lower <= whole.upper).all())
    assert bool(parts.converged.all())
    close(whole.lower, parts.lower, 1e-3)


def test_the_same_twice_and_in_float32():
    att = layer(1, frozenset())
    first, second = token_norm(att), token_norm(att)
    assert torch.equal(first.lower, second.lower)
    assert torch.equal(first.upper, second.upper)
    single = att.to(torch.float32)
    assert torch.equal(token_norm(single).lower, token_norm(single.double()).lower)


def test_zero_jacobians_have_zero_norms():
    draw = normal()
    att = lb.Attention(draw(1, 4, 5), draw(2, 5, 3), draw(2, 5, 3), 0 * draw(2, 5, 2))
    for name in NORMS:
        norm = token_norm(att, name)
        assert not norm.lower.any()
        assert not norm.upper.any()
        assert bool(norm.converged.all())

"""What our bounds make of every row of P, of plain heads and of heads with variants: never below
norms of the matrices themselves, and hardly above."""

import pytest
import torch
from support.checks import close, refused
from support.variants import MASKS, layer
from torch.autograd.functional import jacobian

import lipbound as lb
from lipbound.bounds.ours import block_norms, pairwise, pairwise_variants, token_block_norms
from lipbound.bounds.ours.block_norms import BlockNorms
from lipbound.bounds.ours.token_block_norms import VariantHead
from lipbound.devices import finished
from lipbound.jacobians.token_tangents import Tangents

LEAST = 1 - 1e-13
OURS = ["lipbound", "lipbound_block"]
HAS = ["rotation", "norm", "together cap", "sinks", "rotation norm", "rotation cap sinks"]


def between(found, true, above, of_largest, lost=0.0):
    """Not below the truth (by more than ``lost`` of the largest), nor above it by more than a share
    of it and of the largest."""
    largest = true.amax()
    low = found >= true * LEAST - lost * largest
    return bool((low & (found <= true * (1 + above) + of_largest * largest)).all())


@pytest.mark.parametrize("at_once", [1, 3, 9])
@pytest.mark.parametrize("mask", MASKS)
def test_norms_are_those_of_the_matrices(mask, at_once, monkeypatch):
    for name in ("ROW_BYTES", "SUM_BYTES"):
        monkeypatch.setattr(block_norms, name, 8 * 3 * 3 * 4 * at_once)
    att = layer(1, "", mask=mask, n=9, samples=1).unpadded(0)
    with torch.no_grad():
        found = BlockNorms(att, gram=True)
    p, k, v, q = (t[0] for t in (att.p, att.centred_k, att.centred_v, att.scale * att.q))
    a = p[..., None] * (v[:, None] - (p @ v)[:, :, None])  # (heads, i, j, d_v)
    steep = att.scale * torch.einsum("hija,hjc,hdc->hiad", a, k, att.w_q)  # B_i, (heads, i, d_v, D)
    through = torch.einsum("hkc,hdc->hkd", q, att.w_k)  # q~_k
    seen = torch.einsum("hiad,hkd->hika", steep, through).norm(dim=-1)
    # norms of blocks are rounded upwards
    assert between(found.a, torch.linalg.matrix_norm(a, 2), 2e-2, 1e-4)
    assert between(found.b, torch.linalg.matrix_norm(steep, 2), 2e-2, 1e-4)
    assert between(found.b_v, torch.linalg.matrix_norm(steep @ att.w_v[:, None], 2), 2e-2, 1e-4)
    real = p.mT > 0
    assert between(torch.where(real, found.b_q, 0.0), torch.where(real, seen, 0.0), 1e-3, 1e-4)
    assert mask != "causal" or at_once == 9 or bool((found.b_q[:, 4, :3] == 0).all())


@pytest.mark.parametrize("mask", MASKS)
def test_samples_together_are_samples_one_by_one(mask):
    """As other devices than the CPU take them."""
    att = layer(2, "", mask=mask, n=9, samples=3)
    with torch.no_grad():
        ((whole, *_),) = block_norms.samples_of(att, 3)
        together = finished(pairwise._lipbound(whole, slice(None))).view(3, -1, 2)
        for found, (one, *_) in zip(together, block_norms.samples_of(att), strict=True):
            close(found, finished(pairwise._lipbound(one, slice(None))), 1e-6)
        sizes = block_norms.sharp_block_norms(whole, slice(1, 3)).unflatten(0, (3, 2))
        for each, (one, *_) in zip(sizes, block_norms.samples_of(att), strict=True):
            close(each, block_norms.sharp_block_norms(one, slice(1, 3)), 1e-6, 1e-9)


def test_values_wider_than_queries():
    """Images of queries are lengths of d_v numbers, whatever d is."""
    one, x = torch.ones(1, 1, 1).double(), torch.tensor([[[0.5], [1.0]]]).double()
    w_v = torch.full((1, 1, 500), 2.0**-27.51, dtype=torch.float64)
    w_v[..., :7] = 7**-0.5
    att = lb.Attention(x, one, one, w_v, scale=1.0)
    p, v, k = att.p[0, 0], att.centred_v[0, 0], att.centred_k[0, 0]
    cov = torch.einsum("ij,ijv,ja->iva", p, v - (p @ v)[:, None], k)
    with torch.no_grad():
        found = BlockNorms(att, gram=True).b_q[0]
    assert between(found, torch.einsum("iva,ka->ikv", cov, att.q[0, 0]).norm(dim=-1), 1e-3, 0.0)


@pytest.mark.parametrize("exponent", [-10, -60, -70, -80, -200])
def test_rows_that_leave_next_to_nothing(exponent):
    """Squares of their probabilities are tiny, and the key that has the rest has the value
    zero."""
    small = 2.0**exponent
    p = torch.tensor([[[1 - 2 * small, small, small]]], dtype=torch.float64)
    v = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    with torch.no_grad():
        found = block_norms.spread(p * p, v, p @ v)
    true = float(torch.linalg.matrix_norm(p[0, 0][:, None] * (v[0] - p[0] @ v[0]), 2))
    assert true <= float(found) <= true * (1 + 2e-2) + 1e-18


# -- heads with variants ---------------------------------------------------------------------------


def slopes_of(att, side):
    """Derivatives of the first head's queries or keys by their own tokens, (n, d, D), of one
    sample, by autograd."""
    found = jacobian(lambda x: getattr(att.at(x), side)[0, 0], att.x)[:, :, 0]
    return found.diagonal(dim1=0, dim2=2).movedim(-1, 0)


@pytest.mark.parametrize("has", ["", *HAS])
def test_parts_are_those_of_the_maps(has, monkeypatch):
    """`token_block_norms.TokenVectors` of all tokens of the first head, from derivatives of queries
    and keys by autograd: q~_ij is a vector of the layer's input."""
    att = layer(3, has).of_samples(slice(0, 1))
    g, n, w_v = torch.Generator().manual_seed(0), att.tokens, att.w_v[0]
    e = torch.rand(n, n, generator=g, dtype=torch.float64) ** 8
    cov = torch.randn(n, att.d_v, att.d, generator=g, dtype=torch.float64)
    head, every = VariantHead(att, 0), slice(0, n)
    monkeypatch.setattr(head, "covariances", lambda rows, keys: cov[rows])
    monkeypatch.setattr(head, "by_query", lambda rows: cov[rows].norm(dim=(1, 2)))
    found = head.vectors(every, every, head.queries(every, every, squarings=1), e)
    turned = att.scale * torch.einsum("jdx,id->jxi", slopes_of(att, "k"), att.q[0, 0])
    steep = cov @ slopes_of(att, "q")  # B_i, (i, d_v, D)
    # norms of blocks are rounded upwards; roots of what rounding leaves of squares
    assert between(found.b, torch.linalg.matrix_norm(steep, 2), 2e-2, 2e-3, 1e-14)
    assert between(found.b_v, torch.linalg.matrix_norm(steep @ w_v, 2), 2e-2, 2e-3, 1e-14)
    inner = torch.einsum("ij,kj,jik->ik", e, e, (turned.mT @ turned).abs())
    for value, true in (
        (found.length, turned.norm(dim=1).mT),
        (found.image, (turned.mT @ w_v).norm(dim=-1).mT),
        (found.inner, inner),
        (found.b_q, (steep @ turned).norm(dim=1)),
    ):
        assert between(value, true, 1e-6, 1e-7, 1e-14)


@pytest.mark.parametrize("has", ["", *HAS])
def test_covariances_are_those_of_their_definition(has):
    att = layer(3, has, n=7).of_samples(slice(0, 1))
    head = VariantHead(att, 0)
    t, k, v = att.weights[0, 0] / head.unit, att.centred_k[0, 0], att.centred_v[0, 0]
    a = t[..., None] * (v - (att.p[0, 0] @ v)[:, None])
    close(head.covariances(slice(None)), att.scale * a.mT @ k, 1e-7, 1e-7)
    sizes = abs(att.scale) * a.abs().mT.matmul(k.abs()).norm(dim=(1, 2))
    sizes = sizes * Tangents(att, 0, 0).size("q", torch.arange(7))
    assert bool((head.by_query(slice(None)) >= sizes * (1 - 1e-12)).all())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("has", ["rotation", "rotation norm", "together cap", "sinks"])
def test_what_a_mask_forbids_is_skipped_and_not_missed(has, mask, monkeypatch):
    monkeypatch.setattr(token_block_norms, "CHUNK", 2 * 8 * 9 * 9)  # two tokens at a time
    few = lb.bounds.evaluate(layer(7, has, mask=mask, n=9), OURS)
    formed = []
    plain_seen = token_block_norms.seen

    def all_of_them(t, step):
        found = plain_seen(t, step)
        formed.extend(sum(p[side].stop - p[side].start for p in found) for side in (1, 2))
        return [(part, slice(0, len(t)), slice(0, len(t))) for part, _, _ in found]

    monkeypatch.setattr(token_block_norms, "seen", all_of_them)
    for name, value in lb.bounds.evaluate(layer(7, has, mask=mask, n=9), OURS).items():
        close(few[name], value, 1e-5)  # sums of other lengths round otherwise
    assert mask not in ("causal", "window") or max(formed) < 5 * 9


@pytest.mark.parametrize("has", HAS)
def test_long_heads_have_all_bounds_but_the_one_with_inner_products(has, monkeypatch):
    short = lb.bounds.get("lipbound_block")(layer(4, has, n=9))
    monkeypatch.setattr(pairwise_variants, "LONGEST", 8)
    att = layer(4, has, n=9)
    close(lb.bounds.get("lipbound_block")(att), short, 1e-6)
    words = "up to 8 tokens of such heads, and there are 9", "take exact_upper"
    refused(lambda: lb.bounds.get("lipbound")(att), *words)

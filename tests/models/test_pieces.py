"""Attention in pieces and in other layouts than (samples, heads, tokens, width): one layer each,
with the norms of dense derivatives of what the model's own output projection is given."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.checks import refused
from support.models import build
from support.modules import QKV, before, check, joined, norms, sdpa
from support.modules import split as of_heads
from torch import nn

import lipbound as lb
from lipbound.models.capture.capture import Capturer

D, HEADS = 12, 3
X = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PICTURES = torch.randn(2, D, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
FUTURE = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)


heads = partial(of_heads, heads=HEADS)


class Projections(QKV):
    """What all have in common; ``mix`` does the rest."""

    def __init__(self, mix):
        super().__init__(D, HEADS)
        self.k_2, self.v_2 = nn.Linear(D, D), nn.Linear(D, D)
        self.mix = mix

    def forward(self, x):
        return self.o(self.mix(self, *self.qkv(x), x))


def by_hand(q, k, v, mask=0.0):
    return (q @ k.mT / 2 + mask).softmax(-1) @ v


def chunks_of_queries(m, q, k, v, x):
    rows = [slice(i, i + 2) for i in range(0, 6, 2)]
    return joined(torch.cat([sdpa(q[..., i, :], k, v, FUTURE[i]) for i in rows], -2))


def chunks_of_queries_by_hand(m, q, k, v, x):
    out = torch.empty_like(q)
    for i in (slice(0, 2), slice(2, 4), slice(4, 6)):
        out[..., i, :] = by_hand(q[..., i, :], k, v, FUTURE[i])
    return joined(out)


def a_single_chunk(m, q, k, v, x):
    return joined(torch.cat([sdpa(q, k, v)], -2))


def chunks_that_see_their_past(m, q, k, v, x):
    past = [(slice(i, i + 2), slice(i + 2)) for i in range(0, 6, 2)]
    parts = (sdpa(q[..., i, :], k[..., j, :], v[..., j, :], FUTURE[i, : i.stop]) for i, j in past)
    return joined(torch.cat([*parts], -2))


def slices_of_heads(m, q, k, v, x):
    """Samples and heads on one axis, a slice of which is computed at a time (diffusers)."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out = torch.zeros_like(q)
    for i in (slice(i, i + 2) for i in range(0, len(q), 2)):
        out[i] = torch.bmm((torch.bmm(q[i], k[i].mT) / 2).softmax(-1), v[i])
    return joined(out.unflatten(0, (-1, HEADS)))


def head_by_head(m, q, k, v, x):
    parts = zip(*(t.split(1, 1) for t in (q, k, v)), strict=True)
    return joined(torch.cat([sdpa(*one) for one in parts], 1))


def sample_by_sample(m, q, k, v, x):
    return joined(torch.stack([sdpa(*one) for one in zip(q, k, v, strict=True)]))


def blocks_of_keys(m, q, k, v, x):
    """Two blocks, weighed by their sums of exponentials."""
    blocks = [*zip(k.split(3, -2), v.split(3, -2), strict=True)]
    sums = torch.stack([(q @ k.mT / 2).logsumexp(-1, keepdim=True) for k, _ in blocks])
    first, second = (by_hand(q, k, v) for k, v in blocks)
    weights = sums.softmax(0)
    return joined(weights[0] * first + weights[1] * second)


def two_that_are_added(m, q, k, v, x):
    """As in IP-Adapter: the same queries and other keys, before one projection."""
    return joined(sdpa(q, k, v) + 0.7 * sdpa(q, heads(m.k_2(x)), heads(m.v_2(x))))


def differences(m, q, k, v, x):
    """Differential attention, whose values are cut in two for kernels that want that."""
    (q_1, q_2), (k_1, k_2), values = (t.chunk(2, -1) for t in (q, k, v))
    pairs = (q_1, k_1), (q_2, k_2)
    first, second = (torch.cat([sdpa(q, k, v) for v in values], -1) for q, k in pairs)
    return joined(first - 0.4 * second)


def differences_in_one_call(m, q, k, v, x):
    """The same with both softmaxes in one, as heads behind each other."""
    q, k = (torch.cat(t.chunk(2, -1), 1) for t in (q, k))
    first, second = torch.chunk(by_hand(q, k, torch.cat([v, v], 1)), 2, dim=1)
    return joined(first - 0.4 * second)


def differences_that_are_normalised(m, q, k, v, x):
    """Whose lengths are those of heads, before they are projected."""
    return joined(F.rms_norm(heads(differences_in_one_call(m, q, k, v, x)), (D // HEADS,)))


def heads_first(m, q, k, v, x):
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    return sdpa(q, k, v).permute(1, 2, 0, 3).flatten(2)


def interleaved(m, q, k, v, x):
    return sdpa(q, k, v).permute(0, 2, 3, 1).flatten(2)


def windows(m, q, k, v, x):
    """Blocks of two tokens on an axis of their own behind samples and heads."""
    q, k, v = (t.flatten(0, 1).unflatten(1, (3, 2)) for t in (q, k, v))
    scores = torch.einsum("bwie,bwje->bwij", q, k)
    out = torch.einsum("bwij,bwje->bwie", scores.softmax(-1), v)
    return joined(out.flatten(1, 2).unflatten(0, (-1, HEADS)))


def one_linear_head(m, q, k, v, x):
    """Windows beside a head without softmax, which is no head of the layer's."""
    linear = q[:, 2:].softmax(-1) @ (k[:, 2:].softmax(-2).mT @ v[:, 2:])
    q, k, v = (t[:, :2].flatten(0, 1).unflatten(1, (3, 2)) for t in (q, k, v))
    out = torch.einsum("bwij,bwje->bwie", torch.einsum("bwie,bwje->bwij", q, k).softmax(-1), v)
    return joined(torch.cat([out.flatten(1, 2).unflatten(0, (-1, 2)), linear], 1))


def one_matrix_a_call(m, q, k, v, x):
    made = [by_hand(q[i, h], k[i, h], v[i, h]) for i in range(len(q)) for h in range(HEADS)]
    return joined(torch.stack(made).unflatten(0, (-1, HEADS)))


def heads_before_samples(m, q, k, v, x):
    q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
    return joined(by_hand(q, k, v).unflatten(0, (HEADS, -1)).transpose(0, 1))


PARTS = [slice(4 * h, 4 * h + 4) for h in range(HEADS)]
"""Entries of heads, where they are consecutive."""
CLOSED = [chunks_of_queries, chunks_of_queries_by_hand, a_single_chunk, slices_of_heads]
CLOSED += [head_by_head, sample_by_sample, heads_first, interleaved]
AUTOMATIC = [chunks_that_see_their_past, blocks_of_keys, two_that_are_added, differences]
AUTOMATIC += [differences_that_are_normalised, windows, one_linear_head, one_matrix_a_call]
AUTOMATIC += [heads_before_samples]
ENTRIES = {interleaved: [slice(h, None, HEADS) for h in range(HEADS)], one_linear_head: PARTS[:2]}
"""Those that are not."""


def dense(model, projection, x, entries):
    """Norms of the Jacobians of what a projection is given, whose channels are last."""
    given = before(projection, lambda one: model(one[None])[0], 1)

    def heads(one):
        flat = given(one)[0, ..., 0, :]
        flat = flat.movedim(0, -1).flatten(0, 1) if one.ndim == 3 else flat
        return torch.stack([flat[:, e] for e in entries], 1)

    return torch.stack([norms(heads, one) for one in x])


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("mix", [*CLOSED, *AUTOMATIC])
def test_pieces_are_one_layer(mix, closed):
    entries = ENTRIES.get(mix, PARTS)
    model = build(lambda: Projections(mix)).double()
    (att,) = lb.capture(model, X, closed=closed)
    assert isinstance(att, lb.Attention) == (closed and mix in CLOSED)
    assert (att.samples, att.heads, att.tokens, att.d_v) == (2, len(entries), 6, 4)
    expected = dense(model, model.o, X, entries)
    check(att, expected, sample=slice(None), rtol=1e-7)
    for x, its in zip(X, expected, strict=True):
        (alone,) = lb.capture(model, x[None], closed=closed)
        check(alone, its, rtol=1e-7)


@pytest.mark.parametrize(
    "mix",
    [
        *(chunks_of_queries, slices_of_heads, heads_first, differences),
        *(differences_in_one_call, differences_that_are_normalised),
    ],
)
def test_pieces_have_an_output_projection(mix):
    model = build(lambda: Projections(mix)).double()
    (att,) = lb.capture(model, X)
    check(att, norms(lambda one: model(one[None])[0][:, None], X[0]), map="layer", rtol=1e-7)


def test_pieces_with_a_projection_each_are_told():
    class Chunks(Projections):
        def forward(self, x):
            q, k, v = self.qkv(x)
            return torch.cat([self.o(joined(by_hand(part, k, v))) for part in q.split(2, -2)], 1)

    with pytest.warns(lb.Notice, match=r"\(Chunks\) calls attention 3 times in a run"):
        assert len(lb.capture(build(lambda: Chunks(by_hand)).double(), X)) == 3


class Head(nn.Module):
    """One head of a tutorial's GPT."""

    def __init__(self, is_fused):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, 4, bias=False) for _ in range(3))
        self.is_fused = is_fused

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return sdpa(q, k, v, FUTURE) if self.is_fused else by_hand(q, k, v, FUTURE)


class Listed(nn.Module):
    def __init__(self, is_fused, projects):
        super().__init__()
        self.heads = nn.ModuleList(Head(is_fused) for _ in range(HEADS))
        self.o, self.drop = nn.Linear(D, D) if projects else nn.Identity(), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.o(torch.cat([head(x) for head in self.heads], -1)))


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("projects", [True, False])
def test_lists_of_single_heads_are_a_layer(is_fused, projects):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.att = nn.LayerNorm(D), Listed(is_fused, projects)
            self.next = nn.Linear(D, D)

        def forward(self, x):
            return self.next(x + self.att(self.norm(x)))

    model = build(Block).double()
    expected = dense(model.att, model.att.o, model.norm(X).detach(), PARTS)
    for closed in (True, False):
        (layer,) = Capturer(model, closed=closed).run({"x": X})
        att = layer.attention
        assert (layer.name, isinstance(att, lb.Attention)) == ("att", closed and projects)
        assert (att.w_o is not None) == projects
        check(att, expected, sample=slice(None), rtol=1e-7)


class Convolved(nn.Module):
    """Attention of pictures, whose channels stand before the tokens."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Conv2d(D, 3 * D, 1), nn.Conv2d(D, D, 1)

    def forward(self, x):
        q, k, v = (t.flatten(2).unflatten(1, (HEADS, 4)) for t in self.qkv(x).chunk(3, 1))
        p = torch.einsum("bhdi,bhdj->bhij", q, k).softmax(-1)
        return self.o(torch.einsum("bhij,bhdj->bhdi", p, v).flatten(1, 2).unflatten(-1, (2, 3)))


def test_channels_before_tokens():
    model = build(Convolved).double()
    (att,) = lb.capture(model, PICTURES)
    assert isinstance(att, lb.ModuleAttention)
    assert (att.samples, att.heads, att.tokens, att.d_v) == (2, HEADS, 6, 4)
    expected = dense(model, model.o, PICTURES, PARTS)
    check(att, expected, sample=slice(None), rtol=1e-7)
    run = lb.compare(model, inputs=PICTURES, bounds="none", dtype="float64", progress=False)
    assert run["length"].values.tolist() == [6, 6]


class Grouped(nn.Module):
    """Heads whose groups are projected apart, one head of each group beside the others' first."""

    def __init__(self):
        super().__init__()
        self.qkv, self.weights = nn.Linear(16, 48), nn.Parameter(torch.randn(2, 8, 5))

    def heads(self, x):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return sdpa(q, k, v).transpose(1, 2)

    def forward(self, x):
        groups = self.heads(x).unflatten(2, (2, 2)).flatten(-2)
        return torch.einsum("bngd,gdo->bngo", groups, self.weights).flatten(2)


@pytest.mark.parametrize("closed", [True, False])
def test_groups_of_heads_that_are_projected_apart(closed):
    model = build(Grouped).double()
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (att,) = lb.capture(model, x, closed=closed)
    assert (att.samples, att.heads, att.tokens, att.d_v) == (2, 4, 6, 4)
    check(att, norms(lambda one: model.heads(one[None])[0], x[0]), rtol=1e-7)


class Biased(nn.Module):
    """Attention that is handed the module of its biases, as x-transformers does."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, bias):
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[1])
        far = (places - places[:, None]).float()
        added = bias(far[..., None]).permute(2, 0, 1)
        added = added.masked_fill(far > 0, -torch.finfo(q.dtype).max)
        return self.o(joined(sdpa(q, k, v, added)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Biased() for _ in range(2))
        self.bias = nn.Linear(1, HEADS)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, bias=self.bias)
        return x


def test_modules_among_the_arguments():
    model = build(Stack)
    for weights in model.parameters():  # of a size that float32 resolves
        weights.data.mul_(0.3)
    found = Capturer(model).run({"x": X.float()})
    assert [layer.name for layer in found] == ["layers.0", "layers.1"]
    assert all(isinstance(layer.attention, lb.Attention) for layer in found)
    for layer, one in zip(found, lb.capture(model, X.float(), closed=False), strict=True):
        its = lb.spectral_norm(one, tol=1e-7).lower
        check(layer.attention, its, sample=slice(None), tol=1e-7, rtol=1e-5)
    x = X.float() + model.layers[0](X.float(), model.bias)
    given = x.detach().double()
    model = model.double()
    bias = nn.Linear(1, HEADS)
    bias.load_state_dict(model.bias.state_dict())

    class Second(nn.Module):
        def forward(self, x):
            return model.layers[1](x, lambda far: bias(far).double())

    expected = dense(Second(), model.layers[1].o, given[:1], PARTS)
    check(found[1].attention, expected[0], tol=1e-7, rtol=1e-5)


HUNDREDS = torch.randn(200, 3, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
SHIFT = torch.zeros(D, dtype=torch.float64).index_fill(0, torch.tensor([1, 6, 7]), -100)
FLAT = [chunks_of_queries, slices_of_heads, heads_before_samples, one_matrix_a_call]


def in_double(mix):
    torch.manual_seed(3)
    module = Projections(mix).double()
    for p in module.parameters():
        p.data.mul_(2)
    return module


@pytest.mark.parametrize("mix", FLAT)
def test_channels_without_a_derivative_hide_no_heads(mix):
    """An activation before the projection is flat there: one head was found instead of three."""
    module = in_double(lambda *given: F.hardswish(mix(*given) + SHIFT))
    refused(lambda: lb.capture(module, {"x": X}), "layout in which they cannot be told apart")


@pytest.mark.parametrize("closed", [True, False])
def test_hundreds_of_samples_hide_no_heads(closed):
    """Behind them on their axis heads stood where nobody looked: two, of other norms."""
    module = in_double(heads_before_samples)
    (layer,) = lb.capture(module, {"x": HUNDREDS}, closed=closed)
    assert (layer.samples, layer.heads) == (len(HUNDREDS), HEADS)
    expected = dense(module, module.o, HUNDREDS[:2], PARTS)
    check(layer, expected, sample=slice(2), tol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_projection_in_parts_is_whole_or_refused(interleaved, activated):
    """The first of its products met one head alone, which passed for the layer."""

    class Parts(Projections):
        def forward(self, x):
            q, k, v = self.qkv(x)
            made = by_hand(q, k, v).transpose(1, 2)
            made = (made.mT if interleaved else made).flatten(2)
            made = F.hardswish(made) if activated else made
            places = [slice(i, i + 4) for i in (0, 4, 8)]
            parts = [F.linear(made[..., some], self.o.weight[:, some]) for some in places]
            return torch.stack(parts).sum(0)

    torch.manual_seed(3)
    module = Parts(chunks_of_queries).double()
    if activated:
        refused(lambda: lb.capture(module, {"x": X}), "projects the outputs of its heads in parts")
        return
    (layer,) = lb.capture(module, {"x": X})
    check(layer, norms(lambda x: module(x)[..., None, :], X[:1]), map="layer", rtol=1e-5)
    assert lb.spectral_norm(layer).lower.shape == (2, HEADS)


class Windows(Projections):
    """Samples, windows of two tokens and heads on one axis, and heads on one of their own after."""

    def forward(self, x):
        q, k, v = (t.unflatten(2, (3, 2)).transpose(1, 2) for t in self.qkv(x))
        scores = torch.matmul(q, k.mT) + torch.matmul(q, self.k_2.weight[:4, :2])
        out = torch.bmm(scores.softmax(-1).reshape(-1, 2, 2), v.reshape(-1, 2, 4))
        return out.view(-1, 3, HEADS, 2, 4).transpose(2, 3).reshape(-1, 6, HEADS, 4)


class Projected(nn.Module):
    """Projects the outputs of heads outside of the module that makes them."""

    def __init__(self):
        super().__init__()
        self.attention, self.o = Windows(sdpa), nn.Linear(D, D)

    def forward(self, x):
        return self.o(self.attention(x).flatten(2))


def test_heads_that_share_an_axis_with_windows_are_refused():
    model = build(Projected).double()
    refused(lambda: lb.capture(model, X), "hands on its heads in an order that is not known")

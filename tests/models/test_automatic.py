"""Layers through their own modules: which derivative is taken, of which heads, and what moves."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.checks import refused
from support.models import build
from support.modules import check as checked
from support.modules import joined, norms, sdpa
from support.modules import split as of_heads
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import lipbound as lb
from lipbound.jacobians import automatic
from lipbound.models.capture.capture import Capturer

X, Z, W = torch.randn(3, 1, 5, 12, generator=torch.Generator().manual_seed(0)).double()
K, V = (torch.randn(1, 7, n, generator=torch.Generator().manual_seed(n)).double() for n in (10, 12))


split = partial(of_heads, heads=3)


class Layer(nn.Module):
    """Three heads, made by a function of itself, its tokens, and its queries, keys and values."""

    def __init__(self, made):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm, self.made = nn.LayerNorm(12), made

    def before(self, x, made=None):
        return (made or self.made)(self, x, *map(split, self.qkv(x).chunk(3, -1)))

    def forward(self, x):
        return self.out(self.before(x))


def of_layer(layer, x=X, made=None):
    """Norms of its heads, where they are consecutive."""
    return norms(lambda x: layer.before(x, made)[0].unflatten(-1, (3, 4)), x)


def check(att, expected, **options):
    """Compare norms of the first sample; closed forms allow for rounding."""
    checked(att, expected, rtol=1e-6 if isinstance(att, lb.ModuleAttention) else 1e-4, **options)


class Sine(torch.autograd.Function):
    """A function of which only one derivative can be had."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class Rounded(torch.autograd.Function):
    """A function that passes gradients straight through."""

    forward = staticmethod(lambda ctx, x: (8 * x).round() / 8)
    backward = staticmethod(lambda ctx, grad: grad)


def sine(fn, layer, x, q, k, v):
    return joined(sdpa(q, k, fn(v)))


def hard_gate(layer, x, *qkv):
    return joined(sdpa(*qkv)) * F.hardsigmoid(x)


def distances(of, layer, x, q, k, v):
    return joined(sdpa(q, k, v, attn_mask=-of(x, x)[:, None]))


def explicit(x, y):
    off = (x[:, :, None] - y[:, None]).square().sum(-1)
    return (off + torch.eye(off.shape[-1])).sqrt() - torch.eye(off.shape[-1])


def kept(reentrant, layer, x, q, k, v):
    def inside(q, k, v):
        return joined(sdpa(q, k * k, v))

    return checkpoint(inside, q, k, v, use_reentrant=reentrant)


DERIVATIVES = {
    "once differentiable": (partial(sine, Sine.apply), partial(sine, torch.sin)),
    "no second derivative": (hard_gate, hard_gate),
    "no other derivative": (partial(distances, torch.cdist), partial(distances, explicit)),
    "checkpoint": (partial(kept, False), partial(kept, False)),
    "reentrant checkpoint": (partial(kept, True), partial(kept, False)),
}


@pytest.mark.parametrize("case", DERIVATIVES)
def test_derivatives_that_are_lost_or_missing_are_had_in_another_way(case):
    made, plain = DERIVATIVES[case]
    layer = build(partial(Layer, made)).double()
    (att,) = lb.capture(layer, {"x": X})
    assert isinstance(att, lb.ModuleAttention)
    check(att, of_layer(layer, made=plain))
    whole = norms(lambda x: layer.out(layer.before(x, plain))[..., None, :], X)
    check(att, whole, map="layer")


class Depthwise(Layer):
    """Tokens of pictures pass a convolution and a normalisation over channels, as CvT has them."""

    def __init__(self):
        super().__init__(lambda layer, x, q, k, v: joined(sdpa(q, k, v)))
        self.conv, self.channels = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12)
        nn.init.normal_(self.channels.running_mean)

    def before(self, x, made=None):
        x = self.conv(x.transpose(1, 2).unflatten(-1, (2, 4)))
        return super().before(self.channels(x).flatten(2).transpose(1, 2), made)


def test_gradients_of_one_picture_with_channels_last():
    """torch 2.13 takes them for another layout; differences tell."""
    layer, x = build(Depthwise).double(), torch.cat([X, Z], 1)[:, :8]
    (att,) = lb.capture(layer, {"x": x})

    def heads(x):
        return layer.before(x)[0].unflatten(-1, (3, 4))

    steps = 1e-6 * torch.eye(96).view(96, 1, 8, 12).double()
    with torch.no_grad():
        columns = torch.stack([(heads(x + h) - heads(x - h)) / 2e-6 for h in steps], -1)
    check(att, torch.linalg.matrix_norm(columns.movedim(1, 0).flatten(1, 2), 2))


def test_what_is_no_derivative_is_refused(monkeypatch):
    straight = build(partial(Layer, partial(sine, Rounded.apply))).double()
    with pytest.raises(lb.errors.AttentionError, match=r"does not give the derivative .* off"):
        lb.spectral_norm(lb.capture(straight, {"x": X})[0])
    monkeypatch.setattr(automatic, "ASSEMBLED", 100)
    (att,) = lb.capture(build(partial(Layer, partial(sine, Sine.apply))), {"x": X})
    with pytest.raises(lb.errors.AttentionError, match=r"of 60 rows, is too large to be assembled"):
        lb.spectral_norm(att)


def between(act, interleaved, layer, x, *qkv):
    o = sdpa(*qkv)
    return act(layer, x, (o.permute(0, 2, 3, 1) if interleaved else o.transpose(1, 2)).flatten(2))


BETWEEN = {
    "nothing": lambda layer, x, o: o,
    "gate": lambda layer, x, o: o * layer.gate(x).sigmoid(),
    "activation": lambda layer, x, o: F.hardswish(o),
    "norm": lambda layer, x, o: layer.norm(o),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("act", BETWEEN)
def test_heads_are_those_that_attention_returns(act, interleaved):
    """In whatever order they are projected; what is done to them before is part of them."""
    layer = build(partial(Layer, partial(between, BETWEEN[act], interleaved))).double()

    def heads(x):
        o = layer.before(x)[0]
        return o.unflatten(-1, (4, 3)).mT if interleaved else o.unflatten(-1, (3, 4))

    def projected(x):
        w = layer.out.weight.unflatten(1, (4, 3) if interleaved else (3, 4))
        return torch.einsum("nhv,ovh->nho" if interleaved else "nhv,ohv->nho", heads(x), w)

    if interleaved and act == "norm":  # of all channels, which mixes heads
        refused(lambda: lb.capture(layer, {"x": X}), "in which they cannot be told apart")
        return
    for closed in (True, False):
        (att,) = lb.capture(layer, {"x": X}, closed=closed)
        check(att, norms(heads, X))
        if isinstance(att, lb.ModuleAttention):
            check(att, norms(projected, X), map="head_out")
            assert ("part of them" in repr(att)) == (act != "nothing")
        else:
            assert ("gate" in att.variants) == (act == "gate")


DETACHED = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "no_grad": torch.no_grad()(lambda t: t * 1),
}


@pytest.mark.parametrize("how", DETACHED)
def test_what_is_detached_moves(how):
    def made(free, layer, x, *qkv):
        return joined(sdpa(*qkv)) * free(layer.gate(x).sigmoid())

    layer = build(partial(Layer, partial(made, DETACHED[how]))).double()
    expected = of_layer(layer, made=partial(made, lambda t: t))
    for closed in (True, False):
        (att,) = lb.capture(layer, {"x": X}, closed=closed)
        assert isinstance(att, lb.Attention) == closed
        check(att, expected)
    assert ("detaches moves as well" in repr(att)) == (how != "no_grad")


def biased(z, b, h, i, j):
    return z - 0.3 * (h + 1) * (i - j).abs()


def causal(b, h, i, j):
    return i >= j


PLACES = torch.arange(5)
FAR = (PLACES[:, None] - PLACES).double()


@pytest.mark.parametrize("case", ["biases", "mask"])
def test_flex_attention(case):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    options = {"score_mod": biased}
    mask = -0.3 * torch.arange(1, 4)[:, None, None] * FAR.abs()
    if case == "mask":
        sizes = (None, None, 5, 5)
        made = flex.create_block_mask(causal, *sizes, device="cpu", BLOCK_SIZE=16)
        options = {"block_mask": made}
        mask = torch.zeros(5, 5).double().masked_fill(FAR < 0, -torch.inf)

    def made(attend, layer, x, *qkv):
        return joined(attend(*qkv))

    layer = build(partial(Layer, partial(made, partial(flex.flex_attention, **options)))).double()
    (att,) = lb.capture(layer, {"x": X})
    assert isinstance(att, lb.Attention)
    check(att, of_layer(layer, made=partial(made, partial(sdpa, attn_mask=mask))))


def test_flex_attention_that_bends_scores_is_refused():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def made(layer, x, *qkv):
        return joined(flex.flex_attention(*qkv, score_mod=lambda z, b, h, i, j: z.tanh()))

    with pytest.raises(lb.errors.CaptureError, match="does more to scores than add to them"):
        lb.capture(build(partial(Layer, made)), {"x": X})


class Given(nn.Module):
    """torch's attention, given what a function makes of the tokens."""

    def __init__(self, given, **options):
        super().__init__()
        self.mha = nn.MultiheadAttention(12, 3, batch_first=True, **options)
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
        self.given = given
        for norm in self.norms:
            nn.init.normal_(norm.weight)

    def forward(self, x, y=None, pos=None):
        return x + self.mha(*self.given(self, x, *(t for t in (y, pos) if t is not None)))[0]

    def heads(self, q, k, v):
        own = self.mha
        w = own.in_proj_weight
        w = (own.q_proj_weight, own.k_proj_weight, own.v_proj_weight) if w is None else w.chunk(3)
        made = zip((q, k, v), w, own.in_proj_bias.chunk(3), strict=True)
        q, k, v = (split(t @ w.T + b) for t, w, b in made)
        return joined(sdpa(q, k, v))[0][..., None, :]


def rows(model, inputs, closed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lb.Notice)
        return Capturer(model, closed=closed).run(inputs)


ONE = {
    "two norms": lambda m, x: (m.norms[0](x), m.norms[1](x), m.norms[1](x)),
    "norm of queries": lambda m, x: (m.norms[0](x), x, x),
    "positions": lambda m, x: (x + Z, x + Z, x),
    "one query": lambda m, x: (x[:, :1], x, x),
}


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("case", ONE)
def test_the_input_is_what_the_block_was_given(case, closed):
    model = build(lambda: nn.Sequential(nn.Linear(12, 12), Given(ONE[case]))).double()
    block, tokens = model[1], model[0](X).detach()
    (layer,) = rows(model, {"input": X}, closed)
    att = layer.attention
    assert (layer.name, att.kind, att.perturbed) == ("1", "self", "input")
    check(att, norms(lambda x: block.heads(*ONE[case](block, x)), tokens), map="heads")


SEVERAL = {
    "values apart": ((X, X, Z), {}, lambda f, x: f(x, x, Z), lambda f, z: f(X, X, z), Z),
    "keys apart": ((X, Z, X), {}, lambda f, x: f(x, Z, x), lambda f, z: f(X, z, X), Z),
    "one memory": ((X, Z, Z), {}, lambda f, x: f(x, Z, Z), lambda f, z: f(X, z, z), Z),
    "keys and values apart": (
        *((X, Z, W), {}, lambda f, x: f(x, Z, W)),
        *(lambda f, y: f(X, y[..., 12:], y[..., :12]), torch.cat([W, Z], -1)),
    ),
    "of two widths": (
        *((X, K, V), {"kdim": 10, "vdim": 12}, lambda f, x: f(x, K, V)),
        *(lambda f, y: f(X, y[..., 12:], y[..., :12]), torch.cat([V, K], -1)),
    ),
}


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("case", SEVERAL)
def test_of_several_tensors_there_are_queries_and_the_rest(case, closed):
    given, options, of_queries, of_memory, memory = SEVERAL[case]
    block = build(lambda: Given(lambda m, x: (x, x, x), **options)).double()
    inputs = dict(zip(("query", "key", "value"), given, strict=True))
    found = rows(block.mha, inputs, closed)
    assert [row.attention.perturbed for row in found] == ["queries", "memory"]
    for row, f, x in zip(found, (of_queries, of_memory), (X, memory), strict=True):
        check(row.attention, norms(lambda x, f=f: f(block.heads, x), x), map="heads")


def test_a_memory_that_is_given_twice_is_one():
    """Once with positions, by a block whose queries passed another attention."""

    class Decoder(Given):
        def forward(self, x, y, pos):
            x = self.norms[0](x + self.mha(x, x, x)[0])
            return x + self.mha(x, y + pos, y)[0]

    model = build(lambda: Decoder(lambda: ())).double()
    *_, row = rows(model, {"x": X, "y": Z, "pos": W}, True)
    assert (row.name, row.attention.perturbed) == ("", "memory")
    x = model.norms[0](X + model.mha(X, X, X)[0]).detach()
    check(row.attention, norms(lambda y: model.heads(x, y + W, y), Z), map="heads")

"""Modules that are called attention, and compute none that is seen, are named; others are not."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.checks import refused
from support.modules import QKV, check, joined, norms, sdpa, split
from torch import Tensor, nn

import lipbound as lb
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import AutogradJacobian

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


class OwnAttention(QKV):
    """Two heads, whose outputs a function makes of queries, keys and values."""

    def __init__(self, made):
        super().__init__(16, 2)
        self.mix, self.score = nn.Parameter(torch.randn(2, 2)), nn.Linear(8, 1)
        self.made = made

    def heads(self, x):
        return self.made(self, *self.qkv(x))

    def forward(self, x):
        return self.o(joined(self.heads(x)))


def softmax(h, q, k, v):
    return sdpa(q, k, v)


def exp_and_sum(h, q, k, v):
    e = (q @ k.mT / 8**0.5).exp()
    return e / e.sum(-1, keepdim=True) @ v


def sigmoid(h, q, k, v):
    return torch.einsum("bhnm,bhmd->bhnd", (q @ k.mT - math.log(6)).sigmoid(), v)


def linear(h, q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def additive(h, q, k, v):
    return h.score((q[:, :, :, None] + k[:, :, None]).tanh()).squeeze(-1).softmax(-1) @ v


def part_of_softmax(h, q, k, v):
    """With a key that is nothing."""
    return F.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :-1] @ v


LEFT_OUT = [exp_and_sum, sigmoid, linear, additive, part_of_softmax]


class Gated(nn.Module):
    """A feed-forward part, behind a normalisation whose name says what it follows."""

    def __init__(self):
        super().__init__()
        self.post_attention = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x):
        a, b = self.up(self.post_attention(x)).chunk(2, -1)
        return self.down(a * b.softmax(-1))


class Convolution(nn.Conv1d):
    """Three tokens at a time."""

    def __init__(self):
        super().__init__(16, 16, 3, padding=1)

    def forward(self, x):
        return super().forward(x.mT).mT


class Model(nn.Module):
    """Some parts one after the other, in a list or not."""

    def __init__(self, *parts, listed=False):
        super().__init__()
        torch.manual_seed(0)
        made = [one() for one in parts]
        self.parts = nn.ModuleList(made) if listed else nn.Sequential(*made)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


plain = partial(OwnAttention, softmax)


def said(model):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        layers = lb.capture(model.eval(), X)
    return len(layers), [str(one.message) for one in found if one.category is lb.Notice]


@pytest.mark.parametrize("made", LEFT_OUT, ids=lambda f: f.__name__)
def test_attention_of_another_kind_is_named_with_its_count(made):
    other = partial(OwnAttention, made)
    count, (note,) = said(Model(plain, other, other))
    told = "is left out, in 2 modules: parts.1 (OwnAttention), parts.2 (OwnAttention) of Model"
    assert (count, note.endswith(told)) == (1, True)
    whole = "is of unknown make, in 1 module: the model itself (OwnAttention)"
    refused(partial(lb.capture, other().eval(), X), whole, error=lb.errors.CaptureError)


@pytest.mark.parametrize("name", ["LinearAttention", "WindowAttn", "MHSA", "GroupedMHA"])
def test_attention_is_known_by_its_name(name):
    other = partial(type(name, (OwnAttention,), {}), linear)
    count, (note,) = said(Model(plain, other))
    assert (count, note.endswith(f"in 1 module: parts.1 ({name}) of Model")) == (1, True)


def test_runs_say_so():
    model = Model(plain, lambda: OwnAttention(additive)).eval()
    with pytest.warns(lb.Notice, match="attention of unknown make"):
        ds = lb.compare(model, {"x": X}, bounds=["lipbound"], progress=False)
    assert ds.sizes["layer"] == 1
    assert ds.attrs["notes"][0].endswith("in 1 module: parts.1 (OwnAttention) of Model")


class AttentionInParts(OwnAttention):
    """Attention that is seen, beside a part that is called so and computes none."""

    def __init__(self):
        super().__init__(softmax)
        self.after_attention = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))

    def forward(self, x):
        return self.after_attention(super().forward(x))


def test_nothing_is_said_of_parts_of_attention_and_of_other_modules():
    assert said(Model(AttentionInParts, Gated, AttentionInParts, Gated)) == (2, [])
    alone = "has no attention that ", "(it seems to have no attention layers)"
    refused(partial(lb.capture, Model(Gated).eval(), X), *alone, error=lb.errors.CaptureError)


def test_of_a_list_of_layers_those_with_attention_are_counted():
    count, notes = said(Model(plain, Gated, Convolution, Convolution, plain, listed=True))
    told = "was found in 2 of 5 layers in parts; what the others do to tokens is left out"
    assert (count, len(notes), told in notes[0]) == (2, 1, True)
    assert said(Model(plain, Convolution)) == (1, [])


def test_layers_that_share_their_attention_are_all_found():
    shared = Model(plain, Convolution, plain, plain, listed=True)
    shared.parts[2], shared.parts[3] = shared.parts[0], nn.Sequential(shared.parts[0])
    count, notes = said(shared)
    assert (count, "was found in 3 of 4 layers in parts" in notes[0]) == (3, True)


class Beside(nn.Module):
    """Attention and something else beside it, as one layer."""

    def __init__(self, other):
        super().__init__()
        self.attention, self.other = plain(), other()

    def forward(self, x):
        return self.attention(x) + self.other(x)


class Cumulative(nn.Module):
    """A mean over the tokens so far."""

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


@pytest.mark.parametrize("other", [Convolution, Cumulative, lambda: OwnAttention(sigmoid)])
def test_layers_that_mix_tokens_by_more_than_attention_say_so(other):
    beside, both = partial(Beside, other), partial(Beside, plain)
    count, notes = said(Model(both, beside, beside))
    (told,) = (one for one in notes if "also mix tokens by other means" in one)
    assert (count, told[:32]) == (4, "layers such as parts.1 (Beside) ")
    assert said(Model(partial(Beside, Gated), both, plain)) == (4, [])


def talking(h, q, k, v):
    scores = torch.einsum("hg,bhnm->bgnm", h.mix, torch.einsum("bhnd,bhmd->bhnm", q, k))
    return torch.einsum("hg,bhnm->bgnm", h.mix, scores.softmax(-1)) @ v


def talking_by_products(h, q, k, v):
    p = torch.einsum("bhij,hg->bgij", q @ k.mT, h.mix).softmax(-1)
    return joined(torch.einsum("bhij,hg->bgij", p, h.mix) @ v).unflatten(-1, (2, 8)).transpose(1, 2)


@torch.jit.script
def clamped(t: Tensor, most: float) -> Tensor:
    return (t / most).tanh() * most


def softclamped(h, q, k, v):
    return clamped(q @ k.mT / 8**0.5, 3.0).softmax(-1) @ v


@pytest.mark.filterwarnings("ignore::lipbound.errors.Notice")
@pytest.mark.parametrize("made", [talking, talking_by_products, softclamped])
def test_heads_that_are_mixed_and_scores_that_are_clamped_are_measured(made):
    torch.manual_seed(0)
    model = OwnAttention(made).eval()
    (layer,) = lb.capture(model, X)
    model = model.double()
    exact = [norms(lambda t: model.heads(t).transpose(1, 2), x[None]) for x in X.double()]
    check(layer, torch.stack(exact), sample=slice(None), tol=1e-8, rtol=1e-6)


def test_the_ways_that_a_refusal_names_are_there():
    """What it says of operator_norm and of Attention gives the right numbers."""
    torch.manual_seed(0)
    model, x = OwnAttention(exp_and_sum).double().eval(), X[:1].double()
    ways = "lipbound.Attention", "lipbound.linalg.operator_norm.operator_norm", "closed=False needs"
    refused(lambda: lb.capture(model, x), *ways, error=lb.errors.CaptureError)
    exact = torch.func.jacrev(lambda t: model.heads(t)[0])(x).reshape(2, 48, 96)
    maps = model.q, model.k, model.v
    w = [f.weight.detach().mT.unflatten(1, (2, 8)).transpose(0, 1) for f in maps]
    b_q, b_k, b_v = (f.bias.detach().view(2, 8) for f in maps)
    att = lb.Attention(x, *w, b_q=b_q, b_k=b_k, b_v=b_v)
    check(att, torch.linalg.matrix_norm(exact, 2), rtol=1e-7)
    whole = operator_norm(AutogradJacobian(model.heads, x), tol=1e-9).lower[0]
    both = torch.linalg.matrix_norm(exact.flatten(0, 1), 2)
    torch.testing.assert_close(whole, both, rtol=1e-7, atol=0)


class InPlace(OwnAttention):
    """What is added to the outputs of heads, in their place, is not handed on to the record."""

    def __init__(self):
        super().__init__(softmax)
        self.convolution = Convolution()

    def forward(self, x):
        q, k, v = self.qkv(x)
        out = (q @ k.mT / 8**0.5).softmax(-1) @ v
        out += split(self.convolution(joined(v)), 2)
        return self.o(joined(out))


def test_outputs_of_heads_that_are_changed_in_their_place_stay_as_they_were_recorded():
    count, notes = said(Model(InPlace, InPlace))
    assert (count, sum("also mix tokens by other means" in one for one in notes)) == (2, 1)


def test_scripted_parts_beside_attention_run_as_they_are():
    """They take no hooks."""
    torch.manual_seed(0)
    model = nn.Sequential(plain(), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)))
    (expected,) = lb.capture(model, X)
    model[1] = torch.jit.script(model[1])
    (found,) = lb.capture(model, X)
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=0)
    assert all(module.training for module in model.modules())

"""Ways to compute attention that the package does not know: another package's, seen as CONTRIBUTING
says, and functions of the user's own, registered with transformers; against dense derivatives."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.models import MODERN, build, inputs_for
from support.modules import before, check, given_to, norms, sdpa
from support.versions import newer_torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

import lipbound as lb
from lipbound.models.capture.capture import Capturer
from lipbound.models.capture.seeing import interface

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(3))


@torch.library.custom_op("tests::flash", mutates_args=())
def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of (samples, N, heads, d) that nothing can look into."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    n = q.shape[-2]
    scores = (scale * q @ k.mT).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()


def flash_attn_func(q, k, v, *, softmax_scale, causal):
    assert causal
    return kernel(q, k, v, softmax_scale)


THEIRS = SimpleNamespace(flash_attn_func=flash_attn_func)


class Flash(nn.Module):
    """Attention by a kernel of another package; gated where asked for."""

    def __init__(self, gated=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.gate = nn.Linear(24, 24) if gated else None

    def heads(self, x, attend):
        o = attend(*self.qkv(x).unflatten(-1, (12, 6)).chunk(3, 2))
        return o if self.gate is None else o * self.gate(x).sigmoid().unflatten(-1, (4, 6))

    def forward(self, x):
        theirs = partial(THEIRS.flash_attn_func, softmax_scale=0.3, causal=True)
        return self.out(self.heads(x, theirs).flatten(2))


def by_products(*qkv):
    q, k, v = (t.transpose(1, 2) for t in qkv)
    return sdpa(q, k, v, scale=0.3, is_causal=True).transpose(1, 2)


def test_the_guides_example(monkeypatch):
    (code,) = re.findall(r"```python\n(def flash.*?)```", GUIDE.read_text(), re.DOTALL)
    monkeypatch.setattr(interface, "OTHERS", [])
    exec(code, {"OTHERS": interface.OTHERS, "their_module": THEIRS})
    for gated in (False, True):
        module = build(lambda gated=gated: Flash(gated)).double()
        (layer,) = Capturer(module).run({"x": X.double()})
        assert isinstance(layer.attention, lb.Attention)
        assert layer.attention.variants == ({"gate"} if gated else set())
        expected = norms(partial(module.heads, attend=by_products), X[:1].double())
        check(layer.attention, expected, rtol=1e-7)
    assert THEIRS.flash_attn_func is flash_attn_func


GQA = newer_torch("2.5", "scaled_dot_product_attention has no enable_gqa")
NAME = "mine"


def masked(q, k, mask, scale):
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    return scores if mask is None else scores + mask


def hotter(module, q, k, v, mask, **kw):
    made = sdpa(q, k, v, attn_mask=mask, scale=3 * kw["scaling"], enable_gqa=True)
    return made.transpose(1, 2), None


def both_ways(module, q, k, v, mask, **kw):
    return sdpa(q, k, v, enable_gqa=True).transpose(1, 2), None


def doubled(module, q, k, v, mask, **kw):
    return 2 * hotter(module, q, k, v, mask, **kw)[0], None


def few(module, q, k, v, mask, **kw):
    scores = masked(q, k, mask, kw["scaling"])
    least = scores.topk(3, -1).values[..., -1:]
    p = scores.masked_fill(scores < least, -1e9).softmax(-1)
    return (p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).transpose(1, 2), p


def off_by_one(module, q, k, v, mask, **kw):
    e = masked(q, k, mask, kw["scaling"]).exp()
    p = e / (1 + e.sum(-1, keepdim=True))
    return (p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).transpose(1, 2), None


CLOSED = [hotter, both_ways, sdpa_attention_forward]
AUTOMATIC = [doubled, few, off_by_one]


@pytest.fixture
def registered():
    def model(function):
        AttentionInterface.register(NAME, function)
        AttentionMaskInterface.register(NAME, eager_mask)
        made = build(MODERN["Llama"]).double()
        for p in made.parameters():
            p.data.mul_(2)
        made.set_attn_implementation(NAME)
        return made

    yield model
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


@GQA
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("function", [*CLOSED, *AUTOMATIC])
def test_they_are_measured_themselves(function, closed, registered):
    model = registered(function)
    inputs = {name: t[:1] for name, t in inputs_for(model).items()}
    attention, given = model.layers[0].self_attn, given_to(model, "layers.0.self_attn", inputs)
    layer = lb.capture(model, inputs, closed=closed)[0]
    assert isinstance(layer, lb.Attention) == (closed and function in CLOSED)
    heads = before(attention.o_proj, lambda x: attention(**{**given, "hidden_states": x}))
    check(layer, norms(heads, given["hidden_states"]), rtol=1e-6)
    assert model.config._attn_implementation == NAME


def test_they_are_refused_in_training(registered):
    model = registered(hotter)
    words = "computes attention by 'mine', a function of your own"
    with pytest.raises(lb.LipboundError, match=words), lb.attention_probabilities(model):
        model(**inputs_for(model))
    assert model.config._attn_implementation == NAME

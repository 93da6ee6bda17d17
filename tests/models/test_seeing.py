"""A way to see attention that the package does not know, written as CONTRIBUTING says."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import build
from support.modules import norms, sdpa
from torch import Tensor, nn

import lipbound as lb
from lipbound.attention.layer import Attention
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


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> Any:
    assert causal
    return kernel(q, k, v, softmax_scale)


THEIRS = SimpleNamespace(flash_attn_func=flash_attn_func)


class Flash(nn.Module):
    """Attention by a kernel of another package; gated where asked for."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.gate = nn.Linear(24, 24) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 6)).chunk(3, 2)
        o = THEIRS.flash_attn_func(q, k, v, softmax_scale=0.3, causal=True).flatten(2)
        return self.out(o if self.gate is None else o * self.gate(x).sigmoid())


def heads(module: Flash, x: Tensor) -> Tensor:
    """By plain products."""
    q, k, v = (t.transpose(1, 2) for t in module.qkv(x).unflatten(-1, (12, 6)).chunk(3, 2))
    o = sdpa(q, k, v, scale=0.3, is_causal=True).transpose(1, 2)
    return o if module.gate is None else o * module.gate(x).sigmoid().unflatten(-1, (4, 6))


def test_the_guides_example(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(def flash.*?)```", GUIDE.read_text(), re.DOTALL)
    monkeypatch.setattr(interface, "OTHERS", [])
    exec(code, {"OTHERS": interface.OTHERS, "their_module": THEIRS})
    for gated in (False, True):
        module = build(lambda gated=gated: Flash(gated)).double()
        (layer,) = Capturer(module).run({"x": X.double()})
        assert isinstance(layer.attention, Attention)
        assert layer.attention.variants == ({"gate"} if gated else set())
        mine = lb.spectral_norm(layer.attention, tol=1e-9).lower[0]
        expected = norms(partial(heads, module), X[:1].double())
        torch.testing.assert_close(mine, expected, rtol=1e-7, atol=0)
    assert THEIRS.flash_attn_func is flash_attn_func


def test_without_it_nothing_is_seen() -> None:
    with pytest.raises(lb.errors.CaptureError, match="no attention that can be captured"):
        Capturer(build(Flash)).run({"x": X})

"""Modules that keep something from pass to pass: measured as they stand, and left as they were."""

import copy
import logging
import threading

import pytest
import torch
import transformers as tf
from support.models import LLAMA, build
from support.modules import QKV, check, joined, norms, sdpa
from support.oracles import matrices
from torch import Tensor

import lipbound as lb
from lipbound.errors import CaptureError

X = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))


class Plain(QKV):
    """Two heads; what classes that derive from it keep is made of its keys and values."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(16, 2)

    def heads(self, x):
        q, k, v = self.qkv(x)
        return sdpa(q, *self.kept(k, v))

    def kept(self, k, v):
        return k, v

    def forward(self, x):
        return self.o(joined(self.heads(x)))


class InAttribute(Plain):
    """Appends to a pair of tensors."""

    cache: tuple[Tensor, Tensor] | None = None

    def kept(self, k, v):
        if self.cache is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.cache, (k, v), strict=True))
        self.cache = k.detach(), v.detach()
        return k, v


class InBuffers(Plain):
    """Writes into buffers, and counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 40, 8))
        self.register_buffer("values", torch.zeros(1, 2, 40, 8))
        self.filled, self.seen = 0, []

    def kept(self, k, v):
        start, self.filled = self.filled, self.filled + k.shape[2]
        self.keys[:, :, start : self.filled] = k.detach()
        self.values[:, :, start : self.filled] = v.detach()
        self.seen.append(k.shape)
        before = self.keys[:, :, :start].to(k), self.values[:, :, :start].to(v)
        return torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)


class MovingMean(Plain):
    """Takes away a mean that every pass moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def heads(self, x):
        self.mean = self.mean * 0.9 + 0.1 * x.mean((0, 1))
        self.count += 1
        return super().heads(x - self.mean)


def state(module):
    buffers = {name: (id(t), t.clone()) for name, t in module.named_buffers()}
    others = {name: copy.deepcopy(v) for name, v in vars(module).items() if name[0] != "_"}
    return {"buffers": buffers, **others}


@pytest.mark.filterwarnings("ignore::lipbound.errors.Notice")
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("kind", [InAttribute, InBuffers, MovingMean])
def test_what_a_module_keeps_stays_as_it_was(kind, filled):
    module = kind().eval()
    if filled:
        with torch.no_grad():
            module(X.flip(1))
    before, double = state(module), copy.deepcopy(module).double()
    (layer,) = lb.capture(module, X)
    torch.testing.assert_close(state(module), before, rtol=0, atol=0)
    exact = norms(lambda x: copy.deepcopy(double).heads(x).transpose(1, 2), X.double())
    check(layer, exact, tol=1e-7, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::lipbound.errors.Notice")
def test_a_cache_that_is_given_does_not_grow_and_padding_behind_it_is_no_token():
    config = tf.LlamaConfig(**LLAMA, output_hidden_states=True)
    model, cache = build(lambda: tf.LlamaModel(config)), tf.DynamicCache(config=config)
    ids = torch.arange(1, 23).view(2, 11)
    given = {"input_ids": ids, "attention_mask": (ids < 21).long()}
    whole = lb.capture(model, given)[0]  # its first layer has the same tokens, not interacting yet
    model(ids[:, :5], past_key_values=cache)  # with gradients, as a user may leave them
    layer = lb.capture(model, given | {"input_ids": ids[:, 5:], "past_key_values": cache})[0]
    assert (cache.get_seq_length(), len(model(ids).hidden_states)) == (5, 3)
    # outputs of 6 channels, tokens of 24
    check(layer, torch.linalg.matrix_norm(matrices(whole, 1)[:, 30:, 120:], 2), sample=1, rtol=1e-5)


def test_padding_beside_a_key_that_is_no_token():
    m = torch.nn.MultiheadAttention(16, 2, batch_first=True, add_zero_attn=True).double()
    back = m.out_proj.weight.inverse().T
    x, padding = X.double(), {"key_padding_mask": torch.arange(5)[None] > 2}
    (layer,) = lb.capture(m, dict.fromkeys(("query", "key", "value"), x) | padding)
    check(layer, norms(lambda x: (m(x, x, x)[0] @ back).unflatten(2, (2, 8)), x[:, :3]), rtol=1e-6)


def test_what_cannot_be_copied_is_shared():
    """Loggers are one object however they are copied, and some things cannot be copied at all."""
    module = InBuffers().eval()
    module.log, module.other = logging.getLogger("lipbound.tests"), lambda: None
    module.log.handlers_before, module.pair = [1], (torch.zeros(2), module.seen)
    before = dict(vars(module))
    lb.capture(module, X)
    assert all(vars(module)[name] is value for name, value in before.items())
    assert (module.log.handlers_before, module.seen) == ([1], [])
    module.lock = threading.Lock()
    with pytest.raises(CaptureError, match="InBuffers cannot be copied, to be run apart: cannot p"):
        lb.capture(module, X)

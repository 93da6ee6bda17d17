"""The map from the outputs of heads to what their module returns, whatever stands between, against
dense derivatives of the module itself."""

import pytest
import torch
import torch.nn.functional as F
from support.models import MODERN, build, inputs_for
from support.modules import norms, sdpa, split
from torch import nn

import lipbound as lb
from lipbound.models.capture.capture import Capturer

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CONSTANT = torch.linspace(-1, 2, 12, dtype=torch.float64)


class Wrapper(nn.Module):
    """A linear map and one of low rank beside it, as adapters are."""

    def __init__(self, inside):
        super().__init__()
        self.base, self.a, self.b = inside, nn.Linear(12, 2, bias=False), nn.Linear(2, 12)

    def forward(self, x):
        return self.base(x) + 4 * self.b(self.a(x))


class Scaling(Wrapper):
    """What its own linear map is given is not what it is given."""

    def forward(self, x):
        return self.base(x * CONSTANT.to(x))


class Heads(nn.Module):
    """Three heads, and what stands between them and the module's return.

    Args:
        by_hand: whether to multiply probabilities and values here.
        end: that.
    """

    only: int | None = None
    """The head whose outputs are kept, for reference."""

    def __init__(self, by_hand, end=lambda m, o, x: m.out(o.flatten(2))):
        super().__init__()
        self.qkv, self.by_hand, self.end = nn.Linear(12, 36), by_hand, end
        self.out: nn.Module = nn.Linear(12, 12)

    def heads(self, x):
        q, k, v = (split(t, 3) for t in self.qkv(x).chunk(3, -1))
        made = (q @ k.mT / 2).softmax(-1) @ v if self.by_hand else sdpa(q, k, v)
        if self.only is not None:
            made = made * (torch.arange(3) == self.only)[:, None, None]
        return made.transpose(1, 2)

    def forward(self, x):
        return self.end(self, self.heads(x), x)


ENDS = {
    "constants between": lambda m, o, x: m.out(o.flatten(2) * CONSTANT.to(o)),
    "heads interleaved": lambda m, o, x: m.out(o.mT.flatten(2)),
    "two projections": lambda m, o, x: F.linear(m.out(o.flatten(2)), m.qkv.weight[:7]),
    "no module": lambda m, o, x: F.linear(o.flatten(2), m.out.weight, m.out.bias),
}
"""What a module makes of the outputs of its heads, and of its tokens."""
ABLATION = torch.tensor([1.0] * 4 + [0.0] * 4 + [3.0] * 4)


def twice(_, args, named):
    return tuple(2 * x for x in args), {name: 2 * x for name, x in named.items()}


def change(module, case):
    """Put something before or behind parts of a module."""
    if "wrapper" in case:
        module.out = (Scaling if "scales" in case else Wrapper)(module.out)
    elif case == "dropout":
        module.out = nn.Sequential(nn.Dropout(0.5), module.out, nn.Dropout(0.5))
    elif case == "a hook behind the projection":
        module.out.register_forward_hook(lambda _, args, made: 2 * made + 1)
    elif case == "a hook on the module":
        module.register_forward_hook(lambda _, args, made: -2 * made)
    elif case == "a hook before the module":
        module.register_forward_pre_hook(twice, with_kwargs=True)
    elif "hook" in case:
        module.out.register_forward_pre_hook(lambda _, args: (args[0] * ABLATION.to(args[0]),))


CASES = (
    *("plain", "a wrapper", "a wrapper that scales what it is given"),
    *("a hook that ablates a head", "a hook behind the projection", "a hook on the module"),
    *("a hook before the module", "dropout", *ENDS, "two projections and a hook"),
)


def made(case, by_hand):
    torch.manual_seed(1)
    end = ENDS.get(case.removesuffix(" and a hook"))
    module = Heads(by_hand) if end is None else Heads(by_hand, end)
    change(module, case)
    return module.double().eval()


def dense(module, tokens=X):
    """Norms of the Jacobians of a function at every sample."""
    return torch.cat([norms(lambda x: module(x).flatten(0, 1)[:, None], x[None]) for x in tokens])


def check(layer, map, expected, rtol=1e-7):
    torch.testing.assert_close(measured(layer, map), expected, rtol=rtol, atol=1e-12)


def measured(layer, name):
    return lb.spectral_norm(layer, map=name, tol=1e-9).lower


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_what_stands_between_is_counted_once(case, by_hand, closed):
    module = made(case, by_hand)
    (layer,) = lb.capture(module, {"x": X}, closed=closed)
    assert type(layer) is (lb.Attention if closed else lb.ModuleAttention)
    check(layer, "layer", dense(module))
    single = []
    for module.only in range(3):
        single.append(dense(module))
    check(layer, "head_out", torch.stack(single, 1))
    module.only, factor = None, 2 if case == "a hook before the module" else 1
    heads = [norms(lambda x: module.heads(factor * x), x[None]) for x in X]
    check(layer, "head", torch.stack(heads))


def clamped(module):
    module.out.register_forward_hook(lambda _, args, made: made.clamp(-0.2, 0.2))


def normalised(module):
    module.register_forward_hook(lambda _, args, made: made / made.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (clamped, "its output projection (Linear) is not affine"),
        (normalised, "makes something of the outputs of its heads that is not affine"),
    ],
)
def test_a_map_that_is_not_affine_is_automatic_and_told(change, told, closed):
    torch.manual_seed(1)
    module = Heads(False).double()
    (reference,) = lb.capture(module, {"x": X})
    change(module)
    (layer,) = lb.capture(module, {"x": X}, closed=closed)
    assert isinstance(layer, lb.ModuleAttention)
    assert not closed or told in layer.reason
    check(layer, "layer", dense(module))
    check(layer, "head", measured(reference, "head"))
    with pytest.raises(lb.LipboundError, match="'head_out' needs an affine output projection"):
        measured(layer, "head_out")


def test_a_residual_connection_inside_is_no_part_of_it():
    torch.manual_seed(1)
    module = Heads(False, lambda m, o, x: x + 3 * m.out(o.flatten(2))).double()
    (layer,) = lb.capture(module, {"x": X})
    check(layer, "layer", dense(lambda x: module(x) - x))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_maps_of_torch_layers(norm, norm_first, batch_first):
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(12, 3, 8, batch_first=batch_first, norm_first=norm_first)
    layer.add_module("norm1", norm(12))
    for p in layer.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    layer.double().eval()
    (found,) = lb.capture(layer, {"src": X if batch_first else X.transpose(0, 1)}, around=True)
    attention = layer.self_attn
    attention.batch_first = True

    def alone(x):
        return attention(x, x, x, need_weights=False)[0]

    def block(x):
        return x + alone(layer.norm1(x)) if norm_first else layer.norm1(x + alone(x))

    inner = layer.norm1(X) if norm_first else X
    for name, function, tokens in (
        ("layer", alone, inner),
        ("residual", lambda x: x + alone(x), inner),
        ("pre_norm" if norm_first else "post_norm", block, X),
    ):
        check(found, name, dense(function, tokens.detach()), rtol=1e-6)
    torch.testing.assert_close(found.w_o.flatten(0, 1), attention.out_proj.weight.mT.detach())


def test_released_weights_are_probed_again_with_their_wrappers():
    model = build(MODERN["Llama"])
    capturer, inputs = Capturer(model, around=True), inputs_for(model)
    capturer.run(inputs)
    for _ in range(2):
        capturer.model = build(MODERN["Llama"])
        layer = capturer.model.layers[0].self_attn
        capturer.release()
        capturer.run(inputs)
        wrapper = Wrapper(layer.o_proj)
        wrapper.base, wrapper.a, wrapper.b = layer.o_proj, nn.Linear(24, 2), nn.Linear(2, 24)
        layer.o_proj = wrapper
        capturer.release()
        w_o = capturer.run(inputs)[0].attention.w_o
        eye = torch.eye(24)
        expected = (wrapper(eye) - wrapper(0 * eye)).detach()
        torch.testing.assert_close(w_o.flatten(0, 1), expected)

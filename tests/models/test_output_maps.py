"""The map from the outputs of heads to what their module returns, whatever stands between, against
dense derivatives of the module itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CONSTANT = torch.linspace(-1, 2, 12, dtype=torch.float64)


class Wrapper(nn.Module):
    """A linear map and one of low rank beside it, as adapters are."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = inside, nn.Linear(12, 2, bias=False), nn.Linear(2, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 4 * self.b(self.a(x))


class Scaling(Wrapper):
    """What its own linear map is given is not what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x * CONSTANT.to(x))
        return made


class Heads(nn.Module):
    """Three heads, and what stands between them and the module's return.

    Args:
        by_hand: whether to multiply probabilities and values here.
    """

    only: int | None = None
    """The head whose outputs are kept, for reference."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.qkv, self.by_hand = nn.Linear(12, 36), by_hand
        self.out: nn.Module = nn.Linear(12, 12)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.by_hand:
            made = (q @ k.mT / 2).softmax(-1) @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v)
        if self.only is not None:
            made = made * (torch.arange(3) == self.only)[:, None, None]
        return made.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.heads(x).flatten(2))
        return made


class Between(Heads):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.heads(x).flatten(2) * CONSTANT.to(x))
        return made


class Interleaved(Heads):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.heads(x).mT.flatten(2))
        return made


class Two(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.qkv.weight[:7])


class Functional(Heads):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.out, nn.Linear)
        return F.linear(self.heads(x).flatten(2), self.out.weight, self.out.bias)


class Residual(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return x + 3 * super().forward(x)


def wrapped(module: Heads) -> None:
    module.out = Wrapper(module.out)


def scaled(module: Heads) -> None:
    module.out = Scaling(module.out)


def ablated(module: Heads) -> None:
    def without(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] * torch.tensor([1.0] * 4 + [0.0] * 4 + [3.0] * 4).to(args[0]),)

    module.out.register_forward_pre_hook(without)


def doubled(module: Heads) -> None:
    module.out.register_forward_hook(lambda _, args, made: 2 * made + 1)


def outside(module: Heads) -> None:
    module.register_forward_hook(lambda _, args, made: -2 * made)


def before(module: Heads) -> None:
    def twice(
        _: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return tuple(2 * x for x in args), {name: 2 * x for name, x in named.items()}

    module.register_forward_pre_hook(twice, with_kwargs=True)


def dropping(module: Heads) -> None:
    module.out = nn.Sequential(nn.Dropout(0.5), module.out, nn.Dropout(0.5))


def plain(module: Heads) -> None:
    pass


CASES: dict[str, tuple[type[Heads], Callable[[Any], None]]] = {
    "plain": (Heads, plain),
    "a wrapper": (Heads, wrapped),
    "a wrapper that scales what it is given": (Heads, scaled),
    "a hook that ablates a head": (Heads, ablated),
    "a hook behind the projection": (Heads, doubled),
    "a hook on the module": (Heads, outside),
    "a hook before the module": (Heads, before),
    "dropout": (Heads, dropping),
    "constants between": (Between, plain),
    "heads interleaved": (Interleaved, plain),
    "two projections": (Two, plain),
    "two projections and a hook": (Two, ablated),
    "no module": (Functional, plain),
}


def made(case: str, by_hand: bool) -> Heads:
    kind, change = CASES[case]
    torch.manual_seed(1)
    module = kind(by_hand)
    change(module)
    return module.double().eval()


def dense(module: nn.Module, x: Tensor) -> float:
    """The norm of the Jacobian of a module at one sample."""
    jacobian = torch.autograd.functional.jacobian(module, x[None])
    return float(torch.linalg.matrix_norm(jacobian.flatten(3).flatten(0, 2), 2))


def measured(layer: Any, name: str) -> Tensor:
    return lb.spectral_norm(layer, map=name, tol=1e-9).lower


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_what_stands_between_is_counted_once(case: str, by_hand: bool, closed: bool) -> None:
    module = made(case, by_hand)
    (layer,) = lb.capture(module, {"x": X}, closed=closed)
    assert type(layer) is (Attention if closed else ModuleAttention)
    found = measured(layer, "layer"), measured(layer, "head_out"), measured(layer, "head")
    expected = torch.tensor([dense(module, x) for x in X]).double()
    torch.testing.assert_close(found[0], expected, rtol=1e-7, atol=0)
    for head in range(3):
        module.only = head
        expected = torch.tensor([dense(module, x) for x in X]).double()
        torch.testing.assert_close(found[1][:, head], expected, rtol=1e-7, atol=1e-12)
    module.only, factor = None, 2 if case == "a hook before the module" else 1
    own = (torch.autograd.functional.jacobian(module.heads, factor * x[None]) for x in X)
    jacobians = (factor * jacobian for jacobian in own)
    heads = torch.stack([j[0].flatten(3).movedim(1, 0).flatten(1, 2) for j in jacobians])
    torch.testing.assert_close(found[2], torch.linalg.matrix_norm(heads, 2), rtol=1e-7, atol=0)

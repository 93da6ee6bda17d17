"""Attention and MLP sublayers of a model, read off from what passes through its modules, and checked against its own derivatives."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lipbound.analysis.network import NetworkJacobian, blocks, chain
from lipbound.analysis.sublayers.activations import ACTIVATIONS
from lipbound.analysis.sublayers.sublayer import AttentionPart, Part, Products, Sublayer
from lipbound.analysis.sublayers.token_mlp import TokenMLP
from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser
from lipbound.errors import LipboundError
from lipbound.models.capture.capture import Capturer
from lipbound.models.capture.recorder import implementation
from lipbound.models.capture.residual_detection import Seen, normaliser, watching

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLOSE = 1e-9
"""Largest relative difference between what passes through the model and what is rebuilt, in float64."""


@dataclass(frozen=True)
class Linear:
    """A linear module with what it was given and what it returned; weight (out, in)."""

    x: Tensor
    out: Tensor
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Block:
    """What was found of one block: attention and MLP of a whole batch, each with its normalisation."""

    attention: Attention
    around_attention: Normaliser | None
    mlp: TokenMLP
    around_mlp: Normaliser | None
    post: bool

    def sublayers(self, index: int, sample: int, delta: float) -> list[Sublayer]:
        """Of one sample, without its padding."""
        att, y = self.attention, self.mlp.y[sample]
        keep = torch.ones(len(y), dtype=torch.bool) if att.valid is None else att.valid[sample]
        mlp = TokenMLP(y[keep], self.mlp.inner, self.mlp.bias, self.mlp.outer, self.mlp.activation, self.mlp.gate)
        found: list[tuple[str, Part, Normaliser | None]] = [
            ("attention", AttentionPart(att.unpadded(sample), delta), self.around_attention), ("MLP", mlp, self.around_mlp),
        ]  # fmt: skip
        return [Sublayer(f"block {index}, {name}", part, _of_tokens(norm, sample, keep), self.post, delta) for name, part, norm in found]


@dataclass(frozen=True)
class Network:
    """The blocks of a model at a batch of inputs, and the normalisation behind the last of them, if there is one."""

    blocks: list[Block]
    last: Normaliser | None

    def sublayers(self, sample: int, start: int, end: int | None, delta: float) -> list[Sublayer]:
        """From block ``start`` to block ``end``, or with None to the last hidden state."""
        last = len(self.blocks) - 1 if end is None else end
        found = [one for i in range(start, last + 1) for one in self.blocks[i].sublayers(i, sample, delta)]
        if end is None and self.last is not None:
            valid = self.blocks[0].attention.valid
            keep = torch.ones(self.last.x.shape[1], dtype=torch.bool) if valid is None else valid[sample]
            found.append(Sublayer("last normalisation", None, _of_tokens(self.last, sample, keep), False, delta))
        return found


def read(model: "PreTrainedModel", inputs: Mapping[str, Tensor]) -> Network:
    """Every block of a model at a batch of inputs, in float64.

    Raises:
        LipboundError: a block that is not attention and then an MLP, each with a residual connection; what was found is not what the model computes.
        CaptureError: as of `lipbound.capture`.
    """
    model = copy.deepcopy(model).double().eval()
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    captured = Capturer(model, around=True).run(inputs)
    parts = blocks(model)
    if len(captured) != len(parts):
        raise LipboundError(f"{type(model).__name__} has {len(captured)} attention layers in {len(parts)} blocks; one in every block is understood")
    with implementation(model, "eager"), watching(model) as seen, linear_calls(parts) as calls, leaving(parts[-1]) as left, torch.no_grad():
        model(**inputs, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    found = []
    for i, one in enumerate(captured):
        found.append(_block(i, one.attention, calls[i], seen))
    last = next((norm for s in seen if left and s.x.shape == left[0].shape and torch.equal(s.x, left[0]) and (norm := normaliser(s))), None)
    network = Network(found, last)
    for i in range(len(parts)):
        _check(model, inputs, network, i)
    return network


@contextmanager
def linear_calls(parts: Sequence[nn.Module]) -> Iterator[list[list[Linear]]]:
    """Context in which all that passes through linear modules of each block is listed, in order."""
    found: list[list[Linear]] = [[] for _ in parts]
    hooks = []
    for block, calls in zip(parts, found, strict=True):

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor, calls: list[Linear] = calls) -> None:
            weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
            assert isinstance(weight, Tensor)
            weight = weight.detach().mT if isinstance(module, Conv1D) else weight.detach()
            bias = bias.detach() if isinstance(bias, Tensor) else weight.new_zeros(len(weight))
            calls.append(Linear(args[0].detach(), output.detach(), weight, bias))

        hooks += [module.register_forward_hook(after) for module in block.modules() if isinstance(module, nn.Linear | Conv1D)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def leaving(block: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which what a block returns is listed."""
    found: list[Tensor] = []
    hook = block.register_forward_hook(lambda _, args, output: found.append((output[0] if isinstance(output, tuple) else output).detach()))
    try:
        yield found
    finally:
        hook.remove()


def _block(index: int, att: Attention, calls: list[Linear], seen: Sequence[Seen]) -> Block:
    around = att.surroundings
    if around is None or around.residual is None:
        raise LipboundError(f"block {index}: no residual connection around its attention was found, so its sublayers are not known")
    mlp, out = _mlp(index, calls, att)
    same = [
        Seen(s.module, s.x.view(att.x.shape), s.out.view(att.x.shape))
        for s in seen
        if s.x.shape[-1] == att.x.shape[2] and s.x.numel() == att.x.numel()
    ]
    post = around.residual == "post"
    if post:
        norm = next((n for s in same if _close(s.x, mlp.y + out) and (n := normaliser(s))), None)
        return Block(att, around.followed_by, mlp, norm, True)
    norm = next((n for s in same if _close(s.out, mlp.y) and (n := normaliser(s))), None)
    return Block(att, around.fed_by, mlp, norm, False)


def _mlp(index: int, calls: list[Linear], att: Attention) -> tuple[TokenMLP, Tensor]:
    """The MLP among the linear maps of a block, by the numbers that pass through them, and its output."""
    shape = att.x.shape
    wide = [c for c in calls if c.x.shape[-1] == shape[2] and c.x.numel() == att.x.numel()]
    back = [c for c in calls if c.out.shape[-1] == shape[2] and c.out.numel() == att.x.numel()]
    for last in back:
        for first in wide:
            if first is last or first.out.shape != last.x.shape:
                continue
            for activation in ACTIVATIONS:
                value = activation.value(first.out)
                y, out = first.x.view(shape), last.out.view(shape)
                if _close(value, last.x):
                    return TokenMLP(y, first.weight, first.bias, last.weight, activation), out
                for other in wide:
                    if other is not first and other.out.shape == last.x.shape and torch.equal(other.x, first.x) and _close(value * other.out, last.x):
                        return TokenMLP(y, first.weight, first.bias, last.weight, activation, (other.weight, other.bias)), out
    known = ", ".join(a.name for a in ACTIVATIONS)
    raise LipboundError(f"block {index}: no MLP was found: two linear maps with {known} between them, or three where one of them is a gate")


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().amax()) <= CLOSE * float(b.abs().amax())


def _of_tokens(norm: Normaliser | None, sample: int, keep: Tensor) -> Normaliser | None:
    if norm is None:
        return None
    return Normaliser(norm.x[sample : sample + 1, keep], norm.weight, norm.bias, eps=norm.eps, centred=norm.centred)


def _check(model: "PreTrainedModel", inputs: Mapping[str, Tensor], network: Network, index: int) -> None:
    """Raise LipboundError where the Jacobian of a block is not that of the sublayers found in it, on a random direction."""
    with chain(model, dict(inputs), index, index) as (f, x, real):
        direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(index)).to(x.device)
        direction = direction if real is None else direction * real
        own = NetworkJacobian(f, x, real).jvp(direction)
    for s in range(len(x)):
        keep = torch.ones(x.shape[1], dtype=torch.bool) if real is None else real[s, :, 0] != 0
        parts = network.sublayers(s, index, index, 0.5)
        rebuilt = Products(parts, (int(keep.sum()), x.shape[2]), x.device).jvp(direction[s][keep][None])[0]
        off = float((rebuilt - own[s][keep]).norm() / own[s][keep].norm())
        if not off <= 1e-6:
            raise LipboundError(
                f"block {index} of {type(model).__name__} is not its attention and then its MLP, each with a residual connection: derivatives are "
                f"off by {off:.1e}; parallel sublayers, scaled residuals and further modules are not understood"
            )

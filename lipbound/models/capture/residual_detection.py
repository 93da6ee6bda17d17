"""Finding the layer normalisation around each attention layer of a model, by the numbers that pass
through it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser, ResidualContext
from lipbound.models.offload import resident

RESIDUAL_TOLERANCE = 1e-4
"""Largest relative difference between what passes through the model and what is rebuilt."""


class Seen(NamedTuple):
    """A module with one vector of weights, what it was given and what it returned."""

    module: nn.Module
    x: Tensor
    out: Tensor


@contextmanager
def watching(model: nn.Module | None) -> Iterator[list[Seen]]:
    """Context in which everything that passes through modules that may be normalisations is listed,
    in order; nothing for None."""
    seen: list[Seen] = []

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (
            args
            and isinstance(args[0], Tensor)
            and isinstance(output, Tensor)
            and args[0].shape == output.shape
        ):
            seen.append(Seen(module, args[0].detach(), output.detach()))

    modules = [] if model is None else list(model.modules())
    candidates = [
        m for m in modules if isinstance(w := getattr(m, "weight", None), Tensor) and w.ndim == 1
    ]
    hooks = [module.register_forward_hook(after) for module in candidates]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def surroundings(att: Attention, seen: Sequence[Seen]) -> ResidualContext:
    """What stands around a layer, each part of it checked against the numbers of the model; None
    for what could not be found."""
    shape = att.x.shape
    seen = [
        Seen(s.module, s.x.view(shape), s.out.view(shape))
        for s in seen
        if s.x.numel() == att.x.numel() and s.x.shape[-1] == shape[-1]
    ]
    fed_by = next(
        (norm for s in seen if _close(s.out, att.x, att) and (norm := normaliser(s)) is not None),
        None,
    )
    if att.w_o is None or att.w_o.shape[2] != att.x.shape[2]:
        return ResidualContext(fed_by)
    out = torch.einsum("shnv,hvo->sno", att.out, att.w_o)
    att.cache.drop("p", "out")
    streams = {"post": att.x} | ({} if fed_by is None else {"pre": fed_by.x})
    for residual, stream in streams.items():
        for s in seen:
            if _constant(s.x - stream - out, out, att):
                return ResidualContext(
                    fed_by, residual, normaliser(s) if residual == "post" else None
                )
    return ResidualContext(fed_by)


def _real(t: Tensor, att: Attention) -> Tensor:
    """The tokens that are not padding, (n, D)."""
    return t.flatten(0, 1) if att.valid is None else t[att.valid]


def _close(a: Tensor, b: Tensor, att: Attention) -> bool:
    a, b = _real(a, att), _real(b, att)
    return float((a - b).abs().amax()) <= RESIDUAL_TOLERANCE * float(b.abs().amax())


def _constant(difference: Tensor, out: Tensor, att: Attention) -> bool:
    """Whether a difference is the same for every token: the output bias."""
    rest = _real(difference, att)
    if len(rest) < 2:
        return False  # one token shows nothing
    return float((rest - rest[:1]).abs().amax()) <= RESIDUAL_TOLERANCE * float(
        _real(out, att).abs().amax()
    )


def normaliser(s: Seen) -> Normaliser | None:
    """LayerNorm, or RMSNorm with weights w or 1 + w, whichever rebuilds what the module
    returned."""
    with resident(s.module):
        weight, bias = s.module.weight, getattr(s.module, "bias", None)
    eps = eps_of(s.module, s.x.dtype)
    assert isinstance(weight, Tensor)
    weight, bias = weight.to(s.x.device), None if bias is None else bias.to(s.x.device)
    for centred, shift in ((True, 0.0), (False, 0.0), (False, 1.0)):
        norm = Normaliser(
            s.x,
            (weight + shift).detach(),
            None if bias is None else bias.detach(),
            eps=eps,
            centred=centred,
        )
        if float((norm.out - s.out).abs().amax()) <= RESIDUAL_TOLERANCE * float(s.out.abs().amax()):
            return norm
    return None


def eps_of(norm: nn.Module, dtype: torch.dtype) -> float:
    """The number that a module of normalisation, or one inside it, adds under the root; torch's own
    default, which depends on the dtype, if None."""
    for part in norm.modules():
        for name in ("eps", "variance_epsilon", "epsilon"):
            value = getattr(part, name, None)
            if isinstance(value, (int, float)) or (
                isinstance(value, Tensor) and value.numel() == 1
            ):
                return float(value)
    return (
        torch.finfo(dtype).eps
        if any(isinstance(part, nn.RMSNorm) for part in norm.modules())
        else 0.0
    )

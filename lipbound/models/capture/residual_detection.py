"""Finding the layer normalisation around each attention layer, by the numbers that pass through."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser, ResidualContext
from lipbound.models.capture.rerun import relative_error
from lipbound.models.capture.seeing.call import samples_first
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
    """Yield a list of what passes through modules that may be normalisations; empty for None."""
    seen: list[Seen] = []

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and isinstance(output, Tensor) and x.shape == output.shape:
            seen.append(Seen(module, x.detach(), output.detach()))

    with ExitStack() as hooks:
        for module in () if model is None else model.modules():
            if isinstance(w := getattr(module, "weight", None), Tensor) and w.ndim == 1:
                hooks.enter_context(module.register_forward_hook(after))
        yield seen


def surroundings(att: Attention, seen: Sequence[Seen]) -> ResidualContext:
    """Return what stands around a layer, each part checked against the numbers of the model.

    Parts are None where they could not be found.
    """
    shape, (samples, n) = att.x.shape, att.x.shape[:2]

    def laid(t: Tensor) -> Tensor:
        return samples_first(t, samples, n).reshape(shape)

    like = [s for s in seen if s.x.numel() == att.x.numel() and s.x.shape[-1] == shape[-1]]
    seen = [Seen(s.module, laid(s.x), laid(s.out)) for s in like]
    feeding = (
        normaliser(s)
        for s in seen
        if relative_error(_real(s.out, att), _real(att.x, att)) <= RESIDUAL_TOLERANCE
    )
    fed_by = next(filter(None, feeding), None)
    if att.w_o is None or att.w_o.shape[2] != shape[2]:
        return ResidualContext(fed_by)
    out = torch.einsum("shnv,hvo->sno", att.out, att.w_o)
    att.cache.drop("p", "out")
    streams = {"post": att.x} | ({} if fed_by is None else {"pre": fed_by.x})
    for residual, stream in streams.items():
        for s in seen:
            if _constant(s.x - stream - out, out, att):
                after = normaliser(s) if residual == "post" else None
                return ResidualContext(fed_by, residual, after)
    return ResidualContext(fed_by)


def _real(t: Tensor, att: Attention) -> Tensor:
    """Return the tokens that are not padding, (n, D)."""
    return t.flatten(0, 1) if att.valid is None else t[att.valid]


def _constant(difference: Tensor, out: Tensor, att: Attention) -> bool:
    """Return whether a difference is the same for every token: the output bias."""
    rest, size = _real(difference, att), float(_real(out, att).abs().amax())
    if len(rest) < 2:
        return False  # one token shows nothing
    return float((rest - rest[:1]).abs().amax()) <= RESIDUAL_TOLERANCE * size


def normaliser(s: Seen) -> Normaliser | None:
    """Return LayerNorm, or RMSNorm with weights w or 1 + w, whichever rebuilds the output."""
    with resident(s.module):
        weight, bias = s.module.weight, getattr(s.module, "bias", None)
    assert isinstance(weight, Tensor)
    weight, bias = weight.to(s.x.device), None if bias is None else bias.to(s.x.device).detach()
    eps = eps_of(s.module, s.x.dtype)
    for centred, shift in ((True, 0.0), (False, 0.0), (False, 1.0)):
        norm = Normaliser(s.x, (weight + shift).detach(), bias, eps=eps, centred=centred)
        if relative_error(norm.out, s.out) <= RESIDUAL_TOLERANCE:
            return norm
    return None


def eps_of(norm: nn.Module, dtype: torch.dtype) -> float:
    """Return the number that a normalisation, or one inside it, adds under the root.

    It is torch's own default, which depends on the dtype, where an RMSNorm has None.
    """
    for part in norm.modules():
        for name in ("eps", "variance_epsilon", "epsilon"):
            value = getattr(part, name, None)
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                return float(value)
    own = any(isinstance(part, nn.RMSNorm) for part in norm.modules())
    return torch.finfo(dtype).eps if own else 0.0

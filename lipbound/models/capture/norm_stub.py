"""Normalisations of queries and keys, taken out of a layer and read off: a stub in a
normalisation's place does its linear part only."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.models.capture.recorder import Call, hidden_states
from lipbound.models.capture.residual_detection import eps_of

Project = Callable[[Tensor], tuple[Tensor, ...]]
"""What makes q, k, v of tokens."""


class NormStub(nn.Module):
    """Stands for a normalisation: does what ``mode`` says with it.

    "linear": passes vectors through, without their mean if the normalisation takes it away.
    "nothing": zero. "pattern": a fixed vector of mean zero and mean square 1. "plus", "minus",
    "shifted": what the normalisation makes of the fixed vector, of its negative, of it plus one.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.mode, self.centred, self.width = norm, "linear", False, 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"its normalisation {type(self.norm).__name__} is of an unknown make: the layer "
                f"itself reads its {name}"
            ) from None

    def forward(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(y, Tensor) or any(
            isinstance(one, Tensor) for one in (*args, *kwargs.values())
        ):
            raise TypeError(
                f"its normalisation {type(self.norm).__name__} is of an unknown make: it takes "
                "more than one tensor"
            )
        self.width = y.shape[-1]
        if self.mode == "linear":
            return y - y.mean(-1, keepdim=True) if self.centred else y
        if self.mode == "nothing":
            return torch.zeros_like(y)
        vector = _pattern(y.shape[-1]).to(y).expand_as(y).contiguous()
        if self.mode == "pattern":
            return vector
        out: Tensor = self.norm(
            {"plus": vector, "minus": -vector, "shifted": vector + 1}[self.mode], *args, **kwargs
        )
        return out


def stub_norms(owner: nn.Module) -> list[NormStub]:
    """Put a stub in the place of every normalisation of a module, the outermost where they are
    nested; the stubs."""
    stubs: list[NormStub] = []
    replaced: list[str] = []
    for name, module in list(owner.named_modules()):
        inside = any(name.startswith(done + ".") for done in replaced)
        if name and not inside and "norm" in type(module).__name__.lower():
            replaced.append(name)
            parent, _, last = name.rpartition(".")
            stubs.append(NormStub(module))
            setattr(owner.get_submodule(parent), last, stubs[-1])
    return stubs


def read_normalisations(
    call: Call, stubs: Sequence[NormStub], project: Project
) -> list[tuple[QKNorm | None, bool]]:
    """Those of queries and of keys, each as if a head's own vector were normalised, and whether it
    is that of all heads together.

    Args:
        call: of the layer.
        stubs: what stands for the normalisations of a copy of the layer; left in the mode "linear".
        project: q, k, v, each (samples N, heads, d), that the copy makes of tokens (samples, N, D).

    Raises:
        CaptureError: values are normalised, queries or keys more than once, or vectors that are
            neither a head's nor those of all heads together.
    """
    x = torch.randn(
        hidden_states(call).shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).to(call.q.device)
    plain = project(x)
    touching: list[list[NormStub]] = [[], [], []]
    for stub in [s for s in stubs if s.width]:
        stub.mode = "nothing"
        for side, (a, b) in enumerate(zip(project(x), plain, strict=True)):
            if not torch.equal(a, b):
                touching[side].append(stub)
        stub.mode = "linear"
    if touching[2]:
        latent = touching[2][0].width not in (
            plain[2].shape[-1],
            plain[2].shape[-1] * plain[2].shape[-2],
        )
        raise call.unsupported(
            "makes its values of a normalised vector (latent attention)"
            if latent
            else "normalises its values"
        )
    if any(len(found) > 1 for found in touching):
        raise call.unsupported("normalises its queries or keys twice")
    return [
        _read(call, found[0], side, x, project) if found else (None, False)
        for side, found in enumerate(touching[:2])
    ]


def _read(
    call: Call, stub: NormStub, side: int, x: Tensor, project: Project
) -> tuple[QKNorm, bool]:
    """The normalisation of queries (side 0) or keys (1) that a stub stands for, and whether it is
    that of all heads together."""

    def seen(mode: str) -> Tensor:
        stub.mode = mode
        return project(x)[side][0]  # (heads, d) of one token

    pattern, plus, minus, shifted = (seen(mode) for mode in ("pattern", "plus", "minus", "shifted"))
    heads, d = pattern.shape
    stub.centred = bool((shifted - plus).abs().amax() <= 1e-5 * plus.abs().amax())
    if stub.width not in (d, heads * d):
        raise call.unsupported(
            "makes its queries or keys of a normalised vector of another width (latent attention)"
        )
    eps = eps_of(stub.norm, call.q.dtype)
    bias = (plus + minus) / 2
    stub.mode = "linear"
    gain = (plus - minus) / 2 / pattern * (1 + eps) ** 0.5
    return QKNorm(gain, bias if bool((bias != 0).any()) else None, eps), stub.width != d


def _pattern(width: int) -> Tensor:
    """A vector without zeros, of mean zero and mean square 1 (for a width of at least 2)."""
    vector = torch.ones(width, dtype=torch.float64)
    vector[1::2] = -1
    if width % 2 and width > 1:
        vector[-3:] = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64) / 2**0.5
    return vector

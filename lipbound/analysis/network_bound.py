r"""A sound local Lipschitz constant of several blocks of a network over a ball of inputs: Lemma 114 (docs/theory/networks.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipbound.analysis.network import blocks
from lipbound.analysis.sublayers.reading import read
from lipbound.analysis.sublayers.sublayer import Products, Sublayer, upper_norm
from lipbound.bounds.entry import check_radii
from lipbound.errors import LipboundError, real, shown
from lipbound.linalg.operator_norm import operator_norm
from lipbound.models.capture.recorder import check_model, taken

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class NetworkBound:
    """What `network_bound` found; float64 on the CPU.

    Attributes:
        upper: upper bound on the norm of the Jacobian at every input of the ball, (samples,) or (samples, radii).
        centre: upper end of the exact norm at the centre, (samples,). lower: its lower end, so that ``upper`` has a bracket.
        product: the product of the sublayers' own constants over the same ball, which ``upper`` is to be compared with, as ``upper``.
        sublayers: what the map was taken apart into, in order.
    """

    upper: Tensor
    centre: Tensor
    lower: Tensor
    product: Tensor
    sublayers: tuple[str, ...]


def network_bound(
    model: "PreTrainedModel",
    inputs: Mapping[str, Tensor],
    radius: float | Sequence[float],
    *,
    start: str | int = "embeddings",
    end: str | int = "last_hidden_state",
    delta: float = 1e-6,
) -> NetworkBound:
    r"""An upper bound on the Lipschitz constant of some blocks over a ball of inputs, at every sample.

    The map starts at what enters block ``start`` and ends at what leaves block ``end``. All its tokens together move by at most ``radius`` (the
    Frobenius norm of the change); padding is held fixed. With the sublayers' Jacobians :math:`J_l` at the centre and :math:`e_l(r)` at least
    :math:`\|J'_l - J_l\|` where the input of sublayer l moves by at most r,

    .. math:: T_b = \|J_b \cdots J_1\| + \sum_{l \le b} \|J_b \cdots J_{l+1}\|\, e_l(T_{l-1} \rho)\, T_{l-1}

    bounds the first b of them over the ball of radius :math:`\rho`: Lemma 114 (docs/theory/networks.md). As the radius goes to 0 it is the exact
    constant of the composition. It is no certificate of robustness: beyond small radii it is far above what attacks find.

    Computed in float64, from a copy of the model, one sample at a time: a norm for every pair of sublayers. Rounding of activations is not counted.

    Args:
        model: a transformers model of blocks that are attention and then an MLP, each with a residual connection and layer normalisation before or
            after: ViT, BERT, GPT-2, Llama and their kin.
        inputs: what its forward takes.
        radius: in the units of the vectors that enter the map; a sequence gives a curve.
        start: "embeddings", or the number of a block.
        end: "last_hidden_state" (with the model's last normalisation), or the number of a block.
        delta: probability that any of the norms at the centre fails.

    Raises:
        LipboundError: no such block, a negative radius, blocks of another kind, normalised queries and keys.
    """
    check_model(model)
    inputs = {name: t for name, t in taken(model, inputs).items() if isinstance(t, Tensor)}
    single, radii = check_radii(radius, "frobenius")
    delta = real("delta", delta, "a probability between 0 and 1", above=0, below=1)
    first, last = _places(start, end, len(blocks(model)))
    network = read(model, inputs)
    samples = len(network.blocks[0].attention.x)
    count = len(network.sublayers(0, first, last, delta))
    share = delta / (samples * (count * (count + 1) // 2 + 2 * count))  # a norm for each pair, and two for each sublayer alone
    found = [_Chain(network.sublayers(s, first, last, share), share).bounds(radii) for s in range(samples)]
    upper, product = (torch.stack([one[i] for one in found]) for i in range(2))
    centre, lower = (torch.stack([one[i] for one in found]) for i in (2, 3))
    names = tuple(one.name for one in network.sublayers(0, first, last, share))
    return NetworkBound(upper[:, 0] if single else upper, centre, lower, product[:, 0] if single else product, names)


def _places(start: str | int, end: str | int, count: int) -> tuple[int, int | None]:
    """Numbers of the first and the last block; None for the end where the last normalisation counts."""
    for name, value, word in (("start", start, "embeddings"), ("end", end, "last_hidden_state")):
        number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count
        if not number and not (isinstance(value, str) and value == word):
            raise LipboundError(f"{name} is {shown(value)}; give {word!r} or the number of a block, and this model has {count}")
    first = start if isinstance(start, int) else 0
    last = end if isinstance(end, int) else None
    if last is not None and last < first:
        raise LipboundError(f"end is block {last} but start is block {first}; end at {first} or later")
    return first, last


class _Chain:
    """Some sublayers at one sample, and the norms of all that follow each other."""

    def __init__(self, sublayers: list[Sublayer], delta: float):
        self.sublayers, self.delta = sublayers, delta
        shape, device = sublayers[0].shape, sublayers[0].device
        count = len(sublayers)
        self.norms = {(a, b): upper_norm(Products(sublayers[a:b], shape, device), delta) for a in range(count) for b in range(a + 1, count + 1)}
        self.norms |= {(b, b): torch.ones((), dtype=torch.float64) for b in range(count + 1)}
        self.lower = operator_norm(Products(sublayers, shape, device), tol=1e-6).lower[0]

    def bounds(self, radii: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Upper bound and product of single sublayers, (radii,), and the ends of the norm at the centre, ()."""
        found = [self._bound(radius) for radius in radii]
        upper, product = (torch.stack([one[i] for one in found]) for i in range(2))
        return upper, product, self.norms[0, len(self.sublayers)], self.lower

    def _bound(self, radius: float) -> tuple[Tensor, Tensor]:
        tops, changes = [torch.ones((), dtype=torch.float64)], []
        product = torch.ones((), dtype=torch.float64)
        for b, sublayer in enumerate(self.sublayers, 1):
            reach = float(tops[-1]) * radius
            changes.append(_change(sublayer, reach))
            spread = [self.norms[at, b] * e * t for at, (e, t) in enumerate(zip(changes, tops, strict=True), 1)]
            telescoped = self.norms[0, b] + torch.stack(spread).sum()
            alone = self.norms[b - 1, b] + changes[-1]
            tops.append(telescoped.minimum(alone * tops[-1]).nan_to_num(torch.inf, torch.inf) * (1 + 1e-12))
            product = product * (self.norms[b - 1, b] + _change(sublayer, float(product) * radius))
        return tops[-1], product.nan_to_num(torch.inf, torch.inf)


def _change(sublayer: Sublayer, radius: float) -> Tensor:
    """How far the Jacobian of a sublayer may be from the one at the centre, on the CPU, (); infinite where that cannot be said."""
    return sublayer.change(radius).cpu().nan_to_num(torch.inf, torch.inf)

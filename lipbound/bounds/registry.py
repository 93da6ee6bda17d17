"""What a bound is, and the list of all of them."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError, UnknownNameError, nearest

MAP_NORMS = {"head": "exact", "l2": "exact_l2"}
"""The variable that holds the exact norm of the map a bound is about."""


@dataclass(frozen=True)
class Bound:
    """A published (or our own) upper bound on the local Lipschitz constant of one attention head at one input.

    Attributes:
        name: registry name, the variable of a run.
        label: short label for figures and tables.
        citation: BibTeX key of the source (see `lipbound.bounds.citations`).
        statement: the inequality, in plain text.
        source: theorem or equation number.
        assumptions: when the statement is a bound, in words.
        map: "head" (softmax(q k^T) v; with the output slice folded into the values when asked for) or "l2" (L2 attention).
        cost: leading cost per head.
        condition: the same assumptions as a test on an `Attention`, True per (sample, head) where they hold.
        function: the bound itself.
        costly: whether it takes far longer than the exact norm; such bounds are computed on request, not by default.
        caveat: why the statement is no bound where its assumptions fail; empty when they always hold.
        ball: the statement for all inputs near X, or None where the source has none: see `over_ball`.
        covers: which of `lipbound.attention.variants.VARIANTS` it holds for; it says nothing about layers with others.
    """

    name: str
    label: str
    citation: str
    statement: str
    source: str
    assumptions: str
    map: str
    cost: str
    condition: Callable[[Attention], Tensor]
    function: Callable[[Attention], Tensor]
    costly: bool = False
    ball: Callable[[Attention, float, str], Tensor] | None = None
    caveat: str = ""
    covers: frozenset[str] = frozenset()

    def __call__(self, att: Attention) -> Tensor:
        """Value of the bound, (samples, heads), float64.

        Raises:
            AttentionError: a layer that the statement is not about; see `applies`.
        """
        att.only(f"bound {self.name!r}", self.covers)
        return self.function(att).to(torch.float64).expand(att.samples, att.heads)

    def applies(self, att: Attention) -> bool:
        """Whether the statement is about layers such as this one at all: whether it covers its variants."""
        return att.variants <= self.covers

    def sound(self, att: Attention) -> Tensor:
        """Whether the statement is a valid upper bound here, by its assumptions: (samples, heads), bool."""
        return self.condition(att).expand(att.samples, att.heads)

    def over_ball(self, att: Attention, radius: float, *, norm: str = "token") -> Tensor:
        """The source's bound over a ball of inputs, (samples, heads), float64; `lipbound.bounds.over_ball` is ours.

        Args:
            att: the layer at the centre.
            radius: of the ball, in the units of ``x``.
            norm: "token" (every token moves by at most ``radius``) or "frobenius" (all of X does).

        Raises:
            LipboundError: where the source has no such statement, a negative radius, an unknown norm.
        """
        if self.ball is None:
            raise LipboundError(
                f"bound {self.name!r} is a statement about one input, without a radius; use lipbound.bounds.over_ball(..., at={self.name!r})"
            )
        att.only(f"bound {self.name!r} over a ball")
        check_ball(radius, norm)
        return self.ball(att, float(radius), norm).to(torch.float64).expand(att.samples, att.heads)

    @property
    def year(self) -> int:
        """Year of the source, read off its BibTeX key."""
        return int("".join(c for c in self.citation if c.isdigit()))

    @property
    def exact(self) -> str:
        """Name of the variable with the exact norm this bound is compared with."""
        return MAP_NORMS[self.map]


BALLS = {"token": "every token moves by at most the radius", "frobenius": "X moves by at most the radius in the Frobenius norm"}


def check_ball(radius: float, norm: str) -> None:
    """Raise LipboundError unless ``radius`` is a number from 0 to 1e60, whose fourth power is in range, and ``norm`` one of `BALLS`."""
    if norm not in BALLS:
        raise UnknownNameError(f"unknown norm {norm!r} of a ball; {nearest(norm, BALLS)}")
    if not 0 <= radius <= 1e60:
        raise LipboundError(f"radius is {radius}; it must be a finite number >= 0, and at most 1e60")


_BOUNDS: dict[str, Bound] = {}


def bound(
    name: str,
    *,
    label: str,
    citation: str,
    statement: str,
    source: str,
    assumptions: str,
    condition: Callable[[Attention], Tensor],
    cost: str,
    map: str = "head",
    costly: bool = False,
    ball: Callable[[Attention, float, str], Tensor] | None = None,
    caveat: str = "",
    covers: Collection[str] = (),
) -> Callable[[Callable[[Attention], Tensor]], Callable[[Attention], Tensor]]:
    """Decorator: enter a function of an `Attention` into the registry under ``name``."""

    def enter(function: Callable[[Attention], Tensor]) -> Callable[[Attention], Tensor]:
        if name in _BOUNDS:
            raise ValueError(f"a bound named {name!r} is already registered")
        _BOUNDS[name] = Bound(
            name, label, citation, statement, source, assumptions, map, cost, condition, function, costly, ball, caveat, frozenset(covers)
        )
        return function

    return enter


def names() -> list[str]:
    """Registry names of all bounds, oldest source first, as figures and tables show them."""
    return sorted(_BOUNDS, key=lambda name: _BOUNDS[name].year)


def get(name: str) -> Bound:
    """The bound registered under ``name``.

    Raises:
        UnknownNameError: naming the nearest registered names.
    """
    if name not in _BOUNDS:
        raise UnknownNameError(f"unknown bound {name!r}; {nearest(name, _BOUNDS)}")
    return _BOUNDS[name]


def resolve(bounds: str | Iterable[str]) -> list[str]:
    """Names for "all", "default" (all but the costly), one name, comma-separated names, or a list of names; unknown ones raise."""
    if isinstance(bounds, str):
        if bounds in ("default", "all"):
            return [name for name in names() if bounds == "all" or not get(name).costly]
        bounds = [part.strip() for part in bounds.split(",") if part.strip()]
    return list(dict.fromkeys(get(name).name for name in bounds))


def evaluate(att: Attention, bounds: str | Iterable[str] = "default") -> dict[str, Tensor]:
    """Values of some bounds on every head at every input: {name: (samples, heads) float64}.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> att = Attention(*(torch.randn(s, generator=g) for s in [(2, 5, 8), (3, 8, 4), (3, 8, 4), (3, 8, 4)]))
    >>> evaluate(att, ["castin", "yudin"])["yudin"].shape
    torch.Size([2, 3])
    """
    return {name: get(name)(att) for name in resolve(bounds)}

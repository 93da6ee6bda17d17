"""The list of all bounds. The papers are imported when the list is first asked for."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lipbound.bounds.entry import Bound, Formula
from lipbound.bounds.kinds import ByKind
from lipbound.errors import UnknownNameError, nearest, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from lipbound.attention.layer import Attention
    from lipbound.bounds.entry import Ball, Function, Layer, Terms

PAPERS = ("castin2024", "kim2021", "specformer2024", "yudin2025", "lipbound2026.plain", "lipbound2026.variants", "lipbound2026.gram")
"""The modules that register bounds, under ``lipbound.bounds``."""
_BOUNDS: dict[str, Bound] = {}
_BIBTEX: dict[str, str] = {}


def bound(
    name: str,
    *,
    label: str,
    citation: str,
    statement: str,
    source: str,
    assumptions: str,
    condition: Function,
    cost: str,
    bibtex: str = "",
    map: str = "head",
    costly: bool = False,
    terms: Terms | None = None,
    layer: Layer | None = None,
    ball: Ball | None = None,
    caveat: str = "",
    covers: Collection[str] = (),
    differentiable: bool = True,
) -> Callable[[Function], Bound]:
    """Decorator: enter a function of an `Attention` into the registry under ``name``. What it returns is the `Bound`, which is called alike.

    Adding a bound touches three files: the paper's own, with its BibTeX entry and terms inside, one word in `PAPERS`, and a test. A new paper::

        BIBTEX = "@misc{doe2027, ...}"

        @bound(
            "doe",
            label="Doe 2027",
            citation="doe2027",
            bibtex=BIBTEX,
            statement="||J|| <= ||W_V|| (||P|| + ...)",
            source="Theorem 1",
            assumptions="no query bias; any mask",
            condition=qty.no_query_bias,
            cost="O(N D)",
            terms=values_and_softmax(lambda att, value: factors.norm_v(att) * factors.norm_p(att) / value),
        )
        def doe(att: Attention) -> Tensor: ...

    Args:
        covers: variants of attention for which the same function holds.
        bibtex: the source's entry; bounds of one source may share it.
        terms, layer: see `Formula`. The other arguments are attributes of `Bound`.

    Where other formulas hold for other kinds of heads, each is registered with `Bound.extends`::

        @doe.extends("rotation", "cap", condition=qty.always)
        def _turned(att: Attention) -> Tensor: ...

    Raises:
        ValueError: a name that is taken, a BibTeX key that has another entry.
    """

    def enter(function: Function) -> Bound:
        if function.__module__ not in _modules():
            load_papers()  # whose names are taken, even if nobody has asked for them yet
        if name in _BOUNDS:
            raise ValueError(f"a bound named {name!r} is already registered")
        if bibtex and _BIBTEX.setdefault(citation, bibtex) != bibtex:
            raise ValueError(f"the BibTeX key {citation!r} is already that of another entry")
        formulas = ByKind(Formula(function, condition, terms, layer), covers)
        _BOUNDS[name] = Bound(name, label, citation, statement, source, assumptions, map, cost, formulas, costly, caveat, ball, differentiable)
        return _BOUNDS[name]

    return enter


def _modules() -> list[str]:
    return [f"lipbound.bounds.{paper}" for paper in PAPERS]


@functools.cache
def load_papers() -> None:
    """Import the modules of `PAPERS`, which registers their bounds."""
    for module in _modules():
        importlib.import_module(module)


def bibliography() -> dict[str, str]:
    """BibTeX entries of the sources of all bounds, by key."""
    load_papers()
    return _BIBTEX


def names() -> list[str]:
    """Registry names of all bounds, oldest source first, as figures and tables show them."""
    load_papers()
    modules = _modules()

    def age(name: str) -> tuple[int, int]:
        """Bounds of one year in the order of `PAPERS`, whichever was imported first."""
        entry = _BOUNDS[name]
        module = entry.function.__module__
        return entry.year, modules.index(module) if module in modules else len(modules)

    return sorted(_BOUNDS, key=age)


def get(name: str) -> Bound:
    """The bound registered under ``name``.

    Raises:
        UnknownNameError: naming the nearest registered names.
    """
    load_papers()
    if not isinstance(name, str) or name not in _BOUNDS:
        raise UnknownNameError(f"unknown bound {shown(name)}; {nearest(name, _BOUNDS)}")
    return _BOUNDS[name]


def resolve(bounds: str | Bound | Iterable[str | Bound]) -> list[str]:
    """Names for "all", "default" (all but the costly), one name, comma-separated names, or a list of names; unknown ones raise."""
    if isinstance(bounds, Bound):
        bounds = bounds.name
    if isinstance(bounds, str):
        if bounds in ("default", "all"):
            return [name for name in names() if bounds == "all" or not get(name).costly]
        given, bounds = bounds, [part.strip() for part in bounds.split(",") if part.strip()]
        if not bounds:
            raise UnknownNameError(f"bounds is {shown(given)}, which names none; give 'default', 'all', a name, or names separated by commas")
    if not isinstance(bounds, Iterable) or isinstance(bounds, bytes | Mapping) or (hasattr(bounds, "shape") and not bounds.shape):
        raise UnknownNameError(f"bounds is {shown(bounds)}; give 'default', 'all', a name, or a list of names")
    return list(dict.fromkeys(get(name.name if isinstance(name, Bound) else name).name for name in bounds))


def evaluate(att: Attention, bounds: str | Iterable[str] = "default") -> dict[str, Tensor]:
    """Values of some bounds on every head at every input: {name: (samples, heads) float64}.

    >>> import torch
    >>> from lipbound.attention.layer import Attention
    >>> g = torch.Generator().manual_seed(0)
    >>> att = Attention(*(torch.randn(s, generator=g) for s in [(2, 5, 8), (3, 8, 4), (3, 8, 4), (3, 8, 4)]))
    >>> evaluate(att, ["castin", "yudin"])["yudin"].shape
    torch.Size([2, 3])
    """
    return {name: get(name)(att) for name in resolve(bounds)}

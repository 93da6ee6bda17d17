"""Registry of all bounds. The papers are imported when it is first asked."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lipbound.bounds.statement import Bound, Formula
from lipbound.errors import LipboundError, UnknownNameError, choice, nearest, shown
from lipbound.schema import NORMS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from lipbound.attention.layer import Attention
    from lipbound.bounds.statement import Ball, Function, Layer, Longest, Terms

PAPERS = (
    "papers.castin2024",
    "papers.kim2021",
    "papers.specformer2024",
    "papers.yudin2025",
    "papers.dasoulas2021",
    "papers.newhouse2025",
    "ours.pairwise",
    "ours.pairwise_variants",
    "ours.single_token",
)
"""The modules that register bounds, under ``lipbound.bounds``."""
NO_BOUNDS = ("none", "exact")
"""Names for no bound at all."""
_BOUNDS: dict[str, Bound] = {}
_BIBTEX: dict[str, str] = {}


def bound(
    name: str,
    *,
    label: str,
    citation: str,
    statement: str,
    statement_latex: str,
    source: str,
    assumptions: str,
    condition: Function,
    cost: str,
    bibtex: str = "",
    map: str = "head",
    terms: Terms | None = None,
    layer: Layer | None = None,
    longest: Longest | None = None,
    ball: Ball | None = None,
    caveat: str = "",
    covers: Collection[str] = (),
    differentiable: bool = True,
    norm: str = "frobenius",
) -> Callable[[Function], Bound]:
    r"""Decorator: enter a function of an `Attention` into the registry under ``name``.

    It returns the `Bound`, which is called alike. Adding a bound touches three files: the paper's
    own, with its BibTeX entry and terms inside, one word in `PAPERS`, and a test. A new paper::

        BIBTEX = "@misc{doe2027, ...}"

        @bound(
            "doe",
            label="Doe 2027",
            citation="doe2027",
            bibtex=BIBTEX,
            statement="||J|| <= ||W_V|| (||P|| + ...)",
            statement_latex=r"$\|J\| \le \|W_V\| (\|P\| + \dots)$",
            source="Theorem 1",
            assumptions="no query bias; any mask",
            condition=conditions.no_query_bias,
            cost="O(N D)",
            terms=values_and_softmax(
                lambda att, value: factors.norm_v(att) * factors.norm_p(att) / value
            ),
        )
        def doe(att: Attention) -> Tensor: ...

    Args:
        name: registry name.
        covers: variants of attention for which the same function holds.
        bibtex: the source's entry; bounds of one source may share it.
        condition, terms, layer, longest: see `Formula`.
        label, citation, statement, statement_latex, source, assumptions: see `Bound`.
        cost, map, ball, caveat, differentiable, norm: see `Bound`, too.

    Returns:
        The decorator.

    Where other formulas hold for other kinds of heads, each is registered with `Bound.extends`::

        @doe.extends("rotation", "cap", condition=conditions.always)
        def _turned(att: Attention) -> Tensor: ...

    Raises:
        ValueError: a name that is taken, a BibTeX key that has another entry.
        UnknownNameError: an unknown norm.
    """

    def enter(function: Function) -> Bound:
        if function.__module__ not in _modules():
            load_papers()  # whose names are taken, even if nobody has asked for them yet
        if name in _BOUNDS:
            raise ValueError(f"a bound named {name!r} is already registered")
        choice("norm", norm, NORMS)
        if bibtex and _BIBTEX.setdefault(citation, bibtex) != bibtex:
            raise ValueError(f"the BibTeX key {citation!r} is already that of another entry")
        formulas = [Formula(function, condition, terms, layer, longest, frozenset(covers))]
        facts = (label, citation, statement, statement_latex, source, assumptions, map, cost)
        _BOUNDS[name] = Bound(name, *facts, formulas, caveat, ball, differentiable, norm)
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


def names(norm: str | None = "frobenius") -> list[str]:
    """Registry names of all bounds in a norm, oldest source first, as figures and tables show them.

    Args:
        norm: "frobenius", "every-token" or "one-token" (`lipbound.schema.NORMS`); None for
            the bounds of all of them, norm by norm.

    Returns:
        The names.

    Raises:
        UnknownNameError: another norm.
    """
    load_papers()
    if norm is None:
        return [name for one in NORMS for name in names(one)]
    choice("norm", norm, NORMS)
    modules = _modules()

    def age(name: str) -> tuple[int, int]:
        """Bounds of one year in the order of `PAPERS`, whichever was imported first."""
        entry = _BOUNDS[name]
        module = entry.function.__module__
        return entry.year, modules.index(module) if module in modules else len(modules)

    return sorted((name for name in _BOUNDS if _BOUNDS[name].norm == norm), key=age)


def get(name: str) -> Bound:
    """The bound registered under ``name``.

    Args:
        name: registry name.

    Returns:
        The bound.

    Raises:
        UnknownNameError: naming the nearest registered names.
    """
    load_papers()
    if not isinstance(name, str) or name not in _BOUNDS:
        raise UnknownNameError(f"unknown bound {shown(name)}; {nearest(name, _BOUNDS)}")
    return _BOUNDS[name]


def resolve(bounds: str | Bound | Iterable[str | Bound], norm: str | None = None) -> list[str]:
    """Registry names of the bounds that are meant.

    Args:
        bounds: "default" or "all" (all bounds of the norm), "none" or "exact" (exact norms alone),
            one name, names separated by commas, or a list.
        norm: of the bounds. None: that of the bounds that are named, and Frobenius for "all" and
            "default".

    Returns:
        The names.

    Raises:
        UnknownNameError: unknown names, an unknown norm.
        LipboundError: a bound of another norm, or bounds of several.
    """
    if norm is not None:
        choice("norm", norm, NORMS)
    if isinstance(bounds, Bound):
        bounds = bounds.name
    if isinstance(bounds, str):
        if bounds in ("default", "all"):
            return names(norm or "frobenius")
        if bounds in NO_BOUNDS:
            return []
        given, bounds = bounds, [part.strip() for part in bounds.split(",") if part.strip()]
        if not bounds:
            raise UnknownNameError(
                f"bounds is {shown(given)}, which names none; give 'default', 'all', a name, "
                "names separated by commas, or 'none'"
            )
    if (
        not isinstance(bounds, Iterable)
        or isinstance(bounds, bytes | Mapping)
        or (hasattr(bounds, "shape") and not bounds.shape)
    ):
        raise UnknownNameError(
            f"bounds is {shown(bounds)}; give 'default', 'all', a name, or a list of names"
        )
    named = [get(name.name if isinstance(name, Bound) else name).name for name in bounds]
    return _of_one_norm(list(dict.fromkeys(named)), norm)


def _of_one_norm(found: list[str], norm: str | None) -> list[str]:
    """These names, of bounds in one norm: the one that is given, or that of the first.

    Raises:
        LipboundError: they are in several.
    """
    for name in found:
        other, own = get(name).norm, norm or get(found[0]).norm
        if other != own:
            here = f"here the norm is {own}" if norm else f"{found[0]!r} in the {own} norm"
            raise LipboundError(
                f"bound {name!r} is stated in the {other} norm and {here}, and numbers of "
                "different norms are not compared; take some of "
                f"{', '.join(names(own))}"
            )
    return found


def evaluate(
    att: Attention, bounds: str | Iterable[str] = "default", norm: str | None = None
) -> dict[str, Tensor]:
    """Values of some bounds of one norm on every head at every input.

    Args:
        att: the layer.
        bounds: as for `resolve`.
        norm: as for `resolve`.

    Returns:
        (samples, heads) float64 by registry name.

    >>> import torch
    >>> from lipbound.attention.layer import Attention
    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(2, 5, 8), (3, 8, 4), (3, 8, 4), (3, 8, 4)]
    >>> att = Attention(*(torch.randn(shape, generator=g) for shape in shapes))
    >>> evaluate(att, ["castin", "yudin"])["yudin"].shape
    torch.Size([2, 3])
    """
    return {name: get(name)(att) for name in resolve(bounds, norm)}

"""Registry of all bounds. The papers are imported when it is first asked."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lipbound.bounds.statement import Bound, Formula
from lipbound.errors import LipboundError, UnknownNameError, choice, knows_options, shown
from lipbound.schema import NORMS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from lipbound.attention.layer import Attention
    from lipbound.bounds.statement import Function

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
    "ours.mass_splitting",
)
"""The modules that register bounds, under ``lipbound.bounds``."""
NO_BOUNDS = ("none", "exact")
"""Names for no bound at all."""
_PARTS = ("condition", "terms", "layer", "longest")
"""Keywords that belong to a `Formula`; all others are facts of the bound."""
_BOUNDS: dict[str, Bound] = {}
_BIBTEX: dict[str, str] = {}


def bound(
    name: str, *, bibtex: str = "", covers: Collection[str] = (), **facts: Any
) -> Callable[[Function], Bound]:
    r"""Decorator: enter a function of an `Attention` into the registry under ``name``.

    It returns the `Bound`, which is called alike. A function that also takes a radius and a kind of
    ball, ``radius: float = 0.0, ball: str = "token"``, is the statement over balls too. Adding a
    bound touches three files: the paper's own, with its BibTeX entry and terms inside, one word in
    `PAPERS`, and a test. A new paper::

        BIBTEX = "@misc{doe2027, ...}"

        @bound(
            "doe",
            label="Doe 2027",
            bibtex=BIBTEX,
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
        facts: condition, terms, layer and longest as of `Formula`; label,
            statement_latex, source, assumptions, cost, map, ball, caveat, differentiable and norm
            as of `Bound`, and citation, which is read off ``bibtex`` where that is given.

    Returns:
        The decorator.

    Where other formulas hold for other kinds of heads, each is registered with `Bound.extends`::

        @doe.extends("rotation", "cap", condition=conditions.always)
        def _turned(att: Attention) -> Tensor: ...

    Raises:
        ValueError: a name that is taken, a BibTeX key that has another entry.
        UnknownNameError: an unknown norm.
    """
    citation = facts.pop("citation", None) or bibtex.partition("{")[2].partition(",")[0]
    parts = {key: facts.pop(key) for key in _PARTS if key in facts}

    def enter(function: Function) -> Bound:
        if function.__module__ not in _modules():
            load_papers()  # whose names are taken, even if nobody has asked for them yet
        if name in _BOUNDS:
            raise ValueError(f"a bound named {name!r} is already registered")
        choice("norm", facts.get("norm", "frobenius"), NORMS)
        if "radius" in inspect.signature(function).parameters:
            facts["ball"] = function
        if bibtex and _BIBTEX.setdefault(citation, bibtex) != bibtex:
            raise ValueError(f"the BibTeX key {citation!r} is already that of another entry")
        formula = Formula(function, covers=frozenset(covers), **parts)
        _BOUNDS[name] = Bound(name, citation=citation, formulas=[formula], **facts)
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
    # those of one year in the order of `PAPERS`, whichever was imported first
    place = {module: i for i, module in enumerate(_modules())}
    found = (one for one in _BOUNDS.values() if one.norm == norm)
    ages = {one.name: (one.year, place.get(one.function.__module__, len(place))) for one in found}
    return sorted(ages, key=ages.__getitem__)


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
    return _BOUNDS[choice("bound", name, _BOUNDS)]


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
    if isinstance(bounds, str) and bounds in ("default", "all"):
        return names(norm or "frobenius")
    if isinstance(bounds, str) and bounds in NO_BOUNDS:
        return []
    asked: Any = bounds
    if isinstance(bounds, str):
        asked = [part.strip() for part in bounds.split(",") if part.strip()]
    no_list = not isinstance(asked, Iterable) or isinstance(asked, bytes | Mapping)
    if no_list or not getattr(asked, "shape", True) or (isinstance(bounds, str) and not asked):
        none = ", which names none" if isinstance(bounds, str) else ""
        raise UnknownNameError(
            f"bounds is {shown(bounds)}{none}; give 'default', 'all', a name, names separated by "
            "commas, a list of names, or 'none'"
        )
    named = [get(name.name if isinstance(name, Bound) else name) for name in asked]
    for one in named:
        own = norm or named[0].norm
        if one.norm != own:
            here = f"here the norm is {own}" if norm else f"{named[0].name!r} in the {own} norm"
            raise LipboundError(
                f"bound {one.name!r} is stated in the {one.norm} norm and {here}, and numbers of "
                f"different norms are not compared; take some of {', '.join(names(own))}"
            )
    return list(dict.fromkeys(one.name for one in named))


@knows_options
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

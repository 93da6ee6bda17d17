"""A bound: its statement, the facts that judge it, and its formula for each kind of head."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lipbound.errors import LipboundError, check_layer, choice, is_number, shown
from lipbound.formatting import formula, html_facts
from lipbound.schema import NORMS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lipbound.attention.layer import Attention

    Function = Callable[[Attention], Tensor]
    Ball = Callable[[Attention, float, str], Tensor]
    Terms = Callable[["Bound", Attention], dict[str, Tensor]]
    Layer = Callable[["Bound", Attention, str], Tensor]
    Longest = Callable[[int], int]

DIFFERENTIABLE = {
    "frobenius": "lipbound",
    "every-token": "lipbound_every_block",
    "one-token": "lipbound_one",
}
"""By norm, a sharp bound that has derivatives, to take in place of one that has none."""
BALLS = ("token", "frobenius")
"""Balls around an input: every token moves by at most the radius, or all of X does in the
Frobenius norm."""
_PLAIN = (
    (r"\$", ""),
    (r"\\\|", "||"),
    (r"\\, *", " "),
    (r"\\le\b", "<="),
    (r"\\ge\b", ">="),
    (r"\\times", "x"),
    (r"(?:\\mathrm|(_))\{(.*?)\}", r"\1\2"),
    (r"(\^|\\sqrt)\{(.*?)\}", r"\1(\2)"),
    (r"\\", ""),
)
"""Patterns of LaTeX in statements and their plain text, replaced in this order."""


@dataclass(frozen=True)
class Formula:
    """A bound for some kinds of heads.

    Attributes:
        function: the bound itself.
        condition: when it is a bound, as a test on an `Attention`, True per (sample, head) where
            the assumptions hold.
        terms: contributions of its terms, fractions of one; None where it is a single
            product. See `Bound.terms`.
        layer: what it makes of a whole layer, (samples,), map "heads" or "layer"; None for the
            published rules. See `lipbound.bounds.whole_layer`.
        longest: the most tokens at which it is computed on layers of so many heads; None for any
            number.
        covers: the `lipbound.attention.variants.VARIANTS` for which it holds.
    """

    function: Function
    condition: Function
    terms: Terms | None = None
    layer: Layer | None = None
    longest: Longest | None = None
    covers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Bound:
    """An upper bound on the local Lipschitz constant of one attention head at one input.

    Attributes:
        name: registry name, the variable of a run.
        label: short label for figures and tables.
        citation: BibTeX key of the source (an entry of `lipbound.bounds.BIBTEX`).
        statement_latex: the inequality, its formulas in LaTeX between dollar signs.
        source: theorem or equation number.
        assumptions: when the statement is a bound, in words.
        map: "head" (softmax(q k^T) v; with the output slice folded into the values when asked for)
            or "l2" (L2 attention).
        cost: leading cost per head.
        formulas: the bound itself, from the formula for plain heads to the one that covers most
            variants.
        norm: of `lipbound.schema.NORMS`: how perturbations and outputs are measured. Bounds of
            different norms never stand beside each other.
        caveat: why the statement is no bound where its assumptions fail; empty when they always
            hold.
        differentiable: whether its values have derivatives; one that has none refuses layers whose
            derivatives may be wanted.
        ball: the statement for all inputs near X, of plain heads, or None where the source has
            none: see `over_ball`. It is the formula itself where that takes a radius.
    """

    name: str
    label: str
    citation: str
    statement_latex: str
    source: str
    assumptions: str
    cost: str
    formulas: list[Formula] = field(repr=False)
    map: str = "head"
    caveat: str = ""
    ball: Ball | None = None
    differentiable: bool = True
    norm: str = "frobenius"

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.function.__doc__)

    def __call__(self, att: Attention) -> Tensor:
        """Value of the bound, (samples, heads), float64; infinite where it cannot be evaluated.

        Raises:
            AttentionError: a layer that the statement is not about; see `applies`.
            LipboundError: derivatives may be wanted of a bound that has none; inputs longer than
                `longest`; a float64 layer whose largest entries are neither 0 nor from 1e-60 to
                1e60.
        """
        from lipbound.attention.validation import check_sizes  # here, since they need torch
        from lipbound.devices import in_own_modes

        formula = self.formula(att)
        if not self.differentiable and att.cache.recording:
            raise LipboundError(
                f"bound {self.name!r} has no derivatives; call it under torch.no_grad(), or take "
                f"{DIFFERENTIABLE[self.norm]!r}"
            )
        if why := self.too_long(att.tokens, att.heads, att.variants):
            raise LipboundError(f"bound {self.name!r} {why}")
        check_sizes(att)
        return in_own_modes(
            lambda layer: _numbers(layer, formula.function(layer)).expand(att.samples, att.heads)
        )(att)

    def formula(self, att: Attention) -> Formula:
        """The formula for the layer's kind of heads.

        Raises:
            AttentionError: a layer that the statement is not about; see `applies`.
        """
        check_layer(att, f"bound {self.name!r}")
        att.only(f"bound {self.name!r}", self.covers)
        return self._formula_for(att.variants)

    def _formula_for(self, variants: frozenset[str]) -> Formula:
        """The first formula that covers these variants, or the one that covers most."""
        fitting = (formula for formula in self.formulas if variants <= formula.covers)
        return next(fitting, self.formulas[-1])

    @property
    def statement(self) -> str:
        """The inequality in plain text."""
        text = self.statement_latex
        for pattern, plain in _PLAIN:
            text = re.sub(pattern, plain, text)
        return text

    @property
    def function(self) -> Function:
        """The formula for plain heads, whose docstring is the statement."""
        return self.formulas[0].function

    @property
    def covers(self) -> frozenset[str]:
        """Variants that some formula holds for; the bound says nothing about layers with others."""
        return self.formulas[-1].covers

    def applies(self, att: Attention) -> bool:
        """True if the statement is about layers with these variants at all."""
        check_layer(att, f"bound {self.name!r}")
        return att.variants <= self.covers

    def too_long(self, tokens: int, heads: int, variants: frozenset[str]) -> str:
        """End of the sentence why it is not computed at so many tokens; empty where it is."""
        longest = self._formula_for(variants).longest
        if longest is None or tokens <= longest(heads):
            return ""
        return (
            f"is computed up to {longest(heads):,} tokens of such heads, and there are {tokens:,}; "
            "take exact_upper, the enclosure of the exact norm, which is sharper and takes less "
            "time there"
        )

    def sound(self, att: Attention) -> Tensor:
        """True where the statement is an upper bound by its assumptions, (samples, heads)."""
        check_layer(att, f"bound {self.name!r}")
        from lipbound.devices import in_own_modes  # here, since it needs torch

        condition = self._formula_for(att.variants).condition
        return in_own_modes(lambda layer: condition(layer).expand(att.samples, att.heads))(att)

    def terms(self, att: Attention) -> dict[str, Tensor] | None:
        """Contributions of the terms, as fractions of one, (samples, heads) each.

        "values" is what would remain if attention did not depend on the input, "softmax" what comes
        from its change. Terms of Theorem 3 of Yudin et al. and of Specformer's theorem add up to
        the bound, those of Castin et al. to its square. For ours, softmax is told apart by what
        moves it, keys or queries: ``lipbound_block`` at the top singular pair of its matrix of
        norms, ``lipbound`` at the top eigenvector of the matrix of its first branch, with "mixed"
        for products of different terms.

        Returns:
            Shares by the name of the term; None for statements that are a single product, and of
            ours for variants of attention.
        """
        terms = self._formula_for(att.variants).terms if self.applies(att) else None
        return None if terms is None else terms(self, att)

    def over_ball(self, att: Attention, radius: float, *, ball: str = "token") -> Tensor:
        """The source's bound over a ball of inputs; `lipbound.bounds.over_ball` is ours.

        Args:
            att: the layer at the centre.
            radius: of the ball, in the units of ``x``.
            ball: "token" (every token moves by at most ``radius``) or "frobenius" (all of X does).

        Returns:
            (samples, heads), float64.

        Raises:
            LipboundError: where the source has no such statement, a negative radius, an unknown
                ball.
        """
        if self.ball is None:
            raise LipboundError(
                f"bound {self.name!r} is a statement about one input, without a radius; use "
                f"lipbound.bounds.over_ball(..., at={self.name!r})"
            )
        check_layer(att, f"bound {self.name!r}")
        att.only(f"bound {self.name!r} over a ball")
        check_ball(radius, ball)
        return _numbers(att, self.ball(att, float(radius), ball)).expand(att.samples, att.heads)

    def extends(self, *variants: str, **parts: Any) -> Callable[[Function], Function]:
        """Decorator: a formula for variants of heads that the formulas so far do not cover.

        Nothing is taken over from the formula for plain heads: terms, say, that are not given
        here are missing.

        Args:
            variants: heads that it covers have some or all of these, and no others.
            parts: condition, terms, layer, longest: see `Formula`.

        Returns:
            The decorator.

        Raises:
            ValueError: unless ``variants`` hold all that earlier formulas cover, and more.
        """
        covers = frozenset(variants)
        if not self.covers < covers:
            raise ValueError(
                f"an extension to {sorted(covers)} must cover more than {sorted(self.covers)}, "
                "which is covered already"
            )

        def enter(function: Function) -> Function:
            self.formulas.append(Formula(function, covers=covers, **parts))
            return function

        return enter

    def facts(self) -> dict[str, object]:
        """The bound's facts as plain data."""
        names = ["name", "label", "statement", "statement_latex", "source", "citation"]
        names += ["assumptions", "caveat", "map", "norm", "cost", "differentiable"]
        return {name: getattr(self, name) for name in names} | {
            "covers": sorted(self.covers),
            "over_ball": self.ball is not None,
        }

    def _repr_html_(self) -> str:
        covers = ", ".join(("plain heads", *sorted(self.covers)))
        said = {
            "source": f"{self.source} [{self.citation}]",
            "norm": NORMS[self.norm],
            "a bound when": self.assumptions,
            "else": self.caveat,
            "covers": covers,
            "cost per head": self.cost,
        }
        title, statement = f"{self.label} ({self.name})", formula(self.statement_latex)
        return html_facts(title, said, {"statement": statement})

    @property
    def year(self) -> int:
        """Year of the source, read off its BibTeX key."""
        return int("".join(c for c in self.citation if c.isdigit()))

    @property
    def exact(self) -> str:
        """Name of the variable with the exact norm this bound is compared with."""
        return "exact_l2" if self.map == "l2" else "exact"


def _numbers(att: Attention, values: Tensor) -> Tensor:
    """Values in float64, rounded upwards; NaN, which bounds nothing, becomes infinite."""
    upper = values.double() * (1 + formula_rounding(att))
    return upper.nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)


def formula_rounding(att: Attention) -> float:
    """Relative error of a formula's own operations on upper values: 1e-12 at 1,000 tokens.

    Formulas are sums, products, roots and minima of numbers >= 0, over tokens and coordinates:
    Lemma 77 (docs/theory/upper_values.md).
    """
    from lipbound.linalg.matrix_norms import gamma  # here, since it needs torch

    sizes = max(att.rows, att.keys) + att.x.shape[2] + 2 * att.d + 2 * att.d_v
    return 2 * gamma(6 * sizes + 400)


def check_ball(radius: float, ball: str) -> None:
    """Check a ball.

    Args:
        radius: a number from 0 to 1e60, whose fourth power is in range.
        ball: one of `BALLS`.

    Raises:
        LipboundError: another radius.
        UnknownNameError: another kind of ball.
    """
    choice("ball", ball, BALLS)
    if not is_number(radius) or not 0 <= radius <= 1e60:
        raise LipboundError(
            f"radius is {shown(radius)}; it must be a finite number >= 0, and at most 1e60"
        )


def check_radii(radius: float | Sequence[float], ball: str) -> tuple[bool, list[float]]:
    """True if one radius was given, and all of them as numbers.

    Args:
        radius: a number, or several.
        ball: as for `check_ball`.

    Returns:
        Both.

    Raises:
        LipboundError: as `check_ball` does, or for no radius at all.
    """
    given: Any = radius
    single = not isinstance(given, Iterable) or isinstance(given, str | bytes)
    single = single or getattr(given, "ndim", 1) == 0
    radii = [given] if single else list(given)
    if not radii:
        raise LipboundError("radius is empty; give a number >= 0, or a sequence of at least one")
    for one in radii:
        check_ball(one, ball)
    return single, [float(one) for one in radii]

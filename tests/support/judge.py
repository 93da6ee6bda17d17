"""Every enclosure and every sound bound of hard heads, set beside norms known to 80 digits. Nothing
is allowed for rounding."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch
from support import mp_oracle
from support.hard_heads import FAMILIES
from support.mp_oracle import Enclosed
from torch import Tensor

import lipbound as lb

METHODS = ("lanczos", "dense")
ESTIMATE = "lanczos without delta"
"""The method of lower ends alone."""
L2 = "lanczos (L2)"
"""The enclosure of L2 attention's norm."""
WHOLE = ("heads", "layer")
Norms = list[list[Enclosed]]


@dataclass(frozen=True)
class Verdict:
    """What one method or bound said about one norm.

    Attributes:
        method: of `METHODS`, `L2`, or "bound " and a name of the registry.
        case: where the norm is found again.
        refused: it raised a `LipboundError` instead.
        miss: by how much a wrong end is wrong, lower / norm - 1 or norm / upper - 1: 0 where the
            enclosure holds the norm, infinite for NaN, for an upper end of 0 under a norm that is
            not, for a lower end above a norm of 0, and for errors that are not ours.
        converged: as the method says; None for bounds.
        width: upper / lower - 1 of an enclosure, upper / norm - 1 of a bound.
    """

    method: str
    case: str
    refused: bool
    miss: float = 0.0
    converged: bool | None = None
    width: float = math.nan


def case(family: str, dtype: torch.dtype, seed: int) -> lb.Attention:
    """The layer of a family and a seed."""
    return FAMILIES[family](torch.Generator().manual_seed(seed), dtype)


def judge(
    att: lb.Attention,
    name: str,
    *,
    map: str = "head",
    tol: float = 1e-4,
    delta: float = 1e-6,
    methods: Iterable[str] = METHODS,
    chosen: Iterable[str] | None = None,
    l2: bool = True,
    exact: Norms | None = None,
) -> Iterator[Verdict]:
    """The verdicts on all norms of a layer.

    Args:
        att: the layer. name: of the case, for `Verdict.case`.
        map: what the norms are of. tol, delta: of the enclosures.
        methods: for enclosures. chosen: names of bounds, where None all that cover the layer; for
            map "head" alone.
        l2: whether bounds on L2 attention, whose norms have no enclosures, are judged too, where
            the layer has no variants; for map "head" alone.
        exact: the norms, where they are known already.
    """
    exact = mp_oracle.norms(att, map) if exact is None else exact
    for method in methods:
        yield from _enclosures(att, name, method, exact, map=map, tol=tol, delta=delta)
    if map != "head":
        return
    norms = {"head": exact}
    if l2 and not att.variants:
        norms["l2"] = mp_oracle.norms(att, "l2")
    for bound in lb.bounds.names() if chosen is None else chosen:
        entry = lb.bounds.get(bound)
        if entry.applies(att) and entry.map in norms:
            yield from _bounds(att, name, bound, norms[entry.map])


def _enclosures(
    att: lb.Attention, name: str, method: str, exact: Norms, *, map: str, tol: float, delta: float
) -> Iterator[Verdict]:
    def measure(part: lb.Attention) -> tuple[Tensor, Tensor, Tensor]:
        how = {"delta": None} if method == ESTIMATE else {"method": method, "delta": delta}
        norm = lb.spectral_norm(part, map=map, tol=tol, **how)
        return norm.lower, norm.upper, norm.converged

    for where, value, found in _each(att, name, method, exact, map, measure):
        if isinstance(found, Verdict):
            yield found
            continue
        low, high, converged = found
        miss = max(above(low, value), below(high, value))
        yield Verdict(method, where, False, miss, bool(converged), _ratio(high, low))


def _bounds(att: lb.Attention, name: str, bound: str, exact: Norms) -> Iterator[Verdict]:
    entry, method = lb.bounds.get(bound), f"bound {bound}"
    both = _each(att, name, method, exact, "head", lambda part: (entry(part), entry.sound(part)))
    for where, value, found in both:
        if isinstance(found, Verdict):
            yield found
        elif found[1]:
            miss = below(found[0], value)
            yield Verdict(method, where, False, miss, None, _ratio(found[0], value.value))
        elif math.isnan(found[0]):
            yield Verdict(method, where, False, math.inf)


def _each(
    att: lb.Attention,
    name: str,
    method: str,
    exact: Norms,
    map: str,
    measure: Callable[[lb.Attention], tuple[Tensor, ...]],
) -> Iterator[tuple[str, Enclosed, Any]]:
    """What is measured, norm by norm; what is refused together is taken one by one, and a verdict
    where that is refused too."""
    try:
        found = [t.view(len(exact), -1).tolist() for t in measure(att)]
    except Exception as error:
        # to refuse is right; to end in an error of some library is a miss, even where the norms are
        # right one by one
        if not isinstance(error, lb.LipboundError):
            yield name, exact[0][0], Verdict(method, f"{name}: {error}", False, math.inf)
        found = []
    alone = att.samples == 1 and (att.heads == 1 or map in WHOLE)
    for s, row in enumerate(exact):
        for h, value in enumerate(row):
            where = name if "[" in name else f"{name}[{s},{h}]"
            if found:
                yield where, value, [values[s][h] for values in found]
            elif alone:
                yield where, value, Verdict(method, where, True)
            else:
                heads = slice(None) if map in WHOLE else slice(h, h + 1)
                part = att.select(slice(s, s + 1), heads)
                yield from _each(part, where, method, [[value]], map, measure)


def assert_holds(lower: Tensor, upper: Tensor, exact: Norms) -> None:
    """No lower end is above a norm that is known, and no upper end below."""
    for end, miss in ((lower, above), (upper, below)):
        values = zip(end.flatten().tolist(), (one for row in exact for one in row), strict=True)
        assert [miss(*pair) for pair in values] == [0.0] * end.numel()


def above(lower: float, norm: Enclosed) -> float:
    """How far a lower end is above the norm, relative to it."""
    return math.inf if math.isnan(lower) else _beyond(Decimal(lower), norm.upper)


def below(upper: float, norm: Enclosed) -> float:
    """How far an upper end is below the norm, relative to that end."""
    return math.inf if math.isnan(upper) else _beyond(norm.lower, Decimal(upper))


def _beyond(large: Decimal, small: Decimal) -> float:
    if large <= small:
        return 0.0
    with mp_oracle.exactly(80):
        return float(large / small - 1) if small > 0 else math.inf


def _ratio(upper: float, lower: float) -> float:
    return upper / lower - 1 if lower > 0 else math.inf if upper > 0 else 0.0


def summary(verdicts: Iterable[Verdict]) -> str:
    """The misses, a line per method with the worst of them."""
    wrong: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.miss > 0:
            wrong.setdefault(verdict.method, []).append(verdict)
    lines = []
    for method, found in wrong.items():
        worst = max(found, key=lambda verdict: verdict.miss)
        lines += [f"\n{method}: {len(found)} misses, the worst by {worst.miss:.3g} at {worst.case}"]
    return "".join(lines)

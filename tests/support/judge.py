"""Every enclosure and every sound bound of hard heads, set beside norms known to 80 digits. Nothing
is allowed for rounding."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal

import torch
from support import mp_oracle
from support.hard_heads import FAMILIES
from support.mp_oracle import Enclosed

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError
from lipbound.jacobians.spectral_norm import spectral_norm

METHODS = ("lanczos", "dense")
L2 = "lanczos (L2)"
"""The enclosure of L2 attention's norm."""
WHOLE = ("heads", "layer")


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


def case(family: str, dtype: torch.dtype, seed: int) -> Attention:
    """The layer of a family and a seed."""
    return FAMILIES[family](torch.Generator().manual_seed(seed), dtype)


def judge(
    att: Attention,
    name: str,
    *,
    map: str = "head",
    tol: float = 1e-4,
    delta: float = 1e-6,
    methods: Iterable[str] = METHODS,
    chosen: Iterable[str] | None = None,
    l2: bool = True,
    exact: list[list[Enclosed]] | None = None,
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
    for bound in bounds.names() if chosen is None else chosen:
        entry = bounds.get(bound)
        if entry.applies(att) and entry.map in norms:
            yield from _bounds(att, name, bound, norms[entry.map])


def _enclosures(
    att: Attention,
    name: str,
    method: str,
    exact: list[list[Enclosed]],
    *,
    map: str,
    tol: float,
    delta: float,
) -> Iterator[Verdict]:
    try:
        norm = spectral_norm(att, map=map, method=method, tol=tol, delta=delta)
    except Exception as error:
        yield from _broken(method, name, error)
        for part, where, inner in _parts(att, name, exact, map):
            if part is None:
                yield Verdict(method, where, True)
            else:
                yield from _enclosures(part, where, method, inner, map=map, tol=tol, delta=delta)
        return
    columns = len(exact[0])
    lower, upper, converged = (
        t.view(-1, columns).tolist() for t in (norm.lower, norm.upper, norm.converged)
    )
    for s, row in enumerate(exact):
        for h, value in enumerate(row):
            low, high = lower[s][h], upper[s][h]
            miss = max(above(low, value), below(high, value))
            yield Verdict(
                method, _where(att, name, s, h), False, miss, converged[s][h], _ratio(high, low)
            )


def _bounds(
    att: Attention, name: str, bound: str, exact: list[list[Enclosed]]
) -> Iterator[Verdict]:
    entry = bounds.get(bound)
    try:
        values, sound = entry(att).tolist(), entry.sound(att).tolist()
    except Exception as error:
        yield from _broken(f"bound {bound}", name, error)
        for part, where, inner in _parts(att, name, exact, "head"):
            if part is None:
                yield Verdict(f"bound {bound}", where, True)
            else:
                yield from _bounds(part, where, bound, inner)
        return
    for s, row in enumerate(exact):
        for h, value in enumerate(row):
            if sound[s][h]:
                yield Verdict(
                    f"bound {bound}",
                    _where(att, name, s, h),
                    False,
                    below(values[s][h], value),
                    None,
                    _ratio(values[s][h], value.value),
                )
            elif math.isnan(values[s][h]):
                yield Verdict(f"bound {bound}", _where(att, name, s, h), False, math.inf)


def _broken(method: str, name: str, error: Exception) -> Iterator[Verdict]:
    """To refuse is right; to end in an error of some library is a miss, even where the norms are
    right one by one."""
    if not isinstance(error, LipboundError):
        yield Verdict(method, f"{name}: {error}", False, math.inf)


def _parts(
    att: Attention, name: str, exact: list[list[Enclosed]], map: str
) -> Iterator[tuple[Attention | None, str, list[list[Enclosed]]]]:
    """What is refused together may be taken one by one; a norm that is by itself
    already is None."""
    alone = att.samples == 1 and (att.heads == 1 or map in WHOLE)
    for s, row in enumerate(exact):
        for h, value in enumerate(row):
            heads = slice(None) if map in WHOLE else slice(h, h + 1)
            yield (
                None if alone else att.select(slice(s, s + 1), heads),
                _where(att, name, s, h),
                [[value]],
            )


def _where(att: Attention, name: str, sample: int, head: int) -> str:
    return name if "[" in name else f"{name}[{sample},{head}]"


def above(lower: float, norm: Enclosed) -> float:
    """How far a lower end is above the norm, relative to it."""
    if math.isnan(lower):
        return math.inf
    if Decimal(lower) <= norm.upper:
        return 0.0
    return _beyond(Decimal(lower), norm.upper)


def below(upper: float, norm: Enclosed) -> float:
    """How far an upper end is below the norm, relative to that end."""
    if math.isnan(upper):
        return math.inf
    if Decimal(upper) >= norm.lower:
        return 0.0
    return _beyond(norm.lower, Decimal(upper))


def _beyond(large: Decimal, small: Decimal) -> float:
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
    worst = {
        method: max(found, key=lambda verdict: verdict.miss) for method, found in wrong.items()
    }
    return "".join(
        f"\n{method}: {len(wrong[method])} misses, the worst by {v.miss:.3g} at {v.case}"
        for method, v in worst.items()
    )

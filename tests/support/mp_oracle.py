"""The exact norm of a layer's Jacobian to 80 digits: the forward map differentiated step by step,
in arithmetic that does not round in float64.

Written from the definition of attention alone. The layer's given tensors (and ``scale``, ``cap``,
eps) are taken as the exact numbers that they are. Projections, normalisation, rotation, scores,
cap, mask, softmax and values are differentiated one after the other by the chain rule (forward
mode; the softmax as a quotient), in `decimal` arithmetic of the standard library, whose exponents
have 18 digits. No q, k, P or output of lipbound is used, and no closed form of a Jacobian.
"""

import decimal
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Context, Decimal, getcontext, localcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.qk_norm import QKNorm

Exact = npt.NDArray[np.object_]
"""Arrays of `Decimal`."""
DIGITS = (80, 200, 500)
"""Precisions that are tried one after the other until what rounding leaves is below `ENOUGH` of the
norm, or below `TINY`."""
ENOUGH, TINY = Decimal("1e-25"), Decimal("1e-400")
KNOWN = {"rotation", "qk_norm", "value_norm", "gate", "cross", "cap", "sinks"}
"""Variants of attention that are differentiated here."""
BLOCKED = -1e30
"""Additive mask entries at or below this forbid attention."""
SVD_ERROR = Decimal("1e-14")
"""Relative error allowed to LAPACK's largest singular value of a matrix of at most 100 rows; it
enters the upper end only."""


@dataclass(frozen=True)
class Enclosed:
    """A norm: ``lower <= norm <= upper``. Comparisons of a `Decimal` with a float are exact."""

    lower: Decimal
    upper: Decimal

    @property
    def value(self) -> float:
        """Nearest float64, 0 or infinite beyond its range."""
        return float(self.lower)

    @property
    def width(self) -> float:
        """upper / lower - 1."""
        with exactly(DIGITS[0]):
            without = math.inf if self.upper else 0.0
            return float(self.upper / self.lower - 1) if self.lower else without


@dataclass(frozen=True)
class Differentiated:
    """A Jacobian (tokens, outputs, tokens, D), an upper value of the absolute error that rounding
    leaves in each entry, and of one head what is differentiated, (tokens, outputs)."""

    jacobian: Exact
    error: Decimal
    outputs: Exact | None = None


def norms(att: Attention, map: str = "head", side: str | None = None) -> list[list[Enclosed]]:
    """Norms of all heads at all samples, [sample][head]; for "heads" and "layer" one per sample,
    [sample][0]."""
    heads = range(1 if map in ("heads", "layer") else att.heads)
    return [[norm(att, sample, head, map, side) for head in heads] for sample in range(att.samples)]


def norm(
    att: Attention, sample: int = 0, head: int = 0, map: str = "head", side: str | None = None
) -> Enclosed:
    """The norm of the Jacobian of one head at one sample.

    Args:
        map: "head", "head_out", "heads", "layer" as for `spectral_norm` (the latter two without
            regard to ``head``), or "l2": L2 attention with the layer's ``w_q`` and ``w_v`` as
            `lipbound.jacobians.l2_attention` defines it.
        side: "q", "k" or "v" for the Jacobian by the vectors of that side as they enter.
    """
    found, digits = resolved(att, sample, head, map, side)
    with exactly(digits):
        return enclosed(found)


def resolved(
    att: Attention, sample: int, head: int, map: str = "head", side: str | None = None
) -> tuple[Differentiated, int]:
    """The Jacobian of `norm` in as many digits as it takes, and how many these are."""
    for digits in DIGITS:
        with exactly(digits):
            found = differentiated(att, sample, head, map, side)
            if found.error <= max(_largest(found.jacobian) * ENOUGH, TINY):
                break
    return found, digits


@contextmanager
def exactly(digits: int) -> Iterator[Context]:
    """Arithmetic of so many digits; numbers below 1e-999999999999999999 are zero."""
    traps = [decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow]
    with localcontext(
        Context(prec=digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=traps)
    ) as context:
        yield context


def exact(t: Tensor | float) -> Any:
    """The numbers of a tensor (an array), or one number (a `Decimal`), rounded to the digits of the
    arithmetic."""
    if not isinstance(t, Tensor):
        return +Decimal(t)
    numbers = [+Decimal(value) for value in t.detach().double().flatten().tolist()]
    return np.array(numbers, dtype=object).reshape(t.shape)


# -- the Jacobian ----------------------------------------------------------------------------------


def differentiated(
    att: Attention,
    sample: int,
    head: int,
    map: str,
    side: str | None = None,
    x: Exact | None = None,
) -> Differentiated:
    """The Jacobian of a map in the digits of the arithmetic, padding left out; of one head also at
    other tokens than those of the sample."""
    x = exact(att.x[sample][_real(att.valid, sample, att.tokens)]) if x is None else x
    if map in ("head", "l2"):
        return _head(att, sample, head, x, l2=map == "l2", side=side)
    chosen = [head] if map == "head_out" else range(att.heads)
    parts = [_head(att, sample, h, x, l2=False, side=side) for h in chosen]
    if map == "heads":
        return Differentiated(
            np.concatenate([part.jacobian for part in parts], 1), max(part.error for part in parts)
        )
    slices = [exact(att.w_o[h]) for h in chosen]
    total = sum(
        np.moveaxis(np.tensordot(part.jacobian, w_o, (1, 0)), -1, 1)
        for part, w_o in zip(parts, slices, strict=True)
    )
    largest = max(
        (_largest(part.jacobian) * _ulp() + part.error) * _largest(w_o)
        for part, w_o in zip(parts, slices, strict=True)
    )
    return Differentiated(np.asarray(total), 100 * att.d_v * len(parts) * largest)


@dataclass
class Vectors:
    """One vector per token, its derivative with respect to that token, and how far rounding may
    have moved both, in units of the last digit.

    Attributes:
        y: (n, d). dy: (n, d, D). size, slope: upper values of the entries of y and of dy before
            anything in them cancels.
    """

    y: Exact
    dy: Exact
    size: Decimal
    slope: Decimal


def _projected(x: Exact, w: Exact, b: Exact | None) -> Vectors:
    y = x @ w if b is None else x @ w + b
    size = _largest(abs(x) @ abs(w)) + (0 if b is None else _largest(b))
    return Vectors(y, np.broadcast_to(w.T, (len(x), *w.T.shape)), size, _largest(w))


def _normalised(x: Exact, given: Vectors, norm: QKNorm, head: int) -> Vectors:
    """gain y / s + bias, s = sqrt(mean(t^2) + eps), t the vector itself or what is normalised
    together."""
    gain = exact(norm.gain[head])
    whole = given
    if norm.over is not None:
        whole = _projected(x, *(None if t is None else exact(t) for t in norm.over))
    n = whole.y.shape[1]
    # the other coordinates are multiplied by gain alone
    part = np.ones(len(gain), dtype=bool) if norm.part is None else norm.part.numpy()
    s = [((row * row).sum() / n + exact(norm.eps)).sqrt() for row in whole.y]
    y, dy = np.empty_like(given.y), np.empty_like(given.dy)
    for i, root in enumerate(s):
        ds = (whole.y[i][:, None] * whole.dy[i]).sum(0) / n / root
        by, row = gain * np.where(part, 1 / root, 1), np.where(part, given.y[i], 0)
        y[i] = by * given.y[i]
        dy[i] = by[:, None] * (given.dy[i] - np.multiply.outer(row, ds) / root)
    ratio = 1 + max(given.size, whole.size) / min(s)
    slope = n * _largest(gain) * max(given.slope, whole.slope) / min(s) * ratio**3
    slope += _largest(gain) * given.slope
    return Vectors(
        y if norm.bias is None else y + exact(norm.bias[head]),
        dy,
        n * _largest(gain) * ratio**2 + _largest(y),
        slope,
    )


def _turned(given: Vectors, cos: Exact, sin: Exact) -> Vectors:
    """Coordinates i and i + r of every token turned by its i-th angle."""
    r = cos.shape[1]

    def turn(z: Exact, c: Exact, s: Exact) -> Exact:
        a, b = z[:, :r], z[:, r : 2 * r]
        return np.concatenate([c * a - s * b, c * b + s * a, z[:, 2 * r :]], 1)

    factor = 2 * (_largest(cos) + _largest(sin)) + 1
    return Vectors(
        turn(given.y, cos, sin),
        turn(given.dy, cos[..., None], sin[..., None]),
        given.size * factor,
        given.slope * factor,
    )


def _real(valid: Tensor | None, sample: int, count: int) -> list[int]:
    """Which tokens are not padding."""
    return list(range(count)) if valid is None else valid[sample].nonzero()[:, 0].tolist()


def _sides(
    att: Attention, sample: int, head: int, x: Exact, l2: bool
) -> tuple[Vectors, Vectors, Vectors]:
    """Queries, keys and values as they enter."""
    w_q, w_v = exact(att.w_q[head]), exact(att.w_v[head])
    b_q, b_k, b_v = (
        None if b is None or l2 else exact(b[head]) for b in (att.b_q, att.b_k, att.b_v)
    )
    if l2:
        w_v = exact(att.scale) * (w_q @ (w_q.T @ w_v))
    q, v = _projected(x, w_q, b_q), _projected(x, w_v, b_v)
    k = q if l2 else _projected(x, exact(att.w_k[head]), b_k)
    assert not att.norm_late, "the oracle turns what is normalised"
    q, k, v = (
        side if norm is None else _normalised(x, side, norm, head)
        for side, norm in ((q, att.norm_q), (k, att.norm_k), (v, att.norm_v))
    )
    if att.rotation is not None:
        keep = _real(att.valid, sample, att.tokens)
        angles = exact(att.rotation.cos[keep]), exact(att.rotation.sin[keep])
        q, k = _turned(q, *angles), _turned(k, *angles)
    other = att.other_stream
    if other is None:
        return q, k, v
    rows, keys = _real(att.valid_rows, sample, att.rows), _real(att.valid_keys, sample, att.keys)
    held = ((q, other.q, rows), (k, other.k, keys), (v, other.v, keys))
    q, k, v = (
        own if given is None else _held(given[head, sample][real], x.shape[1])
        for own, given, real in held
    )
    return q, k, v


def _capped(z: Exact, cap: Decimal) -> tuple[Exact, Exact]:
    """Scores under a cap, and the slopes there."""
    shrunk = np.frompyfunc(lambda t: (-2 * abs(t) / cap).exp(), 1, 1)(z)
    slopes = 4 * shrunk / (1 + shrunk) ** 2
    return np.where(z < 0, -cap, cap) * (1 - shrunk) / (1 + shrunk), slopes


def _head(
    att: Attention, sample: int, head: int, x: Exact, *, l2: bool, side: str | None
) -> Differentiated:
    """The Jacobian of one head: every score's derivatives with respect to its query's and its key's
    token, then those of the softmax's quotient."""
    assert att.variants <= KNOWN, f"the oracle does not know {sorted(att.variants - KNOWN)}"
    scale = exact(att.scale)
    rows, keys = _real(att.valid_rows, sample, att.rows), _real(att.valid_keys, sample, att.keys)
    q, k, v = _sides(att, sample, head, x, l2)
    if side is not None:
        sides = {"q": q, "k": k, "v": v}
        width = sides[side].y.shape[1]
        q, k, v = (_alone(t, side == name, width) for name, t in sides.items())
    z, by_query, by_key = _distances(q, scale) if l2 else _products(q, k, scale)
    unit = abs(scale) * q.y.shape[1]
    score, slope = unit * q.size * k.size, unit * (q.size * k.slope + k.size * q.slope)
    if att.cap is not None:
        cap = exact(att.cap)
        z, slopes = _capped(z, cap)
        by_query, by_key = slopes[..., None] * by_query, slopes[..., None] * by_key
        slope *= 1 + score / cap
        score += cap
    allowed = np.ones((len(rows), len(keys)), dtype=bool)
    if att.mask is not None:
        shape = att.samples, att.heads, att.rows, att.keys
        mask = att.mask.expand(shape)[sample, head].double()[rows][:, keys]
        allowed = (mask > BLOCKED).numpy()
        finite = exact(mask.masked_fill(mask <= BLOCKED, 0.0))
        z, score = z + finite, score + _largest(finite)
    sink = None if att.sinks is None else exact(float(att.sinks[head]))
    other = att.other_stream
    moves = other is None or other.q is None, other is None or other.k is None
    if side is not None:
        moves = side == "q", side != "q"
    jacobian, outputs = _softmax(z, by_query, by_key, v, allowed, sink, moves)
    if sink is not None:
        score += abs(sink)
    gate = att.gate
    if gate is not None:
        jacobian, outputs, more = _gated(x, gate, head, jacobian, outputs, held=side is not None)
        v = replace(v, slope=v.slope + more * v.size, size=v.size * (1 + more))
    error = 1000 * max(att.tokens, att.rows, att.keys) * x.shape[1] * _ulp()
    return Differentiated(jacobian, error * (1 + score) * (v.size * slope + v.slope), outputs)


def _alone(given: Vectors, moves: bool, width: int) -> Vectors:
    """The same vectors as functions of themselves, or of others of that width, which they do not
    follow."""
    n, d = given.y.shape
    dy = exact(torch.eye(d).expand(n, d, d)) if moves else exact(torch.zeros(n, d, width))
    return replace(given, dy=dy, slope=Decimal(int(moves)))


def _held(t: Tensor, width: int) -> Vectors:
    """Vectors (n, d) of another stream, which do not follow tokens of this one."""
    y = exact(t)
    return Vectors(y, np.full((*y.shape, width), Decimal(0), dtype=object), _largest(y), Decimal(0))


def _gated(
    x: Exact, gate: Gate, head: int, jacobian: Exact, outputs: Exact, *, held: bool
) -> tuple[Exact, Exact, Decimal]:
    """The Jacobian of outputs times sigmoids of a projection, they, and the size of its logits."""
    w = exact(gate.w[head])
    y = x @ w if gate.b is None else x @ w + exact(gate.b[head])
    factor = np.frompyfunc(lambda t: 1 / (1 + (-t).exp()), 1, 1)(y)
    slope = factor * (1 - factor) * outputs
    jacobian = factor[..., None, None] * jacobian
    for i in range(0 if held else len(x)):
        jacobian[i, :, i] += slope[i][:, None] * w.T
    return jacobian, factor * outputs, 1 + _largest(abs(x) @ abs(w)) + _largest(w)


def _products(q: Vectors, k: Vectors, scale: Decimal) -> tuple[Exact, Exact, Exact]:
    """Scores scale q_i k_j, (n, n), and their derivatives with respect to tokens i and j, (n, n,
    D)."""
    by_query = np.tensordot(q.dy, scale * k.y, (1, 1))  # (i, D, j)
    by_key = np.tensordot(scale * q.y, k.dy, (1, 1))  # (i, j, D)
    return scale * (q.y @ k.y.T), np.moveaxis(by_query, 2, 1), by_key


def _distances(q: Vectors, scale: Decimal) -> tuple[Exact, Exact, Exact]:
    """Scores -scale |q_i - q_j|^2 with the same derivatives."""
    apart = q.y[:, None] - q.y[None]  # (i, j, d)
    # the projection of every token is the same
    slope = -2 * scale * np.tensordot(apart, q.dy[0], (2, 0))
    return -scale * (apart * apart).sum(-1), slope, -slope


def _softmax(
    z: Exact,
    by_query: Exact,
    by_key: Exact,
    v: Vectors,
    allowed: npt.NDArray[np.bool_],
    sink: Decimal | None,
    moves: tuple[bool, bool],
) -> tuple[Exact, Exact]:
    """The Jacobian (n, d_v, n, D) of sum_j e^z_ij v_j / sum_j e^z_ij, by the rule for quotients;
    and these outputs, (n, d_v). ``moves``: whether queries, and keys and values, follow the tokens.
    """
    rows, (keys, d_v, width) = len(z), v.dy.shape
    moved = keys if moves[1] else rows
    jacobian = np.full((rows, d_v, moved, width), Decimal(0), dtype=object)
    outputs = np.full((rows, d_v), Decimal(0), dtype=object)
    for i in range(rows):
        seen = np.flatnonzero(allowed[i])
        top = max(z[i, seen])
        top = top if sink is None else max(top, sink)
        e = np.array([(z[i, j] - top).exp() for j in seen], dtype=object)
        total = e.sum() + (0 if sink is None else (sink - top).exp())
        outputs[i] = out = e @ v.y[seen] / total
        d_total = (
            e[:, None] * by_key[i, seen]
        )  # (seen, D): of the denominator, with respect to each key's token
        d_above = np.array(
            [
                np.multiply.outer(v.y[j], d) + w * v.dy[j]
                for j, d, w in zip(seen, d_total, e, strict=True)
            ]
        )  # (seen, d_v, D)
        if moves[1]:
            jacobian[i][:, seen] = np.moveaxis(
                (d_above - np.multiply.outer(out, d_total).swapaxes(0, 1)) * (1 / total), 0, 1
            )
        if not moves[0]:
            continue
        own = e[:, None] * by_query[i, seen]  # with respect to the query's token
        jacobian[i, :, i] += (v.y[seen].T @ own - np.multiply.outer(out, own.sum(0))) * (1 / total)
    return jacobian, outputs


# -- its norm --------------------------------------------------------------------------------------


def enclosed(found: Differentiated) -> Enclosed:
    """The norm of a matrix by a float64 singular value decomposition for vectors, and a quotient
    and a residual in many digits.

    With w = J^T u, v = w / |w| and J v = s u', the norm is at least s. In orthonormal bases that
    begin with u' and v the matrix is (s, e; 0, R) with e the part of J^T u' across v and R = J - u'
    (J^T u')^T, so it is at most that of the 2 x 2 matrix (s, |e|; 0, |R|).
    """
    n, d_v, moved, width = found.jacobian.shape
    j = found.jacobian.reshape(n * d_v, moved * width)
    left_over = found.error * max(n, moved) * Decimal(d_v * width).sqrt()  # in the Frobenius norm
    largest = _largest(j)
    if largest == 0:
        return Enclosed(Decimal(0), left_over)
    j = j * Decimal(1).scaleb(-largest.adjusted())
    u = exact(torch.from_numpy(np.linalg.svd(j.astype(float))[0][:, 0]))
    w = u @ j
    v = w / length(w)
    y = j @ v
    s = length(y)
    across = (y / s) @ j
    rest = (j - np.multiply.outer(y / s, across)).astype(float)
    rho = Decimal(float(np.linalg.svd(rest, compute_uv=False)[0])) * (1 + SVD_ERROR)
    rho += s * Decimal("1e-290")
    e = length(across - s * v)
    trace = s * s + e * e + rho * rho
    upper = ((trace + max(Decimal(0), trace * trace - 4 * s * s * rho * rho).sqrt()) / 2).sqrt()
    unit = Decimal(1).scaleb(largest.adjusted())
    slack = 10**6 * len(j) * _ulp()
    return Enclosed(
        max(Decimal(0), s * unit * (1 - slack) - left_over), upper * unit * (1 + slack) + left_over
    )


def length(x: Exact) -> Decimal:
    """Of a vector."""
    return (x * x).sum().sqrt()


def _largest(x: Exact) -> Decimal:
    return max(map(abs, x.flat))


def _ulp() -> Decimal:
    return Decimal(1).scaleb(1 - getcontext().prec)

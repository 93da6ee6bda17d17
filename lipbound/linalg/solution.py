"""The result of a solver, the random vectors it starts from, and the store of its values."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound.errors import LipboundError, RangeError, shown, whole
from lipbound.formatting import TABLE_ROWS, html_table, number
from lipbound.linalg.matrix_norms import UNIT, power_of_two, times_power, times_power_up
from lipbound.linalg.operators import JacobianOperator

Seed = int | Sequence[int]
"""One seed for all of a batch, or one for each of its equal parts."""
NOT_ASKED = "not asked (delta=)"
"""What is shown for upper ends that nobody asked for, and which are infinite."""
SALT = "lipbound: directions that no data know of"
"""Part of the key of every random stream."""


@dataclass(frozen=True, repr=False)
class Norm:
    """Spectral norms of a batch of Jacobians.

    Attributes:
        lower: attained value, a lower bound on the norm, float64; up to rounding of the dtype where
            a solver returns it, less all rounding where `lipbound.spectral_norm` does.
        upper: upper bound on the norm where one was asked for (``delta``, or a dense method), else
            infinite, float64.
        steps: products with J J^T (or J^T J) spent, int64; 0 for dense methods.
        converged: whether the stopping rule was met.
        error: estimate of the relative error of ``lower`` (exceeded with probability at most 1e-3
            each), float64; NaN for power iteration.
        left, right: top singular pair, unit vectors, when asked for; else None.
        limited: whether rounding alone takes more than a quarter of the tolerance, or has ended a
            search: why a norm has not converged, and would not in more steps. Of closed forms.
    """

    lower: Tensor
    upper: Tensor
    steps: Tensor
    converged: Tensor
    error: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    limited: Tensor | None = None

    @property
    def _asked(self) -> bool:
        """Whether there are upper ends; without, ``error`` is an estimate, and finite."""
        return bool(self.upper.isfinite().any() or self.error.isinf().all())

    def __repr__(self) -> str:
        shown = vars(self) | ({} if self._asked else {"upper": NOT_ASKED})
        return f"Norm({', '.join(f'{name}={t}' for name, t in shown.items() if t is not None)})"

    def _repr_html_(self) -> str:
        n = self.lower.ndim
        axes = ("sample", "head") if n == 2 else tuple(f"axis {k}" for k in range(n))
        columns = [*axes, "lower", "upper", "steps", "converged"]
        rows = []
        for at in np.ndindex(*self.lower.shape):
            ends = [number(float(end[at]), 6) for end in (self.lower, self.upper)]
            ends[1:] = ends[1:] if self._asked else [NOT_ASKED]
            rounding = self.limited is not None and bool(self.limited[at] & ~self.converged[at])
            closed = f"{bool(self.converged[at])}{' (rounding)' if rounding else ''}"
            rows.append([*map(str, at), *ends, str(int(self.steps[at])), closed])
        return html_table(columns, rows, title="Spectral norms", most=TABLE_ROWS)

    @staticmethod
    def cat(norms: "Sequence[Norm]", dim: int = 0) -> "Norm":
        """Return norms concatenated along an axis, with vectors where all have them."""
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(Norm)):
            some = [getattr(norm, name) for norm in norms]
            values[name] = None if any(t is None for t in some) else torch.cat(some, dim)
        return Norm(**values)

    def put(self, index: Tensor, other: "Norm") -> None:
        """Replace the values of some entries by those of another batch, (len(index),)."""
        for name in ("lower", "upper", "steps", "converged", "error"):
            getattr(self, name)[index] = getattr(other, name)

    def view(self, *shape: int) -> "Norm":
        """Return the same values with the batch axis reshaped."""
        numbers: dict[str, Any] = vars(self) | {"left": None, "right": None}
        return replace(self, **{n: t.view(*shape) for n, t in numbers.items() if t is not None})

    def times_power(self, exponents: Tensor) -> "Norm":
        """Return ends times powers of two, rounded outwards; they are not close where that rounds.

        Args:
            exponents: integers, which broadcast to the ends.
        """
        lower, upper = times_power(self.lower, exponents), times_power_up(self.upper, exponents)
        lost = (lower < 1e-300) & (self.lower > 0)
        lower, error = torch.where(lost, 0.0, lower), torch.where(lost, math.inf, self.error)
        close = self.converged & ~lost
        return replace(self, lower=lower, upper=upper, error=error, converged=close)


def widened(norm: Norm, by: Tensor, tol: float) -> Norm:
    """Return bounds on norms of operators that are off by ``by`` (batch,) at most.

    ``converged`` where they are no wider than ``tol``.
    """
    low = torch.nan_to_num((norm.lower - by) * (1 - 2 * UNIT), nan=0.0).clamp_min(0)
    high = (norm.upper + by) * (1 + 2 * UNIT)
    error = width(low, high)
    return replace(norm, lower=low, upper=high, error=error, converged=error <= tol)


def width(low: Tensor, high: Tensor) -> Tensor:
    """Return the relative widths of enclosures, infinite where the lower end is 0."""
    return torch.where(high > low, high / low - 1, 0.0)


def start_vectors(op: JacobianOperator, shape: tuple[int, ...], seed: Seed) -> Tensor:
    """Draw an independent direction, uniform on the sphere, for every entry of a batch.

    Args:
        op: whose batch, device and dtype the vectors are of.
        shape: their shape before it is flattened.
        seed: one seed, or several: the batch is then cut into that many equal parts, and a part's
            vectors do not depend on what else is in the batch.

    Returns:
        Unit vectors (batch, prod(shape)), drawn in float64: by `normal_numbers`, on NVIDIA's GPUs
        by their own generator, with seeds from the same hash.
    """
    count, seeds = math.prod(shape), seeds_each(op.batch, seed)
    if op.device.type == "cuda":
        x = torch.empty(len(seeds), count, dtype=torch.float64, device=op.device)
        generator = torch.Generator(op.device)  # noqa: TID251 - seeded by the same hash
        for row, one in zip(x, seeds, strict=True):
            row.normal_(generator=generator.manual_seed(_hash(count, one) >> 65))
    else:
        x = torch.stack([normal_numbers(count, one) for one in seeds])
    return (x / torch.linalg.vector_norm(x, dim=1, keepdim=True)).to(op.device, op.dtype)


def normal_numbers(count: int, *key: int | str) -> Tensor:
    """Return independent standard normal numbers, (count,), float64 on the CPU.

    All that is drawn at random under a failure probability is drawn here, or on an NVIDIA GPU by
    `start_vectors`. The stream belongs to
    ``key`` and ``count``, and to nothing else: a counter-based generator (Philox), keyed by a hash
    with a salt of its own. What users draw with any seed of torch or numpy, data and weights alike,
    is therefore independent of it.
    """
    generator = np.random.Generator(np.random.Philox(key=_hash(count, *key)))
    return torch.from_numpy(generator.standard_normal(count))


def seeds_each(batch: int, seed: Seed, *purpose: int | str) -> list[int]:
    """Return a seed for every entry of a batch.

    It depends on the seed given for the entry, its place among the entries that share this, and
    the purpose.

    Raises:
        LipboundError: a seed is no integer of 64 bits, or seeds do not fit the batch.
    """
    seeds = check_seed(seed)
    if not seeds or batch % len(seeds):
        raise LipboundError(
            f"{len(seeds)} seeds were given for {batch} norms; give one seed, or one per sample"
        )
    each = max(1, batch // len(seeds))
    return [_hash(seeds[i // each], i % each, *purpose) >> 65 for i in range(batch)]


def sample_seeds(samples: int, seed: Seed) -> list[int]:
    """Return a seed for every sample of a layer.

    What is drawn for a head then does not depend on which other heads and samples there are.
    """
    return check_seed(seed) if _several(seed) else seeds_each(samples, seed)


def _hash(*key: int | str) -> int:
    digest = hashlib.blake2b(repr((SALT, *key)).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def _several(seed: Any) -> bool:
    return isinstance(seed, Sequence) and not isinstance(seed, str | bytes)


def check_seed(seed: Any) -> list[int]:
    """Return seeds as a list: one for all, or one per sample.

    Raises:
        LipboundError: one is no integer, or beyond 64 bits.
    """
    try:
        seeds = [whole("seed", one) for one in (seed if _several(seed) else [seed])]
        if not all(-(2**63) <= one < 2**64 for one in seeds):
            raise LipboundError("seed")
    except LipboundError as error:
        raise LipboundError(
            f"seed is {shown(seed)}; it must be an integer of at most 64 bits, or a sequence of "
            "them, one per sample"
        ) from error
    return seeds


def solved(
    op: JacobianOperator, lower: Tensor, *, left: Tensor | None = None, **known: Tensor | float
) -> Norm:
    """Return what a solver has found, (batch,) on the CPU or one for all, as a `Norm`.

    Args:
        op: the Jacobians.
        lower: attained values.
        left: what singular vectors are found from, if they are wanted.
        known: other fields of the norm; by default infinite upper ends, no steps, converged, and
            no error.

    Raises:
        RangeError: a value is not finite.
    """
    check_finite(op, lower)
    values = {"upper": math.inf, "steps": 0, "converged": True, "error": 0.0} | known
    dtypes = (torch.float64, torch.int64, torch.bool, torch.float64)
    pairs = zip(values.values(), dtypes, strict=True)
    each = (torch.as_tensor(value, dtype=dtype) for value, dtype in pairs)
    norm = Norm(lower, *(t.expand(op.batch).clone() for t in each))
    return norm if left is None else with_vectors(norm, op, left)


def check_finite(op: JacobianOperator, lower: Tensor) -> None:
    """Raise RangeError where a value is not finite."""
    if not bool(torch.isfinite(lower).all()):
        if op.dtype == torch.float32:
            raise RangeError("Jacobian products overflow in float32; use dtype='float64'")
        raise RangeError("Jacobian products overflow; rescale the inputs or the weights")


def with_vectors(norm: Norm, op: JacobianOperator, left: Tensor) -> Norm:
    """Return the norms with singular vectors, from those on the left, (batch, n) or as outputs.

    They have seen one product more, which also clears directions that J does not reach.
    """
    right = unit_vectors(op.vjp(left.reshape(-1, *op.out_shape)))
    return replace(norm, left=unit_vectors(op.jvp(right)), right=right)


def unit_vectors(x: Tensor) -> Tensor:
    """Return batch entries divided by their 2-norms; zero stays zero."""
    flat = x.flatten(1)
    # of entries near 1, whose squares stay in range
    flat = flat / power_of_two(flat.abs().amax(1, keepdim=True) / 2).to(x.dtype)
    size = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return (flat / size).view_as(x)

"""What a solver returns, what it starts from, and where it collects its results."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound.errors import LipboundError, RangeError, shown, whole
from lipbound.formatting import number
from lipbound.formatting.html import ROWS, html_table
from lipbound.linalg.operators import JacobianOperator

SALT = "lipbound: directions that no data know of"
"""Part of the key of every random stream."""


@dataclass(frozen=True)
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
    """

    lower: Tensor
    upper: Tensor
    steps: Tensor
    converged: Tensor
    error: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    def _repr_html_(self) -> str:
        places = [tuple(index) for index in torch.nonzero(torch.ones(self.lower.shape)).tolist()]
        axes = (
            ("sample", "head")
            if self.lower.ndim == 2
            else tuple(f"axis {k}" for k in range(self.lower.ndim))
        )
        rows = [
            [
                *map(str, at),
                number(float(self.lower[at]), 6),
                number(float(self.upper[at]), 6),
                str(int(self.steps[at])),
                str(bool(self.converged[at])),
            ]
            for at in places[: ROWS + 1]
        ]
        missing = [[""] * (len(axes) + 4)] * max(0, len(places) - len(rows))
        return html_table(
            [*axes, "lower", "upper", "steps", "converged"],
            rows + missing,
            title="Spectral norms",
            most=ROWS,
        )

    @staticmethod
    def cat(norms: "Sequence[Norm]", dim: int = 0) -> "Norm":
        """Several side by side; vectors where all have them."""
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(Norm)):
            some = [getattr(norm, name) for norm in norms]
            values[name] = None if any(t is None for t in some) else torch.cat(some, dim)
        return Norm(**values)

    def view(self, *shape: int) -> "Norm":
        """The same values with the batch axis reshaped."""
        return replace(
            self,
            **{
                name: getattr(self, name).view(*shape)
                for name in ("lower", "upper", "steps", "converged", "error")
            },
        )


def start_vectors(
    op: JacobianOperator, shape: tuple[int, ...], seed: int | Sequence[int]
) -> Tensor:
    """Independent directions, uniform on the sphere: one unit vector per batch entry, (batch,
    prod(shape)), drawn on the CPU in float64.

    With a sequence of seeds the batch is cut into that many equal parts, and a part's vectors do
    not depend on what else is in the batch.
    """
    x = torch.stack([normal_numbers(math.prod(shape), one) for one in seeds_each(op.batch, seed)])
    return (x / torch.linalg.vector_norm(x, dim=1, keepdim=True)).to(op.device, op.dtype)


def normal_numbers(count: int, *key: int | str) -> Tensor:
    """Independent standard normal numbers, float64 on the CPU, (count,): all that is drawn at
    random under a failure probability is drawn here.

    The stream belongs to ``key`` and ``count``, and to nothing else: a counter-based generator
    (Philox), keyed by a hash with a salt of its own. What users draw with any seed of torch or
    numpy, data and weights alike, is therefore independent of it.
    """
    return torch.from_numpy(
        np.random.Generator(np.random.Philox(key=_hash(count, *key))).standard_normal(count)
    )


def seeds_each(batch: int, seed: int | Sequence[int], *purpose: int | str) -> list[int]:
    """A seed for every entry of a batch, which depends on its own seed, its place among the entries
    that share this, and the purpose."""
    seeds = seeds_for(batch, seed)
    each = max(1, batch // len(seeds))
    return [_hash(seeds[i // each], i % each, *purpose) >> 65 for i in range(batch)]


def sample_seeds(samples: int, seed: int | Sequence[int]) -> list[int]:
    """A seed for every sample of a layer, so that what is drawn for a head does not depend on which
    other heads and samples there are."""
    return (
        check_seed(seed)
        if isinstance(seed, Sequence) and not isinstance(seed, str | bytes)
        else seeds_each(samples, seed)
    )


def _hash(*key: int | str) -> int:
    """A hash of 128 bits over a key and the salt."""
    return int.from_bytes(
        hashlib.blake2b(repr((SALT, *key)).encode(), digest_size=16).digest(), "little"
    )


def seeds_for(batch: int, seed: int | Sequence[int]) -> list[int]:
    """One seed, or one for each of equally many entries of a batch; raises LipboundError where they
    do not fit."""
    seeds = check_seed(seed)
    if not seeds or batch % len(seeds):
        raise LipboundError(
            f"{len(seeds)} seeds were given for {batch} norms; give one seed, or one per sample"
        )
    return seeds


def check_seed(seed: Any) -> list[int]:
    """Seeds, one for all or one per sample; raises LipboundError for what is none, or beyond 64
    bits."""
    many = isinstance(seed, Sequence) and not isinstance(seed, str | bytes)
    try:
        seeds = [whole("seed", one) for one in seed] if many else [whole("seed", seed)]
        if not all(-(2**63) <= one < 2**64 for one in seeds):
            raise LipboundError("seed")
    except LipboundError as error:
        raise LipboundError(
            f"seed is {shown(seed)}; it must be an integer of at most 64 bits, or a sequence of "
            "them, one per sample"
        ) from error
    return seeds


class Results:
    """What the entries that have stopped have shown: recurrences of the operator in units of
    ``unit``, then values."""

    def __init__(self, op: JacobianOperator, vectors: bool, limit: int = 0):
        self.alpha, self.beta = (torch.ones(op.batch, limit, dtype=torch.float64) for _ in range(2))
        self.unit = torch.ones(op.batch, dtype=torch.float64)
        self.exhausted = torch.zeros(op.batch, dtype=torch.bool)
        self.lower = torch.zeros(op.batch, dtype=torch.float64)
        self.upper = torch.full((op.batch,), math.inf, dtype=torch.float64)
        self.error = torch.zeros(op.batch, dtype=torch.float64)
        self.steps = torch.zeros(op.batch, dtype=torch.int64)
        self.converged = torch.zeros(op.batch, dtype=torch.bool)
        self.left = (
            torch.zeros(op.batch, *op.out_shape, dtype=op.dtype, device=op.device)
            if vectors
            else None
        )
        self.done = torch.zeros(op.batch, dtype=torch.bool)

    def stop(
        self,
        index: Tensor,
        steps: int,
        alpha: Tensor,
        beta: Tensor,
        unit: Tensor,
        exhausted: Tensor,
        reached: Tensor,
    ) -> None:
        """Store the recurrences of the entries ``index`` after ``steps`` steps."""
        self.alpha[index, :steps], self.beta[index, :steps], self.unit[index] = alpha, beta, unit
        self.exhausted[index], self.converged[index], self.steps[index], self.done[index] = (
            exhausted,
            reached,
            steps,
            True,
        )

    def norm(self, op: JacobianOperator, *, refined: bool = True) -> Norm:
        """The results as a `Norm`; singular vectors are refined by one product, which also clears
        directions that J does not reach, or only those on the left are there, as they were found.
        """
        if not bool(torch.isfinite(self.lower).all()):
            remedy = (
                " in float32; use dtype='float64'"
                if op.dtype == torch.float32
                else "; rescale the inputs or the weights"
            )
            raise RangeError(f"Jacobian products overflow{remedy}")
        left = right = None
        if self.left is not None and not refined:
            left = self.left
        elif self.left is not None:
            right = unit_vectors(op.vjp(self.left))
            left = unit_vectors(op.jvp(right))
        return Norm(self.lower, self.upper, self.steps, self.converged, self.error, left, right)


def unit_vectors(x: Tensor) -> Tensor:
    """Every batch entry divided by its 2-norm (zero stays zero)."""
    size = torch.linalg.vector_norm(x.flatten(1), dim=1).clamp_min(torch.finfo(x.dtype).tiny)
    return x / size.view(-1, *(1,) * (x.ndim - 1))

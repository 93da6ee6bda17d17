"""Upper values of nonnegative numbers with exponents of their own.

Products and powers of norms neither overflow nor underflow on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipbound.linalg.matrix_norms import UNIT, exact_power, times_power

UP = 1 + 4 * UNIT
"""Factor by which the result of a rounded operation is at least the exact one."""
FAR = 200
"""A summand that is smaller by more than this power of two counts as if it were by this power."""
ZERO = torch.iinfo(torch.int64).min // 4
"""Exponent that zero has where exponents are compared."""


def exponents(t: Tensor, dims: int | tuple[int, ...] | None = None) -> Tensor:
    """Return e for which the largest |t| over ``dims`` is 2^e times a number in [1/2, 1), int64.

    ``dims`` are kept, of length one; e is 0 where the largest is 0 or infinite.
    """
    size = t.detach().abs().double()
    size = size if dims is None else size.amax(dims, keepdim=True)
    return torch.where(torch.isfinite(size), torch.frexp(size).exponent.long(), 0)


class Upper:
    r"""Upper values :math:`m\,2^e` of real numbers >= 0, element by element.

    Lemma 83 (docs/theory/upper_values.md). Every operation rounds upwards. What is no number is
    infinite; zero times infinity is zero, as zeros are exact and infinity stands for a number that
    is not known. Derivatives are those of the mantissas; of equal numbers `max` and `maximum`
    follow one.

    Args:
        m: mantissas, float64, any shape.
        e: exponents, int64, broadcastable to it.
    """

    def __init__(self, m: Tensor, e: Tensor):
        self.m, self.e = m, e

    @staticmethod
    def of(value: Upper | Tensor | float) -> Upper:
        """Return upper values in this form; what is NaN or negative becomes infinite."""
        if isinstance(value, Upper):
            return value
        t = torch.as_tensor(value, dtype=torch.float64)
        t = torch.where(t >= 0, t, torch.inf)
        e = exponents(t)
        return Upper(times_power(t, -e), e)

    def value(self) -> Tensor:
        """Return the numbers in float64, rounded upwards.

        Infinite beyond its range, never zero for a number that is not.
        """
        inner = exponents(self.m)
        e = (self.e + inner).clamp(-1300, 1100)
        v = times_power(times_power(self.m, -inner), e)
        smallest = torch.finfo(torch.float64).smallest_normal
        return torch.where((v < smallest) & (self.m > 0), v + 2.0**-1074, v)

    def detach(self) -> Upper:
        """Return the same without derivatives."""
        return Upper(self.m.detach(), self.e)

    def __mul__(self, other: Upper | Tensor | float) -> Upper:
        other = Upper.of(other)
        m = self.m * other.m * UP
        return Upper(torch.where((self.m == 0) | (other.m == 0), 0.0, m), self.e + other.e)

    def __truediv__(self, other: Upper | Tensor | float) -> Upper:
        """Return quotients by numbers that are exact, or lower values; infinite for zero."""
        other = Upper.of(other)
        m = self.m / torch.where(other.m == 0, 1.0, other.m) * UP
        return Upper(torch.where(other.m == 0, torch.inf, m), self.e - other.e)

    def __add__(self, other: Upper | Tensor | float) -> Upper:
        other = Upper.of(other)
        e = torch.maximum(*(torch.where(t.m == 0, ZERO, t.e) for t in (self, other)))
        e = torch.where(e == ZERO, 0, e)
        own, its = (t.m * exact_power((t.e - e).clamp(-FAR, 0)) for t in (self, other))
        return Upper((own + its) * UP, e)

    __rmul__ = __mul__
    __radd__ = __add__

    def __pow__(self, k: int) -> Upper:
        """Return k-th powers, k = 1, 2, ..."""
        product = self
        for _ in range(k - 1):
            product = product * self
        return product

    def sqrt(self) -> Upper:
        """Return square roots; the derivative at zero is zero."""
        odd = self.e & 1
        m = self.m * exact_power(odd)
        root = torch.where(m == 0, 1.0, m).sqrt() * UP
        return Upper(torch.where(m == 0, 0.0, root), (self.e - odd) >> 1)

    def exp(self) -> Upper:
        """Return exponentials; infinite beyond 2^(2^40)."""
        y = self.value()
        large = y > 2.0**39
        y = torch.where(large, 0.0, y)
        whole = (y.detach() / 0.6931471805599453).floor()
        m = (y - whole * 0.6931471805599453).exp() * (1 + 8 * UNIT * (y.detach() + 4))
        return Upper(torch.where(large, torch.inf, m), whole.long())

    def __gt__(self, other: Upper | Tensor | float) -> Tensor:
        """Return where it is larger than ``other``, by comparison of what is kept."""
        other = Upper.of(other)
        (m, e), (n, f) = self._normal(), other._normal()
        bigger = torch.where(e == f, m > n, e > f)
        return (m != 0) & (n < torch.inf) & torch.where(n == 0, m > 0, (m == torch.inf) | bigger)

    def _normal(self) -> tuple[Tensor, Tensor]:
        """Return mantissas in [1/2, 1), and exponents."""
        m = self.m.detach()
        inner = exponents(m)
        return times_power(m, -inner), self.e + inner

    def maximum(self, other: Upper | Tensor | float) -> Upper:
        """Return the larger of two, element by element."""
        other = Upper.of(other)
        return other._where(other > self, self)

    def minimum(self, other: Upper | Tensor | float) -> Upper:
        """Return the smaller of two, element by element."""
        other = Upper.of(other)
        return other._where(self > other, self)

    def _where(self, here: Tensor, other: Upper) -> Upper:
        return Upper(torch.where(here, self.m, other.m), torch.where(here, self.e, other.e))

    def sum(self) -> Upper:
        """Return sums over the last axis."""
        top = torch.where(self.m == 0, ZERO, self.e).amax(-1, keepdim=True)
        top = torch.where(top < -(2**60), 0, top)
        total = (self.m * exact_power((self.e - top).clamp(-FAR, 0))).sum(-1)
        return Upper(total * (1 + (self.m.shape[-1] + 4) * UNIT), top[..., 0])

    def shifted(self, e: Tensor) -> Upper:
        """Return the numbers times 2^e, exactly."""
        return Upper(self.m, self.e + e)

    def __getitem__(self, index: object) -> Upper:
        return Upper(self.m[index], self.e.expand_as(self.m)[index])  # type: ignore[index]


def scaled(t: Tensor, dims: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return t in float64 with its largest entry over ``dims`` in [1/2, 1), and exponents.

    t is divided by the powers of two with these exponents, (``dims`` of length one).
    """
    e = exponents(t, dims)
    return times_power(t.double(), -e), e

r"""A batch of linear maps given by their products, and the ones that need no closed form.

Every operator is a *batch* of Jacobians :math:`J_b : R^{in} \to R^{out}`, flattened to a single
batch axis, with

    ``jvp(x)``   (batch, *in_shape)  -> (batch, *out_shape)      :math:`J x`
    ``vjp(y)``   (batch, *out_shape) -> (batch, *in_shape)       :math:`J^T y`
    ``gram(y)``  (batch, *out_shape) -> (batch, *out_shape)      :math:`J J^T y`
    ``select(index)``  the operators of some batch entries
    ``dense()``  the matrices themselves, (batch, out, in)
    ``to_scipy(i)``  one of them as a ``scipy.sparse.linalg.LinearOperator``

so that the solvers of this folder work on any of them.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from lipbound.errors import T

Product = Callable[[Tensor], Tensor]


class Roundoff(NamedTuple):
    r"""Upper values of float64 rounding in a batch of operators, (batch,) each, float64 on the CPU.

    Attributes:
        tensors: :math:`\|J - \hat J\|`, J-hat being the operator of the tensors that are stored.
        products: distance of products of J-hat, or its transpose, with unit vectors from exact
            ones.
        size: :math:`\|\hat J\|`, crudely.
    """

    tensors: Tensor
    products: Tensor
    size: Tensor

    def select(self, index: Tensor) -> "Roundoff":
        """Return that of some entries of the batch."""
        return Roundoff(*(t[index] for t in self))

    def scaled(self, unit: Tensor) -> "Roundoff":
        """Return that of the operators times ``unit`` (batch,)."""
        return Roundoff(*(t * unit for t in self))


class JacobianOperator(ABC):
    """A batch of linear maps given by their products; the module says what each method does."""

    batch: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    squared: bool = False
    """True if `gram` multiplies by squares of factors, and rounds as these do."""
    coarse: float = 1.0
    """Largest relative error of the numbers that products are made of, in units of the dtype's."""

    def graphable(self) -> bool:
        """Return whether Lanczos' steps are launched as a graph: small products that only read.

        Makes what `gram` keeps for its next call.
        """
        return False

    @abstractmethod
    def jvp(self, x: Tensor) -> Tensor:
        """Return J x for every entry: (batch, *in_shape) -> (batch, *out_shape)."""

    @abstractmethod
    def vjp(self, y: Tensor) -> Tensor:
        """Return J^T y for every entry: (batch, *out_shape) -> (batch, *in_shape)."""

    @abstractmethod
    def select(self, index: Tensor) -> "JacobianOperator":
        """Return the operators at positions ``index`` of the batch."""

    def gram(self, y: Tensor) -> Tensor:
        """Return J J^T y for every entry: (batch, *out_shape) -> (batch, *out_shape)."""
        return self.jvp(self.vjp(y))

    def image(self, y: Tensor) -> Tensor:
        """Return J^T y in any coordinates in which `length` measures it, (batch, ...)."""
        return self.vjp(y)

    def sums(self, image: Tensor) -> Tensor:
        """Return what lengths of an `image` are found from, (batch, 1 or 3), on its device."""
        return torch.linalg.vector_norm(image.flatten(1), dim=1, keepdim=True)

    def length(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lengths of what `image` gives, and how much too long they may be.

        From `sums`, float64 on the CPU. Upper values of the rounding of these sums alone, (batch,)
        each.
        """
        size, count, known = sums[:, 0], math.prod(self.in_shape), torch.finfo(self.dtype)
        underflow = (count * known.tiny) ** 0.5  # of squares
        return size, (count + 8) * known.eps / 2 * size + underflow

    def double(self) -> "JacobianOperator":
        """Return the same maps with products in float64, where the operator can do that."""
        return self

    def dense(self) -> Tensor:
        """Return the matrices, (batch, out, in), one product a row or column: for small cases."""
        if math.prod(self.out_shape) < math.prod(self.in_shape):
            return torch.stack(list(Transposed(self).columns()), 1)
        return torch.stack(list(self.columns()), -1)

    def columns(self) -> Iterator[Tensor]:
        """Yield the columns of the matrices, (batch, out) each, by one product each."""
        size = math.prod(self.in_shape)
        for k in range(size):
            e = torch.zeros(self.batch, size, dtype=self.dtype, device=self.device)
            e[:, k] = 1
            yield self.jvp(e.view(self.batch, *self.in_shape)).reshape(self.batch, -1)

    def to_scipy(self, i: int = 0) -> LinearOperator:
        """Return entry ``i`` as a scipy operator (out, in) on flattened vectors, in its dtype."""
        one = self.select(torch.tensor([i], device=self.device))

        def applied(product: Product, into: tuple[int, ...], x: np.ndarray) -> np.ndarray:
            t = torch.from_numpy(np.ascontiguousarray(x)).to(self.device, self.dtype)
            return product(t.view(1, *into)).reshape(-1).cpu().numpy()

        return LinearOperator(
            (math.prod(self.out_shape), math.prod(self.in_shape)),
            matvec=partial(applied, one.jvp, self.in_shape),
            rmatvec=partial(applied, one.vjp, self.out_shape),
            dtype=np.dtype(str(self.dtype).removeprefix("torch.")),
        )


class FromCPU(JacobianOperator):
    """An operator on a device without float64, for vectors on the CPU.

    Products are taken on the device, and what certifies a norm is computed on the CPU.

    Args:
        op: the operator on its device.
    """

    def __init__(self, op: JacobianOperator):
        self._op = op
        self.batch, self.in_shape, self.out_shape = op.batch, op.in_shape, op.out_shape
        self.dtype, self.device = op.dtype, torch.device("cpu")

    def jvp(self, x: Tensor) -> Tensor:
        return self._op.jvp(x.to(self._op.device)).cpu()

    def vjp(self, y: Tensor) -> Tensor:
        return self._op.vjp(y.to(self._op.device)).cpu()

    def select(self, index: Tensor) -> "FromCPU":
        return FromCPU(self._op.select(index))


_BATCHED = "has the batch axis first"
PerEntry = Annotated[T, _BATCHED]
"""Type of a field of a `TensorOperator` that has the batch axis first: a tensor, something with a
method ``select``, and one ``to`` where it has a dtype, or None."""


@dataclass(init=False, eq=False, repr=False)
class TensorOperator(JacobianOperator):
    """An operator made of tensors, which its copies share or take entries of.

    A subclass is a dataclass that names its batch fields by the type `PerEntry`. Copies hold the
    declared fields and nothing else, so an attribute that is not declared is missed at its first
    use.
    """

    batch: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def _with(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields."""
        other = object.__new__(type(self))
        for name in (f.name for f in fields(self)):
            setattr(other, name, changes[name] if name in changes else getattr(self, name))
        return other

    def select(self, index: Tensor | slice) -> Self:
        """Return the operators at positions ``index``, with views of their tensors for a slice."""
        count = len(range(self.batch)[index]) if isinstance(index, slice) else len(index)
        names = [f.name for f in fields(self) if _BATCHED in getattr(f.type, "__metadata__", ())]
        own = {n: _entries(v, index) for n in names if (v := getattr(self, n)) is not None}
        return self._with(batch=count, **own)

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same maps with products in another dtype."""
        cast = {f.name: _cast(getattr(self, f.name), dtype) for f in fields(self)}
        return self._with(**cast | {"dtype": dtype})

    def double(self) -> Self:
        """Return the same maps with products in float64."""
        return self.to(torch.float64)


def _entries(value: Any, index: Tensor | slice) -> Any:
    return value[index] if isinstance(value, Tensor) else value.select(index)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value.to(dtype) if hasattr(value, "to") else value
    whole = not value.is_floating_point()
    return value if whole else value.to(dtype, memory_format=torch.contiguous_format)


class AutogradJacobian(JacobianOperator):
    """Jacobian of any callable at one point, by ``torch.func`` (a batch of one).

    Args:
        f: a function of one tensor, differentiable by forward and reverse mode.
        x: the point; its shape and dtype are the operator's.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor):
        self._f, self._x = f, x
        value, self._pullback = torch.func.vjp(f, x)[:2]
        self.batch, self.in_shape, self.out_shape = 1, tuple(x.shape), tuple(value.shape)
        self.dtype, self.device = x.dtype, x.device

    def jvp(self, x: Tensor) -> Tensor:
        return torch.func.jvp(self._f, (self._x,), (x[0],))[1][None]

    def vjp(self, y: Tensor) -> Tensor:
        return self._pullback(y[0])[0][None]

    def select(self, index: Tensor) -> "AutogradJacobian":
        if index.tolist() != [0]:
            raise IndexError(f"this operator holds one Jacobian, at index 0; got {index.tolist()}")
        return self


class Between(JacobianOperator):
    """The maps between factors of their inputs and of their outputs.

    Args:
        op: the operators.
        left, right: numbers by which entries of outputs and of inputs are multiplied, which
            broadcast to (batch, ...) and have the batch axis.
    """

    def __init__(self, op: JacobianOperator, left: Tensor, right: Tensor):
        self._op, self._left, self._right = op, left, right
        self.batch, self.in_shape, self.out_shape = op.batch, op.in_shape, op.out_shape
        self.dtype, self.device = op.dtype, op.device

    def jvp(self, x: Tensor) -> Tensor:
        return self._left * self._op.jvp(self._right * x)

    def vjp(self, y: Tensor) -> Tensor:
        return self._right * self._op.vjp(self._left * y)

    def select(self, index: Tensor) -> Self:
        other = copy.copy(self)
        other._op, other.batch = self._op.select(index), len(index)
        other._left, other._right = self._left[index], self._right[index]
        return other


class InUnits(Between):
    """The maps times numbers ``unit`` (batch,), which powers of two are exact for."""

    def __init__(self, op: JacobianOperator, unit: Tensor):
        unit = unit.to(op.device, op.dtype)
        left, right = (unit.view(-1, *[1] * len(shape)) for shape in (op.out_shape, op.in_shape))
        super().__init__(op, left, torch.ones_like(right))


class Transposed(JacobianOperator):
    """The transposed maps, of the same norms: for outputs that are larger than inputs."""

    def __init__(self, op: JacobianOperator):
        self._op = op
        self.batch, self.dtype, self.device = op.batch, op.dtype, op.device
        self.in_shape, self.out_shape = op.out_shape, op.in_shape

    def jvp(self, x: Tensor) -> Tensor:
        return self._op.vjp(x)

    def vjp(self, y: Tensor) -> Tensor:
        return self._op.jvp(y)

    def select(self, index: Tensor) -> "Transposed":
        return Transposed(self._op.select(index))

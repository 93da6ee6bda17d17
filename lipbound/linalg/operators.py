r"""A batch of linear maps given by their products, and the ones that need no closed form.

Every operator is a *batch* of Jacobians :math:`J_b : R^{in} \to R^{out}`, flattened to a single batch axis, with

    ``jvp(x)``   (batch, *in_shape)  -> (batch, *out_shape)      :math:`J x`
    ``vjp(y)``   (batch, *out_shape) -> (batch, *in_shape)       :math:`J^T y`
    ``gram(y)``  (batch, *out_shape) -> (batch, *out_shape)      :math:`J J^T y`
    ``select(index)``  the operators of some batch entries
    ``dense()``  the matrices themselves, (batch, out, in)
    ``to_scipy(i)``  one of them as a ``scipy.sparse.linalg.LinearOperator``

so that the solvers of `lipbound.linalg.matrix_norms` work on any of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor


class JacobianOperator(ABC):
    """A batch of linear maps given by their products (see the module's header for the contract)."""

    batch: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def jvp(self, x: Tensor) -> Tensor:
        """J x for every entry: (batch, *in_shape) -> (batch, *out_shape)."""

    @abstractmethod
    def vjp(self, y: Tensor) -> Tensor:
        """J^T y for every entry: (batch, *out_shape) -> (batch, *in_shape)."""

    @abstractmethod
    def select(self, index: Tensor) -> "JacobianOperator":
        """The operators at positions ``index`` of the batch."""

    def gram(self, y: Tensor) -> Tensor:
        """J J^T y for every entry: (batch, *out_shape) -> (batch, *out_shape)."""
        return self.jvp(self.vjp(y))

    def double(self) -> "JacobianOperator":
        """The same maps with products in float64, where the operator can do that; else itself."""
        return self

    def dense(self) -> Tensor:
        """The matrices, (batch, out, in), one column of J per product; for small cases."""
        size = math.prod(self.in_shape)
        columns = []
        for k in range(size):
            e = torch.zeros(self.batch, size, dtype=self.dtype, device=self.device)
            e[:, k] = 1
            columns.append(self.jvp(e.view(self.batch, *self.in_shape)).reshape(self.batch, -1))
        return torch.stack(columns, -1)

    def to_scipy(self, i: int = 0) -> LinearOperator:
        """Entry ``i`` of the batch as a scipy operator of shape (out, in) on flattened vectors, in this operator's dtype."""
        one = self.select(torch.tensor([i], device=self.device))
        shape = (math.prod(self.out_shape), math.prod(self.in_shape))

        def product(f: Callable[[Tensor], Tensor], into: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
            def apply(x: np.ndarray) -> np.ndarray:
                t = torch.from_numpy(np.ascontiguousarray(x)).to(self.device, self.dtype)
                return f(t.view(1, *into)).reshape(-1).cpu().numpy()

            return apply

        return LinearOperator(
            shape,
            matvec=product(one.jvp, self.in_shape),
            rmatvec=product(one.vjp, self.out_shape),
            dtype=np.dtype(str(self.dtype).removeprefix("torch.")),
        )


Operator = TypeVar("Operator", bound=JacobianOperator)


def cast(op: Operator, names: tuple[str, ...]) -> Operator:
    """A copy of an operator with the named tensors in float64, and what was derived from them dropped."""
    other = object.__new__(type(op))
    other.__dict__.update({name: value for name, value in op.__dict__.items() if name != "_reduction"})
    other.dtype = torch.float64
    for name in names:
        setattr(other, name, getattr(op, name).double())
    return other


def select_entries(op: Operator, names: tuple[str, ...], index: Tensor | slice) -> Operator:
    """A copy of an operator with some entries of the named tensors, all of which have the batch axis; views of them for a slice."""
    part = object.__new__(type(op))
    part.__dict__.update(op.__dict__)
    for name in names:
        setattr(part, name, getattr(op, name)[index])
    part.batch = len(getattr(part, names[0]))
    return part


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


class Transposed(JacobianOperator):
    """The transposed maps, of the same norms: for outputs that are larger than inputs."""

    def __init__(self, op: JacobianOperator):
        self._op = op
        self.batch, self.in_shape, self.out_shape, self.dtype, self.device = op.batch, op.out_shape, op.in_shape, op.dtype, op.device

    def jvp(self, x: Tensor) -> Tensor:
        return self._op.vjp(x)

    def vjp(self, y: Tensor) -> Tensor:
        return self._op.jvp(y)

    def select(self, index: Tensor) -> "Transposed":
        return Transposed(self._op.select(index))

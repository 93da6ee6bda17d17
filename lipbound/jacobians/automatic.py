"""Jacobians of heads by automatic differentiation of the module that computes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.attention.module_attention import ModuleAttention
from lipbound.jacobians.maps import WHOLE
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import Norm


class AutomaticJacobian(JacobianOperator):
    r"""Jacobians of all samples and heads of a module, by reverse mode alone.

    :math:`J^T y` is a derivative of the outputs. It is linear in y, and its derivative with respect
    to y is :math:`J x`. All samples and heads of a product are differentiated in one pass.

    Args:
        att: the layer.
        map: of `lipbound.attention.module_attention.MAPS`.
    """

    def __init__(self, att: ModuleAttention, map: str):
        with torch.enable_grad():
            x = att.stream.detach().clone().requires_grad_()
            y = att.outputs(x, map)
            cotangent = torch.zeros_like(y, requires_grad=True)
            (pulled,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
        self._x, self._y, self._cotangent, self._pulled = x, y, cotangent, pulled
        self._axis, self._valid, groups = att.axis, att.valid, y.shape[1]
        heads = range(groups)[att.chosen[1]] if groups > 1 else range(1)
        self._entries = [(s, h) for s in range(len(y))[att.chosen[0]] for h in heads]
        self._batched = True
        self._refresh(y.shape[2:])

    def _refresh(self, out_shape: Sequence[int]) -> None:
        self.batch, self.out_shape = len(self._entries), tuple(out_shape)
        self.in_shape = tuple(self._samples_first(self._x).shape[1:])
        self.dtype, self.device = self._x.dtype, self._x.device

    def _samples_first(self, stream: Tensor) -> Tensor:
        return stream[None] if self._axis is None else stream.movedim(self._axis, 0)

    def _as_stream(self, x: Tensor) -> Tensor:
        return x[0] if self._axis is None else x.movedim(0, self._axis)

    def _passes(self) -> list[tuple[int, list[int], list[int]]]:
        """Return each head with the entries of the batch that are of it, and their samples."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for i, (s, h) in enumerate(self._entries):
            entries, samples = found.setdefault(h, ([], []))
            entries.append(i)
            samples.append(s)
        return [(h, *both) for h, both in found.items()]

    def _grad(self, of: Tensor, by: Tensor, directions: Tensor) -> Tensor:
        """Return the derivatives of a tensor in several directions at once."""
        if self._batched and len(directions) > 1:
            try:
                return torch.autograd.grad(
                    of, by, directions, retain_graph=True, is_grads_batched=True
                )[0]
            except RuntimeError:  # an operation that cannot be batched
                self._batched = False
        return torch.stack(
            [torch.autograd.grad(of, by, one, retain_graph=True)[0] for one in directions]
        )

    def jvp(self, x: Tensor) -> Tensor:
        passes = self._passes()
        whole = x.new_zeros(len(passes), len(self._y), *self.in_shape)
        for direction, (_, entries, samples) in zip(whole, passes, strict=True):
            direction[samples] = x[entries]
        self._cut(whole)
        streams = torch.stack([self._as_stream(one) for one in whole])
        found = self._grad(self._pulled, self._cotangent, streams)
        out = x.new_empty(self.batch, *self.out_shape)
        for result, (h, entries, samples) in zip(found, passes, strict=True):
            out[entries] = result[samples, h]
        return out

    def vjp(self, y: Tensor) -> Tensor:
        passes = self._passes()
        whole = y.new_zeros(len(passes), *self._y.shape)
        for direction, (h, entries, samples) in zip(whole, passes, strict=True):
            direction[samples, h] = y[entries]
        found = self._grad(self._y, self._x, whole)
        pulled = torch.stack([self._samples_first(one) for one in found])
        self._cut(pulled)
        out = y.new_empty(self.batch, *self.in_shape)
        for result, (_, entries, samples) in zip(pulled, passes, strict=True):
            out[entries] = result[samples]
        return out

    def _cut(self, x: Tensor) -> None:
        """Set padding to zero, in place: (passes, samples, *in_shape)."""
        if self._valid is not None:
            shape = (len(self._valid), *self.in_shape[:-1], 1)
            x *= self._valid.view(shape)

    def select(self, index: Tensor) -> "AutomaticJacobian":
        other = object.__new__(AutomaticJacobian)
        vars(other).update(vars(self))
        other._entries = [self._entries[i] for i in index.tolist()]
        other._refresh(self.out_shape)
        return other


def automatic_norm(
    att: ModuleAttention,
    *,
    map: str,
    method: str,
    tol: float,
    delta: float | None,
    vectors: bool,
    seed: int | Sequence[int],
    max_steps: int | None,
) -> Norm:
    """Compute norms of a layer through its module; arguments as of `lipbound.spectral_norm`.

    ``upper`` encloses the Jacobian as automatic differentiation computes it in float64, up to
    `lipbound.linalg.certificates.ROUNDING`: the rounding of the module itself is not counted.
    """
    op = AutomaticJacobian(att, map)
    norm = operator_norm(
        op,
        method=method,
        tol=tol,
        delta=delta,
        vectors=vectors,
        seed=seed,
        max_steps=max_steps,
    )
    return norm if map in WHOLE else norm.view(att.samples, att.heads)

"""Jacobians of heads by automatic differentiation of the module that computes them.

Functions of other packages may declare a derivative that is not theirs, or lack a second one. J x
is therefore computed in up to three ways, of which the first that agrees with differences of
outputs is taken.
"""

import copy
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lipbound.attention.module_attention import ModuleAttention
from lipbound.errors import AttentionError
from lipbound.linalg.operators import JacobianOperator, Product
from lipbound.linalg.solution import normal_numbers

_STEPS = (1e-6, 1e-8, 1e-4, 1e-3)
"""Lengths of differences, relative to the tokens'; one of them must tell the derivative."""
AGREES, TRANSPOSED = 1e-4, 1e-5
"""Relative errors of differences, and of products with J and its transpose, that are allowed."""
ROUNDED = 1e-7
"""Least size of J x, relative to |y| / |x|, that errors are measured by: in heads that hardly move,
as where every probability is one or zero, rounding would look like a wrong derivative else."""
ASSEMBLED = 2**26
"""Number of entries of matrices that are put together row by row."""


class AutomaticJacobian(JacobianOperator):
    r"""Jacobians of all samples and heads of a module.

    :math:`J^T y` is a derivative of the outputs. It is linear in y, and its derivative with respect
    to y is :math:`J x`. Where a function of the module has no second derivative, :math:`J x` is
    taken in forward mode, or from the matrix with the rows :math:`J^T e_i`. All samples and heads
    of a product are differentiated in one pass. Norms enclose the Jacobian as automatic
    differentiation computes it in float64, up to `lipbound.linalg.certificates.ROUNDING`: the
    rounding of the module itself is not counted.

    Args:
        att: the layer.
        map: of `lipbound.attention.module_attention.DIFFERENTIATED`.

    Raises:
        AttentionError: no way gives the derivative of what the module computes.
    """

    _push: Product

    def __init__(self, att: ModuleAttention, map: str):
        self._differentiate(att, partial(att.outputs, map=map))
        self._push = self._first_that_agrees()

    def _differentiate(self, att: ModuleAttention, function: Product) -> None:
        """Run a function of the layer's stream, (samples, groups, ...), at that stream."""
        self._function, self._axis, self._valid = function, att.axis, att.valid
        with torch.enable_grad():
            self._x = att.stream.detach().clone().requires_grad_()
            self._y = function(self._x)
        samples, groups = (torch.arange(n, device=att.device) for n in self._y.shape[:2])
        chosen = samples[att.chosen[0]], groups[att.chosen[1]] if len(groups) > 1 else groups
        self._s, self._h = torch.cartesian_prod(*chosen).T
        self.in_shape = tuple(self._samples_first(self._x[None]).shape[2:])
        self.batch, self.out_shape = len(self._s), tuple(self._y.shape[2:])
        self.dtype, self.device, self._batched = self._x.dtype, self._x.device, True

    def _first_that_agrees(self) -> Product:
        """Return a function from several x to their J x, by the first way that is right."""
        whys = dict[str, None]()
        for way in (self._twice, self._in_forward_mode, self._assembled):
            self._batched = True
            try:
                push = way()
                if not (why := self._disagreement(push)):
                    return push
            except (RuntimeError, ValueError, TypeError) as error:
                why = str(error).strip().partition("\n")[0]
            whys[why] = None
        raise AttentionError(
            "automatic differentiation does not give the derivative of a layer that has no closed "
            f"form ({'; '.join(whys)}): leave it out (layers=), give fewer tokens, or replace the "
            "functions of its module that have no derivative, or declare one that is not theirs"
        )

    def _twice(self) -> Product:
        with torch.enable_grad():
            cotangent = torch.zeros_like(self._y, requires_grad=True)
            (pulled,) = torch.autograd.grad(self._y, self._x, cotangent, create_graph=True)
        return lambda streams: self._grad(pulled, cotangent, streams)

    def _in_forward_mode(self) -> Product:
        def pushed(direction: Tensor) -> Tensor:
            with torch.no_grad(), forward_ad.dual_level():
                out = self._function(forward_ad.make_dual(self._x.detach(), direction))
                tangent: Tensor | None = forward_ad.unpack_dual(out).tangent
                return torch.zeros_like(out) if tangent is None else tangent

        return lambda streams: torch.stack([pushed(one) for one in streams])

    def _assembled(self) -> Product:
        shape, rows = self._y.shape, self._y[0].numel()
        if rows * self._x.numel() > ASSEMBLED:
            raise AttentionError(f"its Jacobian, of {rows} rows, is too large to be assembled")
        units = torch.eye(rows).to(self._y).view(rows, 1, *shape[1:]).expand(rows, *shape)
        parts = [self._grad(self._y, self._x, some) for some in units.split(64)]
        matrix = self._samples_first(torch.cat(parts)).flatten(2)

        def pushed(streams: Tensor) -> Tensor:
            given = self._samples_first(streams).flatten(2)
            return torch.einsum("rsi,psi->psr", matrix, given).view(-1, *shape)

        return pushed

    def _disagreement(self, push: Product) -> str:
        """Return where products in a random direction are wrong, in words; empty if nowhere."""
        x, y = self._x.detach(), self._y.detach()
        drawn = (normal_numbers(z.numel(), "check", name) for name, z in (("x", x), ("y", y)))
        t, u = (some.view(z.shape).to(z) for some, z in zip(drawn, (x, y), strict=True))
        self._cut(self._samples_first(t[None]))  # a view

        def size(z: Tensor) -> Tensor:
            return torch.linalg.vector_norm(z.flatten(2), dim=-1)  # (samples, groups)

        both = push(torch.stack([t, t]))  # several at once, as later
        scale, jx, of_jx = float(x.square().mean().sqrt()) or 1.0, both[0], size(both[0])
        of_jx = of_jx.maximum(ROUNDED * size(y) / scale)
        u *= of_jx.reciprocal().nan_to_num(posinf=0)[(..., *[None] * (u.ndim - 2))]
        back = self._grad(self._y, self._x, torch.stack([u, u]))
        off = float(((both * u).flatten(1).sum(1) - (back * t).flatten(1).sum(1)).abs().max())
        if not off <= TRANSPOSED * of_jx.numel() ** 0.5:
            return f"its products with J and with the transpose of J are {off:.1e} apart"
        least = float("inf")
        for h in (step * scale for step in _STEPS):
            with torch.no_grad():
                difference = (self._function(x + h * t) - self._function(x - h * t)) / (2 * h)
            apart = size(difference - jx) - 1e-10 / h * size(y)  # its rounding
            least = min(least, float((apart / of_jx.clamp_min(1e-300)).amax()))
            if least <= AGREES:
                return ""
        return f"it is {least:.1e} off differences of the outputs"

    def _samples_first(self, streams: Tensor) -> Tensor:
        return streams[:, None] if self._axis is None else streams.movedim(self._axis + 1, 1)

    def _grad(self, of: Tensor, by: Tensor, directions: Tensor) -> Tensor:
        """Return the derivatives of a tensor in several directions at once."""
        grad = partial(torch.autograd.grad, of, by, retain_graph=True)
        if self._batched and len(directions) > 1:
            try:
                return grad(directions, is_grads_batched=True)[0]
            except RuntimeError:  # an operation that cannot be batched, or has no derivative
                self._batched = False
        return torch.stack([grad(one)[0] for one in directions])

    def jvp(self, x: Tensor) -> Tensor:
        heads, passes = self._h.unique(return_inverse=True)
        whole = x.new_zeros(len(heads), len(self._y), *self.in_shape)
        whole[passes, self._s] = x
        self._cut(whole)
        streams = whole[:, 0] if self._axis is None else whole.movedim(1, self._axis + 1)
        return self._push(streams)[passes, self._s, self._h]

    def vjp(self, y: Tensor) -> Tensor:
        heads, passes = self._h.unique(return_inverse=True)
        whole = y.new_zeros(len(heads), *self._y.shape)
        whole[passes, self._s, self._h] = y
        pulled = self._samples_first(self._grad(self._y, self._x, whole))
        self._cut(pulled)
        return pulled[passes, self._s]

    def _cut(self, x: Tensor) -> None:
        """Set padding to zero, in place: (passes, samples, *in_shape)."""
        if self._valid is not None:
            x *= self._valid.reshape(len(self._valid), *self.in_shape[:-1], 1)

    def select(self, index: Tensor) -> Self:
        other = copy.copy(self)
        other._s, other._h, other.batch = self._s[index], self._h[index], len(index)
        return other

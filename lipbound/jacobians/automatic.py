"""Jacobians of heads by automatic differentiation of the module that computes them.

Functions of others say themselves what their derivatives are, or have none of second order.
Products are therefore compared with differences of outputs, and taken in the first way that agrees.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lipbound.attention.module_attention import ModuleAttention
from lipbound.errors import AttentionError
from lipbound.jacobians.maps import WHOLE
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import JacobianOperator
from lipbound.linalg.solution import Norm


STEPS = (1e-6, 1e-8, 1e-4, 1e-3)
"""Lengths of differences, relative to the tokens'; one of them must tell the derivative."""
AGREES, TRANSPOSED = 1e-4, 1e-5
"""Relative errors of differences, and of products with J and its transpose, that are allowed."""
ROWS, ASSEMBLED = 2**13, 2**26
"""Numbers of rows and entries of matrices that are put together row by row."""


class AutomaticJacobian(JacobianOperator):
    r"""Jacobians of all samples and heads of a module.

    :math:`J^T y` is a derivative of the outputs. It is linear in y, and its derivative with respect
    to y is :math:`J x`. Where a function of the module has no second derivative, :math:`J x` is
    taken in forward mode, or from the matrix with the rows :math:`J^T e_i`. All samples and heads
    of a product are differentiated in one pass.

    Args:
        att: the layer.
        map: of `lipbound.attention.module_attention.MAPS`.

    Raises:
        AttentionError: no way gives the derivative of what the module computes.
    """

    def __init__(self, att: ModuleAttention, map: str):
        def function(x: Tensor) -> Tensor:
            return att.outputs(x, map)

        with torch.enable_grad():
            x = att.stream.detach().clone().requires_grad_()
            y = function(x)
        self._x, self._y, self._function = x, y, function
        self._axis, self._valid, groups = att.axis, att.valid, y.shape[1]
        heads = range(groups)[att.chosen[1]] if groups > 1 else range(1)
        self._entries = [(s, h) for s in range(len(y))[att.chosen[0]] for h in heads]
        self._batched = True
        self._refresh(y.shape[2:])
        self._push = self._first_that_agrees(att.ways, map)

    def _first_that_agrees(self, known: dict[str, int], map: str) -> Callable[[Tensor], Tensor]:
        """Return a function from several x to their J x, by the first way that is right.

        Args:
            known: numbers of the ways that were found for maps of this layer.
            map: of the layer.
        """
        ways, whys = (self._twice, self._in_forward_mode, self._assembled), dict[str, None]()
        for i in [known[map]] if map in known else range(len(ways)):
            self._batched = True
            try:
                push = ways[i]()
                why = "" if map in known else self._disagreement(push)
            except (RuntimeError, ValueError) as error:
                why = str(error).strip().partition("\n")[0]
            if not why:
                known[map] = i
                return push
            whys[why] = None
        raise AttentionError(
            "automatic differentiation does not give the derivative of a layer that has no closed "
            f"form ({'; '.join(whys)}): leave it out (layers=), give fewer tokens, or replace the "
            "functions of its module that have no derivative or another than their own"
        )

    def _twice(self) -> Callable[[Tensor], Tensor]:
        with torch.enable_grad():
            cotangent = torch.zeros_like(self._y, requires_grad=True)
            (pulled,) = torch.autograd.grad(self._y, self._x, cotangent, create_graph=True)
        return lambda streams: self._grad(pulled, cotangent, streams)

    def _in_forward_mode(self) -> Callable[[Tensor], Tensor]:
        def pushed(direction: Tensor) -> Tensor:
            with torch.no_grad(), forward_ad.dual_level():
                out = self._function(forward_ad.make_dual(self._x.detach(), direction))
                tangent: Tensor | None = forward_ad.unpack_dual(out).tangent
            return torch.zeros_like(self._y) if tangent is None else tangent

        return lambda streams: torch.stack([pushed(one) for one in streams])

    def _assembled(self) -> Callable[[Tensor], Tensor]:
        samples, rows, columns = len(self._y), self._y[0].numel(), self._x.numel() // len(self._y)
        if rows > ROWS or samples * rows * columns > ASSEMBLED:
            raise AttentionError(f"its matrix of {rows} x {columns} is too large to be assembled")
        units = torch.eye(rows).to(self._y).view(rows, 1, *self._y.shape[1:])
        units = units.expand(-1, samples, *self._y.shape[1:])
        parts = [self._grad(self._y, self._x, some) for some in units.split(64)]
        matrix = torch.cat([self._each_first(part).flatten(2) for part in parts])

        def pushed(streams: Tensor) -> Tensor:
            given = self._each_first(streams).flatten(2)
            return torch.einsum("rsi,psi->psr", matrix, given).view(-1, *self._y.shape)

        return pushed

    def _disagreement(self, push: Callable[[Tensor], Tensor]) -> str:
        """Return where products in a random direction are wrong, in words; empty if nowhere."""
        random = torch.Generator().manual_seed(0)
        x, y = self._x.detach(), self._y.detach()
        t, u = (torch.randn(z.shape, generator=random, dtype=z.dtype).to(z) for z in (x, y))
        self._cut(self._each_first(t[None]))  # a view

        def size(z: Tensor) -> Tensor:
            return torch.linalg.vector_norm(z.flatten(2), dim=-1)  # (samples, groups)

        both = push(torch.stack([t, t]))  # several at once, as later
        jx, of_jx = both[0], size(both[0])
        u *= torch.where(of_jx > 0, 1 / of_jx, 0).view(*of_jx.shape, *[1] * (u.ndim - 2))
        pulled = self._grad(self._y, self._x, torch.stack([u, u]))
        pairs = zip(both, pulled, strict=True)
        off = max(float(((a * u).sum() - (t * b).sum()).abs()) for a, b in pairs)
        if not off <= TRANSPOSED * of_jx.numel() ** 0.5:
            return f"its products with J and with the transpose of J are {off:.1e} apart"
        scale, least = float(x.square().mean().sqrt()) or 1.0, float("inf")
        for h in (step * scale for step in STEPS):
            with torch.no_grad():
                ends = [self._function(x + sign * h * t) for sign in (1, -1)]
            apart = size((ends[0] - ends[1]) / (2 * h) - jx) - 1e-10 / h * size(y)
            least = min(least, float((apart / of_jx.clamp_min(1e-300)).amax()))
            if least <= AGREES:
                return ""
        return f"it is {least:.1e} off differences of the outputs"

    def _refresh(self, out_shape: Sequence[int]) -> None:
        self.batch, self.out_shape = len(self._entries), tuple(out_shape)
        self.in_shape = tuple(self._each_first(self._x[None]).shape[2:])
        self.dtype, self.device = self._x.dtype, self._x.device

    def _each_first(self, streams: Tensor) -> Tensor:
        return streams[:, None] if self._axis is None else streams.movedim(self._axis + 1, 1)

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
            except RuntimeError:  # an operation that cannot be batched, or not twice
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
        found = self._push(streams)
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
        pulled = self._each_first(found)
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

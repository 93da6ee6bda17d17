"""JaSMin, the penalty of Yudin et al. 2025."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound.errors import LipboundError, UnknownNameError, nearest, shown, whole

QUERY_REDUCTIONS = ("max", "mean")
SMALL = 1e-6
"""Added to g_k of equation (9), which has no such term: ours, so that the logarithm is finite."""


class JaSMin:
    r"""The penalty of Yudin et al. 2025, equations (8) and (9), on attention probabilities.

    .. math::
        \sum_{l,h} \max_i \log g_1(P_i^{l,h}) \quad (k = 0), \qquad
        \sum_{l,h} \max_i \log \frac{g_1(P_i^{l,h})}{g_k(P_i^{l,h})} \quad (k > 1)

    averaged over samples; ``reduce="mean"`` takes the mean over queries i for their maximum.
    Padding does not count, and samples that are all padding are left out. Two things are ours, not
    the paper's: where k > 1, :math:`10^{-6}` is added to :math:`g_k`, which may vanish; and
    :math:`g_1` is evaluated without cancellation (see `lipbound.attention.softmax.g`), its
    logarithm from below at the smallest positive number of the dtype, where rows are one-hot.

    Args:
        k: 0 for the bound on the norm, or an order above 1 for the ratio.
        reduce: "max" or "mean", over queries.

    Raises:
        LipboundError: k is 1 or negative; k larger than the row length (when called).
    """

    def __init__(self, k: int = 0, reduce: str = "max"):
        k = whole("k", k)
        if k < 0 or k == 1:
            raise LipboundError(
                f"k is {k}; give 0, for the largest singular value, or an order above 1, for the "
                "ratio"
            )
        if reduce not in QUERY_REDUCTIONS:
            raise UnknownNameError(
                f"unknown reduction {reduce!r}; {nearest(reduce, QUERY_REDUCTIONS)}"
            )
        self.k, self.reduce = k, reduce

    def __call__(self, attentions: Sequence[Tensor], valid: Tensor | None = None) -> Tensor:
        """Return the penalty, a scalar.

        Args:
            attentions: what transformers calls so, per layer (samples, heads, queries, keys), rows
                summing to one.
            valid: (samples, queries) bool or 0/1, as the model's ``attention_mask``: rows of
                padding do not count. What `lipbound.attention_probabilities` has found knows its
                own.

        Raises:
            LipboundError: no attentions, what is no list of such tensors, or a ``valid`` of other
                tokens.
        """
        known = getattr(attentions, "valid", None)
        if not isinstance(attentions, list | tuple):
            raise LipboundError(
                f"attentions is {shown(attentions)}; give a list with one tensor of shape "
                "(samples, heads, queries, keys) per layer"
            )
        if not attentions:
            raise LipboundError(
                "there are no attentions; was the model run inside attention_probabilities, or "
                "with output_attentions=True?"
            )
        for p in attentions:
            if not isinstance(p, Tensor) or p.ndim != 4 or not p.is_floating_point():
                what = f"has shape {tuple(p.shape)}" if isinstance(p, Tensor) else f"is {shown(p)}"
                raise LipboundError(
                    f"one of the attentions {what}; each must be (samples, heads, queries, "
                    "keys), such as attention_probabilities gives"
                )
        masks = known if valid is None and known is not None else [valid] * len(attentions)
        total = torch.zeros((), device=attentions[0].device)
        for p, mask in zip(attentions, masks, strict=True):
            counts = None if mask is None else _rows_that_count(p, mask)
            total = total + self._layer(p, counts).to(total.device)
        return total

    def _layer(self, p: Tensor, valid: Tensor | None) -> Tensor:
        n = p.shape[-1]
        if self.k > n:
            raise LipboundError(f"k is {self.k} but rows have {n} entries; give k at most {n}")
        if valid is not None and not bool((some := valid.any(-1)).all()):
            if not bool(some.any()):
                return p.new_zeros(())
            p, valid = p[some], valid[some]
        if self.reduce == "max":  # only the row that attains it takes part in the derivative
            with torch.no_grad():
                values = _values(p, self.k)
                if valid is not None:
                    values = values.masked_fill(~valid[:, None, :], -math.inf)
                where = values.argmax(-1)[..., None, None].expand(*p.shape[:2], 1, n)
            return self.rows(p.gather(-2, where))[..., 0].sum(-1).mean()
        values = self.rows(p)
        if valid is None:
            return values.mean(-1).sum(-1).mean()
        counted = values.masked_fill(~valid[:, None, :], 0.0).sum(-1) / valid.sum(-1, keepdim=True)
        return counted.sum(-1).mean()

    def rows(self, p: Tensor) -> Tensor:
        """Return the logarithm for every row, (..., N) -> (...)."""
        result: Tensor = _Logarithm.apply(p, self.k)  # type: ignore[no-untyped-call]
        return result


def _rows_that_count(p: Tensor, valid: object) -> Tensor:
    """Return ``valid`` as (samples, queries) bool on the device of p.

    Raises:
        LipboundError: it is of other tokens.
    """
    rows = (len(p), p.shape[-2])
    if not isinstance(valid, Tensor) or tuple(valid.shape) != rows:
        shape = f"has shape {tuple(valid.shape)}" if isinstance(valid, Tensor) else ""
        what = shape or f"is {shown(valid)}"
        raise LipboundError(
            f"valid {what}; attentions of shape {tuple(p.shape)} need {rows}, True where a token "
            "is not padding"
        )
    return valid.to(p.device) != 0


def _values(p: Tensor, k: int) -> Tensor:
    """Return the logarithm for every row without derivatives, from sorted rows.

    On CPUs numpy sorts values several times as fast as torch finds places.
    """
    if p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64):
        order = torch.from_numpy(np.sort(p.detach().numpy(), -1))
    else:
        order = p.detach().sort(-1).values
    n, tiny = p.shape[-1], torch.finfo(p.dtype).tiny
    twice = order[..., :-1].sum(-1)
    if n > 1:
        twice = twice + order[..., -2]
    value = order[..., -1].clamp_min(tiny).log() + twice.clamp_min(tiny).log()
    if not k:
        return value
    last = order[..., n - k]
    return value - (last * (1 - last + (order[..., n - k - 1] if k < n else 0)) + SMALL).log()


def _order(p: Tensor, k: int) -> Tensor:
    """Return where each row has its two largest entries, and for k > 0 the k-th and the next.

    That is (..., up to 4) indices. On CPUs torch's top-k is slow: two maxima are three times as
    fast as the top two, and of more, only the unsorted ones are asked for.
    """
    n, top, where = p.shape[-1], p, None
    ends: list[Tensor] = []
    if k:
        top, where = p.topk(min(k + 1, n), -1, sorted=False)
        last = top.min(-1, keepdim=True).indices
        if k < n:
            ends = [top.scatter(-1, last, math.inf).argmin(-1, keepdim=True)]
        ends = [*ends, last]
    found = [top.max(-1, keepdim=True).indices]
    if n > 1:
        found += [top.scatter(-1, found[0], -math.inf).max(-1, keepdim=True).indices]
    found += ends
    return torch.cat(found if where is None else [where.gather(-1, i) for i in found], -1)


def _terms(p: Tensor, k: int, where: Tensor) -> tuple[Tensor, ...]:
    """Return p_(1), 1 - p_(1) + p_(2), and for k > 0 p_(k), 1 - p_(k) + p_(k+1), each (...)."""
    n = p.shape[-1]
    at = p.gather(-1, where)
    # 1 - p_(1) cancels near one-hot rows, the sum of the others does not
    twice = p.scatter(-1, where[..., :1], 0.0).sum(-1)
    if n > 1:
        twice = twice + at[..., 1]
    if not k:
        return at[..., 0], twice
    if k == n:
        return at[..., 0], twice, at[..., -1], 1 - at[..., -1]
    return at[..., 0], twice, at[..., -2], 1 - at[..., -2] + at[..., -1]


def _logarithm(p: Tensor, k: int, where: Tensor) -> Tensor:
    tiny = torch.finfo(p.dtype).tiny
    first, twice, *others = _terms(p, k, where)
    value = first.clamp_min(tiny).log() + twice.clamp_min(tiny).log()
    return value - (others[0] * others[1] + SMALL).log() if k else value


class _Logarithm(torch.autograd.Function):
    """The logarithm of g_1 of rows, or of g_1 / (g_k + 1e-6).

    Its derivative is written into one array, since this runs in every step of training.
    """

    @staticmethod
    def forward(ctx: Any, p: Tensor, k: int) -> Tensor:
        where = _order(p, k)
        ctx.save_for_backward(p, where)
        ctx.k = k
        return _logarithm(p, k, where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        p, where = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: leave both to autograd
            with torch.enable_grad():
                value = _logarithm(p, ctx.k, where)
                return torch.autograd.grad(value, p, grad, create_graph=True)[0], None
        tiny, n = torch.finfo(p.dtype).tiny, p.shape[-1]
        first, twice, *others = _terms(p, ctx.k, where)
        rest = torch.where(twice >= tiny, grad / twice, 0.0)
        steps = [torch.where(first >= tiny, grad / first, 0.0) - rest, *([rest] if n > 1 else [])]
        if ctx.k:
            last, factor = others
            scale = grad / (last * factor + SMALL)
            steps += [scale * (last - factor), *([-scale * last] if ctx.k < n else [])]
        return rest[..., None].expand(p.shape).scatter_add(-1, where, torch.stack(steps, -1)), None

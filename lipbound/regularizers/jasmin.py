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
"""Added to g_k of equation (9), which has no such term: ours, so that the logarithm stays finite
where g_k vanishes."""


class JaSMin:
    r"""The penalty of Yudin et al. 2025, equations (8) and (9), on what transformers calls
    ``attentions``.

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
        """The penalty, a scalar.

        Args:
            attentions: per layer (samples, heads, queries, keys), rows summing to one.
            valid: (samples, queries) bool or 0/1, as the model's ``attention_mask``: rows of
                padding do not count. What `lipbound.attention_probabilities` has found knows its
                own.

        Raises:
            LipboundError: no attentions, what is no list of such tensors, or a ``valid`` of other
                tokens.
        """
        known = getattr(attentions, "valid", None) if valid is None else None
        if not isinstance(attentions, list | tuple):
            raise LipboundError(
                f"attentions is {shown(attentions)}; give a list with one tensor of shape "
                "(samples, heads, queries, keys) per layer"
            )
        attentions = list(attentions)
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
        masks = [valid] * len(attentions) if known is None else known
        total = torch.zeros((), device=attentions[0].device)
        for p, mask in zip(attentions, masks, strict=True):
            total = total + self._layer(p, None if mask is None else _rows_that_count(p, mask)).to(
                total.device
            )
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
        """The logarithm for every row, (..., N) -> (...)."""
        result: Tensor = _Logarithm.apply(p, self.k)  # type: ignore[no-untyped-call]
        return result


def _rows_that_count(p: Tensor, valid: object) -> Tensor:
    """``valid`` as (samples, queries) bool on the device of p."""
    rows = (len(p), p.shape[-2])
    if not isinstance(valid, Tensor) or tuple(valid.shape) != rows:
        what = (
            f"has shape {tuple(valid.shape)}" if isinstance(valid, Tensor) else f"is {shown(valid)}"
        )
        raise LipboundError(
            f"valid {what}; attentions of shape {tuple(p.shape)} need {rows}, True where a token "
            "is not padding"
        )
    return valid.to(p.device) != 0


def _values(p: Tensor, k: int) -> Tensor:
    """The logarithm for every row without derivatives, from sorted rows: on CPUs numpy sorts values
    several times as fast as torch finds places."""
    numpy = p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64)
    order = (
        torch.from_numpy(np.sort(p.detach().numpy(), -1)) if numpy else p.detach().sort(-1).values
    )
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
    """Where the first and second largest entries of each row lie, and for k > 0 the k-th and the
    next: (..., up to 4) indices.

    On CPUs torch's top-k is slow: two maxima are three times as fast as the top two, and of more,
    only the unsorted ones are asked for.
    """
    n = p.shape[-1]
    if k:
        top, where = p.topk(min(k + 1, n), -1, sorted=False)
        at = top.min(-1, keepdim=True).indices
        ends = (
            [
                where.gather(-1, top.scatter(-1, at, math.inf).argmin(-1, keepdim=True)),
                where.gather(-1, at),
            ]
            if k < n
            else [where.gather(-1, at)]
        )
    else:
        top, where, ends = p, None, []
    first = top.max(-1, keepdim=True).indices
    second = [top.scatter(-1, first, -math.inf).max(-1, keepdim=True).indices] if n > 1 else []
    starts = [first, *second]
    return torch.cat(
        [*(starts if where is None else [where.gather(-1, i) for i in starts]), *ends], -1
    )


def _terms(p: Tensor, k: int, where: Tensor) -> tuple[Tensor, ...]:
    """p_(1), 1 - p_(1) + p_(2), and for k > 0 p_(k), 1 - p_(k) + p_(k+1), of every row, (...)."""
    n = p.shape[-1]
    at = p.gather(-1, where)
    twice = p.scatter(-1, where[..., :1], 0.0).sum(
        -1
    )  # 1 - p_(1) cancels near one-hot rows, the sum of the others does not
    if n > 1:
        twice = twice + at[..., 1]
    if not k:
        return at[..., 0], twice
    last = at[..., -2] if k < n else at[..., -1]
    return at[..., 0], twice, last, 1 - last + at[..., -1] if k < n else 1 - last


def _logarithm(p: Tensor, k: int, where: Tensor) -> Tensor:
    tiny = torch.finfo(p.dtype).tiny
    first, twice, *others = _terms(p, k, where)
    value = first.clamp_min(tiny).log() + twice.clamp_min(tiny).log()
    return value - (others[0] * others[1] + SMALL).log() if k else value


class _Logarithm(torch.autograd.Function):
    """log g_1 of rows, or log of g_1 / (g_k + 1e-6), with its derivative written into one array:
    this runs in every step of training."""

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
                return torch.autograd.grad(_logarithm(p, ctx.k, where), p, grad, create_graph=True)[
                    0
                ], None
        tiny, n = torch.finfo(p.dtype).tiny, p.shape[-1]
        first, twice, *others = _terms(p, ctx.k, where)
        rest = torch.where(twice >= tiny, grad / twice, 0.0)
        steps = [torch.where(first >= tiny, grad / first, 0.0) - rest, *([rest] if n > 1 else [])]
        if ctx.k:
            last, factor = others
            scale = grad / (last * factor + SMALL)
            steps += [scale * (last - factor), *([-scale * last] if ctx.k < n else [])]
        return rest[..., None].expand(p.shape).scatter_add(-1, where, torch.stack(steps, -1)), None

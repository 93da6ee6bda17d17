r"""Penalties that make attention smoother, for use in any training loop.

In two lines of a training step (`lipbound.training`):

    with attention_probabilities(model) as attentions:
        loss = model(**batch).loss
    (loss + 1e-3 * JaSMin(k=10)(attentions)).backward()

With ``transformers.Trainer``: ``class MyTrainer(PenaltyMixin, Trainer)``, then ``trainer.penalty = JaSMin(); trainer.strength = 1e-3``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipbound.attention import Attention
from lipbound.bounds import get
from lipbound.errors import LipboundError, UnknownNameError, nearest
from lipbound.projections import projections
from lipbound.training import attention_layers, attention_probabilities

REDUCTIONS = ("max", "mean")
SMALL = 1e-6
"""Added to g_k in equation (9)."""


class JaSMin:
    r"""The penalty of Yudin et al. 2025, equations (8) and (9), on what transformers calls ``attentions``.

    .. math:: \sum_{l,h} \max_i \log g_1(P_i^{l,h}) \quad (k = 0), \qquad \sum_{l,h} \max_i \log \frac{g_1(P_i^{l,h})}{g_k(P_i^{l,h}) + 10^{-6}}
    \quad (k > 1)

    averaged over samples; ``reduce="mean"`` takes the mean over queries i for their maximum. :math:`g_1` is evaluated without cancellation (see
    `lipbound.softmax.g`), and its logarithm from below at the smallest positive number of the dtype, where rows are one-hot.

    Args:
        k: 0 for the bound on the norm, or an order above 1 for the ratio.
        reduce: "max" or "mean", over queries.

    Raises:
        LipboundError: k is 1 or negative; k larger than the row length (when called).
    """

    def __init__(self, k: int = 0, reduce: str = "max"):
        if k < 0 or k == 1:
            raise LipboundError(f"k is {k}; give 0, for the largest singular value, or an order above 1, for the ratio")
        if reduce not in REDUCTIONS:
            raise UnknownNameError(f"unknown reduction {reduce!r}; {nearest(reduce, REDUCTIONS)}")
        self.k, self.reduce = k, reduce

    def __call__(self, attentions: Sequence[Tensor], valid: Tensor | None = None) -> Tensor:
        """The penalty, a scalar.

        Args:
            attentions: per layer (samples, heads, N, N), rows summing to one.
            valid: (samples, N) bool or 0/1, as the model's ``attention_mask``: rows of padding do not count.
        """
        if not len(attentions):
            raise LipboundError("there are no attentions; was the model run inside attention_probabilities, or with output_attentions=True?")
        return sum((self._layer(p, None if valid is None else valid.bool()) for p in attentions), torch.zeros((), device=attentions[0].device))

    def _layer(self, p: Tensor, valid: Tensor | None) -> Tensor:
        n = p.shape[-1]
        if self.k > n:
            raise LipboundError(f"k is {self.k} but rows have {n} entries; give k at most {n}")
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


def _values(p: Tensor, k: int) -> Tensor:
    """The logarithm for every row without derivatives, from sorted rows: on CPUs numpy sorts values several times as fast as torch finds places."""
    numpy = p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64)
    order = torch.from_numpy(np.sort(p.detach().numpy(), -1)) if numpy else p.detach().sort(-1).values
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
    """Where the first and second largest entries of each row lie, and for k > 0 the k-th and the next: (..., up to 4) indices.

    On CPUs torch's top-k is slow: two maxima are three times as fast as the top two, and of more, only the unsorted ones are asked for.
    """
    n = p.shape[-1]
    if k:
        top, where = p.topk(min(k + 1, n), -1, sorted=False)
        at = top.min(-1, keepdim=True).indices
        ends = [where.gather(-1, top.scatter(-1, at, math.inf).argmin(-1, keepdim=True)), where.gather(-1, at)] if k < n else [where.gather(-1, at)]
    else:
        top, where, ends = p, None, []
    first = top.max(-1, keepdim=True).indices
    second = [top.scatter(-1, first, -math.inf).max(-1, keepdim=True).indices] if n > 1 else []
    starts = [first, *second]
    return torch.cat([*(starts if where is None else [where.gather(-1, i) for i in starts]), *ends], -1)


def _terms(p: Tensor, k: int, where: Tensor) -> tuple[Tensor, ...]:
    """p_(1), 1 - p_(1) + p_(2), and for k > 0 p_(k), 1 - p_(k) + p_(k+1), of every row, (...)."""
    n = p.shape[-1]
    at = p.gather(-1, where)
    twice = p.scatter(-1, where[..., :1], 0.0).sum(-1)  # 1 - p_(1) cancels near one-hot rows, the sum of the others does not
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
    """log g_1 of rows, or log of g_1 / (g_k + 1e-6), with its derivative written into one array: this runs in every step of training."""

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
                return torch.autograd.grad(_logarithm(p, ctx.k, where), p, grad, create_graph=True)[0], None
        tiny, n = torch.finfo(p.dtype).tiny, p.shape[-1]
        first, twice, *others = _terms(p, ctx.k, where)
        rest = torch.where(twice >= tiny, grad / twice, 0.0)
        steps = [torch.where(first >= tiny, grad / first, 0.0) - rest, *([rest] if n > 1 else [])]
        if ctx.k:
            last, factor = others
            scale = grad / (last * factor + SMALL)
            steps += [scale * (last - factor), *([-scale * last] if ctx.k < n else [])]
        return rest[..., None].expand(p.shape).scatter_add(-1, where, torch.stack(steps, -1)), None


class Specformer(nn.Module):
    r"""The penalty of Hu et al. 2024: :math:`\sum_{l,h} \lambda_Q \sigma_1^2(W_Q) + \lambda_K \sigma_1^2(W_K) + \lambda_V \sigma_1^2(W_V)`.

    :math:`\sigma_1` by power iteration that goes on from call to call, as in the paper; its derivative is that of :math:`(u^T W v)^2` at the
    vectors found.

    Args:
        l_q, l_k, l_v: the three weights.
        steps: of power iteration in each call; the first call takes twenty.
    """

    def __init__(self, l_q: float, l_k: float, l_v: float, *, steps: int = 1):
        super().__init__()
        self.weights, self.steps = (l_q, l_k, l_v), steps
        self._vectors: dict[tuple[str, int], Tensor] = {}

    def forward(self, model: nn.Module) -> Tensor:
        """The penalty, a scalar; models whose projections have known names (`lipbound.projections.projections`)."""
        total: Tensor | None = None
        for found in projections(model):
            for i, (w, factor) in enumerate(zip(found.w, self.weights, strict=True)):
                if factor:
                    term = factor * self._squared((found.name, i), w)
                    total = term if total is None else total + term
        if total is None:
            raise LipboundError("all three weights of Specformer are 0, so there is nothing to penalise")
        return total

    def _squared(self, key: tuple[str, int], w: Tensor) -> Tensor:
        """Sum over heads of sigma_1(w)^2, w (heads, D, d)."""
        fixed = w.detach()
        fresh = key not in self._vectors
        if fresh:
            generator = torch.Generator().manual_seed(0)
            self._vectors[key] = torch.randn(w.shape[0], w.shape[2], 1, generator=generator).to(w)
        v = self._vectors[key].to(w)
        for _ in range(20 if fresh else self.steps):
            u = nn.functional.normalize(fixed @ v, dim=1)
            v = nn.functional.normalize(fixed.mT @ u, dim=1)
        self._vectors[key] = v
        u = nn.functional.normalize(fixed @ v, dim=1)
        return ((u * (w @ v)).sum((1, 2)) ** 2).sum()


class SoundPenalty:
    r"""Mean over samples of :math:`\sum_{l,h} \log L^{l,h}`, L a registered bound that has derivatives: "lipbound" or "lipbound_block".

    Sound and far tighter than what `JaSMin` is built on, at a far higher price. To be called with the list of
    `lipbound.training.attention_layers`.
    """

    NAMES = ("lipbound", "lipbound_block")

    def __init__(self, name: str = "lipbound_block"):
        if name not in self.NAMES:
            raise UnknownNameError(f"unknown penalty bound {name!r}; {nearest(name, self.NAMES)}")
        self.name = name

    def __call__(self, layers: Sequence[Attention]) -> Tensor:
        """The penalty, a scalar in float64."""
        if not len(layers):
            raise LipboundError("there are no layers; was the model run inside attention_layers, and has its context ended?")
        terms = [get(self.name)(att).clamp_min(torch.finfo(torch.float64).tiny).log().sum(-1).mean() for att in layers]
        return torch.stack(terms).sum()


class PenaltyMixin:
    """For ``transformers.Trainer``: adds ``strength`` times ``penalty`` to the loss. ``class MyTrainer(PenaltyMixin, Trainer)``.

    Attributes:
        penalty: `JaSMin`, `Specformer`, `SoundPenalty`, or a function of the list of attention probabilities.
        strength: its factor. layers: which attention layers it sees; all by default.
    """

    penalty: Callable[..., Tensor] | None = None
    strength: float = 0.0
    layers: Sequence[int] | None = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """The loss of the Trainer, plus the penalty while the model is in training."""
        parent: Any = super()
        if self.penalty is None or not self.strength or not model.training:
            return parent.compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        inner = getattr(model, "module", model)
        valid = inputs.get("attention_mask")
        if isinstance(self.penalty, Specformer):
            loss, outputs = parent.compute_loss(model, inputs, return_outputs=True, **kwargs)
            extra = self.penalty(inner)
        elif isinstance(self.penalty, SoundPenalty):
            with attention_layers(inner, self.layers) as found:
                loss, outputs = parent.compute_loss(model, inputs, return_outputs=True, **kwargs)
            extra = self.penalty(found).to(loss.dtype)
        else:
            with attention_probabilities(inner, self.layers) as attentions:
                loss, outputs = parent.compute_loss(model, inputs, return_outputs=True, **kwargs)
            extra = self.penalty(attentions, valid) if isinstance(self.penalty, JaSMin) else self.penalty(attentions)
        loss = loss + self.strength * extra
        return (loss, outputs) if return_outputs else loss

"""The penalties: JaSMin, Specformer, and those on a bound or the exact norm of every head."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lipbound.attention import softmax
from lipbound.attention.layer import Attention
from lipbound.bounds.registry import get
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, check_layer, choice, real, shown, whole
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.matrix_norms import with_derivative
from lipbound.models.training import projections

_SMALL = 1e-6
"""Added to g_k of equation (9), which has no such term: ours, so that the logarithm is finite."""


class Penalty:
    """Shows the numbers that it was made with."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"


class JaSMin(Penalty):
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
        self.k, self.reduce = k, choice("reduction", reduce, ("max", "mean"))

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
        listed = isinstance(attentions, list | tuple)
        for p in attentions if listed else [attentions]:
            fits = isinstance(p, Tensor) and p.ndim == 4 and p.is_floating_point()
            if not (listed and fits):
                raise LipboundError(
                    f"attentions {_said(p)}; give a list with one tensor of shape (samples, heads, "
                    "queries, keys) per layer, such as that of attention_probabilities"
                )
        if not attentions:
            raise LipboundError(
                "there are no attentions; was the model run inside attention_probabilities, or "
                "with output_attentions=True?"
            )
        known = getattr(attentions, "valid", None) if valid is None else None
        masks = [valid] * len(attentions) if known is None else known
        device = attentions[0].device
        each = (self._layer(p, m).to(device) for p, m in zip(attentions, masks, strict=True))
        return sum(each, start=torch.zeros((), device=device))

    def _layer(self, p: Tensor, valid: object) -> Tensor:
        """Return the penalty of a layer; ``valid`` is None where no token is padding."""
        n = p.shape[-1]
        if self.k > n:
            raise LipboundError(f"k is {self.k} but rows have {n} entries; give k at most {n}")
        counted = torch.ones(len(p), p.shape[-2], dtype=torch.bool, device=p.device)
        if valid is not None:
            counted = _rows_that_count(p, valid)
            if not bool((some := counted.any(-1)).all()):
                p, counted = p[some], counted[some]
        if not len(p):
            return p.new_zeros(())
        if self.reduce == "max":  # only the row that attains it takes part in the derivative
            values = _values(p, self.k).masked_fill(~counted[:, None, :], -math.inf)
            where = values.argmax(-1)[..., None, None].expand(*p.shape[:2], 1, n)
            return self.rows(p.gather(-2, where))[..., 0].sum(-1).mean()
        values = self.rows(p).masked_fill(~counted[:, None, :], 0.0).sum(-1)
        return (values / counted.sum(-1, keepdim=True)).sum(-1).mean()

    def rows(self, p: Tensor) -> Tensor:
        """Return the logarithm for every row, (..., N) -> (...)."""
        value = softmax.g(p).clamp_min(torch.finfo(p.dtype).tiny).log()
        return value - (softmax.g(p, self.k) + _SMALL).log() if self.k else value


def _said(value: object) -> str:
    """What a value is, or the shape it has, in words."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    return f"is {shown(value)}" if shape is None else f"has shape {shape}"


def _rows_that_count(p: Tensor, valid: object) -> Tensor:
    """Return ``valid`` as (samples, queries) bool on the device of p.

    Raises:
        LipboundError: it is of other tokens.
    """
    rows = (len(p), p.shape[-2])
    if not isinstance(valid, Tensor) or tuple(valid.shape) != rows:
        raise LipboundError(
            f"valid {_said(valid)}; attentions of shape {tuple(p.shape)} need {rows}, True where a "
            "token is not padding"
        )
    return valid.to(p.device) != 0


def _values(p: Tensor, k: int) -> Tensor:
    """Return `JaSMin.rows` without derivatives, from sorted rows.

    On CPUs numpy sorts values several times as fast as torch finds places.
    """
    if p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64):
        order = torch.from_numpy(np.sort(p.detach().numpy(), -1))
    else:
        order = p.detach().sort(-1).values
    order = torch.nn.functional.pad(order, (1, 0))  # p_(N+1) = 0
    value = order[..., -1] * (order[..., :-1].sum(-1) + order[..., -2])
    value = value.clamp_min(torch.finfo(p.dtype).tiny).log()
    if not k:
        return value
    last, following = order[..., -k], order[..., -k - 1]
    return value - (last * (1 - last + following) + _SMALL).log()


class Specformer(nn.Module):
    r"""The penalty of Hu et al. 2024 on squared spectral norms.

    .. math::
        \sum_{l,h} \lambda_Q \sigma_1^2(W_Q) + \lambda_K \sigma_1^2(W_K)
        + \lambda_V \sigma_1^2(W_V)

    :math:`\sigma_1` is found by power iteration that goes on from call to call, as in the paper;
    its derivative is that of :math:`(u^T W v)^2` at the vectors found.

    Args:
        l_q: :math:`\lambda_Q`, the weight of queries.
        l_k: :math:`\lambda_K`, the weight of keys.
        l_v: :math:`\lambda_V`, the weight of values.
        steps: of power iteration in each call; the first call takes twenty at least.
    """

    def __init__(self, l_q: float, l_k: float, l_v: float, *, steps: int = 1):
        super().__init__()
        self.weights, self.steps = (l_q, l_k, l_v), steps
        self._vectors: dict[tuple[str, int], Tensor] = {}

    def extra_repr(self) -> str:
        """Return what its representation says between brackets."""
        return "l_q={}, l_k={}, l_v={}, steps={}".format(*self.weights, self.steps)

    @in_own_modes
    def forward(self, model: nn.Module) -> Tensor:
        """Return the penalty, a scalar.

        Args:
            model: whose projections have known names
                (`lipbound.models.training.projections`).

        Raises:
            LipboundError: all three weights are 0.
        """
        terms = [
            factor * self._squared((found.name, i), w)
            for found in projections(model)
            for i, (w, factor) in enumerate(zip(found.w, self.weights, strict=True))
            if factor
        ]
        if not terms:
            raise LipboundError(
                "all three weights of Specformer are 0, so there is nothing to penalise"
            )
        return sum(terms[1:], terms[0])

    def _squared(self, key: tuple[str, int], w: Tensor) -> Tensor:
        """Return the sum over heads of sigma_1(w)^2, w (heads, D, d)."""
        fixed = w.detach()
        fresh = key not in self._vectors
        if fresh:
            generator = torch.Generator().manual_seed(0)
            self._vectors[key] = torch.randn(w.shape[0], w.shape[2], 1, generator=generator).to(w)
        v = self._vectors[key].to(w)
        for _ in range(max(20, self.steps) if fresh else self.steps):
            u = nn.functional.normalize(fixed @ v, dim=1)
            v = nn.functional.normalize(fixed.mT @ u, dim=1)
        self._vectors[key] = v
        u = nn.functional.normalize(fixed @ v, dim=1)
        return ((u * (w @ v)).sum((1, 2)) ** 2).sum()


class LayerPenalty(Penalty, ABC):
    r"""Mean over samples of :math:`\sum_{l,h} \log L^{l,h}`, with L a number for every head."""

    @abstractmethod
    def norms(self, att: Attention) -> Tensor:
        """Return L of every head at every input, (samples, heads), float64, with derivatives."""

    @in_own_modes
    def __call__(self, layers: Sequence[Attention]) -> Tensor:
        """Return the penalty, a scalar in float64.

        Args:
            layers: what was found in the context of ``attention_layers``.

        Raises:
            LipboundError: no layers, or what is no list of them.
        """
        if not isinstance(layers, list | tuple) or not layers:
            raise LipboundError(
                f"there are no layers in layers, which is {shown(layers)}; give the list of "
                "attention_layers(model), after its context has ended"
            )
        for att in layers:
            check_layer(att, type(self).__name__)
        tiny = torch.finfo(torch.float64).tiny
        each = [self.norms(att).clamp_min(tiny).log().sum(-1).mean() for att in layers]
        return torch.stack([value.to(each[0].device) for value in each]).sum()


class SoundPenalty(LayerPenalty):
    r"""Mean over samples of :math:`\sum_{l,h} \log L^{l,h}`, with L a sound bound.

    Far tighter than what `JaSMin` is built on, at a far higher price. To be called with the list of
    `lipbound.models.training.attention_layers`, whose layers know their padding.

    Args:
        name: of a registered bound that has derivatives: "lipbound" or "lipbound_block".

    Raises:
        UnknownNameError: another bound.
    """

    def __init__(self, name: str = "lipbound_block"):
        self.name = choice("penalty bound", name, ("lipbound", "lipbound_block"))

    def norms(self, att: Attention) -> Tensor:
        """Return the bound, (samples, heads), float64."""
        return get(self.name)(att)


class ExactNorm(LayerPenalty):
    r"""Mean over samples of :math:`\sum_{l,h} \log \|J^{l,h}\|`, the exact norms of all heads.

    Nothing is tighter. The value is the lower end of `lipbound.spectral_norm`; its derivative is
    :math:`u^T dJ\,v` at the top singular pair found, that of a simple largest singular value
    (Watson 1992), and of a multiple one a subgradient of the norm. The search starts anew in every
    step: other inputs have another J, and the vectors of the step before say nothing of it.

    To be called with the list of `lipbound.models.training.attention_layers`; also
    with layers of any other kind that have a closed form (rotary, grouped, capped and so on).

    Args:
        tol: relative error of the norms; singular vectors, and so derivatives, are known to about
            its root.
        seed: of the random vectors that the searches start from.

    Raises:
        LipboundError: ``tol`` is no number between 0 and 1.
    """

    def __init__(self, tol: float = 1e-3, seed: int = 0):
        self.tol = real("tol", tol, "a relative error between 0 and 1", above=0, below=1)
        self.seed = seed

    def norms(self, att: Attention) -> Tensor:
        """Return the exact norms, (samples, heads), float64, with derivatives."""
        top = spectral_norm(att.detached(), tol=self.tol, vectors=True, seed=self.seed)
        assert top.left is not None
        assert top.right is not None
        left, right = (t.to(att.x).flatten(0, 1) for t in (top.left, top.right))
        form = (left * HeadJacobian(att).along(right)).sum((-1, -2)).view(att.samples, att.heads)
        return with_derivative(top.lower.to(form.device, torch.float64), form.double())

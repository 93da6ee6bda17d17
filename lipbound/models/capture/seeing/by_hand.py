"""Attention that a module computes itself: a product, a softmax and a product, followed through.

The tensors of a forward pass are followed under a mode of torch's functions. A product of two
tensors that are no weights may be scores; a softmax of scores is probabilities; the product of
probabilities with another tensor is the output of heads. What happens to a tensor of one of these
kinds element by element leaves its kind.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipbound.models.capture.seeing.fused import SDPA

PRODUCTS = {torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
PRODUCTS |= {Tensor.__rmatmul__, Tensor.baddbmm, torch.einsum}
"""Functions that multiply matrices."""
PROJECTIONS = {F.linear, torch.addmm, torch.mm, F.conv1d, F.conv2d, Tensor.addmm, Tensor.mm}
"""Functions that multiply with weights."""
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


@dataclass(eq=False)
class Scores:
    """Products of queries and keys, and what was made of them element by element.

    Attributes:
        left: first factors of the products that were added up, as they were multiplied.
        right: second factors of the same.
    """

    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]


@dataclass(eq=False)
class Probabilities:
    """The softmax of scores, and what was made of it element by element.

    Attributes:
        scores: what the softmax is of.
        values: the scores as the softmax was given them.
    """

    scores: Scores
    values: Tensor


@dataclass(eq=False)
class HeadOutputs:
    """Outputs of heads, and what was made of them element by element.

    Attributes:
        raw: as they were computed.
        width: d_v.
        head_axis: axis of ``raw`` that counts the heads, where it is known.
        v: the values, as they were multiplied.
        probabilities: what they were multiplied with; None where torch computed them.
        q, k: where they are known, as they were multiplied.
    """

    raw: Tensor
    width: int
    head_axis: int | None
    v: Tensor
    probabilities: Probabilities | None = None
    q: tuple[Tensor, ...] = ()
    k: tuple[Tensor, ...] = ()


@dataclass(eq=False)
class Weights:
    """Forms of parameters, such as their transposes."""


Kind = Scores | Probabilities | HeadOutputs | Weights


class Follower(TorchFunctionMode):
    """Follow scores, probabilities and outputs of heads through the functions of torch.

    Args:
        computed: is told of outputs of heads when they are computed.
        projected: is told of a tensor of outputs of heads that is multiplied with weights.
        fused: does what scaled_dot_product_attention does.
    """

    def __init__(
        self,
        computed: Callable[[HeadOutputs], None],
        projected: Callable[[Tensor, HeadOutputs], None],
        fused: Callable[..., Tensor] = SDPA,
    ):
        super().__init__()
        self._computed, self._projected, self._fused = computed, projected, fused
        self._kinds: dict[int, tuple[weakref.ref[Tensor], Kind]] = {}
        self.paused = False

    def kind(self, value: object) -> Kind | None:
        """Return the kind of a tensor that is followed."""
        reference, kind = self._kinds.get(id(value), (None, None))
        return kind if reference is not None and reference() is value else None

    def _is_weight(self, t: Tensor) -> bool:
        return isinstance(t, torch.nn.Parameter) or isinstance(self.kind(t), Weights)

    def follow(self, tensor: Tensor, kind: Kind) -> None:
        """Follow a tensor from now on."""
        self._kinds[id(tensor)] = (weakref.ref(tensor), kind)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA and not self.paused:
            return self._fused(*args, **kwargs)
        tensors = (
            [] if self.paused else [t for t in _tensors(args, kwargs) if t.is_floating_point()]
        )
        given = [t for t in tensors if not self._is_weight(t)]
        kinds = [kind for t in given if (kind := self.kind(t)) is not None]
        if func in PROJECTIONS or (func in PRODUCTS and kinds):
            for t in given:
                if isinstance(kind := self.kind(t), HeadOutputs):
                    self._projected(t, kind)
        out = func(*args, **kwargs)
        if not self.paused and isinstance(out, Tensor) and out.is_floating_point():
            found = self._kind_of(func, args, given, kinds, out)
            if tensors and not given and func not in PROJECTIONS | PRODUCTS:
                found = Weights()
            if found is not None:
                self.follow(out, found)
                if isinstance(found, HeadOutputs) and found.raw is out:
                    self._computed(found)
        return out

    def _kind_of(
        self,
        func: Any,
        args: tuple[Any, ...],
        given: list[Tensor],
        kinds: list[Kind],
        out: Tensor,
    ) -> Kind | None:
        if func in PRODUCTS:
            equation = next((a for a in args if isinstance(a, str)), None)
            return self._product(given, out, equation)
        if not kinds or func in PROJECTIONS:
            return None
        if func in SOFTMAX:
            scores = next((k for k in kinds if isinstance(k, Scores)), None)
            return None if scores is None else Probabilities(scores, given[0])
        outputs = [k for k in kinds if isinstance(k, HeadOutputs)]
        if outputs:
            whole = out.numel() == outputs[0].raw.numel() or _is_part(func)
            return outputs[0] if whole else None
        probabilities = [k for k in kinds if isinstance(k, Probabilities)]
        if probabilities:
            return probabilities[0] if out.numel() >= probabilities[0].values.numel() else None
        scores_of = [k for k in kinds if isinstance(k, Scores)]
        if out.numel() < 2 or _reduces(func):
            return None
        if len(scores_of) == 1:
            return scores_of[0]
        left = tuple(t for k in dict.fromkeys(scores_of) for t in k.left)
        return Scores(left, tuple(t for k in dict.fromkeys(scores_of) for t in k.right))

    def _product(self, given: list[Tensor], out: Tensor, equation: str | None) -> Kind | None:
        if len(given) < 2:
            return None
        left, right = given[-2:]  # baddbmm has what is added first
        for p, v, at_left in ((left, right, True), (right, left, False)):
            if isinstance(kind := self.kind(p), Probabilities):
                width, axis = _layout(out, equation, at_left)
                scores = kind.scores
                return HeadOutputs(out, width, axis, v, kind, scores.left, scores.right)
        if isinstance(self.kind(left), HeadOutputs) or isinstance(self.kind(right), HeadOutputs):
            return None
        before = [k for t in given[:-2] if isinstance(k := self.kind(t), Scores)]
        more_left = tuple(t for k in before for t in k.left)
        return Scores((left, *more_left), (right, *(t for k in before for t in k.right)))


def _layout(out: Tensor, equation: str | None, at_left: bool) -> tuple[int, int | None]:
    """Return d_v, and the axis of heads, of a product of probabilities with values."""
    if equation is None:
        axis = -1 if at_left else -2
        return out.shape[axis], out.ndim - 3 if out.ndim > 3 else None
    inputs, _, result = equation.replace(" ", "").partition("->")
    one, _, other = inputs.partition(",")
    p, v = (one, other) if at_left else (other, one)
    widths = [i for i, letter in enumerate(result) if letter in v and letter not in p]
    shared = [letter for letter in p if letter in v and letter in result]
    heads = result.index(shared[-1]) if len(shared) > 1 else None
    width = out.shape[widths[-1]] if widths else out.shape[-1]
    return width, heads


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [t for t in value if isinstance(t, Tensor)]
    return [t for t in found if t.is_floating_point()]


def _is_part(func: Any) -> bool:
    return func in (Tensor.__getitem__, Tensor.narrow, torch.narrow, Tensor.chunk, Tensor.split)


def _reduces(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("sum", "mean", "amax", "max", "min", "amin", "norm", "layer_norm", "rms_norm")

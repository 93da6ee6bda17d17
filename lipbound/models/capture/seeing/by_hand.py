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
NORMALISATIONS = {F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.normalize}
ELLIPSIS = "ABCDEFGH"
"""Indices that an ellipsis in an equation stands for."""
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


@dataclass(eq=False)
class Scores:
    """Products of queries and keys, and what was made of them element by element.

    Attributes:
        left: first factors of the products that were added up, as they were multiplied.
        right: second factors of the same.
        factors: queries (..., N, d) and keys (..., M, d) of the product, where it is one of these.
    """

    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    factors: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class FollowedSoftmax:
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
        factors: values (..., M, d_v) and outputs (..., N, d_v), where the product is one of these.
    """

    raw: Tensor
    width: int
    head_axis: int | None
    v: Tensor
    probabilities: FollowedSoftmax | None = None
    q: tuple[Tensor, ...] = ()
    k: tuple[Tensor, ...] = ()
    factors: tuple[Tensor, Tensor] | None = None

    @property
    def form(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Queries, keys, values and outputs, (..., tokens, width) each, where they are known."""
        scores = None if self.probabilities is None else self.probabilities.scores
        if scores is None or scores.factors is None or self.factors is None:
            return None
        return (*scores.factors, *self.factors)


@dataclass(eq=False)
class Weights:
    """Forms of parameters, such as their transposes."""


Letters = tuple[str, str, str]
"""Indices of two factors and of their product."""
Kind = Scores | FollowedSoftmax | HeadOutputs | Weights


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
        projected: Callable[[Tensor, HeadOutputs], None] = lambda x, outputs: None,
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

    def is_weight(self, t: Tensor) -> bool:
        """Return whether a tensor is a parameter, or made of parameters alone."""
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
        given = [t for t in tensors if not self.is_weight(t)]
        kinds = [kind for t in given if (kind := self.kind(t)) is not None]
        if func in PROJECTIONS or (func in PRODUCTS and kinds):
            for t in given:
                if isinstance(kind := self.kind(t), HeadOutputs):
                    self._projected(t, kind)
        out = func(*args, **kwargs)
        if func is Tensor.__setitem__ and kinds and self.kind(args[0]) is None:
            self._set(args[0], kinds[0])
        if not self.paused and isinstance(out, Tensor) and out.is_floating_point():
            found = self._kind_of(func, args, given, kinds, out)
            if tensors and not given and func not in PROJECTIONS | PRODUCTS:
                found = Weights()
            if found is not None:
                self.follow(out, found)
                if isinstance(found, HeadOutputs) and all(found is not kind for kind in kinds):
                    self._computed(found)
        return out

    def _set(self, whole: Tensor, kind: Kind) -> None:
        """Follow a tensor into which something was written."""
        if isinstance(kind, Scores):
            kind = Scores(kind.left, kind.right)
        if isinstance(kind, Scores | FollowedSoftmax):
            self.follow(whole, kind)

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
        if not kinds:
            return None
        if func in PROJECTIONS:
            return _mixed(kinds[0], out, given[0])
        if func in SOFTMAX:
            scores = next((k for k in kinds if isinstance(k, Scores)), None)
            return None if scores is None else FollowedSoftmax(scores, given[0])
        outputs = [k for k in kinds if isinstance(k, HeadOutputs)]
        if outputs:
            whole = out.numel() == outputs[0].raw.numel() or _is_part(func)
            return outputs[0] if whole else None
        probabilities = [k for k in kinds if isinstance(k, FollowedSoftmax)]
        if probabilities:
            return probabilities[0] if out.numel() >= probabilities[0].values.numel() else None
        scores_of = [*dict.fromkeys(k for k in kinds if isinstance(k, Scores))]
        largest = max(t.numel() for t in given if isinstance(self.kind(t), Scores))
        if out.numel() < largest and _is_part(func):
            return Scores(scores_of[0].left, scores_of[0].right)
        if func in NORMALISATIONS or out.numel() < largest:
            return None
        if len(scores_of) == 1:
            return scores_of[0]
        left = tuple(t for k in scores_of for t in k.left)
        right = tuple(t for k in scores_of for t in k.right)
        # of a key for every column, not of one for every distance
        forms = (k.factors for k in scores_of if k.factors is not None)
        factors = (form for form in forms if form[1].shape[-2] == out.shape[-1])
        return Scores(left, right, next(factors, None))

    def _product(self, given: list[Tensor], out: Tensor, equation: str | None) -> Kind | None:
        if len(given) < 2:
            return None
        left, right = given[-2:]  # baddbmm has what is added first
        if min(left.ndim, right.ndim) < 2:
            return None
        letters = None if equation is None else _letters(equation, left.ndim, right.ndim)
        for p, v, turn in ((left, right, False), (right, left, True)):
            if isinstance(kind := self.kind(p), FollowedSoftmax):
                if letters is not None and turn:
                    letters = letters[1], letters[0], letters[2]
                result = out.mT if turn and equation is None else out
                values = v.mT if turn and equation is None else v
                width, axis = _layout(result, letters)
                form = None if turn and letters is None else _second_form(values, out, letters)
                scores = kind.scores
                return HeadOutputs(out, width, axis, v, kind, scores.left, scores.right, form)
        if isinstance(self.kind(left), HeadOutputs) or isinstance(self.kind(right), HeadOutputs):
            return None
        before = [k for t in given[:-2] if isinstance(k := self.kind(t), Scores)]
        more_left = tuple(t for k in before for t in k.left)
        more_right = tuple(t for k in before for t in k.right)
        form = None if before else _first_form(left, right, letters)
        return Scores((left, *more_left), (right, *more_right), form)


def _mixed(kind: Kind, out: Tensor, given: Tensor) -> Kind | None:
    """Return the kind of scores, or of probabilities, of heads that are mixed by weights."""
    if out.shape != given.shape or isinstance(kind, HeadOutputs | Weights):
        return None
    scores = kind if isinstance(kind, Scores) else kind.scores
    mixed = Scores(scores.left, scores.right)
    return mixed if isinstance(kind, Scores) else FollowedSoftmax(mixed, kind.values)


def _layout(out: Tensor, letters: Letters | None) -> tuple[int, int | None]:
    """Return d_v, and the axis of heads, of a product of probabilities with values.

    The letters are those of the probabilities, the values and the outputs.
    """
    if letters is None:
        return out.shape[-1], out.ndim - 3 if out.ndim > 3 else None
    of_p, of_v, result = letters
    widths = [i for i, letter in enumerate(result) if letter in of_v and letter not in of_p]
    shared = [letter for letter in of_p if letter in of_v and letter in result]
    heads = result.index(shared[-1]) if len(shared) > 1 else None
    return out.shape[widths[-1] if widths else -1], heads


def _letters(equation: str, *ndims: int) -> Letters | None:
    """Return the indices of two factors and of their product.

    Args:
        equation: of torch.einsum.
        ndims: of the factors, which tell how many indices an ellipsis stands for.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    factors = inputs.split(",")
    if not arrow or len(factors) != 2:
        return None
    more = [ndim - len(f.replace("...", "")) for f, ndim in zip(factors, ndims, strict=True)]
    rest = ELLIPSIS[: max(more)]
    filled = [f.replace("...", rest[len(rest) - n :]) for f, n in zip(factors, more, strict=True)]
    return filled[0], filled[1], result.replace("...", rest)


def _permuted(t: Tensor, letters: str, wanted: str) -> Tensor | None:
    if sorted(letters) != sorted(wanted) or len(letters) != t.ndim:
        return None
    return t.permute([letters.index(letter) for letter in wanted])


def _first_form(
    left: Tensor, right: Tensor, letters: Letters | None
) -> tuple[Tensor, Tensor] | None:
    """Return queries (..., N, d) and keys (..., M, d) of a product."""
    if letters is None:
        return left, right.mT
    if len(letters[2]) < 3:
        return None
    batch, row, column = letters[2][:-2], letters[2][-2], letters[2][-1]
    shared = [x for x in letters[0] if x in letters[1] and x not in letters[2]]
    if len(shared) != 1:
        return None
    q = _permuted(left, letters[0], batch + row + shared[0])
    k = _permuted(right, letters[1], batch + column + shared[0])
    return None if q is None or k is None else (q, k)


def _second_form(v: Tensor, out: Tensor, letters: Letters | None) -> tuple[Tensor, Tensor] | None:
    """Return values (..., M, d_v) and outputs (..., N, d_v) of a product with probabilities."""
    if letters is None:
        return v, out
    p, values = letters[:2]
    batch, row, column = p[:-2], p[-2], p[-1]
    wide = [x for x in values if x not in p]
    if len(wide) != 1:
        return None
    v_form = _permuted(v, values, batch + column + wide[0])
    out_form = _permuted(out, letters[2], batch + row + wide[0])
    return None if v_form is None or out_form is None else (v_form, out_form)


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


def in_heads(form: tuple[Tensor, Tensor, Tensor, Tensor], heads: int) -> tuple[Tensor, ...] | None:
    """Return queries, keys, values and outputs as (samples, heads or fewer, tokens, width) each.

    Samples and heads may share an axis; heads may share keys and values.
    """
    found: list[Tensor] = []
    for t in form:
        if t.ndim == 3 and form[0].ndim == 3 and len(t) % heads == 0:
            t = t.unflatten(0, (-1, heads))
        if t.ndim != 4 or t.shape[1] not in (1, heads) or len(t) != len(found[0] if found else t):
            return None
        found.append(t)
    return tuple(found)

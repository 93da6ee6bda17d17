"""Attention of every make, seen in a pass: by transformers' function, by torch's, or by hand.

Calls of transformers' attention interface and of scaled_dot_product_attention are seen as they are
made. For attention that a module computes itself, the tensors of a pass are followed under a mode
of torch's functions. A product of two tensors that are no weights may be scores; a softmax of
scores is probabilities; the product of probabilities with another tensor is the output of heads.
What happens to a tensor of one of these kinds element by element leaves its kind.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipbound.models.capture.seeing.call import BY_HAND, FUSED, INTERFACE
from lipbound.models.capture.seeing.interface import SDPA, additive_mask, eager, handling

PRODUCTS = {torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
PRODUCTS |= {Tensor.__rmatmul__, Tensor.baddbmm, torch.einsum}
"""Functions that multiply matrices."""
PROJECTIONS = {F.linear, torch.addmm, torch.mm, F.conv1d, F.conv2d, Tensor.addmm, Tensor.mm}
"""Functions that multiply with weights."""
NORMALISATIONS = {F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.normalize}
PARTS = {Tensor.__getitem__, Tensor.narrow, torch.narrow, Tensor.chunk, Tensor.split}
"""Functions that return a part of a tensor."""
ELLIPSIS = "ABCDEFGH"
"""Indices that an ellipsis in an equation stands for."""
MATMUL = "...ij,...jk->...ik"
"""Products of matrices, as an equation."""
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
class Heads:
    """The heads of one call of attention; their outputs, and what is made of these, are followed.

    Attributes:
        way: how the call was seen.
        q, k: queries and keys as they were multiplied; several where scores are sums of products.
        v: values, as they were multiplied.
        mask: what is added to scores, or None; not known by hand.
        scale: the factor of scores, or None for d^-0.5; not known by hand.
        extras: what else the attention function was handed.
        module: that called transformers' interface.
        boolean: whether the mask was given as True and False; ``mask`` is what that adds to scores.
        adds: whether these are added to scores as the numbers 1 and 0.
        scores: what the softmax was given, by hand.
        form: queries, keys, values and outputs, (..., tokens, width) each, where these are known.
        raw: outputs as they were computed; empty before that.
        width: d_v.
        head_axis: axis of ``raw`` that counts the heads, where it is known.
    """

    way: str
    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    module: nn.Module | None = None
    boolean: bool = False
    adds: bool = False
    scores: Tensor | None = None
    form: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    raw: Tensor = field(default_factory=lambda: torch.zeros(0))
    width: int = 0
    head_axis: int | None = None


@dataclass(eq=False)
class Weights:
    """Forms of parameters, such as their transposes."""


Kind = Scores | FollowedSoftmax | Heads | Weights
Letters = tuple[str, str, str]
"""Indices of two factors and of their product."""


class Follower(TorchFunctionMode):
    """Attention of a pass, whose scores, probabilities and outputs of heads are followed.

    What it does on meeting them is up to classes that derive from it (`asked`, `computed`,
    `projected`).

    Args:
        adds: whether masks of True and False are added to scores as numbers, which eager functions
            of transformers do, and its other functions do not.

    Attributes:
        is_paused: whether nothing is followed at the moment.
    """

    fused: Callable[..., Tensor] = staticmethod(SDPA)
    """The function that does what scaled_dot_product_attention does."""

    def __init__(self, adds: bool = False):
        super().__init__()
        self.adds = adds
        self._kinds: dict[int, tuple[weakref.ref[Tensor], Kind]] = {}
        self.is_paused = False
        self._ways = ExitStack()

    def asked(self, heads: Heads) -> Tensor | None:
        """Act before a function computes heads; what is returned takes the place of its outputs."""
        return None

    def computed(self, heads: Heads) -> None:
        """Act on heads whose outputs were computed."""

    def projected(self, x: Tensor, heads: Heads) -> None:
        """Act on outputs of heads, or what was made of them, that meet weights."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Yield while nothing is followed."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def __enter__(self) -> Self:
        self._ways.enter_context(handling(self._interface, self._fused))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._ways.close()

    def kind(self, value: object) -> Kind | None:
        """Return the kind of a tensor that is followed."""
        reference, kind = self._kinds.get(id(value), (None, None))
        return kind if reference is not None and reference() is value else None

    def is_weight(self, t: Tensor) -> bool:
        """Return whether a tensor is a parameter, or made of parameters alone."""
        return isinstance(t, nn.Parameter) or isinstance(self.kind(t), Weights)

    def _follow(self, tensor: Tensor, kind: Kind) -> None:
        self._kinds[id(tensor)] = (weakref.ref(tensor), kind)

    def _interface(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any
    ) -> tuple[Tensor, Any]:
        """Do what a module's own eager attention function does."""
        boolean = mask is not None and mask.dtype == torch.bool
        if mask is not None and boolean:  # eager functions would add True as 1
            mask = mask.to(q.dtype) if self.adds else additive_mask(q, k, mask, False)
        extras = {name: value for name, value in kw.items() if value is not None}
        heads = Heads(INTERFACE, (q,), (k,), v, mask, kw.get("scaling"), extras, module)
        heads.boolean, heads.adds = boolean and not self.adds, boolean and self.adds
        out, probabilities = self.asked(heads), None
        if out is None:
            with self.paused():
                out, probabilities = eager(module)(module, q, k, v, mask, **kw)
        self._done(heads, out, out.ndim - 2)
        return out, probabilities

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kw: Any,
    ) -> Tensor:
        """Do what torch's own attention function does."""
        mask = additive_mask(query, key, attn_mask, is_causal)
        heads = Heads(FUSED, (query,), (key,), value, mask, kw.get("scale"))
        heads.boolean = attn_mask is not None and attn_mask.dtype == torch.bool
        out = self.asked(heads)
        if out is None:
            with self.paused(), torch._C.DisableTorchFunction():
                out = self.fused(query, key, value, attn_mask, dropout_p, is_causal, **kw)
        self._done(heads, out, out.ndim - 3)
        return out

    def _done(self, heads: Heads, out: Tensor, head_axis: int) -> None:
        heads.raw, heads.width, heads.head_axis = out, out.shape[-1], head_axis
        self._follow(out, heads)
        self.computed(heads)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if func is SDPA:
            return self._fused(*args, **kwargs)
        tensors = _tensors(args, kwargs)
        given = [t for t in tensors if not self.is_weight(t)]
        kinds = [kind for t in given if (kind := self.kind(t)) is not None]
        if func in PROJECTIONS or (func in PRODUCTS and kinds):
            for t in given:
                if isinstance(kind := self.kind(t), Heads):
                    self.projected(t, kind)
        out = func(*args, **kwargs)
        written = func is Tensor.__setitem__ and kinds and self.kind(args[0]) is None
        if written and not isinstance(kinds[0], Heads):
            self._follow(args[0], _mixed(kinds[0]))
        if isinstance(out, Tensor) and out.is_floating_point():
            found = self._kind_of(func, args, given, kinds, out)
            if tensors and not given and func not in PROJECTIONS | PRODUCTS:
                found = Weights()
            if found is not None:
                self._follow(out, found)
                if isinstance(found, Heads) and all(found is not kind for kind in kinds):
                    self.computed(found)
        return out

    def _kind_of(
        self, func: Any, args: Any, given: list[Tensor], kinds: list[Kind], out: Tensor
    ) -> Kind | None:
        if func in PRODUCTS and len(given) > 1:
            equation = next((a for a in args if isinstance(a, str)), None)
            return self._product(given, out, equation)
        if not kinds:
            return None
        if func in PROJECTIONS | PRODUCTS:  # heads that are mixed by weights
            alike = out.shape == given[0].shape and not isinstance(kinds[0], Heads)
            return _mixed(kinds[0]) if alike else None
        scores = [*dict.fromkeys(k for k in kinds if isinstance(k, Scores))]
        if func in SOFTMAX:
            return FollowedSoftmax(scores[0], given[0]) if scores else None
        heads = next((k for k in kinds if isinstance(k, Heads)), None)
        if heads is not None:
            return heads if out.numel() == heads.raw.numel() or func in PARTS else None
        probabilities = next((k for k in kinds if isinstance(k, FollowedSoftmax)), None)
        if probabilities is not None:
            return probabilities if out.numel() >= probabilities.values.numel() else None
        largest = max(t.numel() for t in given if isinstance(self.kind(t), Scores))
        if out.numel() < largest:
            return _sum(scores[:1]) if func in PARTS else None
        if func in NORMALISATIONS:
            return None
        if len(scores) == 1:
            return scores[0]
        # of a key for every column, not of one for every distance
        forms = (k.factors for k in scores if k.factors is not None)
        factors = (form for form in forms if form[1].shape[-2] == out.shape[-1])
        return replace(_sum(scores), factors=next(factors, None))

    def _product(self, given: list[Tensor], out: Tensor, equation: str | None) -> Kind | None:
        """Return the kind of a product: scores, or outputs of heads."""
        if min(t.ndim for t in given[-2:]) < 2:
            return None
        left, right = given[-2:]  # baddbmm has what is added first
        letters = _letters(equation or MATMUL, left.ndim, right.ndim)
        for p, v, turned in ((left, right, False), (right, left, True)):
            if isinstance(kind := self.kind(p), FollowedSoftmax):
                of_p, of_v, result = letters
                return _heads(kind, v, out, (of_v, of_p, result) if turned else letters)
        if any(isinstance(self.kind(t), Heads) for t in (left, right)):
            return None
        found = Scores((left,), (right,), _queries_and_keys(left, right, letters))
        added = [k for t in given[:-2] if isinstance(k := self.kind(t), Scores)]
        return _sum([found, *added]) if added else found


def _sum(scores: Iterable[Scores]) -> Scores:
    """Return the kind of a sum, of a part or of a mixture of scores."""
    left, right = ([getattr(one, side) for one in scores] for side in ("left", "right"))
    return Scores(tuple(chain(*left)), tuple(chain(*right)))


def _mixed(kind: Kind) -> Kind:
    """Return the kind of scores, or of probabilities, of heads that are mixed."""
    if isinstance(kind, FollowedSoftmax):
        return FollowedSoftmax(_sum([kind.scores]), kind.values)
    return _sum([kind]) if isinstance(kind, Scores) else kind


def _letters(equation: str, *ndims: int) -> Letters:
    """Return the indices of two factors and of their product; none where they are not two.

    Args:
        equation: of torch.einsum.
        ndims: of the factors, which tell how many indices an ellipsis stands for.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    factors = inputs.split(",")
    if not arrow or len(factors) != 2:
        return "", "", ""
    more = [ndim - len(f.replace("...", "")) for f, ndim in zip(factors, ndims, strict=True)]
    rest = ELLIPSIS[: max(more)]
    filled = [f.replace("...", rest[len(rest) - n :]) for f, n in zip(factors, more, strict=True)]
    return filled[0], filled[1], result.replace("...", rest)


def _permuted(t: Tensor, letters: str, wanted: str) -> Tensor | None:
    if sorted(letters) != sorted(wanted) or len(letters) != t.ndim:
        return None
    return t.permute([letters.index(letter) for letter in wanted])


def _queries_and_keys(
    left: Tensor, right: Tensor, letters: Letters
) -> tuple[Tensor, Tensor] | None:
    """Return queries (..., N, d) and keys (..., M, d) of a product, where it is one of these."""
    of_q, of_k, result = letters
    shared = [x for x in of_q if x in of_k and x not in result]
    if len(result) < 3 or len(shared) != 1:
        return None
    q = _permuted(left, of_q, result[:-1] + shared[0])
    k = _permuted(right, of_k, result[:-2] + result[-1] + shared[0])
    return None if q is None or k is None else (q, k)


def _heads(kind: FollowedSoftmax, v: Tensor, out: Tensor, letters: Letters) -> Heads:
    """Return the heads of a product of probabilities with values."""
    of_p, of_v, result = letters
    heads = Heads(BY_HAND, kind.scores.left, kind.scores.right, v, scores=kind.values)
    heads.raw, heads.width = out, out.shape[-1]
    batch, row, column = of_p[:-2], of_p[-2:-1], of_p[-1:]
    wide = "".join(x for x in of_v if x not in of_p)
    if len(wide) != 1 or wide not in result:
        return heads
    heads.width = out.shape[result.index(wide)]
    heads.head_axis = result.index(batch[-1]) if len(batch) > 1 and batch[-1] in result else None
    values = _permuted(v, of_v, batch + column + wide)
    outputs = _permuted(out, result, batch + row + wide)
    if kind.scores.factors is not None and values is not None and outputs is not None:
        heads.form = (*kind.scores.factors, values, outputs)
    return heads


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    given = [a if isinstance(a, list | tuple) else [a] for a in (*args, *kwargs.values())]
    return [t for t in chain(*given) if isinstance(t, Tensor) and t.is_floating_point()]


def in_heads(heads: Heads, count: int) -> tuple[Tensor, ...] | None:
    """Return queries, keys, values and outputs as (samples, heads or fewer, tokens, width) each.

    Samples and heads may share an axis; heads may share keys and values. None where these axes are
    not known.

    Args:
        heads: of a call by hand.
        count: how many they are.
    """
    found: list[Tensor] = []
    for t in heads.form or ():
        if t.ndim == 3 and heads.q[0].ndim == 3 and len(t) % count == 0:
            t = t.unflatten(0, (-1, count))
        if t.ndim != 4 or t.shape[1] not in (1, count) or len(t) != len(found[0] if found else t):
            return None
        found.append(t)
    return tuple(found) or None

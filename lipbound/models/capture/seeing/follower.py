"""Attention of every make, seen in a pass: by transformers' function, by torch's, or by hand.

Calls of transformers' attention interface and of scaled_dot_product_attention are seen as they are
made. For attention that a module computes itself, the tensors of a pass are followed under a mode
of torch's functions. A product of two tensors that are no weights may be scores; a softmax of
scores is probabilities; the product of probabilities with another tensor is the output of heads.
What happens to a tensor of one of these kinds element by element leaves its kind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lipbound.models.capture.seeing.interface import SDPA, additive_mask, eager, handling
from lipbound.models.other_libraries import temporarily

INTERFACE, FUSED, BY_HAND = "the interface", "scaled_dot_product_attention", "by hand"
"""Ways to compute attention: through transformers' interface, by torch, or by the module itself."""

PRODUCTS = {torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
PRODUCTS |= {Tensor.__rmatmul__, Tensor.baddbmm, torch.einsum}
"""Functions that multiply matrices."""
PROJECTIONS = {F.linear, torch.addmm, torch.mm, F.conv1d, F.conv2d, Tensor.addmm, Tensor.mm}
"""Functions that multiply with weights."""
NORMALISATIONS = {F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.normalize}
SPLITS = {Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.unbind, torch.unbind}
SPLITS |= {Tensor.split_with_sizes, torch.split_with_sizes}
"""Functions that return all parts of a tensor."""
_PARTS = {Tensor.__getitem__, Tensor.narrow, torch.narrow, *SPLITS}
"""Functions that return a part of a tensor, or all of them."""
JOINS = {torch.cat, torch.concat, torch.concatenate}
"""Functions that put tensors beside each other."""
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
        sides: numbers of rows and of columns of the product.
    """

    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    factors: tuple[Tensor, Tensor] | None = None
    sides: tuple[int, ...] = ()


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
        left, right: queries and keys as they were multiplied; several where scores are sums of
            products.
        v: values, as they were multiplied.
        mask: what is added to scores, or None; not known by hand.
        scale: the factor of scores, or None for d^-0.5; not known by hand.
        extras: what else the attention function was handed.
        caller: the module that called transformers' interface.
        boolean: whether the mask was given as True and False; ``mask`` is what that adds to scores.
        adds: whether these are added to scores as the numbers 1 and 0.
        reason: why the call has no closed form, where that is known.
        scores: what the softmax was given, by hand.
        known: queries, keys, values and outputs, (..., tokens, width) each, and the scores or what
            is added to them, (..., tokens, tokens) or None, where these are known.
        raw: outputs as they were computed; empty before that.
        width: d_v.
        head_axis: axis of ``raw`` that counts the heads, where it is known.
        width_axis: axis of ``raw`` that is as wide as a head.
        parts: the calls whose outputs were put together, where they are several; ``raw`` is what
            these make.
        is_projected: whether outputs have met weights.
    """

    way: str
    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    v: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    caller: nn.Module | None = None
    boolean: bool = False
    adds: bool = False
    reason: str = ""
    scores: Tensor | None = None
    known: tuple[Any, ...] = ()
    raw: Tensor = field(default_factory=lambda: torch.zeros(0))
    width: int = 0
    head_axis: int | None = None
    width_axis: int = -1
    parts: tuple["Heads", ...] = ()
    is_projected: bool = False

    @property
    def calls(self) -> tuple["Heads", ...]:
        """The calls that made the outputs."""
        return self.parts or (self,)


class Form(NamedTuple):
    """How the calls of one layer of attention make (samples, heads, tokens, width).

    Attributes:
        heads: how many they are, where samples share their axis.
        axis: on which calls are put together: 1 for heads, 2 for queries, 0 before samples and
            heads, which share an axis, are told apart; None for a single call.
        turned: whether heads stand before samples.
    """

    heads: int
    axis: int | None = None
    turned: bool = False

    def in_heads(self, parts: "Sequence[Heads]") -> tuple[Any, ...]:
        """Return queries, keys, values, outputs, scores as (samples, heads, tokens, width) each.

        Heads may share keys and values. Empty where the calls have no such form.

        Args:
            parts: calls of one layer.
        """
        if not all(one.known and one.scale == parts[0].scale for one in parts):
            return ()
        count = self.heads // (len(parts) if self.axis == 1 else 1)
        found: list[Any] = []
        for side, some in enumerate(zip(*(one.known for one in parts), strict=True)):
            made = [t for t in some if t is not None]
            if not made or (len(parts) == 1 and parts[0].way == BY_HAND and side == 4):
                found += some[:1]
                continue
            try:
                if side == 4:  # masks may be the same for all samples, heads or queries
                    rows = zip(made, (one.known[0].shape[:-1] for one in parts), strict=True)
                    made = [t.expand(*shape, -1) for t, shape in rows]
                made = [torch.cat(made)] if self.axis == 0 else made
                made = [t.unflatten(0, (-1, count)) if t.ndim == 3 else t for t in made]
                made = [t.transpose(0, 1) if self.turned else t for t in made]
                if self.axis == 2 and side in (1, 2):  # all queries have the same keys and values
                    made = made[:1] if all(torch.equal(t, made[0]) for t in made) else []
                whole = made[0] if len(made) == 1 else torch.cat(made, self.axis or 0)
            except (RuntimeError, ValueError):
                return ()  # shapes or keys that do not fit, or some without a mask
            first = found[0] if found else whole
            if whole.ndim != 4 or first.shape[1] % whole.shape[1] or len(whole) != len(first):
                return ()
            found.append(whole)
        return tuple(found)


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
        self._kinds = WeakIdKeyDictionary()
        self.is_paused, self._count = False, 0

    def asked(self, heads: Heads) -> None:
        """Act before a function computes heads."""

    def computed(self, heads: Heads) -> Tensor | None:
        """Act on heads whose outputs were computed; what is returned takes their place."""
        return None

    def projected(self, x: Tensor, heads: Heads) -> None:
        """Act on outputs of heads, or what was made of them, that meet weights."""

    def returned(self, out: Tensor) -> None:
        """Act on what a function of the user's own returns, in which heads were seen."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Yield while calls of attention functions come here, and their outputs are followed."""
        with handling(self._interface, self._fused), self:
            yield

    def kind(self, value: object) -> Kind | None:
        """Return the kind of a tensor that is followed."""
        return self._kinds.get(value) if isinstance(value, Tensor) else None

    def is_weight(self, t: Tensor) -> bool:
        """Return whether a tensor is a parameter, or made of parameters alone."""
        return isinstance(t, nn.Parameter) or isinstance(self.kind(t), Weights)

    def _interface(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, own: Any, **kw: Any
    ) -> tuple[Tensor, Any]:
        """Do what a module's own eager attention function does, or a function of the user's.

        That is followed; it is attention as a whole only where none is seen in it.
        """
        given, boolean = mask, mask is not None and mask.dtype == torch.bool
        if mask is not None and boolean:  # eager functions would add True as 1
            mask = mask.to(q.dtype) if self.adds else additive_mask(q, k, mask, False)
        extras = {name: value for name, value in kw.items() if value is not None}
        heads = Heads(INTERFACE, (q,), (k,), v, mask, kw.get("scaling"), extras, module)
        heads.boolean, heads.adds = boolean and not self.adds, boolean and self.adds
        before = self._count
        self.asked(heads)
        if own is not None:
            out, probabilities = own(module, q, k, v, given, **kw)
            if self._count > before:
                self.returned(out)
                return out, probabilities
            heads.reason = "computes attention by a function of yours in which no softmax is seen"
        else:
            with temporarily("is_paused", True, self):
                out, probabilities = eager(module)(module, q, k, v, mask, **kw)
        return self._done(heads, out, out.ndim - 2), probabilities

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        """Do what torch's own attention function does."""
        kw |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
        given = kw.get("attn_mask")
        mask = additive_mask(query, key, given, kw.get("is_causal", False))
        heads = Heads(FUSED, (query,), (key,), value, mask, kw.get("scale"))
        heads.boolean = given is not None and given.dtype == torch.bool
        self.asked(heads)
        with temporarily("is_paused", True, self), torch._C.DisableTorchFunction():
            out = self.fused(query, key, value, **kw)
        heads.known = query, key, value, out, mask
        return self._done(heads, out, out.ndim - 3 if out.ndim > 3 else None)

    def _done(self, heads: Heads, out: Tensor, head_axis: int | None) -> Tensor:
        heads.raw, heads.width, heads.head_axis = out, out.shape[-1], head_axis
        return self._seen(heads)

    def _seen(self, heads: Heads) -> Tensor:
        """Return outputs of heads, or what takes their place, and follow them."""
        self._count += 1
        self._kinds[heads.raw] = heads
        if (other := self.computed(heads)) is not None:
            heads.raw = other
            self._kinds[other] = heads
        return heads.raw

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
                    for one in kind.calls:
                        one.is_projected = True
        out = func(*args, **kwargs)
        if func is Tensor.__setitem__ and kinds:
            if isinstance(kinds[-1], Heads):  # it may take several calls to fill it
                self._kinds[args[0]] = _together(kinds, args[0], at_least=1)
            elif self.kind(args[0]) is None:
                self._kinds[args[0]] = _mixed(kinds[0])
        if func in SPLITS:
            for part in out if kinds and isinstance(kinds[0], Heads) else ():
                self._kinds[part] = kinds[0]
        elif isinstance(out, Tensor) and out.is_floating_point():
            found = self._kind_of(func, (*args, *kwargs.values()), given, kinds, out)
            if tensors and not given and func not in PROJECTIONS | PRODUCTS:
                found = Weights()
            if isinstance(found, Heads) and not any(isinstance(kind, Heads) for kind in kinds):
                return self._seen(found)
            if found is not None:
                self._kinds[out] = found
        return out

    def _kind_of(
        self, func: Any, args: Any, given: list[Tensor], kinds: list[Kind], out: Tensor
    ) -> Kind | None:
        if func in PRODUCTS and len(given) > 1:
            equation = next((a for a in args if isinstance(a, str)), None)
            return self._product(given, out, equation)
        scores = [*dict.fromkeys(k for k in kinds if isinstance(k, Scores))]
        if func in SOFTMAX and given:
            return FollowedSoftmax(scores[0], given[0]) if scores else None
        if not kinds:
            return None
        if func in PROJECTIONS | PRODUCTS:
            return _by_weights(kinds[0], given[0], out)
        if any(isinstance(k, Heads) for k in kinds):
            wider = func in JOINS and out.numel() > max(t.numel() for t in given)
            heads = _together(kinds, out, at_least=1 if wider else 2)
            sizes = {one.raw.numel() for one in (heads, *heads.parts)}
            sizes |= {t.numel() for t in given if isinstance(self.kind(t), Heads)}  # their parts
            return heads if out.numel() in sizes or func in _PARTS else None
        if softmaxes := [k for k in kinds if isinstance(k, FollowedSoftmax)]:
            return softmaxes[0] if out.numel() >= softmaxes[0].values.numel() else None
        largest = max(t.numel() for t in given if isinstance(self.kind(t), Scores))
        if out.numel() < largest:
            return _sum(scores[:1]) if func in _PARTS else None
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
        factors, sides = _queries_and_keys(left, right, letters), tuple(out.shape[-2:])
        found = Scores((left,), (right,), factors, sides)
        added = [k for t in given[:-2] if isinstance(k := self.kind(t), Scores)]
        return _sum([found, *added]) if added else found


def _sum(scores: Iterable[Scores]) -> Scores:
    """Return the kind of a sum, of a part or of a mixture of scores."""
    left, right = ([getattr(one, side) for one in scores] for side in ("left", "right"))
    return Scores(tuple(chain(*left)), tuple(chain(*right)))


def _by_weights(kind: Kind | None, given: Tensor, out: Tensor) -> Kind | None:
    """Return what scores, or probabilities, still are where weights mix their heads."""
    scores = kind.scores if isinstance(kind, FollowedSoftmax) else kind
    if out.shape != given.shape or not isinstance(scores, Scores) or kind is None:
        return None
    # where rows and columns are axes of it still
    return _mixed(kind) if all(n in given.shape for n in scores.sides) else None


def _mixed(kind: Kind) -> Kind:
    """Return the kind of scores, or of probabilities, of heads that are mixed."""
    if isinstance(kind, FollowedSoftmax):
        return replace(kind, scores=_sum([kind.scores]))
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


def _queries_and_keys(left: Tensor, right: Tensor, of: Letters) -> tuple[Tensor, Tensor] | None:
    """Return queries (..., N, d) and keys (..., M, d) of a product, where it is one of these."""
    of_q, of_k, result = of
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
    heads.width_axis = result.index(wide) - len(result)
    heads.width = out.shape[heads.width_axis]
    heads.head_axis = result.index(batch[-1]) if len(batch) > 1 and batch[-1] in result else None
    values = _permuted(v, of_v, batch + column + wide)
    outputs = _permuted(out, result, batch + row + wide)
    if kind.scores.factors is not None and values is not None and outputs is not None:
        heads.known = (*kind.scores.factors, values, outputs, kind.values)
    return heads


def _together(kinds: Sequence[Kind], out: Tensor, at_least: int = 2) -> Heads:
    """Return the kind of what is made of the outputs of several calls.

    Outputs that have met weights are what later calls are made of, and no parts of theirs.

    Args:
        kinds: of what it is made of.
        out: what is made.
        at_least: the number of calls from which on it has parts.
    """
    heads = [*dict.fromkeys(kind for kind in kinds if isinstance(kind, Heads))]
    parts = dict.fromkeys(chain(*(one.calls for one in heads)))
    fresh = tuple(one for one in parts if not one.is_projected)
    if not fresh or len(heads) < at_least:
        return heads[0]
    return fresh[0] if len(fresh) < at_least else replace(fresh[0], parts=fresh, raw=out)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    given = (a if isinstance(a, (list, tuple)) else (a,) for a in (*args, *kwargs.values()))
    return [t for some in given for t in some if isinstance(t, Tensor) and t.is_floating_point()]


def outputs_of(heads: Heads, form: Form) -> Tensor | None:
    """Return a view of the outputs of a call as (samples, N, heads, d_v), where it is known."""
    if heads.way == INTERFACE:
        return heads.raw
    made = form.in_heads([heads])
    if made:
        return made[3].transpose(1, 2)
    return heads.raw.transpose(-3, -2) if heads.way == FUSED else None

"""Which entries of what an output projection is given are the outputs of which head.

They are found by derivatives, whatever the layout: an entry moves with the outputs of its head.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from lipbound.models.capture.seeing.call import Call
from lipbound.models.capture.seeing.follower import Heads

MOST = 256
"""Number of places of an axis of outputs that are looked at; samples and heads may share it."""

Places = frozenset[int]


class _Moved:
    """What of a cut moves with some of the outputs of calls of attention."""

    def __init__(self, cut: Tensor, calls: Sequence[Heads]):
        self.calls = [one for one in calls if one.raw.requires_grad]
        self._cotangent = torch.zeros_like(cut, requires_grad=True)
        self._pulled = torch.autograd.grad(
            cut,
            [one.raw for one in self.calls],
            self._cotangent,
            create_graph=True,
            materialize_grads=True,
        )
        self._generator = torch.Generator(cut.device).manual_seed(0)

    def by(self, call: int, axis: int, place: int) -> list[Places]:
        """Return which places of each axis of the cut move with a call's outputs at a place."""
        tangent, pulled = torch.zeros_like(self.calls[call].raw), self._pulled[call]
        tangent.select(axis, place).normal_(generator=self._generator)
        found = torch.zeros_like(self._cotangent)
        if pulled.requires_grad:
            (found,) = torch.autograd.grad(pulled, self._cotangent, tangent, retain_graph=True)
        return [_places(found, axis) for axis in range(found.ndim)]


def arrangement(
    call: Call, x: Tensor, cut: Tensor, calls: Sequence[Heads]
) -> Callable[[Tensor], Tensor]:
    """Return a function from cuts to (..., heads, d_v).

    Args:
        call: of the layer, which errors name.
        x: the stream of tokens that ``cut`` is a function of.
        cut: what its output projection is given, made of the outputs of ``calls`` with gradients.
        calls: what these outputs are put together from.

    Raises:
        CaptureError: the heads cannot be told apart.
    """
    moved, last = _Moved(cut, calls), cut.ndim - 1
    calls, raw, head_axis = moved.calls, moved.calls[0].raw, moved.calls[0].head_axis
    head_axis = None if head_axis is None or _of_other_tokens(x, calls[0]) else head_axis
    wide = [moved.by(i, one.width_axis, 0) for i, one in enumerate(calls)]
    sizes = zip(*wide, cut.shape, strict=True)
    share = [len(frozenset[int]().union(*each)) / n for *each, n in sizes]
    width = min(range(last, -1, -1), key=lambda axis: share[axis])
    width = width if share[width] < 1 else last
    several = head_axis is not None and raw.shape[head_axis] > 1

    def like(one: Heads, other: Heads) -> bool:
        return all(map(torch.equal, (one.q[0], one.k[0]), (other.q[0], other.k[0])))

    # calls with the same scores are one head with parts of its values
    first = [next(i for i, other in enumerate(calls) if like(one, other)) for one in calls]

    @cache
    def made(axis: int) -> list[list[list[Places]]]:
        found: dict[int, list[list[Places]]] = {}
        for i, one in enumerate(calls):
            some = [moved.by(i, axis, place) for place in range(min(one.raw.shape[axis], MOST))]
            known = found.get(first[i], some)
            pairs = zip(known, some, strict=True)
            found[first[i]] = [[*map(frozenset.union, *pair)] for pair in pairs]
        return [*found.values()]

    axes = dict.fromkeys([head_axis or 0, *range(raw.ndim - 2)])
    tried = [(axis, width, len(calls)) for axis in axes]
    # calls that are chunks of queries move other tokens
    tried += [(head_axis or 0, axis, 1) for axis in range(last, -1, -1) if several]
    for of_raw, axis, count in tried:
        if _apart((one[axis] for one in chain(*made(of_raw)[:count])), cut.shape[axis]):
            groups = [*filter(None, dict.fromkeys(one[axis] for one in chain(*made(of_raw))))]
            order = torch.tensor([*chain(*map(sorted, groups))], device=cut.device)
            if axis == last or len(groups[0]) > 1:
                return lambda t: t.movedim(axis, -1)[..., order].unflatten(-1, (len(groups), -1))
            ends = axis, last if width == axis else width
            return lambda t: t.index_select(axis, order).movedim(ends, (-2, -1))
    if not several and share[width] < 1:  # one head
        return lambda t: t.movedim(width, -1).unsqueeze(-2)
    d_v = calls[0].width  # heads are normalised together, say
    if cut.shape[-1] % d_v:
        raise call.unsupported(
            f"hands on outputs of heads ({d_v} wide) in a tensor of width {cut.shape[-1]}"
        )
    return lambda t: t.unflatten(-1, (-1, d_v))


def _apart(some: Iterable[Places], size: int) -> bool:
    """Return whether places of an axis, each as many, are different ones, but not one for all."""
    groups = {places for places in some if places}
    counts, every = [len(places) for places in groups], frozenset[int]().union(*groups)
    parts = len(groups) > 1 or len(every) < size
    return parts and len({*counts}) == 1 and len(every) == sum(counts)


def _of_other_tokens(x: Tensor, call: Heads) -> bool:
    """Return whether what seem to be heads are made of other tokens each: windows, or samples."""
    sides = (t for t in call.form[:2] if t is not None and t.requires_grad and t.ndim > 3)
    t = next((t for t in sides if t.shape[-3] > 1), None)
    if t is None:
        return False
    found: list[Tensor] = []
    weights = torch.linspace(1, 2, t.shape[-1], dtype=t.dtype, device=t.device)
    for i in range(2):
        one = (t.select(-3, i).select(-2, 0) * weights).sum()
        found += torch.autograd.grad(one, x, retain_graph=True, materialize_grads=True)
    first, second = ([_places(grad, axis) for axis in range(x.ndim)] for grad in found)
    wide = max(range(x.ndim), key=lambda axis: len(first[axis]))
    return any(a != b for i, (a, b) in enumerate(zip(first, second, strict=True)) if i != wide)


def _places(t: Tensor, axis: int) -> Places:
    """Return the places of an axis where a tensor is not zero."""
    found = (t != 0).movedim(axis, 0).flatten(1).any(1).nonzero()
    return frozenset(found.flatten().tolist())

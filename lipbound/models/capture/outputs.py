"""What a layer makes of the outputs of its heads: a gate, and the map to what it returns.

That map is read off the module that projects them, wrappers and hooks included, where the layer
returns just what this one returns, or is handed over to it. Whatever else stands between is read
off the layer itself, run again with other outputs in the place of its heads'.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.attention.variants.gate import Gate
from lipbound.errors import CaptureError
from lipbound.models.capture.rerun import (
    CAPTURE_TOLERANCE,
    ModuleCopy,
    Stopped,
    affine,
    on_units,
)
from lipbound.models.capture.seeing.call import Call, ModuleRun, first_tensor
from lipbound.models.capture.seeing.follower import Follower, Heads, outputs_of
from lipbound.models.capture.seeing.interface import RAISED
from lipbound.models.offload import plain_copy
from lipbound.models.quiet import first_line

CHECKED = 64
"""Number of recorded outputs of all heads that tell whether their projection is affine."""


class _OtherHeads(Follower):
    """Puts other outputs of heads, (samples, N, heads, d_v), in the place of a call's own.

    Args:
        call: in a module that calls attention once.
        outputs: in the place of its own.
        stops: whether to stop where they are projected.
    """

    def __init__(self, call: Call, outputs: Tensor, stops: bool = False):
        super().__init__(call.adds)
        self._outputs, self._stops = outputs, stops

    def computed(self, heads: Heads) -> Tensor:
        raw, place = heads.raw, outputs_of(heads, self._outputs.shape[2])
        if place is None or place.shape != self._outputs.shape:
            raise CaptureError("the outputs of its heads have other axes")
        new, first = raw.clone(), place.storage_offset() - raw.storage_offset()
        new.as_strided(place.shape, place.stride(), first).copy_(self._outputs)
        return new

    def projected(self, x: Tensor, heads: Heads) -> None:
        if self._stops:
            raise Stopped(x.reshape(self._outputs.shape))


def probe_output(call: Call, heads: Tensor) -> Tensor | None:
    """Return the map of the heads' outputs to what their module returns, (heads, d_v, D_out).

    Where it returns these outputs themselves, or a block around them with a residual connection or
    a normalisation, it is that of the module which projects them. None where there is no such map.

    Args:
        call: of the layer.
        heads: outputs of heads, (..., heads, d_v).

    Raises:
        CaptureError: it is not affine.
    """
    own, run = from_heads(call), call.projection
    if own is not None and own.shape[:2] == heads.shape[-2:]:
        return own
    if run is None or run.module is not (call.consumer or run.module):
        return None
    return _projection(call, run, heads)


def _projection(call: Call, run: ModuleRun, heads: Tensor) -> Tensor:
    """Return slices of a module that is given the flattened heads, (heads, d_v, D_out)."""
    count, d_v, device = *heads.shape[-2:], heads.device
    copy = plain_copy(run.module).to(device).double()
    eye = torch.eye(count * d_v, dtype=torch.float64, device=device)
    named = f"layer {call.name}: the output projection ({type(run.module).__name__})"
    try:
        zero = copy(torch.zeros_like(eye[:1]))
        w_o: Tensor = copy(eye) - zero
    except RAISED as error:
        raise CaptureError(f"{named} cannot be run by itself ({first_line(error)})") from error
    flat = heads.reshape(-1, count * d_v)
    flat = flat[:: -(-len(flat) // CHECKED)].double().nan_to_num()  # padding may be undefined
    if not _close(copy(flat) - zero, flat @ w_o, flat.abs() @ w_o.abs()):
        raise CaptureError(f"{named} is not an affine map, which is not supported")
    return w_o.view(count, d_v, -1)


def _close(own: Tensor, mine: Tensor, size: Tensor | None = None) -> bool:
    """Tell whether rebuilt outputs are a module's own, relative to the numbers they are sums of."""
    least = own if size is None else 1e-3 * size
    limit = CAPTURE_TOLERANCE * float(torch.maximum(own.abs().amax(), least.abs().amax()))
    return own.shape == mine.shape and bool((own - mine).abs().amax() <= limit)


def check_output(call: Call, w_o: Tensor | None) -> None:
    """Check a map of outputs of heads against what a module returned.

    Raises:
        CaptureError: they differ by more than what other tensors than the heads' contribute.
    """
    run, given = call.projection, call.projected if call.gated else call.out
    if w_o is None or from_heads(call, w_o) is not None:
        return
    if run is None or given is None or not isinstance(run.returned, Tensor):
        return
    shape = (*call.out.shape[:2], -1)
    own, x = (t.reshape(shape)[_real(call)].double() for t in (run.returned, given))
    w_o = w_o.flatten(0, 1).to(x)
    rest = own - x @ w_o  # the bias
    if not _close(own - own[:1], own - own[:1] - rest + rest[:1], x.abs() @ w_o.abs()):
        raise call.unsupported("makes something else of the outputs of its heads than it seems to")


def from_heads(call: Call, known: Tensor | None = None) -> Tensor | None:
    """Return the map of heads' outputs where it is no single module's, (heads, d_v, D_out).

    None where it is, where it differs from token to token, or is not affine in a block that its
    tokens also enter in another way.

    Args:
        call: of the layer.
        known: the map as it was found before.

    Raises:
        CaptureError: a module makes something of the outputs of its heads alone that is not affine.
    """
    if not call.w_o:
        run = _end(call)
        call.w_o.append(None if run is None else _through(call, run, known))
    return call.w_o[0]


def _end(call: Call) -> ModuleRun | None:
    """Return the innermost run whose return more than one module's projection leads to."""
    own = call.projection if call.consumer and not call.gated else None
    runs = [run for run, before in call.around if not before and run.inside == 1]
    other = [run for run in runs if not _equal(run.returned, call.out)]
    if not call.formed or not other:
        return None
    apart = runs[0] is not other[0] or (own is not None and _equal(other[0].returned, own.returned))
    return None if own is not None and apart else other[0]


def _equal(a: object, b: object) -> bool:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and torch.equal(a.flatten(), b.flatten())


def _real(call: Call) -> Tensor:
    """Return which tokens of a call are no padding, (samples, N)."""
    if call.valid_rows is not None:
        return call.valid_rows
    return torch.ones(call.out.shape[:2], dtype=torch.bool, device=call.out.device)


def _through(call: Call, run: ModuleRun, known: Tensor | None) -> Tensor | None:
    (s, n, count, d_v), real = call.out.shape, _real(call)
    heads = call.out.double().nan_to_num() * real[..., None, None]
    generator = torch.Generator().manual_seed(0)

    def rows(returned: object) -> Tensor:
        y = first_tensor(returned)
        if y is None or y.numel() % (s * n):
            raise CaptureError("its tokens are not known")
        y = y.transpose(0, 1) if y.ndim == 3 and y.shape[:2] == (n, s) != (s, n) else y
        return y.reshape(s, n, -1)[real].double()

    def made(outputs: Tensor, others: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
        follower = _OtherHeads(call, outputs.reshape(call.out.shape))
        return rows(copy.again(follower, others))

    try:
        copy = ModuleCopy(run, call)
        zero, own, twice = (made(factor * heads) for factor in (0.0, 1.0, 2.0))
        alike = made(heads[real][:1].expand(s, n, -1, -1)) - zero
        flat, own = heads[real].flatten(1), own - zero
        if _close(rows(run.returned), own + zero) and _close(twice - zero, 2 * own):
            if not _close(alike, alike[:1].expand_as(alike)):
                return None
            if known is None and call.consumer and call.projection:
                known = _projection(call, call.projection, call.out)
            if known is not None and _close(own, flat @ known.flatten(0, 1).to(flat)):
                return known
            parts = []
            for some in torch.eye(count * d_v, dtype=flat.dtype, device=flat.device).split(len(flat)):
                units = heads.new_zeros(s, n, count * d_v)
                units[tuple(real.nonzero()[: len(some)].T)] = some
                parts.append((made(units) - zero)[: len(some)])
            w_o = torch.cat(parts)
            return w_o.view(count, d_v, -1) if _close(own, flat @ w_o) else None
        noise = [torch.randn(t.shape, generator=generator).double() for t in copy.inputs]
        others = [(t, t.double() + e.to(t.device)) for t, e in zip(copy.inputs, noise, strict=True)]
        alone = not call.changed and call.consumer and _close(own + zero, made(heads, others))
    except CaptureError:
        return None
    if alone:
        raise call.unsupported("makes something of the outputs of its heads that is not affine")
    return None


def probe_gate(call: Call) -> Gate | None:
    """Return the gate of a call's head outputs, float64; None where there is none.

    Raises:
        CaptureError: what stands between attention and its projection is no gate: sigmoids of an
            affine map of the output's own token.
    """
    if not call.gated or call.projected is None:
        return None
    layer = ModuleCopy(call.run, call)

    def logits(tokens: Tensor) -> list[Tensor]:
        outputs = torch.ones_like(call.out, dtype=torch.float64)
        ends = [
            layer.with_tokens(_OtherHeads(call, size * outputs, True), tokens)
            for size in (1.0, 2.0)
        ]
        if not all(isinstance(end, Stopped) for end in ends):
            raise call.unsupported(call.changed)
        one, two = (end.args[0] for end in ends)
        off = float((two - 2 * one).abs().amax())
        if not (bool((one > 0).all() and (one < 1).all()) and off <= CAPTURE_TOLERANCE):
            raise call.unsupported(call.changed)
        return [torch.logit(one).flatten(0, 1)]

    w, b = affine(on_units(call, logits)[0])
    gate = Gate(w.transpose(0, 1).contiguous(), b)
    made = torch.sigmoid(gate.logits(call.x)).transpose(1, 2) * call.out.double()
    own = call.projected.reshape(call.out.shape).double()
    size, off = own.nan_to_num().abs().amax(), (made - own).nan_to_num().abs().amax()
    if not bool(off <= CAPTURE_TOLERANCE * size):
        raise call.unsupported(call.changed)
    return gate

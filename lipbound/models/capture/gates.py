"""Gates of head outputs, read off a layer whose attention is made to return ones."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.attention.variants.gate import Gate
from lipbound.models.capture.output_projection import CAPTURE_TOLERANCE
from lipbound.models.capture.seeing.call import INTERFACE, Call
from lipbound.models.capture.seeing.fused import handling_fused
from lipbound.models.capture.seeing.interface import RAISED, handling
from lipbound.models.capture.token_inputs import filled, replaced
from lipbound.models.offload import plain_copy


class _Projected(Exception):
    """The end of a pass at the output projection, with what that is given."""

    def __init__(self, x: Tensor):
        self.x = x


class GatedLayer:
    """A copy of the layer of a call in float64, whose attention returns a constant."""

    def __init__(self, call: Call):
        self._call = call
        names = {module: name for name, module in call.module.named_modules()}
        if call.projection not in names:
            raise call.unsupported(call.changed)
        self._owner = plain_copy(call.module).to(call.q.device).double()
        self._projection = self._owner.get_submodule(names[call.projection])

    def projected(self, tokens: Tensor, constant: float) -> Tensor:
        """Return what is projected where every head returns a constant, (samples, N, heads, d_v).

        Args:
            tokens: (samples, N, D), float64.
            constant: entries of all outputs.
        """
        call, shape = self._call, self._call.out.shape
        ones = tokens.new_full(shape, constant)

        def of_interface(module: nn.Module, *args: Any, **kw: Any) -> tuple[Tensor, None]:
            return ones, None

        def of_torch(query: Tensor, *args: Any, **kw: Any) -> Tensor:
            return ones.transpose(-3, -2)

        def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
            raise _Projected(args[0])

        hook = self._projection.register_forward_pre_hook(stop)
        args, kwargs = replaced(call, tokens)
        try:
            with ExitStack() as seeing:
                seeing.enter_context(handling(of_interface))
                if call.way != INTERFACE:
                    seeing.enter_context(handling_fused(of_torch))
                self._owner(*args, **kwargs)
        except _Projected as end:
            return end.x.reshape(shape)
        except RAISED as error:
            raise call.unsupported(call.changed) from error
        finally:
            hook.remove()
        raise call.unsupported(call.changed)


def probe_gate(call: Call) -> Gate | None:
    """Return the gate of a call's head outputs, float64; None where there is none.

    Raises:
        CaptureError: what stands between attention and its projection is no gate: sigmoids of an
            affine map of the output's own token.
    """
    if not call.gated or call.projected is None:
        return None
    layer = GatedLayer(call)
    samples, n, width = call.x.shape
    rows = torch.cat([torch.zeros(1, width), torch.eye(width)]).double().to(call.x.device)
    pieces = []
    for some in rows.split(samples * n):
        tokens = filled(some, samples, n)
        one, two = (layer.projected(tokens, constant) for constant in (1.0, 2.0))
        off = (two - 2 * one).abs().amax()
        if not (bool((one > 0).all() and (one < 1).all()) and float(off) <= CAPTURE_TOLERANCE):
            raise call.unsupported(call.changed)
        pieces.append(torch.logit(one).flatten(0, 1)[: len(some)])
    logits = torch.cat(pieces)  # (D + 1, heads, d_v)
    bias = logits[0] if bool((logits[0] != 0).any()) else None
    gate = Gate((logits[1:] - logits[0]).transpose(0, 1).contiguous(), bias)
    made = torch.sigmoid(gate.logits(call.x)).transpose(1, 2) * call.out.double()
    own = call.projected.reshape(call.out.shape).double()
    size, off = own.nan_to_num().abs().amax(), (made - own).nan_to_num().abs().amax()
    if not bool(off <= CAPTURE_TOLERANCE * size):
        raise call.unsupported(call.changed)
    return gate

"""A module run again by itself, in float64, up to one of its calls of attention."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

from lipbound.errors import LipboundError
from lipbound.models.capture.seeing.by_hand import Follower, HeadOutputs
from lipbound.models.capture.seeing.call import Call, ModuleRun
from lipbound.models.capture.seeing.fused import handling_fused, plain_attention
from lipbound.models.capture.seeing.interface import RAISED, eager, handling
from lipbound.models.capture.seeing.without_casts import WithoutCasts
from lipbound.models.capture.token_inputs import same_values
from lipbound.models.offload import plain_copy
from lipbound.models.quiet import first_line


class _Cut(Exception):
    """The end of a pass at the output projection, with what that is given."""

    def __init__(self, x: Tensor):
        self.x = x


@dataclass
class OwnerPass:
    """Outputs of heads in one run of a module, and the tensor that is projected.

    Attributes:
        cut: what the output projection is given, or what the module returns in its place.
        outputs: of the heads.
    """

    cut: Tensor
    outputs: HeadOutputs


class OwnerFunction:
    """A module in float64, run again with other tokens up to one of its calls of attention.

    Tensors that it was given several times over, as copies, are one.

    Args:
        run: of the module, with the arguments that it was given.
        position: number of calls of attention before the one that is meant.
        call: the one that is meant.
    """

    def __init__(self, run: ModuleRun, position: int, call: Call):
        self.run, self._position, self._call = run, position, call
        self._owner = plain_copy(run.module).to(call.q.device).double()
        self._owner.requires_grad_(False)
        given = [t for t in tree_leaves((run.args, run.kwargs)) if isinstance(t, Tensor)]
        self.inputs: list[Tensor] = []
        self._same: dict[int, list[int]] = {}
        for t in {id(t): t for t in given if t.is_floating_point()}.values():
            first = next((one for one in self.inputs if same_values(one, t)), t)
            self.inputs += [t] if first is t else []
            self._same.setdefault(id(first), []).append(id(t))

    def __call__(self, changed: Sequence[tuple[Tensor, Tensor]] = ()) -> OwnerPass:
        """Run the module with some of its tensors exchanged.

        Args:
            changed: pairs of a tensor that it was given, and one in float64 in its place.

        Raises:
            CaptureError: it cannot be run by itself, or computes no such attention.
        """
        replaced = {key: new for old, new in changed for key in self._same[id(old)]}
        found: list[HeadOutputs] = []

        def computed(outputs: HeadOutputs) -> None:
            found.append(outputs)

        def projected(x: Tensor, outputs: HeadOutputs) -> None:
            if len(found) > self._position and outputs is found[self._position]:
                raise _Cut(x)

        def of_interface(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any
        ) -> tuple[Tensor, Any]:
            if mask is not None and mask.dtype == torch.bool and self._call.boolean:
                mask = q.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)
            follower.paused = True
            out, probabilities = eager(module)(module, q, k, v, mask, **kw)
            follower.paused = False
            outputs = HeadOutputs(out, out.shape[-1], out.ndim - 2, v, None, (q,), (k,))
            follower.follow(out, outputs)
            found.append(outputs)
            return out, probabilities

        def of_torch(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
            with torch._C.DisableTorchFunction():
                out = plain_attention(query, key, value, *args, **kw)
            outputs = HeadOutputs(out, out.shape[-1], out.ndim - 3, value, None, (query,), (key,))
            follower.follow(out, outputs)
            found.append(outputs)
            return out

        follower = Follower(computed, projected, of_torch)
        args, kwargs = tree_map(partial(_exchanged, replaced), (self.run.args, self.run.kwargs))
        returned: Any = None
        try:
            with handling(of_interface), handling_fused(of_torch), follower, WithoutCasts():
                returned = self._owner(*args, **kwargs)
        except _Cut as end:
            return OwnerPass(end.x, found[self._position])
        except LipboundError:
            raise
        except RAISED as error:
            raise self._call.unsupported(
                f"cannot be run by itself on other token vectors ({first_line(error)})"
            ) from error
        if len(found) <= self._position:
            raise self._call.unsupported("computes no attention when it is run by itself")
        outputs = found[self._position]
        tensors = [t for t in tree_leaves(returned) if isinstance(t, Tensor)]
        cut = next((t for t in tensors if follower.kind(t) is outputs), outputs.raw)
        return OwnerPass(cut, outputs)


def _exchanged(replaced: dict[int, Tensor], value: Any) -> Any:
    if id(value) in replaced:
        return replaced[id(value)]
    if isinstance(value, Cache):
        return None if not value.get_seq_length() else copy.deepcopy(value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, Tensor) and value.is_complex():
        return value.to(torch.complex128)
    return value

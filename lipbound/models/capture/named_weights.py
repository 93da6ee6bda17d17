"""Weights of plain layers by the names of their parameters, in place of probing.

Names prove nothing: they are read where probing has found the same before (of the same model, with
other values) and where nothing but linear maps of torch has weights; and what is captured with them
is compared with the model's pass like any other.
"""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lipbound.models.capture.head_outputs import probe_output
from lipbound.models.capture.probing import ProbedWeights
from lipbound.models.capture.seeing.call import Call
from lipbound.models.training.differentiable import projections_of

SAME = 1e-12
"""Largest difference of entries, relative to the largest, that probing in float64 makes."""


def read_by_names(call: Call) -> ProbedWeights | None:
    """Return the projections of a layer as its parameters are named; None where they are not.

    Args:
        call: of a layer that multiplies its tokens with them, and does nothing else to them.
    """
    found = projections_of(call.name, call.module)
    heads, home = call.q.shape[1], call.q.device
    if found is None or any(heads % len(w) for w in found.w) or not _linear(call.module):
        return None

    def each_head(t: Tensor) -> Tensor:
        return t.detach().to(home, torch.float64).repeat_interleave(heads // len(t), 0).contiguous()

    b = tuple(None if t is None or not bool((t != 0).any()) else each_head(t) for t in found.b)
    return ProbedWeights(tuple(map(each_head, found.w)), b, _output(call, heads), (None,) * 3)


def _output(call: Call, heads: int) -> Tensor | None:
    """Slices of the output projection, (heads, d_v, D_out): of a linear map its weights."""
    module = call.consumer
    if module is None or not _linear(module):
        return probe_output(call, module, call.out)
    assert isinstance(module, nn.Linear | Conv1D)
    w = module.weight.mT if isinstance(module, nn.Linear) else module.weight
    return w.detach().to(call.q.device, torch.float64).unflatten(0, (heads, -1))


def _linear(module: nn.Module) -> bool:
    """Tell whether all weights of a module are of linear maps as torch and transformers have them.

    Subclasses (adapters, parametrisations) and hooks may do more with weights of these names.
    """
    return all(
        type(part) in (nn.Linear, Conv1D)
        and not part._forward_pre_hooks
        and not part._forward_hooks
        for part in module.modules()
        if next(part.parameters(recurse=False), None) is not None
    )


def same_weights(probed: ProbedWeights, named: ProbedWeights | None) -> bool:
    """Return whether names lead to the weights that probing has found."""
    if named is None:
        return False
    pairs = zip((*probed.w, *probed.b, probed.w_o), (*named.w, *named.b, named.w_o), strict=True)
    return all(_same(mine, other) for mine, other in pairs)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return a is b
    return bool((a - b).abs().amax() <= SAME * b.abs().amax())

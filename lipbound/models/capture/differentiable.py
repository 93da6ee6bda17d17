"""Attention probabilities, and whole `Attention` layers, of a model in training, with gradients:
what penalties are computed from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.devices import in_own_modes, measuring_device
from lipbound.errors import CaptureError
from lipbound.models.capture.parameters import ModuleProjections, projections
from lipbound.models.training.watch import Probabilities, TrainingCall, transformers_model, watching

TRAINING_TOLERANCE = 1e-3
"""Largest relative difference between the model's queries, keys and values and projected inputs, in
float32 and float64."""
HALF_ROUNDINGS = 4
"""The same in half precision, in roundings: of input, of weights, of their product, and of what is
added to it."""


@contextmanager
def attention_probabilities(
    model: nn.Module, layers: Sequence[int] | int | str | None = None
) -> Iterator[Probabilities]:
    """Context in which every forward pass of a model adds its attention probabilities to a list,
    per layer (samples, heads, N, N), with gradients.

    Probabilities are those before dropout, in float32 at least, also where the model or autocast
    uses less. Masks count as fused attention takes them: True where attention is allowed, or
    numbers to be added. A layer that calls attention several times in a pass has one entry: its
    probabilities, where all calls share them, else those of all calls as samples. Afterwards the
    model's attention is what it was before.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``, also inside
            DistributedDataParallel, ``torch.compile`` (it runs uncompiled in the context) or PEFT.
        layers: numbers of attention layers, in the order of the forward pass, counted over all
            forward passes in the context; all by default.

    Returns:
        `lipbound.models.training.watch.Probabilities`: a list whose ``valid`` says which tokens are
            not padding; `JaSMin` looks at it.

    Raises:
        CaptureError: no transformers model; capped scores or sinks; masks of whole numbers; layers
            that do not exist; reentrant gradient checkpointing, which has no gradients to give;
            DataParallel on several devices.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(vocab_size=9, num_hidden_layers=2, **sizes))
    >>> with attention_probabilities(model) as found:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> [tuple(p.shape) for p in found]
    [(1, 2, 3, 3), (1, 2, 3, 3)]
    """
    with watching(model, layers) as watch:
        yield watch.found


@contextmanager
def attention_layers(
    model: nn.Module, layers: Sequence[int] | int | str | None = None
) -> Iterator[list[Attention]]:
    """The same with whole `Attention` layers, differentiable in the model's weights and inputs:
    what bounds are computed from.

    The list is filled when the context ends, without samples that are all padding; of a model in
    half precision the layers are in float32. Weights are found by their names
    (`lipbound.models.capture.parameters`).

    Raises:
        CaptureError: as `attention_probabilities`; biases of relative positions; a model whose
            projections are not found, whose attention modules are not given one tensor of token
            vectors, or whose queries, keys or values are not these projections of it (rotations,
            cross-attention).
    """
    known = {id(p.module): p for p in projections(transformers_model(model))}
    result: list[Attention] = []
    with watching(model, layers, {key: p.module for key, p in known.items()}) as watch:
        yield result
    for call in watch.calls:
        att = _layer(call, known.get(id(call.module)))
        if att is not None:
            result.append(att)


@in_own_modes
def _layer(call: TrainingCall, found: ModuleProjections | None) -> Attention | None:
    """The layer of a call, without samples that are all padding; None where no sample remains."""
    name, x = type(call.module).__name__, call.x
    if found is None or x is None:
        raise CaptureError(
            f"the projections of {name} are not found by their names, so its bound has no gradient"
        )
    if call.biased:
        raise CaptureError(
            f"{name} uses position_bias in its attention, which bounds with gradients do not "
            "support"
        )
    if call.repeated:
        raise CaptureError(
            f"{name} calls attention several times in one forward pass, which bounds with "
            "gradients do not support"
        )
    if (
        x.ndim != 3
        or x.shape[:2] != (call.query.shape[0], call.query.shape[2])
        or call.key.shape[2] != x.shape[1]
    ):
        raise CaptureError(
            f"{name} is given token vectors of shape {tuple(x.shape)} for {call.query.shape[2]} "
            f"queries and {call.key.shape[2]} keys; bounds with "
            "gradients need self-attention without a cache"
        )
    dtype, heads, valid, mask = (
        torch.promote_types(x.dtype, torch.float32),
        call.query.shape[1],
        call.valid,
        call.mask,
    )
    keep = None if valid is None or bool(valid.any(-1).all()) else valid.any(-1)
    if valid is not None and keep is not None:
        if not bool(keep.any()):
            return None
        x, valid, mask = (
            x[keep],
            valid[keep],
            mask[keep] if mask is not None and len(mask) > 1 else mask,
        )
    home = measuring_device(x.device)

    def of_heads(t: Tensor) -> Tensor:
        return t.to(home, dtype).repeat_interleave(heads // len(t), 0)

    w, b = map(of_heads, found.w), [None if t is None else of_heads(t) for t in found.b]
    mask, valid = (
        None if mask is None else mask.to(home, dtype),
        None if valid is None else valid.to(home),
    )
    att = Attention(
        x.to(home, dtype),
        *w,
        b_q=b[0],
        b_k=b[1],
        b_v=b[2],
        scale=call.scale,
        mask=mask,
        valid=valid,
    )
    _check(att, call, 0 if keep is None else int(keep.nonzero()[0]))
    return att


@torch.no_grad()
def _check(att: Attention, call: TrainingCall, sample: int) -> None:
    """Raise CaptureError unless the model's own queries, keys and values are the layer's, at its
    first sample, which is ``sample`` of the call."""
    first = att.select(slice(0, 1))
    real = slice(None) if first.valid is None else first.valid[0]
    for name, mine, own in (
        ("queries", first.q, call.query),
        ("keys", first.k, call.key),
        ("values", first.v, call.value),
    ):
        mine, own = mine[0][:, real], own[sample].to(mine)[:, real]
        own = own.repeat_interleave(len(mine) // len(own), 0)  # keys and values that heads share
        off = (
            float(
                (mine - own).abs().amax() / own.abs().amax().clamp_min(torch.finfo(mine.dtype).tiny)
            )
            if mine.shape == own.shape
            else torch.inf
        )
        resolved = torch.finfo(call.query.dtype).eps * HALF_ROUNDINGS
        if not off <= max(TRAINING_TOLERANCE, resolved):
            raise CaptureError(
                f"{type(call.module).__name__} does more to its {name} than project its input "
                f"(off by {off:.1e}), or takes them from elsewhere "
                "(cross-attention), so its bound has no gradient here"
            )

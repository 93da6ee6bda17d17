"""Attention of a model in training, with gradients: what penalties are computed from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.attention.projections import Projections
from lipbound.attention.scoring import Scoring
from lipbound.devices import in_own_modes, measuring_device
from lipbound.errors import CaptureError, shown
from lipbound.models.capture.rerun import relative_error
from lipbound.models.in_memory import bare_model
from lipbound.models.training.watch import Probabilities, TrainingCall, watching

TRAINING_TOLERANCE = 1e-3
"""Largest relative difference between the model's q, k, v and projected inputs, in float32 and
float64."""
HALF_ROUNDINGS = 4
"""The same in half precision, in roundings: of input, of weights, of their product, and of what is
added to it."""
SEPARATE = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
"""Names of three linear maps in one module."""
FUSED = ("c_attn", "qkv")
"""Names of one linear map onto queries, keys and values, in this order."""
HEADS = ("num_attention_heads", "num_heads", "n_heads")
"""Names under which a module keeps its number of heads."""


@contextmanager
def attention_probabilities(
    model: nn.Module, layers: Sequence[int] | int | str | None = None
) -> Iterator[Probabilities]:
    """Yield a list to which every forward pass of a model adds its attention probabilities.

    Each is that of a layer, (samples, heads, N, N), with gradients, before dropout, in float32 at
    least, also where the model or autocast uses less. Masks count as fused attention takes them:
    True where attention is allowed, or numbers to be added. A layer that calls attention several
    times in a pass has one entry: its probabilities, where all calls share them, else those of all
    calls as samples. Afterwards the model's attention is what it was before.

    A function of the user's own, registered with ``AttentionInterface``, computes as it does
    outside.

    CaptureError is raised for what is no transformers model; capped scores or sinks; functions of
    the user's own in which no softmax of scores is seen; masks of whole numbers; layers that do not
    exist; reentrant gradient checkpointing, which has no gradients to give; DataParallel on several
    devices.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``, also inside
            DistributedDataParallel, ``torch.compile`` (it runs uncompiled in the context) or PEFT.
        layers: numbers of attention layers, in the order of the forward pass, counted over all
            forward passes in the context; all by default.

    Yields:
        `lipbound.models.training.watch.Probabilities`: a list whose ``valid`` says which tokens are
        not padding; `JaSMin` looks at it.

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
    """Yield a list of `Attention` layers, differentiable in the model's weights and inputs.

    Bounds are computed from them. The list is filled when the context ends, without samples that
    are all padding; of a model in half precision the layers are in float32. Weights are found by
    their names (`projections`).

    CaptureError is raised as by `attention_probabilities`, and for biases of relative positions; a
    model whose projections are not found, whose attention modules are not given one tensor of token
    vectors, or whose queries, keys or values are not these projections of it (rotations,
    cross-attention).

    Args:
        model: as of `attention_probabilities`.
        layers: as of `attention_probabilities`.
    """
    known = {id(p.module): p for p in projections(bare_model(model, tells=False))}
    result: list[Attention] = []
    with watching(model, layers, [p.module for p in known.values()]) as watch:
        yield result
    result += filter(None, (_layer(call, known.get(id(call.module))) for call in watch.calls))


class ModuleProjections(NamedTuple):
    """Views of the parameters of one attention module, which gradients reach.

    Attributes:
        name: of the module in the model.
        module: itself.
        w: of queries, keys, values, each (heads, D, d); fewer heads where they share keys.
        b: biases of the same, each (heads, d) or None.
    """

    name: str
    module: nn.Module
    w: tuple[Tensor, ...]
    b: tuple[Tensor | None, ...]


def projections(model: nn.Module) -> list[ModuleProjections]:
    """Return the projections of every attention module of a model, in the order of its modules.

    Raises:
        CaptureError: no module, or none is found in it: the model names its projections in another
            way than `SEPARATE` and `FUSED`.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model is {shown(model)}; give a loaded transformers model")
    found = []
    for name, module in model.named_modules():
        heads = next((n for key in HEADS if isinstance(n := getattr(module, key, None), int)), 0)
        if (maps := _maps(module) if heads else None) is not None:
            w, b = zip(*(_per_head(*m, heads) for m in maps), strict=True)
            found.append(ModuleProjections(name, module, w, b))
    if not found:
        known = ", ".join("/".join(names) for names in SEPARATE)
        raise CaptureError(
            f"{type(model).__name__} has no attention modules that say their number of heads "
            f"({', '.join(HEADS)}), which those with rotary positions or shared keys do not, "
            f"beside projections called {known} or {', '.join(FUSED)}; JaSMin needs neither"
        )
    return found


def _maps(module: nn.Module) -> list[tuple[Tensor, Tensor | None]] | None:
    """Return three maps as (weight (D, heads d), bias or None), or None."""
    for names in SEPARATE:
        linear = [m for name in names if isinstance(m := getattr(module, name, None), nn.Linear)]
        if len(linear) == len(names):
            return [(one.weight.mT, one.bias) for one in linear]
    for name in FUSED:
        one = getattr(module, name, None)
        weight, bias = getattr(one, "weight", None), getattr(one, "bias", None)
        if isinstance(one, nn.Module) and isinstance(weight, Tensor):
            # transformers' Conv1D stores (in, out)
            weight = weight.mT if isinstance(one, nn.Linear) else weight
            if weight.shape[1] % 3 == 0:
                biases = bias.chunk(3) if isinstance(bias, Tensor) else (None, None, None)
                return list(zip(weight.chunk(3, 1), biases, strict=True))
    return None


def _per_head(weight: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor | None]:
    w = weight.unflatten(1, (heads, -1)).transpose(0, 1)
    return w, None if bias is None else bias.unflatten(0, (heads, -1))


@in_own_modes
def _layer(call: TrainingCall, found: ModuleProjections | None) -> Attention | None:
    """Return the layer of a call, without samples that are all padding; None where none remains.

    Raises:
        CaptureError: see `attention_layers`.
    """
    name, x, valid, mask = type(call.module).__name__, call.x, call.valid, call.mask
    if found is None or x is None:
        raise CaptureError(f"projections of {name} are not found by name: no gradient")
    (samples, heads, queries, _), keys = call.query.shape, call.key.shape[2]
    for fault, what in (
        (call.biased, "uses position_bias in its attention"),
        (call.own, "calls an attention function of the user's own"),
        (call.repeated, "calls attention several times in one forward pass"),
        (keys != queries, f"has {queries} queries and {keys} keys, and no self-attention"),
        (x.shape[:-1] != (samples, queries), f"is given token vectors of shape {tuple(x.shape)}"),
    ):
        if fault:
            raise CaptureError(f"{name} {what}, which bounds with gradients do not support")
    first = 0
    if valid is not None and not bool((keep := valid.any(-1)).all()):
        if not bool(keep.any()):
            return None
        x, valid, first = x[keep], valid[keep], int(keep.nonzero()[0])
        mask = mask[keep] if mask is not None and len(mask) > 1 else mask
    home, dtype = measuring_device(x.device), torch.promote_types(x.dtype, torch.float32)

    def each_head(t: Tensor) -> Tensor:
        return t.to(home, dtype).repeat_interleave(heads // len(t), 0)

    biases = (None if b is None else each_head(b) for b in found.b)
    projections = Projections(*map(each_head, found.w), *biases)
    scoring = Scoring(float(call.scale), None if mask is None else mask.to(home, dtype))
    valid = None if valid is None else valid.to(home)
    att = Attention.of(x.to(home, dtype), projections, scoring, valid=valid)
    _check(att, call, first)
    return att


@torch.no_grad()
def _check(att: Attention, call: TrainingCall, sample: int) -> None:
    """Check that the model's queries, keys and values are the layer's at its first sample.

    Args:
        att: the layer.
        call: its call.
        sample: number in the call of the layer's first sample.

    Raises:
        CaptureError: they are not.
    """
    first = att.select(slice(0, 1))
    real = slice(None) if first.valid is None else first.valid[0]
    limit = max(TRAINING_TOLERANCE, torch.finfo(call.query.dtype).eps * HALF_ROUNDINGS)
    for name, mine, own in (
        ("queries", first.q, call.query),
        ("keys", first.k, call.key),
        ("values", first.v, call.value),
    ):
        mine, own = mine[0][:, real], own[sample].to(mine)[:, real]
        own = own.repeat_interleave(len(mine) // len(own), 0)  # keys and values that heads share
        off = relative_error(mine, own) if mine.shape == own.shape else torch.inf
        if not off <= limit:
            raise CaptureError(
                f"{type(call.module).__name__} does more to its {name} than project its input (off "
                f"by {off:.1e}), or is cross-attention, so its bound has no gradient"
            )

"""Exact local constants of whole networks or chains of blocks, through the model's own modules."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipbound.attention.module_attention import ModuleAttention
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, real, shown, whole
from lipbound.jacobians.automatic import AutomaticJacobian
from lipbound.linalg.certificates import ROUNDING
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import JacobianOperator, Transposed
from lipbound.linalg.solution import Norm, sample_seeds, solved
from lipbound.models.capture.seeing.interface import computing, implementation
from lipbound.models.checkpoint import measurable, taken

_FEW = 16
"""Number of outputs, such as logits of a few classes, up to which their gradients are simply
computed: the norm is then that of a dense matrix, and ``upper`` needs no probability."""


class NetworkJacobian(AutomaticJacobian):
    """Jacobians of a function that treats samples one by one.

    At a batch of inputs: one batch entry per sample.

    Products with J^T by reverse mode; with J by forward mode, or where some operation has none, by
    differentiating products with J^T. A product at selected samples is computed at all,
    with zeros for the others.

    Args:
        f: (samples, *in_shape) -> (samples, *out_shape), each sample of the result depending on the
            same sample of the input alone.
        x: the inputs.
        real: (samples, N, 1), 0 for tokens that are held fixed (padding), or None.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, real: Tensor | None = None):
        every = ModuleAttention(x, 0, f, (len(x), 1, 1, 1), valid=real)
        self._differentiate(every, lambda x: f(x)[:, None])
        self._forward = True

    def _push(self, streams: Tensor) -> Tensor:
        if self._forward:
            try:
                return self._in_forward_mode()(streams)
            except RuntimeError:
                self._forward = False
        return self._twice()(streams)


def blocks(model: nn.Module) -> list[nn.Module]:
    """List the transformer blocks of a model in order.

    They are its longest ``ModuleList`` of modules of one class.

    Args:
        model: any module; of a transformers model the list is as long as its configuration says.

    Returns:
        The blocks.

    Raises:
        LipboundError: there is none.
    """
    every = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    lists = [parts for parts in every if len({type(part) for part in parts}) == 1]
    expected = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    fitting = [parts for parts in lists if len(parts) == expected] or lists
    if not fitting:
        raise LipboundError(f"{type(model).__name__} has no list of blocks to start or end at")
    return max(fitting, key=len)


@in_own_modes
def network_norm(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    start: str | int = "embeddings",
    end: str | int = "logits",
    tol: float = 1e-4,
    delta: float | None = None,
    seed: int | Sequence[int] = 0,
    batch: int = 16,
) -> Norm:
    r"""Compute exact local Lipschitz constants of a network at every sample.

    They are 2-norms of the Jacobian from token vectors to its outputs.

    The map starts at what enters the first block ("embeddings": after the patch or word embeddings,
    which are left out as in Yudin et al. 2025), or at what enters block ``start``; it ends at the
    logits, at the last hidden state, or at what leaves block ``end``. The model runs its own
    modules, in evaluation mode, with eager attention; padding is held fixed. The Jacobian is that
    of the network as it computes in its dtype: ``upper`` does not cover the rounding of
    activations, so give a model in float64 where digits beyond the fourth matter.

    Args:
        model: a transformers model, or a `lipbound.models.checkpoint.Checkpoint`; of one in half
            precision a copy in float32 is measured, and a `lipbound.errors.Notice` says so, and
            what taking off a wrapper leaves out.
        inputs: what its forward takes, on its device, or what `lipbound.prepare` returns.
        start: "embeddings", or the number of a block.
        end: "logits", "last_hidden_state", or the number of a block.
        tol, delta, seed: as in `lipbound.spectral_norm`.
        batch: samples that are computed at a time.

    Returns:
        `Norm` with fields of shape (samples,), values in float64.

    Raises:
        LipboundError: no such block, end or output; an end before the start.
    """
    if delta is not None:
        delta = real("delta", delta, "a probability between 0 and 1, or None", above=0, below=1)
    batch = whole("batch", batch, least=1)
    model, inputs, count = network_inputs(model, inputs)
    seeds = sample_seeds(count, seed)
    parts: list[Norm] = []
    for piece, samples in batches(inputs, count, batch):
        with chain(model, piece, start, end) as (f, x, movable):
            op: JacobianOperator = NetworkJacobian(f, x, movable)
            if math.prod(op.out_shape) <= _FEW:
                parts.append(_from_gradients(op))
                continue
            op = Transposed(op) if math.prod(op.out_shape) > math.prod(op.in_shape) else op
            share = None if delta is None else delta * op.batch / count
            parts.append(operator_norm(op, tol=tol, delta=share, seed=seeds[samples]))
    return Norm.cat(parts)


def network_inputs(
    model: PreTrainedModel, inputs: Mapping[str, Tensor]
) -> tuple[PreTrainedModel, dict[str, Tensor], int]:
    """A model without its wrappers, the tensors its forward takes, and the number of samples."""
    model = measurable(model, PreTrainedModel)
    tensors = {name: t for name, t in taken(model, inputs).items() if isinstance(t, Tensor)}
    return model, tensors, len(next(iter(tensors.values())))


def batches(
    inputs: Mapping[str, Tensor], count: int, batch: int
) -> Iterator[tuple[dict[str, Tensor], slice]]:
    """Inputs of ``batch`` samples at a time, each with the slice of samples that they are."""
    for i in range(0, count, batch):
        part = slice(i, i + batch)
        yield {name: t[part] if len(t) == count else t for name, t in inputs.items()}, part


def _from_gradients(op: JacobianOperator) -> Norm:
    """Norms from all gradients of a few outputs.

    ``upper`` allows for the same rounding of products as a certificate.
    """
    sigma = torch.linalg.svdvals(op.dense().cpu().double())[:, 0]
    error, steps = ROUNDING[op.dtype], math.prod(op.out_shape)
    return solved(op, sigma, upper=sigma * (1 + error), steps=steps, error=error)


class _Reached(Exception):
    """Ends a forward pass where the map ends."""

    def __init__(self, value: Tensor):
        self.value = value


def _block(value: Any, name: str, words: Sequence[str], count: int) -> int | None:
    """The number of the block at which a map starts or ends; None where one of the words is given.

    Raises:
        LipboundError: neither such a word nor the number of a block.
    """
    if isinstance(value, str) and value in words:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        what = f"give {' or '.join(map(repr, words))} or the number of a block"
        raise LipboundError(f"{name} is {shown(value)}; {what}, of which this model has {count}")
    return value


@contextmanager
def chain(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], start: str | int, end: str | int
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor, Tensor | None]]:
    """Map from ``start`` to ``end`` of a model, its input here, and the tokens that may move.

    The map is a function of (samples, N, D); its value is zero for padding. Tokens that may move
    are 1 in a tensor (samples, N, 1), padding is 0; None where all may.
    """
    # tensors made in inference mode take part in no derivative
    inputs = {name: t.clone() if t.is_inference() else t for name, t in inputs.items()}
    if any(p.is_inference() for p in model.parameters()):
        model = copy.deepcopy(model)
    parts = blocks(model)
    first = _block(start, "start", ("embeddings",), len(parts)) or 0
    last = _block(end, "end", ("logits", "last_hidden_state"), len(parts))
    if last is not None and last < first:
        raise LipboundError(f"end {last} is before start {first}; end at {first} or later")
    given: list[Tensor] = []
    replacement: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given.append(args[0] if args else kwargs["hidden_states"])
        if not replacement:
            return None
        if args:
            return (replacement[0], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": replacement[0]}

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise _Reached(output[0] if isinstance(output, tuple) else output)

    def run() -> Tensor:
        takes = inspect.signature(model.forward).parameters.keys() & {"use_cache", "kwargs"}
        extra = {"use_cache": False} if takes and hasattr(model.config, "use_cache") else {}
        try:
            outputs = model(**inputs, **extra)
        except _Reached as reached:
            return reached.value
        value = getattr(outputs, str(end), None)
        if not isinstance(value, Tensor):
            names = ", ".join(outputs.keys())
            raise LipboundError(f"{type(model).__name__} has no {end}; its outputs are {names}")
        return value

    def f(x: Tensor) -> Tensor:
        replacement[:] = [x]
        try:
            value = run()
        finally:
            replacement.clear()
        valid = _real_tokens(model, inputs, value, None if last is None else parts[0])
        return value if valid is None else value.masked_fill(~valid, 0)

    hooks = [parts[first].register_forward_pre_hook(before, with_kwargs=True)]
    if last is not None:
        hooks.append(parts[last].register_forward_hook(stop))
    try:
        with implementation(model, "eager"), torch.no_grad():
            with computing(model):
                run()
            x = given[0].detach().clone()
            valid = _real_tokens(model, inputs, x, parts[0])
            yield f, x, None if valid is None else valid.to(x.dtype)
    finally:
        for hook in hooks:
            hook.remove()


def _real_tokens(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], value: Tensor, block: nn.Module | None
) -> Tensor | None:
    """Tokens of (samples, N, ...) that are no padding, (samples, N, 1) bool; None for all.

    An encoder and a decoder have a mask of padding each: taken is that of the one that ``block`` is
    in, or where that is None the decoder's, whose tokens the outputs are.
    """
    name = "attention_mask"
    if getattr(model.config, "is_encoder_decoder", False):
        names = [at for at, module in model.named_modules() if module is block]
        decoder = block is None or any("decoder" in at for at in names)
        name = "decoder_attention_mask" if decoder else name
    mask: Any = inputs.get(name)
    fits = mask is not None and value.ndim == 3 and tuple(mask.shape) == tuple(value.shape[:2])
    return (mask != 0)[..., None] if fits else None

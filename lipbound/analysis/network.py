"""Exact local constants of whole networks or chains of blocks, through the model's own modules."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, real, shown, whole
from lipbound.linalg.certificates import ROUNDING
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import JacobianOperator, Transposed
from lipbound.linalg.solution import Norm, sample_seeds
from lipbound.models.capture.seeing.interface import computing, implementation, taken
from lipbound.models.sources.loaded_model import bare_model, measurable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = Mapping[str, Tensor]
FEW = 16
"""Outputs, such as logits of a few classes, whose gradients are simply computed: the norm is then
dense, and ``upper`` needs no probability."""


class NetworkJacobian(JacobianOperator):
    """Jacobians of a function that treats samples one by one.

    At a batch of inputs: one batch entry per sample.

    Products with J^T by reverse mode; with J by forward mode, or where some operation has none, by
    differentiating products with J^T.

    Args:
        f: (samples, *in_shape) -> (samples, *out_shape), each sample of the result depending on the
            same sample of the input alone.
        x: the inputs.
        real: (samples, N, 1), 0 for tokens that are held fixed (padding), or None.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, real: Tensor | None = None):
        self._f, self._x, self._real = f, x, real
        with torch.enable_grad():
            self._leaf = x.detach().clone().requires_grad_()
            self._value = f(self._leaf)
        self.batch, self.in_shape, self.out_shape = (
            len(x),
            tuple(x.shape[1:]),
            tuple(self._value.shape[1:]),
        )
        self.dtype, self.device = x.dtype, x.device
        self._forward = True

    def jvp(self, x: Tensor) -> Tensor:
        x = x if self._real is None else x * self._real
        return self._pushed(x)

    def _pushed(self, x: Tensor) -> Tensor:
        if self._forward:
            try:
                with torch.no_grad():
                    return torch.func.jvp(self._f, (self._x,), (x,))[1]
            except (NotImplementedError, RuntimeError):
                self._forward = False
        with torch.enable_grad():
            y = torch.zeros_like(self._value).requires_grad_()
            (back,) = torch.autograd.grad(
                self._value, self._leaf, y, create_graph=True, retain_graph=True
            )
            (product,) = torch.autograd.grad(back, y, x, retain_graph=True)
        return product.detach()

    def vjp(self, y: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(self._value, self._leaf, y, retain_graph=True)
        return product if self._real is None else product * self._real

    def dense(self) -> Tensor:
        rows, columns = math.prod(self.out_shape), math.prod(self.in_shape)
        if columns <= rows:
            return super().dense()
        unit = torch.eye(rows, dtype=self.dtype, device=self.device)
        found = [
            self.vjp(e.view(1, *self.out_shape).expand(self.batch, *self.out_shape)).flatten(1)
            for e in unit
        ]
        return torch.stack(found, 1)

    def select(self, index: Tensor) -> "NetworkJacobian":
        if torch.equal(index.cpu(), torch.arange(self.batch)):
            return self
        return _Part(self, index.to(self.device))


class _Part(NetworkJacobian):
    """Some samples of a batch that is computed whole: other samples get zeros."""

    def __init__(self, whole: NetworkJacobian, index: Tensor):
        self._whole, self._index = whole, index
        self.batch, self.in_shape, self.out_shape = len(index), whole.in_shape, whole.out_shape
        self.dtype, self.device = whole.dtype, whole.device

    def _spread(self, x: Tensor) -> Tensor:
        full = x.new_zeros(self._whole.batch, *x.shape[1:])
        full[self._index] = x
        return full

    def jvp(self, x: Tensor) -> Tensor:
        return self._whole.jvp(self._spread(x))[self._index]

    def vjp(self, y: Tensor) -> Tensor:
        return self._whole.vjp(self._spread(y))[self._index]

    def select(self, index: Tensor) -> "NetworkJacobian":
        return _Part(self._whole, self._index[index.to(self.device)])


def blocks(model: nn.Module) -> list[nn.Module]:
    """List the transformer blocks of a model in order.

    They are its longest ``ModuleList`` of modules of one class.

    Raises:
        LipboundError: there is none.
    """
    lists = [
        list(m)
        for m in model.modules()
        if isinstance(m, nn.ModuleList) and len(m) and len({type(part) for part in m}) == 1
    ]
    expected = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    fitting = [parts for parts in lists if len(parts) == expected] or lists
    if not fitting:
        raise LipboundError(
            f"{type(model).__name__} has no list of blocks, so there is nothing to start or end at"
        )
    return max(fitting, key=len)


@in_own_modes
def network_norm(
    model: "PreTrainedModel",
    inputs: Inputs,
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
    model = measurable(bare_model(model))
    inputs = {name: t for name, t in taken(model, inputs).items() if isinstance(t, Tensor)}
    if isinstance(start, int):
        _number(start, len(blocks(model)), "start")
    share = (
        None
        if delta is None
        else real("delta", delta, "a probability between 0 and 1, or None", above=0, below=1)
    )
    return _norm(model, inputs, start, end, tol, share, seed, whole("batch", batch, least=1))


def _norm(
    model: "PreTrainedModel",
    inputs: Inputs,
    start: str | int,
    end: str | int,
    tol: float,
    delta: float | None,
    seed: int | Sequence[int],
    batch: int,
) -> Norm:
    parts: list[Norm] = []
    count = len(next(iter(inputs.values())))
    seeds = sample_seeds(count, seed)
    for i in range(0, count, batch):
        piece = {name: t[i : i + batch] if len(t) == count else t for name, t in inputs.items()}
        with chain(model, piece, start, end) as (f, x, real):
            op: JacobianOperator = NetworkJacobian(f, x, real)
            if math.prod(op.out_shape) <= FEW:
                parts.append(_from_gradients(op))
                continue
            op = Transposed(op) if math.prod(op.out_shape) > math.prod(op.in_shape) else op
            share = None if delta is None else delta * op.batch / count
            parts.append(operator_norm(op, tol=tol, delta=share, seed=seeds[i : i + batch]))
    names = ("lower", "upper", "steps", "converged", "error")
    return Norm(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _from_gradients(op: JacobianOperator) -> Norm:
    """Norms from all gradients of a few outputs.

    ``upper`` allows for the same rounding of products as a certificate.
    """
    sigma = torch.linalg.svdvals(op.dense().cpu().double())[:, 0]
    steps = torch.full((op.batch,), math.prod(op.out_shape))
    error = torch.full_like(sigma, ROUNDING[op.dtype])
    return Norm(sigma, sigma * (1 + error), steps, torch.ones(op.batch, dtype=torch.bool), error)


class _Reached(Exception):
    """Ends a forward pass where the map ends."""

    def __init__(self, value: Tensor):
        self.value = value


def _differentiable(
    model: "PreTrainedModel", inputs: Inputs
) -> tuple["PreTrainedModel", Mapping[str, Tensor]]:
    """Copies of tensors made in inference mode, which take part in no derivative."""
    inputs = {name: t.clone() if t.is_inference() else t for name, t in inputs.items()}
    if any(p.is_inference() for p in model.parameters()):
        model = copy.deepcopy(model)
    return model, inputs


def _ends(start: str | int, end: str | int, count: int) -> tuple[int, str | int]:
    """Number of the first block, ``count`` for the output of the last one, and the checked end."""
    embeddings = isinstance(start, str) and start == "embeddings"
    first = 0 if embeddings else _number(start, count + 1, "start")
    if not isinstance(end, int):
        if not isinstance(end, str) or end not in ("logits", "last_hidden_state"):
            raise LipboundError(
                f"end is {shown(end)}; give 'logits', 'last_hidden_state' or the number of a block"
            )
        return first, end
    last = _number(end, count, "end")
    if last < first:
        raise LipboundError(
            f"end is block {last} but start is block {first}; end at {first} or later"
        )
    return first, last


@contextmanager
def chain(
    model: "PreTrainedModel", inputs: Inputs, start: str | int, end: str | int
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor, Tensor | None]]:
    """Map from ``start`` to ``end`` of a model, its input here, and the entries that may move.

    The map is a function of (samples, N, D), zero for padding.

    ``start`` may also be the number of blocks: what leaves the last one.
    """
    model, inputs = _differentiable(model, inputs)
    parts = blocks(model)
    first, last = _ends(start, end, len(parts))
    given: list[Tensor] = []
    replacement: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[0] if args else kwargs["hidden_states"]
        given.append(value)
        if not replacement:
            return None
        return (
            ((replacement[0], *args[1:]), kwargs)
            if args
            else (args, kwargs | {"hidden_states": replacement[0]})
        )

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        given.append(value)
        if not replacement:
            return None
        return (replacement[0], *output[1:]) if isinstance(output, tuple) else replacement[0]

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise _Reached(output[0] if isinstance(output, tuple) else output)

    def run() -> Tensor:
        extra = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
        try:
            outputs = model(**inputs, **extra)
        except _Reached as reached:
            return reached.value
        if not hasattr(outputs, str(last)) or not isinstance(getattr(outputs, str(last)), Tensor):
            raise LipboundError(
                f"{type(model).__name__} has no {last}; its outputs are {', '.join(outputs.keys())}"
            )
        value: Tensor = getattr(outputs, str(last))
        return value

    def f(x: Tensor) -> Tensor:
        replacement[:] = [x]
        try:
            value = run()
            counted = _real_tokens(
                model, inputs, value, parts[0] if isinstance(last, int) else None
            )
            return value if counted is None else value.masked_fill(~counted, 0)
        finally:
            replacement.clear()

    hooks = [
        parts[first].register_forward_pre_hook(before, with_kwargs=True)
        if first < len(parts)
        else parts[-1].register_forward_hook(after)
    ]
    if isinstance(last, int):
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
    model: "PreTrainedModel", inputs: Inputs, value: Tensor, block: nn.Module | None
) -> Tensor | None:
    """Tokens of (samples, N, ...) that are no padding, (samples, N, 1) bool; None for all.

    Of an encoder and a decoder each has its own padding: the stream is that of a ``block``, or for
    None that of the outputs.
    """
    name = "attention_mask"
    if getattr(model.config, "is_encoder_decoder", False):
        decoder = block is None or any(
            module is block and "decoder" in at for at, module in model.named_modules()
        )
        name = "decoder_attention_mask" if decoder else name
    mask = inputs.get(name)
    fits = mask is not None and value.ndim == 3 and tuple(mask.shape) == tuple(value.shape[:2])
    return (mask != 0)[..., None] if fits and mask is not None else None


def _number(value: Any, count: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise LipboundError(
            f"{name} is {shown(value)}; it must be the number of a block, and this model has "
            f"{count}"
        )
    return value

"""Reading the projections of an attention layer off the layer itself, whatever its weights are called and however they are stored.

The layer is copied, fed chosen tokens in float64, and stopped at the attention interface. Position embeddings are replaced by those that turn
nothing, and normalisations of queries and keys by what they do linearly, so that what remains is affine in the tokens; both are read off separately.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation
from lipbound.errors import CaptureError
from lipbound.models.capture.recorder import Call, handling
from lipbound.models.capture.residual_detection import eps_of
from lipbound.models.capture.rotary_fit import find_rotation
from lipbound.models.offload import plain_copy

Tensors = tuple[Tensor, ...]


POSITIONS = "position_embeddings"


CAPTURE_TOLERANCE = 1e-4
"""Largest relative error of a rebuilt tensor. Affine projections rebuild to 1e-5 or better in float32, others miss by orders of magnitude."""


@dataclass
class Weights:
    """What probing found for one call: per-head projections in float64, what happens to queries and keys after them, and the output projection.

    Attributes:
        w, b: of queries, keys, values. Shared keys and values are repeated, one per query head.
        w_o: (heads, d_v, D_out), or None.
        norm_q, norm_k: normalisations, or None. rotation: of the call's tokens, or None.
        order: of the coordinates of queries and keys, (d,), relative to the model's own.
        positions: the position embeddings of the call, which ``rotation`` belongs to.
    """

    w: Tensors
    b: tuple[Tensor | None, ...]
    w_o: Tensor | None
    norm_q: QKNorm | None = None
    norm_k: QKNorm | None = None
    rotation: Rotation | None = None
    order: Tensor | None = None
    positions: Any = None

    def belongs_to(self, call: Call) -> bool:
        """Whether another call of the layer has the same rotation."""
        return _same(self.positions, call.kwargs.get(POSITIONS))


class _Abort(Exception):
    """Ends a probing pass at the interface, carrying q, k, v and whatever else was handed over."""

    def __init__(self, qkv: Tensors, others: dict[str, Any]):
        self.qkv, self.others = qkv, others


class NormStub(nn.Module):
    """Stands for a normalisation: does what ``mode`` says with it.

    "linear": passes vectors through, without their mean if the normalisation takes it away. "nothing": zero. "pattern": a fixed vector of mean
    zero and mean square 1. "plus", "minus", "shifted": what the normalisation makes of the fixed vector, of its negative, of it plus one.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.mode, self.centred, self.width = norm, "linear", False, 0

    def forward(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.width = y.shape[-1]
        if self.mode == "linear":
            return y - y.mean(-1, keepdim=True) if self.centred else y
        if self.mode == "nothing":
            return torch.zeros_like(y)
        vector = _pattern(y.shape[-1]).to(y).expand_as(y).contiguous()
        if self.mode == "pattern":
            return vector
        out: Tensor = self.norm({"plus": vector, "minus": -vector, "shifted": vector + 1}[self.mode], *args, **kwargs)
        return out


def probe(call: Call) -> Weights:
    """What a layer makes of its tokens.

    Raises:
        CaptureError: queries and keys are normalised, or turned by their positions, in a way that is not known here; a mask, bias or sink depends
            on the tokens; or the output projection is not one.
    """
    layer = _Layer(call)
    layer.refuse_what_depends_on_tokens()
    found = layer.normalisations()
    x = hidden_states(call)
    width = x.shape[-1]
    rows = torch.cat([torch.zeros(1, width, dtype=torch.float64), torch.eye(width, dtype=torch.float64)]).to(x.device)
    parts = [[y[: len(piece)] for y in layer.projections(_fill(piece, x))] for piece in rows.split(x.shape[0] * x.shape[1])]
    maps = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]  # (D + 1, H or H_kv, d) each
    w = [(y[1:] - y[0]).transpose(0, 1).contiguous() for y in maps]
    b = [y[0] if bool((y[0] != 0).any()) else None for y in maps]
    norms = [_over_all_heads(norm, w[i], b[i]) if norm and together else norm for i, (norm, together) in enumerate(found)]
    rotation, order = layer.rotation() if call.kwargs.get(POSITIONS) is not None else (None, None)
    heads = call.q.shape[1]

    def one_per_head(t: Tensor | None, side: int) -> Tensor | None:
        t = t if t is None or order is None or side == 2 else t[..., order]
        return None if t is None else t.repeat_interleave(heads // t.shape[0], 0)

    def every(norm: QKNorm | None, side: int) -> QKNorm | None:
        if norm is None:
            return None
        gain = one_per_head(norm.gain, side)
        assert gain is not None
        return replace(norm, gain=gain, bias=one_per_head(norm.bias, side))

    return Weights(
        tuple(t for i in range(3) if (t := one_per_head(w[i], i)) is not None), tuple(one_per_head(b[i], i) for i in range(3)), _probe_output(call),
        norm_q=every(norms[0], 0), norm_k=every(norms[1], 1), rotation=rotation, order=order, positions=call.kwargs.get(POSITIONS),
    )  # fmt: skip


class _Layer:
    """A copy of the layer of a call, in float64, stopped at the attention interface."""

    def __init__(self, call: Call):
        self._call = call
        self._owner = plain_copy(call.module).double()
        self._stands: list[NormStub] = []
        replaced: list[str] = []
        for name, module in list(self._owner.named_modules()):
            inside = any(name.startswith(done + ".") for done in replaced)
            if name and not inside and "norm" in type(module).__name__.lower():
                replaced.append(name)
                parent, _, last = name.rpartition(".")
                self._stands.append(NormStub(module))
                setattr(self._owner.get_submodule(parent), last, self._stands[-1])

    def projections(self, tokens: Tensor, *, turned: bool = False) -> Tensors:
        """q, k, v of tokens (samples, N, D), each (samples N, H or H_kv, d); with the call's position embeddings, or unturned."""
        return tuple(t.transpose(1, 2).flatten(0, 1) for t in self._stopped(tokens, turned).qkv)

    def refuse_what_depends_on_tokens(self) -> None:
        """Raise CaptureError if masks, biases or sinks change with the tokens: their derivative would be missed, which no forward pass shows."""
        generator = torch.Generator().manual_seed(1)
        shape, device = hidden_states(self._call).shape, self._call.q.device
        inputs = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2))
        first, second = (self._stopped(x, turned=True).others for x in inputs)
        for name, value in first.items():
            if not _same(value, second.get(name)):
                raise CaptureError(self._reason(f"computes its {name.replace('_', ' ')} from its tokens"))

    def _stopped(self, tokens: Tensor, turned: bool) -> _Abort:
        """What the copy hands to the attention interface."""

        def stop(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any) -> tuple[Tensor, Any]:
            raise _Abort((q, k, v), {"mask": mask} | kw)

        args, kwargs = _replaced(self._call, tokens)
        if not turned and kwargs.get(POSITIONS) is not None:
            kwargs[POSITIONS] = _unturned(kwargs[POSITIONS])
        try:
            with handling(stop):
                self._owner(*args, **kwargs)
        except _Abort as end:
            return end
        raise CaptureError(f"layer {self._call.name}: probing did not reach the attention interface")

    def normalisations(self) -> list[tuple[QKNorm | None, bool]]:
        """Those of queries and of keys, each as if a head's own vector were normalised, and whether it is that of all heads together."""
        x = torch.randn(hidden_states(self._call).shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(self._call.q.device)
        plain = self.projections(x)
        touching: list[list[NormStub]] = [[], [], []]
        for stand in [s for s in self._stands if s.width]:
            stand.mode = "nothing"
            for side, (a, b) in enumerate(zip(self.projections(x), plain, strict=True)):
                if not torch.equal(a, b):
                    touching[side].append(stand)
            stand.mode = "linear"
        if touching[2]:
            latent = touching[2][0].width not in (plain[2].shape[-1], plain[2].shape[-1] * plain[2].shape[-2])
            raise CaptureError(self._reason("makes its values of a normalised vector (latent attention)" if latent else "normalises its values"))
        if any(len(stands) > 1 for stands in touching):
            raise CaptureError(self._reason("normalises its queries or keys twice"))
        return [self._read(stands[0], side, x) if stands else (None, False) for side, stands in enumerate(touching[:2])]

    def _read(self, stand: NormStub, side: int, x: Tensor) -> tuple[QKNorm, bool]:
        def seen(mode: str) -> Tensor:
            stand.mode = mode
            return self.projections(x)[side][0]  # (heads, d) of one token

        pattern, plus, minus, shifted = (seen(mode) for mode in ("pattern", "plus", "minus", "shifted"))
        heads, d = pattern.shape
        stand.centred = bool((shifted - plus).abs().amax() <= 1e-5 * plus.abs().amax())
        if stand.width not in (d, heads * d):
            raise CaptureError(self._reason("makes its queries or keys of a normalised vector of another width (latent attention)"))
        eps = eps_of(stand.norm, self._call.q.dtype)
        bias = (plus + minus) / 2
        stand.mode = "linear"
        gain = (plus - minus) / 2 / pattern * (1 + eps) ** 0.5
        return QKNorm(gain, bias if bool((bias != 0).any()) else None, eps), stand.width != d

    def rotation(self) -> tuple[Rotation | None, Tensor]:
        """The rotation of the call's tokens, from the queries and keys of random tokens before and after it."""
        shape = hidden_states(self._call).shape
        given = self._call.kwargs[POSITIONS]
        if any(len(t) > 1 and not torch.equal(t, t[:1].expand_as(t)) for t in ((given,) if isinstance(given, Tensor) else given) if t.ndim > 2):
            raise CaptureError(self._reason("is given samples with different positions (capture them one at a time, or pad on the right)"))
        for stand in self._stands:
            stand.centred = False  # centred vectors do not span the space
        generator = torch.Generator().manual_seed(0)
        before: list[Tensor] = []
        after: list[Tensor] = []
        while sum(map(len, before)) < self._call.q.shape[-1] + 4:
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(self._call.q.device)
            for vectors, turned in ((before, False), (after, True)):
                found = self.projections(x, turned=turned)[:2]
                vectors.extend(t.unflatten(0, shape[:2]).transpose(1, 2).flatten(0, 1) for t in found)
        try:
            return find_rotation(torch.cat(before), torch.cat(after))
        except CaptureError as error:
            raise CaptureError(self._reason(f"cannot be captured: {error}")) from error

    def _reason(self, what: str) -> str:
        return f"layer {self._call.name}: {type(self._call.module).__name__} {what}, which is not supported"


def _over_all_heads(norm: QKNorm, w: Tensor, b: Tensor | None) -> QKNorm:
    """The normalisation of all heads' vectors together, whose projection is (heads, D, d) head by head."""
    return replace(norm, over=(w.transpose(0, 1).flatten(1), None if b is None else b.flatten()))


def _pattern(width: int) -> Tensor:
    """A vector without zeros, of mean zero and mean square 1 (for a width of at least 2)."""
    vector = torch.ones(width, dtype=torch.float64)
    vector[1::2] = -1
    if width % 2 and width > 1:
        vector[-3:] = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64) / 2**0.5
    return vector


def _unturned(positions: Any) -> Any:
    """Position embeddings that turn nothing: cosines 1 and sines 0, or complex numbers 1."""
    if isinstance(positions, Tensor):
        return torch.ones_like(positions)
    cos, sin = positions
    return torch.ones_like(cos), torch.zeros_like(sin)


def _same(a: Any, b: Any) -> bool:
    """Whether two tensors, or tuples or numbers, are equal; other objects count as equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Tensor | int | float | None) or isinstance(b, Tensor | int | float | None):
        return type(a) is type(b) and a == b
    return True


def _probe_output(call: Call) -> Tensor | None:
    """Slices of the projection that consumes the flattened heads, (heads, d_v, D_out)."""
    if call.consumer is None:
        return None
    heads, d_v = call.q.shape[1], call.v.shape[-1]
    projection = plain_copy(call.consumer).double()
    device = call.q.device
    eye = torch.eye(heads * d_v, dtype=torch.float64, device=device)
    zero = projection(torch.zeros_like(eye[:1]))
    w_o: Tensor = projection(eye) - zero
    flat = call.out.flatten(2).double().nan_to_num()  # rows of padding may be undefined
    own, mine, size = projection(flat) - zero, flat @ w_o, flat.abs() @ w_o.abs()
    if not float((own - mine).abs().amax()) <= CAPTURE_TOLERANCE * float(torch.maximum(own.abs().amax(), 1e-3 * size.amax())):
        raise CaptureError(f"layer {call.name}: the output projection ({type(call.consumer).__name__}) is not an affine map, which is not supported")
    return w_o.view(heads, d_v, -1)


def hidden_states(call: Call) -> Tensor:
    """The owner's input X, its first positional argument or ``hidden_states``."""
    x = call.args[0] if call.args else call.kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise CaptureError(f"layer {call.name}: {type(call.module).__name__} is not given one (samples, N, D) tensor of token vectors")
    if call.k.shape[-2] != x.shape[1] or call.q.shape[-2] != x.shape[1]:
        raise CaptureError(
            f"layer {call.name}: {call.q.shape[-2]} queries attend to {call.k.shape[-2]} keys while the layer's input has {x.shape[1]} tokens; "
            "only self-attention is supported (no cross-attention, no cache, no windows cut out of the input)"
        )
    return x


def _replaced(call: Call, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The owner's arguments with X replaced, floating tensors in float64, and no cache."""

    def double(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, Tensor) and value.is_complex():
            return value.to(torch.complex128)
        return tuple(double(v) for v in value) if isinstance(value, tuple) else value

    kwargs = {name: None if name in ("past_key_values", "layer_past") else double(value) for name, value in call.kwargs.items()}
    if call.args:
        return (x, *(double(a) for a in call.args[1:])), kwargs
    return (), kwargs | {"hidden_states": x}


def _fill(rows: Tensor, like: Tensor) -> Tensor:
    """``rows`` in the first token slots of a zero tensor shaped like ``like``."""
    slots = torch.zeros(like.shape[0] * like.shape[1], rows.shape[1], dtype=rows.dtype, device=rows.device)
    slots[: len(rows)] = rows
    return slots.view(*like.shape[:2], -1)

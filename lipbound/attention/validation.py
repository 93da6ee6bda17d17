"""Checks of the parts of an attention layer."""

import itertools
import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.scoring import BLOCKED, zero_one
from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation
from lipbound.errors import AttentionError, LipboundError, is_number, shown, tell

if TYPE_CHECKING:
    from lipbound.attention.layer import Attention

KINDS: dict[str, type] = {
    **dict.fromkeys(("norm_q", "norm_k", "norm_v"), QKNorm),
    "rotation": Rotation,
    "gate": Gate,
    "other_stream": OtherStream,
}
"""Types of the parts of a layer that are no tensors."""
LARGEST = 1e60
"""Largest entries of tensors from which norms are computed, and its inverse the smallest: products
of four of them, and squares of norms, are in the range of float64. All float32 numbers are."""
_NEEDED = ("x", "w_q", "w_k", "w_v")
_TENSORS = (*_NEEDED, "b_q", "b_k", "b_v", "w_o", "mask", "valid", "sinks")
BY_HEAD = ("w_", "b_", "norm_v.gain", "norm_v.bias", "norm_v.after", "other_stream.v")
"""Beginnings of names of tensors of which every head has its own size."""
OWN_DTYPE = ("mask", "norm_", "rotation")
"""Beginnings of names of tensors that may have another dtype than the layer."""


def validate(att: "Attention", scale: float | None) -> None:
    """Check that the parts of a layer fit together, and that tensors are numbers of one dtype.

    Raises:
        AttentionError: they do not or are not, or a query may attend to no key.
    """
    for name, number in (("scale", scale), ("cap", att.cap)):
        if number is None:
            continue
        if isinstance(number, bool) or not is_number(number) or not math.isfinite(number):
            raise AttentionError(f"{name} is {shown(number)}; it must be a finite number")
    if att.cap is not None and att.cap <= 0:
        raise AttentionError(f"cap is {att.cap}; it must be a positive number")
    for name in (*_TENSORS, *KINDS):
        part, kind = getattr(att, name), KINDS.get(name, Tensor)
        if not isinstance(part, kind) and (part is not None or name in _NEEDED):
            what = "torch tensor" if kind is Tensor else f"{kind.__name__} of {kind.__module__}"
            raise AttentionError(f"{name} is {shown(part)}; it must be a {what}")
    for name, tensor in att.tensors().items():
        if tensor.is_meta:
            on = f"{name} is on the device meta, which holds no numbers"
            raise AttentionError(f"{on}; give tensors on a CPU or GPU")
        if tensor.layout != torch.strided:
            raise AttentionError(f"{name} is sparse; give {name}.to_dense()")
    for name in _NEEDED:
        axes = "(samples, N, D)" if name == "x" else "(heads, D, d)"
        shape = tuple(getattr(att, name).shape)
        if len(shape) != 3 or 0 in shape:
            raise AttentionError(f"{name} has shape {shape}; it must be {axes} with no empty axis")
    _check_shapes(att)
    _check_dtypes(att.tensors(), att.x.dtype)
    _check_mask(att)


def _check_shapes(att: "Attention") -> None:
    """Check that tensors have the shapes that those of x, w_q and w_v ask for.

    Raises:
        AttentionError: they have not.
    """
    (samples, tokens, model), (heads, _, d), d_v = att.x.shape, att.w_q.shape, att.w_v.shape[2]
    expected: dict[str, tuple[int | None, ...]] = {
        **dict.fromkeys(("w_q", "w_k"), (heads, model, d)),
        **dict.fromkeys(("w_v", "gate.w"), (heads, model, d_v)),
        **dict.fromkeys(("b_q", "b_k", "norm_q.gain", "norm_k.gain"), (heads, d)),
        **dict.fromkeys(("b_v", "norm_v.gain", "gate.b"), (heads, d_v)),
        "w_o": (heads, d_v, None),
        "valid": (samples, tokens),
        **{f"norm_{side}.over.0": (model, None) for side in "qkv"},
        "sinks": (heads,),
    }
    if (other := att.other_stream) is not None:
        if (other.q is None) == (other.k is None) or (other.k is None) != (other.v is None):
            raise AttentionError("the other stream gives queries alone, or keys and values")
        if att.gate is not None:
            raise AttentionError("gated outputs of cross-attention have no closed form here")
        for side, width in (("q", d), ("k", d), ("v", d_v)):
            expected[f"other_stream.{side}"] = heads, samples, other.tokens, width
        expected["other_stream.valid"] = samples, other.tokens
    given = att.tensors()
    for name, wanted in expected.items():
        got = tuple(given[name].shape) if name in given else wanted
        pairs = zip(got, wanted, strict=False)
        if len(got) != len(wanted) or not all(b in (None, a) for a, b in pairs):
            shape = tuple("any" if s is None else s for s in wanted)
            raise AttentionError(
                f"{name} has shape {got}; with x {tuple(att.x.shape)} and w_q "
                f"{tuple(att.w_q.shape)} it must be {shape}"
            )
        if name.endswith("valid") and name in given and given[name].dtype != torch.bool:
            raise AttentionError(f"{name} has dtype {given[name].dtype}; it must be torch.bool")
    turn = att.rotation
    if turn is not None and (turn.tokens != tokens or turn.width > d):
        raise AttentionError(
            f"rotation is of {turn.tokens} tokens and turns {turn.width} coordinates; with x "
            f"{tuple(att.x.shape)} and w_q {tuple(att.w_q.shape)} it must be of {tokens} tokens "
            f"and turn at most {d}"
        )


def _check_dtypes(given: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Check that tensors of a layer have a dtype that is computed with, and that of its inputs.

    Raises:
        AttentionError: they have not.
    """
    for name, t in given.items():
        if name.endswith(("valid", "part")):
            continue
        if t.dtype not in (torch.float32, torch.float64):
            raise AttentionError(
                f"{name} has dtype {t.dtype}; attention is computed in torch.float32 or "
                "torch.float64"
            )
        if t.dtype != dtype and not name.startswith(OWN_DTYPE):
            raise AttentionError(
                f"{name} has dtype {t.dtype} but x has {dtype}; give all tensors one dtype"
            )


def check_values(att: "Attention", names: Collection[str] | None = None) -> None:
    """Check dtypes of tensors of a layer, by default of all, and that their numbers are finite.

    Raises:
        AttentionError: they are not, or have other dtypes.
    """
    given = {name: t for name, t in att.tensors().items() if names is None or name in names}
    _check_dtypes(given, att.x.dtype)
    sizes = largest_entries(att) if names is None else _largest(given)
    for name, largest in sizes.items():
        if not all(map(math.isfinite, largest)):
            raise AttentionError(
                f"{name} has NaN or infinite entries; the Jacobian is not defined there"
            )


@memoised
def largest_entries(att: "Attention") -> dict[str, list[float]]:
    """Return largest entries of a layer's tensors by name, of some head by head: in one read."""
    return _largest(att.tensors())


def _largest(given: dict[str, Tensor]) -> dict[str, list[float]]:
    counted = {name: t.detach() for name, t in given.items() if t.is_floating_point() and t.numel()}
    counted.pop("mask", None)
    largest = {
        name: (t.flatten(1) if name.startswith(BY_HEAD) else t.reshape(1, -1)).abs().amax(1)
        for name, t in counted.items()
    }
    values = iter(torch.cat([*largest.values()]).tolist() if largest else [])
    return {name: list(itertools.islice(values, len(t))) for name, t in largest.items()}


def sizes(att: "Attention") -> dict[str, list[float]]:
    """Return largest entries of a layer's tensors by name: those of weights head by head."""
    return largest_entries(att) | {"scale": [abs(att.scale)]}


def check_sizes(att: "Attention") -> None:
    """Check that products and squares of a layer's numbers stay in the range of float64.

    Raises:
        LipboundError: a tensor whose largest entry is neither zero nor from 1e-60 to 1e60; of
            weights that of a head.
    """
    for name, values in sizes(att).items():
        for size in values:
            if size and not 1 / LARGEST <= size <= LARGEST:
                raise LipboundError(
                    f"the largest entry of {name} is {size:.3g}; norms and bounds are computed "
                    f"where it is 0 or from {1 / LARGEST:g} to {LARGEST:g}: multiply x by a power "
                    "of two and the weights by its inverse"
                )


def _check_mask(att: "Attention") -> None:
    """Check that a mask has the scores' shape, and that every query that counts sees some key.

    Raises:
        AttentionError: it has not, or a query sees none.
    """
    mask, valid = att.mask, att.valid_keys
    full = att.samples, att.heads, att.rows, att.keys
    if mask is not None:
        given = f"has shape {tuple(mask.shape)}" if mask.ndim else f"is one number, {mask.item()}"
        pairs = zip(reversed(mask.shape), reversed(full), strict=False)
        if not (0 < mask.ndim <= len(full) and all(size in (1, most) for size, most in pairs)):
            raise AttentionError(
                f"mask {given}; it must be broadcastable to (samples, heads, N, N) = {full}"
            )
        if zero_one(mask):
            tell(
                "mask holds 0 and 1, which are added to the scores and forbid nothing; a mask "
                "has 0 where attention is allowed and -inf elsewhere"
            )
        if bool(torch.isnan(mask).any()) or bool((mask == math.inf).any()):
            raise AttentionError(
                "mask has NaN or +inf entries; it must be finite, or -inf where attention is "
                "forbidden"
            )
    if valid is not None and not bool(valid.any(-1).all()):
        raise AttentionError(
            "valid marks every token of a sample as padding; each sample needs at least one token"
        )
    if mask is not None and not sees_some_key(mask, full[-1], valid, att.valid_rows):
        raise AttentionError(
            "mask forbids some query every key, so its softmax is undefined; mark such tokens "
            "with valid=False"
        )


def sees_some_key(
    mask: Tensor, tokens: int, valid: Tensor | None, rows: Tensor | None = None
) -> bool:
    """Return whether every query that counts may attend to some key.

    Args:
        mask: additive, four axes or fewer.
        tokens: number of keys.
        valid: keys that are not padding, (samples, keys) bool, or None.
        rows: queries that are not, (samples, queries) bool; None for all.
    """
    axes = torch.broadcast_shapes(mask.shape[-2:], (1, tokens))
    keys = (mask > BLOCKED).expand(*mask.shape[:-2], *axes)
    seen = (keys if valid is None else keys & valid[:, None, None, :]).any(-1)
    return bool((seen if rows is None else seen | ~rows[:, None, :]).all())

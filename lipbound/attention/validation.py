"""Checks of the tensors of an attention layer."""

import math

import torch
from torch import Tensor

from lipbound.attention.projections import Projections
from lipbound.attention.scoring import BLOCKED, Scoring
from lipbound.attention.variants.base import Shapes
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.errors import AttentionError, shown


def validate(x: Tensor, projections: Projections, scoring: Scoring, valid: Tensor | None) -> None:
    """Check that tensors of a layer fit together and are numbers of one dtype.

    Raises:
        AttentionError: they do not and are not, or a query may attend to no key.
    """
    needed = {"x": x, "w_q": projections.w_q, "w_k": projections.w_k, "w_v": projections.w_v}
    variants = {name: t for step in scoring.steps for name, t in step.tensors().items()}
    optional = projections.tensors() | {"mask": scoring.mask, "valid": valid} | variants
    for name, tensor in (optional | needed).items():
        if tensor is not None or name in needed:
            _check_tensor(name, tensor)
    given = {"x": x} | projections.tensors()
    for name in needed:
        axes = "(samples, N, D)" if name == "x" else "(heads, D, d)"
        shape = tuple(given[name].shape)
        if len(shape) != 3 or 0 in shape:
            raise AttentionError(f"{name} has shape {shape}; it must be {axes} with no empty axis")
    heads, _, d = given["w_q"].shape
    samples, tokens, model = x.shape
    d_v = given["w_v"].shape[2]
    expected: dict[str, tuple[int | None, ...]] = {
        "w_q": (heads, model, d),
        "w_k": (heads, model, d),
        "w_v": (heads, model, d_v),
        "b_q": (heads, d),
        "b_k": (heads, d),
        "b_v": (heads, d_v),
        "w_o": (heads, d_v, None),
        "valid": (samples, tokens),
    }
    for name, tensor in (given | ({} if valid is None else {"valid": valid})).items():
        if name in expected:
            _check_shape(name, tensor, expected[name], given)
    if valid is not None and valid.dtype != torch.bool:
        raise AttentionError(f"valid has dtype {valid.dtype}; it must be torch.bool")
    masks = {} if scoring.mask is None else {"mask": scoring.mask}
    _check_values(given | variants | masks, valid)
    shapes = Shapes(*(tuple(given[name].shape) for name in ("x", "w_q", "w_v")))
    for step in scoring.steps:
        step.check(shapes)
    rows, keys, marks = tokens, tokens, (valid, valid)
    if (other := scoring.find(OtherStream)) is not None:
        if other.q is not None:
            rows, marks = other.tokens, (other.valid, valid)
        else:
            keys, marks = other.tokens, (valid, other.valid)
    _check_mask(scoring.mask, (samples, heads, rows, keys), *marks)


def _check_tensor(name: str, tensor: object) -> None:
    """Check that it is a tensor with numbers in it, one after the other.

    Raises:
        AttentionError: it is not.
    """
    if not isinstance(tensor, Tensor):
        raise AttentionError(f"{name} is {shown(tensor)}; it must be a torch tensor")
    if tensor.is_meta:
        raise AttentionError(
            f"{name} is on the device meta, which holds no numbers; give tensors on a CPU or GPU"
        )
    if tensor.layout != torch.strided:
        raise AttentionError(f"{name} is sparse; give {name}.to_dense()")


def _check_shape(
    name: str, tensor: Tensor, wanted: tuple[int | None, ...], given: dict[str, Tensor]
) -> None:
    got = tuple(tensor.shape)
    fits = len(got) == len(wanted) and all(b in (None, a) for a, b in zip(got, wanted, strict=True))
    if not fits:
        shape = tuple("any" if s is None else s for s in wanted)
        raise AttentionError(
            f"{name} has shape {got}; with x {tuple(given['x'].shape)} and w_q "
            f"{tuple(given['w_q'].shape)} it must be {shape}"
        )


def _check_values(given: dict[str, Tensor], valid: Tensor | None) -> None:
    for name, tensor in given.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise AttentionError(
                f"{name} has dtype {tensor.dtype}; attention is computed in torch.float32 or "
                "torch.float64"
            )
        if tensor.dtype != given["x"].dtype and name != "mask":
            raise AttentionError(
                f"{name} has dtype {tensor.dtype} but x has {given['x'].dtype}; give all tensors "
                "one dtype"
            )
        if name == "mask":
            if bool(torch.isnan(tensor).any()) or bool((tensor == math.inf).any()):
                raise AttentionError(
                    "mask has NaN or +inf entries; it must be finite, or -inf where attention is "
                    "forbidden"
                )
            continue
        counted = tensor[valid] if name == "x" and valid is not None else tensor
        if not bool(torch.isfinite(counted).all()):
            raise AttentionError(
                f"{name} has NaN or infinite entries; the Jacobian is not defined there"
            )


def _check_mask(
    mask: Tensor | None, full: tuple[int, ...], rows: Tensor | None, valid: Tensor | None
) -> None:
    """Check that a mask has the scores' shape, and that every query that counts sees some key.

    ``rows`` and ``valid``: which queries, and which keys, are not padding.

    Raises:
        AttentionError: it has not, or a query sees none.
    """
    if mask is not None:
        if not mask.ndim:
            raise AttentionError(
                f"mask is one number, {shown(mask.item())}; it must have an axis of keys and "
                f"broadcast to (samples, heads, N, N) = {full}"
            )
        try:
            fits = torch.broadcast_shapes(mask.shape, full) == full
        except RuntimeError:
            fits = False
        if not fits:
            raise AttentionError(
                f"mask has shape {tuple(mask.shape)}; it must be broadcastable to (samples, "
                f"heads, N, N) = {full}"
            )
    if valid is not None and not bool(valid.any(-1).all()):
        raise AttentionError(
            "valid marks every token of a sample as padding; each sample needs at least one token"
        )
    if mask is not None and not sees_some_key(mask, full[-1], valid, rows):
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

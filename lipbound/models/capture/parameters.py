"""The query, key and value weights of a model's attention modules, as parameters that gradients
reach (probing, `lipbound.models.capture.probing`, reads copies)."""

from typing import NamedTuple

from torch import Tensor, nn

from lipbound.errors import CaptureError, shown

SEPARATE = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
"""Names of three linear maps in one module."""
FUSED = ("c_attn", "qkv")
"""Names of one linear map onto queries, keys and values, in this order."""

HEADS = ("num_attention_heads", "num_heads", "n_heads")
"""Names under which a module keeps its number of heads."""


class ModuleProjections(NamedTuple):
    """One module's weights, views of its parameters: (heads, D, d), and biases (heads,
    d) or None."""

    name: str
    module: nn.Module
    w: tuple[Tensor, Tensor, Tensor]
    b: tuple[Tensor | None, Tensor | None, Tensor | None]


def projections(model: nn.Module) -> list[ModuleProjections]:
    """Of every attention module of a model, in the order of its modules.

    Raises:
        CaptureError: no module, or none is found in it: the model names its projections in another
            way than `SEPARATE` and `FUSED`.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model is {shown(model)}; give a loaded transformers model")
    found = []
    for name, module in model.named_modules():
        heads = next((n for key in HEADS if isinstance(n := getattr(module, key, None), int)), 0)
        maps = _maps(module) if heads else None
        if maps is not None:
            (w, b) = zip(*(_per_head(*m, heads) for m in maps), strict=True)
            found.append(ModuleProjections(name, module, (w[0], w[1], w[2]), (b[0], b[1], b[2])))
    if not found:
        names = ", ".join("/".join(three) for three in SEPARATE)
        raise CaptureError(
            f"{type(model).__name__} has no attention modules that say how many heads they have "
            f"({', '.join(HEADS)}) and have projections of a known "
            f"name ({names}, {', '.join(FUSED)})"
        )
    return found


def _maps(module: nn.Module) -> list[tuple[Tensor, Tensor | None]] | None:
    """Three maps as (weight (D, heads d), bias or None), or None."""
    for names in SEPARATE:
        linear = [getattr(module, name, None) for name in names]
        if all(isinstance(one, nn.Linear) for one in linear):
            return [(one.weight.mT, one.bias) for one in linear if isinstance(one, nn.Linear)]
    for name in FUSED:
        one = getattr(module, name, None)
        weight = getattr(one, "weight", None)
        if isinstance(one, nn.Module) and isinstance(weight, Tensor):
            weight = (
                weight.mT if isinstance(one, nn.Linear) else weight
            )  # transformers' Conv1D stores (in, out)
            if weight.shape[1] % 3 == 0:
                bias = getattr(one, "bias", None)
                biases = bias.chunk(3) if isinstance(bias, Tensor) else (None, None, None)
                return list(zip(weight.chunk(3, 1), biases, strict=True))
    return None


def _per_head(weight: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor | None]:
    if weight.shape[1] % heads:
        raise CaptureError(
            f"a projection onto {weight.shape[1]} columns does not divide into {heads} heads"
        )
    return weight.unflatten(1, (heads, -1)).transpose(
        0, 1
    ), None if bias is None else bias.unflatten(0, (heads, -1))

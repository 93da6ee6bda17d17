"""The projections of every head of a model, by their names, without a forward pass."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lipbound.errors import CaptureError
from lipbound.models import weight_files
from lipbound.models.training import SEPARATE

FAMILIES = (
    *("bert", "distilbert", "gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral"),
    *("opt", "phi", "phi3", "qwen2", "qwen3", "roberta", "vit"),
)
"""Model types of transformers whose names and layouts are known here."""
JOINT_MAPS = (("c_attn",), ("qkv_proj",))
"""Names of one linear map onto all queries, then all keys, then all values."""
OUTPUT_MAPS = ("o_proj", "out_proj", "c_proj", "out_lin", "dense")
"""Names of the output projection, beside the others."""


def head_weights(model: nn.Module) -> Iterator[tuple[str, list[Tensor], float]]:
    """Yield the projections of one attention layer after the other, in the order of the modules.

    Of weights that stay on disk (`lipbound.models.weight_files`) those of one layer are in memory.

    Args:
        model: of one of `FAMILIES`.

    Yields:
        The name of the module that computes attention; W_Q (heads, D, d), W_K and W_V, shared ones
        once, and W_O (heads, d, D_out); the factor of the scores.

    Raises:
        CaptureError: it is of another family, has cross-attention, layer normalisations of queries
            or keys, other maps in the places of plain linear ones (adapters that are not merged,
            quantised layers), attention modules that are not transformers', or hooks on any of
            them: no forward pass would show what these do.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    instead = "compare(..., extras='wqk_norm') reads them off a forward pass of any model"
    found = [(name, part) for name, part in model.named_modules() if _names(part)]
    types = {getattr(getattr(part, "config", None), "model_type", kind) for _, part in found}
    if not types or not types <= {*FAMILIES}:
        known = f"weights are found by name in {', '.join(FAMILIES)}"
        raise CaptureError(f"{known}, and this is {', '.join(sorted(types)) or kind}; {instead}")
    for what in ("add_cross_attention", "qk_layernorm"):  # two streams; a mean is taken away
        if getattr(config, what, False):
            raise CaptureError(f"weights of {kind} with {what} are not found by name; {instead}")
    for name, part in found:
        if not type(part).__module__.startswith("transformers.") or _changed(part):
            what = f"{name} ({type(part).__name__}) is not as transformers has it"
            raise CaptureError(f"{what}: a class, a forward or hooks of its own; {instead}")
        with weight_files.resident(part):
            maps, scale = _inputs(name, part)
        out: Any = next((getattr(part, key) for key in OUTPUT_MAPS if hasattr(part, key)), None)
        if out is None:  # as in BERT
            out = model.get_submodule(f"{name.rpartition('.')[0]}.output.dense")
        with weight_files.resident(out):
            w_o = _matrix(name, out)
        if {len(maps[0]) // len(t) * len(t) * t.shape[2] for t in maps} != {len(w_o)}:
            raise CaptureError(f"the projections of {name} do not fit each other; {instead}")
        yield name, [*maps, w_o.unflatten(0, (len(maps[0]), -1))], scale


def _names(part: nn.Module) -> tuple[str, ...]:
    """Return the names of the maps onto queries, keys and values, or of one onto all; or none."""
    known = (*SEPARATE, *JOINT_MAPS)
    return next((names for names in known if all(hasattr(part, name) for name in names)), ())


def _inputs(name: str, part: Any) -> tuple[list[Tensor], float]:
    """Return projections of queries, keys and values, (heads, D, d), and the factor of scores."""
    width: Any = getattr(part, "head_dim", None) or getattr(part, "attention_head_size", None)
    plain = getattr(part, "scale_attn_weights", False) and not part.scale_attn_by_inverse_layer_idx
    scale = getattr(part, "scaling", width**-0.5 if plain else None)  # older GPT-2 does not say it
    if width is None or not isinstance(scale, float):
        what = f"{name} ({type(part).__name__}) does not say its heads' width and factor"
        raise CaptureError(f"{what}, as in newer transformers; upgrade it, or take compare")
    found = [_matrix(name, getattr(part, one)) for one in _names(part)]
    if len(found) == 1:
        keys = width * (getattr(part.config, "num_key_value_heads", 0) or 0)
        keys = keys or found[0].shape[1] // 3
        found = [*found[0].split([found[0].shape[1] - 2 * keys, keys, keys], 1)]
    return [t.unflatten(1, (-1, width)).transpose(0, 1) for t in found], scale


def _changed(part: nn.Module) -> bool:
    """Return whether something may change what a module computes: a forward or hooks of others.

    Hooks of ours read weights from disk and look at calls.
    """
    hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    known = (str(h.__module__).startswith(("transformers.", "lipbound.")) for h in hooks)
    return "forward" in vars(part) or not all(known)


def _matrix(name: str, one: Any) -> Tensor:
    """Return the matrix of a plain linear map, (inputs, outputs), in memory."""
    if _changed(one):
        raise CaptureError(f"{name} has hooks on {type(one).__name__}; remove them, or use compare")
    if type(one) not in (nn.Linear, Conv1D):
        what = f"{name} has a {type(one).__name__} in the place of a plain linear map"
        raise CaptureError(f"{what}; merge adapters and give the model before quantization")
    weight: Tensor = one.weight.detach()
    return weight if type(one) is Conv1D else weight.mT

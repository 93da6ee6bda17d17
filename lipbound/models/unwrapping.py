"""The transformers model inside of what users hold in their hands: checkpoints of ours, wrappers of
torch and PEFT, pipelines, sentence encoders."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from transformers import Pipeline, PreTrainedModel

from lipbound.errors import CaptureError, shown, tell
from lipbound.models.batch import Inputs
from lipbound.models.checkpoint import Checkpoint

DEPTH = 8
"""Wrappers around wrappers that are taken off."""
T = TypeVar("T")


def unwrapped(given: object) -> tuple[object, list[str]]:
    """Take all wrappers off an object: what is inside, and sentences on what was left out on the
    way."""
    notes: list[str] = []
    for _ in range(DEPTH):
        if isinstance(given, PreTrainedModel):
            break
        inner, note = _inside(given)
        if inner is None:
            break
        notes += [note] if note else []
        given = inner
    return given, notes + _adapters(given)


def bare_model(given: object, tells: bool = True) -> PreTrainedModel:
    """The transformers model inside what a public function was given; notices tell what was left
    out, unless they were told before.

    Raises:
        CaptureError: there is none.
    """
    model, notes = unwrapped(given)
    if not isinstance(model, PreTrainedModel):
        raise CaptureError(
            f"model is {shown(given)}; give a loaded transformers model, or what "
            "lipbound.load_checkpoint returns"
        )
    for note in notes if tells else ():
        tell(note)
    return model


def bare_inputs(inputs: Any, model: nn.Module) -> Any:
    """The tensors of `Inputs`, on the device of a model; anything else as it is."""
    if not isinstance(inputs, Inputs):
        return inputs
    device = next(
        (t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), None
    )
    return dict(inputs.batch) if device is None else inputs.block(0, inputs.samples, str(device))


def _inside(given: Any) -> tuple[object | None, str]:
    """The content of a wrapper (None for what is no wrapper), and a sentence on what is lost
    without it, or ""."""
    if isinstance(given, Checkpoint | Pipeline):
        return given.model, ""
    if isinstance(given, type):
        return None, ""
    if isinstance(inner := getattr(given, "_orig_mod", None), nn.Module):  # torch.compile
        return inner, ""
    if isinstance(given, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return given.module, ""
    kind = type(given).__name__
    if hasattr(given, "get_base_model") and isinstance(
        configs := getattr(given, "peft_config", None), Mapping
    ):
        learned = [
            str(one.peft_type).rpartition(".")[2]
            for one in configs.values()
            if getattr(one, "is_prompt_learning", False)
        ]
        left_out = (
            f"the tokens that {kind} learned in front of its inputs "
            f"({', '.join(learned)}) are left out; its base model is measured"
        )
        return given.get_base_model(), left_out if learned else ""
    parts = list(given) if isinstance(given, nn.Sequential) else []
    if parts and isinstance(
        inner := getattr(parts[0], "auto_model", None), nn.Module
    ):  # SentenceTransformer
        after = ", ".join(type(part).__name__ for part in parts[1:])
        return (
            inner,
            f"what comes after the transformer of the {kind} ({after}) is left out"
            if after
            else "",
        )
    if isinstance(inner := getattr(given, "model", None), PreTrainedModel):
        return (
            inner,
            f"the {type(inner).__name__} inside the {kind} is measured, and nothing around it",
        )
    return None, ""


def _adapters(model: object) -> list[str]:
    """A sentence where layers of a model have adapters in them."""
    parts = model.modules() if isinstance(model, PreTrainedModel) else ()
    layers = [
        part for part in parts if hasattr(part, "base_layer") and hasattr(part, "active_adapters")
    ]
    if not layers:
        return []
    off = all(getattr(layer, "disable_adapters", False) for layer in layers)
    how = "switched off, and it is measured without them" if off else "and it is measured with them"
    return [f"{len(layers)} layers of the model have adapters in them, {how}"]

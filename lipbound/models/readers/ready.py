"""Inputs that are ready for the model: named tensors, in memory or in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lipbound.errors import InputsError


def is_ready(data: Any) -> bool:
    """Whether it is a mapping, or names a .safetensors file."""
    return isinstance(data, Mapping) or (isinstance(data, str | Path) and str(data).endswith(".safetensors"))


def ready_inputs(data: Mapping[str, Any] | str | Path) -> tuple[dict[str, Tensor], str]:
    """The tensors, each (samples, ...), and a description; raises InputsError where they are no such tensors."""
    if isinstance(data, Mapping):
        tensors, description = dict(data), "ready model inputs"
    else:
        path = Path(data)
        if not path.is_file():
            raise InputsError(f"there is no file {path}")
        try:
            tensors, description = load_file(path), path.name
        except SafetensorError as error:
            raise InputsError(f"{path} is not a readable safetensors file: {error}") from error
    wrong = {name: type(t).__name__ for name, t in tensors.items() if not isinstance(t, Tensor) or t.ndim < 2 or not len(t)}
    if not tensors or wrong:
        raise InputsError(f"ready inputs must be named tensors of (samples, ...) with at least one sample; {wrong or 'none'} given")
    lengths = {name: len(t) for name, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise InputsError(f"ready inputs disagree about the number of samples: {lengths}")
    return tensors, description

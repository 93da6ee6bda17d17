"""One layer at one batch of inputs, as tensors; knows no Jacobian and no model."""

from typing import Any

from lipbound.moved import from_folder


def __getattr__(name: str) -> Any:
    """Names of the module that had this path before."""
    return from_folder(__name__, name)

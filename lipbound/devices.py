"""Where to compute."""

import torch

from lipbound.errors import LipboundError


def resolve(device: str) -> str:
    """A device of this machine; "auto" is CUDA where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LipboundError(f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); try 'cpu' or 'auto'") from error
    return device


def name_of(device: str) -> str:
    """A device as provenance names it."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device

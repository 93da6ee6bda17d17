"""Where to compute."""

import os
from pathlib import Path

import torch

from lipbound.errors import LipboundError


def resolve_device(device: str) -> str:
    """A device of this machine; "auto" is CUDA where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LipboundError(f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); try 'cpu' or 'auto'") from error
    return device


def device_name(device: str) -> str:
    """A device as provenance names it."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device


LIMITS = (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),)
"""Where a container's limit and use are found (cgroup v2)."""


def available(device: torch.device) -> float:
    """Bytes that can be allocated on a device without swapping, as the system estimates it."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    table = Path("/proc/meminfo")
    if table.exists():
        lines = dict(line.split(":", 1) for line in table.read_text().splitlines())
        free = float(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else free
    for limit, use in LIMITS:
        if Path(limit).exists() and (most := Path(limit).read_text().strip()).isdigit():
            free = min(free, float(most) - float(Path(use).read_text()))
    return free


def require(needed: float, device: torch.device, what: str, instead: str) -> None:
    """Raise LipboundError when ``needed`` bytes are more than nine tenths of what is free: ``what`` needs them, and ``instead`` may do."""
    free = available(device)
    if needed > 0.9 * free:
        raise LipboundError(f"{what}, about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB of memory are free; {instead}")

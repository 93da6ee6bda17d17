"""What a run will compute, decided before anything is computed: bounds that apply, blocks of samples, memory."""

import re
from pathlib import Path

import torch

from lipbound.attention.variants import VARIANTS
from lipbound.bounds.registry import get
from lipbound.bounds.registry import names as bound_names
from lipbound.devices import available
from lipbound.errors import LipboundError
from lipbound.runs.measure import LayerInfo

BLOCK_BYTES = 1.5e9
"""Working memory on a CPU, unless asked otherwise."""


BYTES_PER_SCORE = 80
"""Bytes of working memory per entry of the attention matrices (P and its temporaries, some in float64)."""


UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def about(names: list[str], variants: frozenset[str], *, everything: bool) -> tuple[list[str], dict[str, str]]:
    """The bounds that say something about layers with these variants, and what the others do not cover.

    Raises:
        LipboundError: when one of the others was asked for by name.
    """
    silent = {}
    for name in names:
        if other := [VARIANTS[v] for v in VARIANTS if v in variants - get(name).covers]:
            silent[name] = "does not cover " + " and ".join(other)
    if silent and not everything:
        name, why = next(iter(silent.items()))
        fitting = [n for n in bound_names() if variants <= get(n).covers]
        raise LipboundError(f"bound {name!r} {why}, which this model has; leave it out, or take bounds='default' or some of {', '.join(fitting)}")
    return [name for name in names if name not in silent], silent


def absolute(name: str | Path) -> str:
    """A path that is there in full, so that it leads to the same files from elsewhere; any other name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else str(name)


def block_size(captured: list[LayerInfo], count: int, budget: float, parts: int) -> int:
    """How many samples to take at a time: as many as memory allows, and few enough to make so many parts."""
    scores = max(layer.heads * layer.tokens**2 for layer in captured)
    return max(1, min(int(budget // (BYTES_PER_SCORE * scores)), -(-count // parts)))


def memory_bytes(memory: str | float, device: str) -> float:
    """Bytes that ``memory`` means."""
    if memory == "auto":
        return min(BLOCK_BYTES, available(torch.device("cpu")) / 4) if device == "cpu" else available(torch.device(device)) / 4
    if isinstance(memory, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([kMGT]?)i?B?", memory.strip())
        memory = float(match[1]) * UNITS[match[2]] if match else -1.0
    if not memory > 0:
        raise LipboundError(f"memory is {memory!r}; give bytes, a size such as '4GB', or 'auto'")
    return memory

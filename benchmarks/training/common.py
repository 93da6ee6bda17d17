"""What both training scripts share: the schedule, and writing a small float16 checkpoint with its
card."""

import math
from pathlib import Path

import torch
from transformers import PreTrainedModel


def one_cycle(step: int, total: int, warmup: float = 0.05) -> float:
    """Learning-rate factor at ``step``: linear warm-up over the first ``warmup`` share of steps,
    then a half cosine to zero."""
    start = max(1, int(warmup * total))
    if step < start:
        return (step + 1) / start
    return 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, total - start)))


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups in which only matrices decay; biases and normalisation weights do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def save(model: PreTrainedModel, folder: Path, card: str) -> None:
    """Write ``model`` as float16 safetensors and ``card`` as README.md into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().half().save_pretrained(folder)
    (folder / "README.md").write_text(card)
    size = (folder / "model.safetensors").stat().st_size
    print(
        f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {size / 1e6:.2f} MB"
    )

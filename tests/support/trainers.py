"""Small models in a Trainer of transformers: one step of gradient descent on four padded texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from support.models import GPT2, build

from lipbound.regularizers import ExactNorm, JaSMin, SoundPenalty, Specformer
from lipbound.regularizers.trainer import PenaltyMixin

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
"""Two texts of `train`."""
RATE = 0.5
LENGTHS = (9, 6, 4, 9)
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


PENALTIES: dict[str, Callable[[], Any]] = {
    "max": JaSMin,
    "mean": lambda: JaSMin(3, "mean"),
    "specformer": lambda: Specformer(0.1, 0.2, 0.3, steps=300),
    "sound": SoundPenalty,
    "exact": lambda: ExactNorm(tol=1e-6),
}


class SmallTrainer(PenaltyMixin, tf.Trainer):
    """A Trainer with a penalty."""


def decoder(**options: Any) -> Any:
    """A small GPT-2 that predicts tokens, in training mode."""
    config = tf.GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None, **options)
    return build(lambda: tf.GPT2LMHeadModel(config)).train()


def train(model: Any, steps: int, before: Callable[[int], Any] = lambda step: None) -> None:
    """Train by a plain loop, with dropout where the model has it; ``before`` is called every step.

    By SGD: Adam would make steps of rounding, since biases of keys have no gradient.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        before(step)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def texts(label: bool = False) -> list[dict[str, Any]]:
    """Four texts of `LENGTHS`, padded, with their next tokens or one label each."""
    ids = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
    masks = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    return [
        {
            "input_ids": i,
            "attention_mask": m.long(),
            "labels": torch.tensor(k % 2) if label else i.masked_fill(~m, -100),
        }
        for k, (i, m) in enumerate(zip(ids, masks, strict=True))
    ]


def trainer_of(
    model: Any, folder: Path | str, data: Any, kind: type = SmallTrainer, **options: Any
) -> Any:
    """A Trainer of plain gradient descent."""
    usual = {"max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant"}
    usual |= {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    usual |= {"logging_steps": 1, "max_grad_norm": 1e9}
    arguments = tf.TrainingArguments(output_dir=str(folder), **usual | options)
    return kind(model=model, args=arguments, train_dataset=data)

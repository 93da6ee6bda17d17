"""What `lipbound.Monitor` costs, and whether a Trainer and a plain loop give the same numbers.

A decoder of the shape of GPT-2 small is trained on the bytes of a text file, by both. Writes
monitor.json, and figures and runs to a folder.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lipbound as lb
from lipbound.schema import STATISTICS

TOKENS = 128
RATE = 3e-4


class InOrder(Trainer):
    """Takes the rows one after the other, as the plain loop does."""

    def _get_train_sampler(self, *args: Any) -> Sampler:
        return SequentialSampler(self.train_dataset)


def decoder() -> GPT2LMHeadModel:
    """The shape of GPT-2 small, with its vocabulary, without dropout."""
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**none)).train()
    model.accepts_loss_kwargs = False  # the loss is the mean over predicted tokens
    return model


def optimizer_of(model: GPT2LMHeadModel) -> torch.optim.Optimizer:
    """AdamW as both train with it."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)


def update(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """One step of a plain loop; its loss."""
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def both(rows: Tensor, probe: Tensor, steps: int, every: int, folder: Path) -> dict[str, Any]:
    """Train by a plain loop and by a Trainer; the differences of what was monitored."""
    model = decoder()
    optimizer = optimizer_of(model)
    loop = lb.Monitor(model, probe, every=every, out=folder / "loop.zarr")
    losses = []
    for step in range(steps):
        loop.step(step)
        losses.append(update(model, optimizer, rows[step : step + 1]))
    loop.step(steps)
    model = decoder()
    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=1,
        max_grad_norm=0,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
    )
    data: Any = [{"input_ids": row, "labels": row} for row in rows[:steps]]
    given: Any = (optimizer_of(model), None)
    trainer = InOrder(model, arguments, train_dataset=data, optimizers=given)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(given[0], factor=1.0)
    monitor = lb.Monitor(model, probe, every=every, out=folder / "trainer.zarr").attach(trainer)
    trainer.train()
    apart = {}
    for name in ("exact", *STATISTICS):
        mine, theirs = loop.run[name].values, monitor.run[name].values
        apart[name] = float((np.abs(mine - theirs) / np.abs(mine).max()).max())
        lb.plots.over_steps(loop.run, name, folder / f"{name}.png")
    exact, products = loop.run["exact"], loop.run["exact_steps"]
    return {
        "steps": steps,
        "measured": loop.run["step"].values.tolist(),
        "losses": [losses[0], losses[-1]],
        "norms": [[float(e.min()), float(e.max())] for e in (exact[0], exact[-1])],
        "products": float(products.mean()),
        "apart": apart,
    }


def costs(
    rows: Tensor, probe: Tensor, every: int, batches: list[int], repeats: int
) -> list[dict[str, float]]:
    """Medians of interleaved steps of training and measurements.

    In seconds of all processors, which others that use the machine change little.
    """
    model = decoder()
    optimizer, monitor = optimizer_of(model), lb.Monitor(model, probe, every=1)
    monitor.step(0)  # which reads off what later ones need not look for
    found = []
    for batch in batches:
        times: dict[str, list[float]] = {"step": [], "measurement": []}
        for repeat in range(repeats + 1):
            start = time.process_time()
            update(model, optimizer, rows[repeat : repeat + batch])
            middle = time.process_time()
            monitor.step(len(found) * (repeats + 1) + repeat + 1)
            if repeat:
                times["step"].append(middle - start)
                times["measurement"].append(time.process_time() - middle)
        step, measurement = (statistics.median(some) for some in times.values())
        share = measurement / (every * step)
        found.append({"batch": batch, "step": step, "measurement": measurement, "share": share})
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("monitored"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    letters = torch.tensor([*given.text.read_bytes()])
    rows = letters[: len(letters) // TOKENS * TOKENS].view(-1, TOKENS)
    probe, rows = rows[:1], rows[1:]
    given.out.mkdir(parents=True, exist_ok=True)
    report = {"torch": torch.__version__, "threads": given.threads, "every": given.every}
    report["costs"] = costs(rows, probe, given.every, given.batches, given.repeats)
    report["both"] = both(rows, probe, given.steps, given.every, given.out)
    print(json.dumps(report["both"], indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Which number warns first? Small decoders trained until they break down, and what is watched in
them beside the loss.

    python benchmarks/early_warning.py --text alice.txt --data ag_news --out early_warning.json

Architectures: a Llama of 4 layers x 4 heads (plain), the same with normalised queries and keys (a
Qwen 3, "q/k-norm"), and the plain one whose queries and keys are scaled down at every look until no
logit exceeds 20 ("QK-clip"). Bytes as tokens, AdamW without clipping of gradients, three seeds.
The learning rate is 1e-3 throughout, or from step 150 on doubles every 20 or every 10 steps until
the loss breaks away. ``--data`` is a hub dataset with a column text, or a .csv of AG_NEWS without a
line of names.

The rules were fixed before these runs:

- A *spike* is the first step from 150 on at which the training loss exceeds the lowest smoothed
  loss so far (decay 0.9) by half a nat, or is not finite.
- A number *warns* at the first look, from step 150 on, at which it has left the range between half
  and twice its median over the looks of the 40 steps before.
- A warning counts for a spike when it comes at most 60 steps before it, or with it; its *lead* is
  the number of steps between. In runs without a spike every warning is false, and so is one more
  than 60 steps before a spike.

A run ends with its spike; of four that were carried on for 60 steps the loss of all went on rising.

What was counted afterwards: which of two numbers warned first where both did in time, and in how
many runs without a spike a number would have warned from step 100 on.

A pilot of one seed chose the learning rates by losses alone (constant ones up to 0.05 made training
worse, but broke none of these models), and step 150: at step 60 numbers still grow in calm runs.
Numbers are of a held-out sequence, and the largest of all heads (entropy: the smallest). Half an
hour on a core; results are kept as they come, and what is there is not computed again.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import load_dataset
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

import lipbound as lb
from lipbound.attention.conditioning import conditioning
from lipbound.attention.layer import Attention
from lipbound.runs.head_extras import of_heads

KINDS = ("plain", "q/k-norm", "QK-clip")
DOUBLING = (0, 20, 10)
"""Steps in which the learning rate doubles; 0: never."""
SEEDS = (0, 1, 2)
STEPS, BATCH, LENGTH, PROBE, EACH = 400, 6, 96, 64, 5
RATE, TAU = 1e-3, 20.0
START, BEFORE, AHEAD = 150, 40, 60
SOONER = 100
"""A step before `START`, from which runs without a spike are looked at once more."""
PAIRS = (("exact", "kappa_softmax"), ("entropy", "kappa_softmax"), ("entropy", "exact"))
"""Numbers of which it is told which one warned first."""
NUMBERS = ("loss", "exact", "kappa_softmax", "largest_logit", "entropy", "row_norm", "wqk_norm")
MOST = {name: min if name == "entropy" else max for name in NUMBERS}


def texts(args: argparse.Namespace) -> dict[str, Tensor]:
    """Bytes of both texts."""
    if args.data.endswith(".csv"):
        news = pd.read_csv(args.data, header=None)[2].tolist()
    else:
        news = load_dataset(args.data, split="test")["text"]
    found = {"alice": args.text.read_text(), "ag_news": "\n".join(news)[:400_000]}
    return {name: torch.tensor(list(text.encode())) for name, text in found.items()}


def model_of(kind: str) -> PreTrainedModel:
    """A decoder of bytes."""
    config = Qwen3Config if kind == "q/k-norm" else LlamaConfig
    return AutoModelForCausalLM.from_config(
        config(
            vocab_size=256,
            max_position_embeddings=LENGTH,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            intermediate_size=336,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


@torch.no_grad()
def watched(layers: list[Attention]) -> dict[str, float]:
    """Every number, the largest over heads (entropy: the smallest)."""
    found: dict[str, list[float]] = {name: [] for name in NUMBERS[1:]}
    for att in layers:
        values = {
            **att.statistics(),
            **of_heads(att, ("row_norm", "wqk_norm")),
            "exact": lb.spectral_norm(att, tol=1e-2).lower,
            "kappa_softmax": conditioning(att, "kappa_softmax"),
        }
        for name, every in found.items():
            every += values[name][0].tolist()
    return {name: float(f"{MOST[name](values):.5g}") for name, values in found.items()}


@torch.no_grad()
def clip(model: PreTrainedModel, layers: list[Attention]) -> None:
    """Scale queries and keys of heads down until no logit exceeds `TAU`."""
    for layer, att in zip(model.model.layers, layers, strict=True):
        largest = att.statistics()["largest_logit"][0]
        factor = (TAU / largest.clamp_min(TAU)).sqrt().float().repeat_interleave(att.d)[:, None]
        layer.self_attn.q_proj.weight.mul_(factor)
        layer.self_attn.k_proj.weight.mul_(factor)


def train(kind: str, doubling: int, seed: int, ids: Tensor) -> dict[str, list]:
    """One run: the loss of every step up to a spike, and what was watched in every `EACH`-th."""
    torch.manual_seed(seed)
    model, held = model_of(kind), len(ids) * 9 // 10
    probe = {"input_ids": ids[None, held : held + PROBE]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses: list[float] = []
    looks: list[dict] = []
    for step in range(STEPS):
        if step % EACH == 0:
            layers = lb.capture(model.eval(), probe)
            looks.append({"step": step} | watched(layers))
            if kind == "QK-clip":
                clip(model, layers)
            model.train()
        if doubling:
            optimizer.param_groups[0]["lr"] = RATE * 2 ** (max(0, step - START) / doubling)
        start = torch.randint(held - LENGTH, (BATCH, 1))
        inputs = ids[start + torch.arange(LENGTH)]
        loss = model(input_ids=inputs, labels=inputs).loss
        losses.append(round(loss.item(), 4))
        if spike(losses) is not None:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"losses": losses, "looks": looks}


def spike(losses: list[float]) -> int | None:
    """The step of the first spike, or None."""
    smooth, lowest = losses[0], losses[0]
    for step, loss in enumerate(losses):
        if step >= START and not loss <= lowest + 0.5:
            return step
        smooth = 0.9 * smooth + 0.1 * loss
        lowest = min(lowest, smooth)
    return None


def series(run: dict, name: str) -> list[tuple[int, float]]:
    """Steps, and a number over all heads there."""
    if name == "loss":
        return list(enumerate(run["losses"]))[::EACH]
    return [(look["step"], look[name]) for look in run["looks"]]


def warning(values: list[tuple[int, float]], start: int = START) -> int | None:
    """The first step, of those from ``start`` on, at which a number leaves its range."""
    for step, value in values:
        before = [v for s, v in values if step - BEFORE <= s < step]
        if step >= start and before:
            middle = statistics.median(before)
            if not middle / 2 <= value <= 2 * middle:
                return step
    return None


def judged(run: dict) -> dict[str, Any]:
    """The spike of a run, and the first warning of every number up to it."""
    at = spike(run["losses"])
    found = {}
    for name in NUMBERS:
        values = [(s, v) for s, v in series(run, name) if at is None or s <= at]
        found[name] = warning(values)
    return {"spike": at, "warnings": found}


def summary(runs: dict[str, dict]) -> dict[str, dict]:
    """For each architecture and all together: how often each number warned, and when."""
    found = {}
    for kind in (*KINDS, "all"):
        some = [r for key, r in runs.items() if kind in ("all", key.split(", ")[1])]
        every = [judged(r) for r in some]
        spikes = [j for j in every if j["spike"] is not None]
        rows = {}
        for name in NUMBERS:
            leads = [
                j["spike"] - j["warnings"][name] for j in spikes if j["warnings"][name] is not None
            ]
            in_time = [lead for lead in leads if lead <= AHEAD]
            calm = [r for r, j in zip(some, every, strict=True) if j["spike"] is None]
            false, sooner = (
                sum(warning(series(run, name), start) is not None for run in calm)
                for start in (START, SOONER)
            )
            rows[name] = {
                "warned": len(in_time),
                "median lead": statistics.median(in_time) if in_time else None,
                "too early": len(leads) - len(in_time),
                "false": false,
                f"false from step {SOONER} on": sooner,
            }
        found[kind] = {"spikes": len(spikes), "calm": len(every) - len(spikes), "numbers": rows}
        found[kind]["first"] = {" and ".join(pair): first(spikes, *pair) for pair in PAIRS}
    return found


def first(spikes: list[dict[str, Any]], one: str, other: str) -> list[int]:
    """How often one number warned before another, with it, and after it, both of them in time."""
    counts = [0, 0, 0]
    for judgement in spikes:
        steps = [judgement["warnings"][name] for name in (one, other)]
        if all(step is not None and step >= judgement["spike"] - AHEAD for step in steps):
            counts[1 + (steps[0] > steps[1]) - (steps[0] < steps[1])] += 1
    return counts


def cases(ids: dict[str, Tensor]) -> Iterator[tuple[str, str, int, int]]:
    """Text, architecture, doubling and seed of every run, those of one seed together."""
    for seed, text, doubling, kind in product(SEEDS, ids, DOUBLING, KINDS):
        yield text, kind, doubling, seed


def main() -> None:
    """Train what is missing, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--data", default="ag_news")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    ids = texts(args)
    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else {}
    for text, kind, doubling, seed in cases(ids):
        key = f"{text}, {kind}, {doubling}, {seed}"
        if key not in runs:
            runs[key] = train(kind, doubling, seed, ids[text])
            args.out.write_text(json.dumps({"runs": runs, "summary": summary(runs)}))
            print(key, judged(runs[key]), flush=True)
    print(json.dumps(summary(runs), indent=1))


if __name__ == "__main__":
    main()

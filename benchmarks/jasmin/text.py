"""The text case: all-MiniLM-L6-v2 fine-tuned to sort news with JaSMin, accuracy and local constants
against the strength of the penalty.

    python benchmarks/jasmin/text.py --data ag_news --out jasmin-text

``--data`` is a hub dataset with columns text and label, or a .csv of AG_NEWS without a line of
names (class, title, text). One epoch over 1,600 texts of at most 64 tokens, AdamW, three seeds for
every strength; a quarter of an hour on two CPU cores. Results are kept as they come.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from datasets import load_dataset
from torch import Tensor, nn
from transformers import AutoTokenizer, BertForSequenceClassification

import lipbound as lb
from lipbound.bounds.factors import norm_m
from lipbound.models.loading import load_checkpoint
from lipbound.models.training import attention_probabilities
from lipbound.regularizers.penalties import JaSMin

STRENGTHS = (0.0, 1e-4, 1e-3, 1e-2)
SEEDS = (0, 1, 2)
TRAIN, TEST, NORMS = 1600, 600, 32


def texts(data: str) -> tuple[list[str], Tensor]:
    """Shuffled texts and their classes, from 0."""
    if data.endswith(".csv"):
        table = pd.read_csv(data, header=None)
        words, labels = table[2].tolist(), torch.tensor(table[0].values) - 1
    else:
        rows = load_dataset(data, split="test")
        words, labels = rows["text"], torch.tensor(rows["label"])
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))[
        : TRAIN + TEST
    ].tolist()
    return [words[i] for i in order], labels[order]


def run(
    strength: float, seed: int, batch: dict[str, Tensor], labels: Tensor, folder: str
) -> dict[str, float]:
    """One fine-tuning, measured."""
    torch.manual_seed(seed)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=4).float().train()
    model.set_attn_implementation("sdpa")
    penalty = JaSMin(k=0, reduce="mean")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for index in torch.randperm(TRAIN).split(32):
        part = {name: t[index] for name, t in batch.items()}
        if strength:
            with attention_probabilities(model) as attentions:
                loss = nn.functional.cross_entropy(model(**part).logits, labels[index])
            loss = loss + strength * penalty(attentions, part["attention_mask"])
        else:
            loss = nn.functional.cross_entropy(model(**part).logits, labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for index in torch.arange(TRAIN, TRAIN + TEST).split(100):
            right += int(
                (
                    model(**{name: t[index] for name, t in batch.items()}).logits.argmax(-1)
                    == labels[index]
                ).sum()
            )
    few = {name: t[TRAIN : TRAIN + NORMS] for name, t in batch.items()}
    layers = lb.capture(model, few)
    heads = torch.stack([lb.spectral_norm(att, tol=1e-3).lower for att in layers])
    return {
        "accuracy": 100 * right / TEST,
        "network_constant": float(lb.network_norm(model, few).lower.median()),
        "head_constant": float(heads.log().mean().exp()),
        "softmax_norm": float(torch.stack([norm_m(att) for att in layers]).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="ag_news")
    parser.add_argument("--out", type=Path, default=Path("jasmin-text"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    store = args.out / "results.jsonl"
    rows = [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []
    words, labels = texts(args.data)
    folder = str(load_checkpoint("builtin:minilm").source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = dict(
        tokenizer(words, truncation=True, max_length=64, padding=True, return_tensors="pt")
    )
    for seed in SEEDS:
        for strength in STRENGTHS:
            if any(row["seed"] == seed and row["strength"] == strength for row in rows):
                continue
            row = {"strength": strength, "seed": seed} | run(strength, seed, batch, labels, folder)
            rows.append(row)
            with store.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
    columns = ("accuracy", "network_constant", "head_constant", "softmax_norm")
    lines = ["| strength | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for strength in STRENGTHS:
        mine = [row for row in rows if row["strength"] == strength]
        cells = [
            f"{np.mean([r[c] for r in mine]):.3g} ± {np.std([r[c] for r in mine], ddof=1):.2g}"
            for c in columns
        ]
        lines.append(f"| {strength:g} | " + " | ".join(cells) + " |")
    (args.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

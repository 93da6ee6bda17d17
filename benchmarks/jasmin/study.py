"""What penalties on attention do to a vision transformer: accuracy, accuracy under attack, and
local constants of heads and of the whole network.

    python benchmarks/jasmin/study.py benchmarks/jasmin/small.yaml --data uoft-cs/cifar10 --out
    jasmin

Fine-tunes a checkpoint once for every method and seed of the configuration, with the recipe of
Yudin et al. 2025 (SGD with momentum 0.9, weight decay 1e-4, cosine schedule, flips, CutMix and
MixUp), and measures each result. Results are kept as they come (OUT/results.jsonl); what is there
is not computed again. Writes a table with mean and standard deviation over seeds, the distribution
of the network's local constant (yudin-4, Figure 4 of the paper) and attention statistics by layer
and head (yudin-5, Figure 5), which figures/yudin2025.py draws. ``--keep`` writes every network to
OUT/networks, as float16 checkpoints that ``lipbound compare`` reads.

search.yaml looks for strengths, small.yaml compares methods at those found; both are for two CPU
cores. cifar10.yaml and cifar100.yaml have the paper's grid for a ViT-B. ``--only METHOD`` and
``--seed S`` do a part of a configuration, so that every core or GPU can have its own; a last call
without them draws and tabulates everything.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
import yaml
from robustness import ATTACKS, robust_accuracy
from torch import Tensor, nn
from transformers import ViTForImageClassification, ViTImageProcessor

from lipbound.analysis.network import network_norm
from lipbound.attention import softmax
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.capture.capture import capture
from lipbound.models.loading import load_checkpoint
from lipbound.models.training import attention_layers, attention_probabilities
from lipbound.regularizers import ExactNorm, JaSMin, SoundPenalty, Specformer

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parents[2] / "figures"))
import yudin2025  # noqa: F401  (importing a paper's file registers its figures)
from common import save
from jasmin_study import IMAGES_OF_HEADS, cells, studied
from paper_figure import FIGURES
from train_vit import pixels

MEAN = STD = (0.5, 0.5, 0.5)
CARD = """---
license: mit
library_name: transformers
---
# A small ViT on CIFAR-10: {method}

`{start}` without biases of queries, keys and values, fine-tuned by `benchmarks/jasmin/study.py` with the method "{method}": {steps} steps of
{batch} images, SGD with momentum 0.9 from learning rate {lr}, cosine schedule, flips, CutMix and MixUp, seed {seed}.

Measured before rounding to float16: {clean:.1f} % of the first {count} test images right; {pgd:.1f} % of the first {attacks} under projected gradient
descent (4 steps, 2/255); median local Lipschitz constant of the network, embeddings to logits, {constant:.2f} over the first {norms}.
"""  # noqa: E501


def mixed(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A batch with flips, then MixUp or CutMix, by halves of the time: images, and targets (n,
    classes) in their proportions."""
    flip = torch.rand(len(images)) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    order = torch.randperm(len(images))
    share = float(torch.distributions.Beta(1.0, 1.0).sample())
    if torch.rand(()) < 0.5:
        images = share * images + (1 - share) * images[order]
    else:
        height, width = images.shape[-2:]
        h, w = (round(size * (1 - share) ** 0.5) for size in (height, width))
        top, left = int(torch.randint(height - h + 1, ())), int(torch.randint(width - w + 1, ()))
        images = images.clone()
        images[..., top : top + h, left : left + w] = images[order][
            ..., top : top + h, left : left + w
        ]
        share = 1 - h * w / (height * width)
    return images, share * targets + (1 - share) * targets[order]


def penalty(
    method: dict[str, Any],
) -> Callable[[ViTForImageClassification, list[Tensor], Tensor], Tensor]:
    """What a method of the configuration adds to the loss: (model, attentions, images)
    -> scalar."""
    kind = method.get("penalty")
    if kind is None:
        return lambda model, attentions, x: x.new_zeros(())
    if kind == "specformer":
        specformer = Specformer(*method["strengths"])
        return lambda model, attentions, x: specformer(model)
    if kind == "jasmin":
        jasmin = JaSMin(method["k"], method["reduce"])
        return lambda model, attentions, x: method["strength"] * jasmin(attentions)
    on_heads = ExactNorm() if kind == "exact" else SoundPenalty(method["bound"])

    def on_a_few(model: ViTForImageClassification, attentions: list[Tensor], x: Tensor) -> Tensor:
        with attention_layers(model) as layers:
            model(pixel_values=x[: method["images"]])
        return method["strength"] * on_heads(layers).float()

    return on_a_few


def fine_tune(
    config: dict[str, Any],
    method: dict[str, Any],
    seed: int,
    images: Tensor,
    labels: Tensor,
    device: str,
) -> tuple[nn.Module, float]:
    """The checkpoint after its epochs, and seconds per step."""
    torch.manual_seed(seed)
    folder = load_checkpoint(config["start"]).source
    model = ViTForImageClassification.from_pretrained(
        folder,
        ignore_mismatched_sizes=True,
        num_labels=int(labels.max()) + 1,
        **config.get("model", {}),
    )
    model = model.float().to(device).train()
    model.set_attn_implementation("sdpa")
    extra = penalty(method)
    epochs, batch, per_epoch = (
        config["epochs"],
        config["batch"],
        min(config.get("images", len(labels)), len(labels)),
    )
    steps = epochs * (per_epoch // batch)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=1e-4
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    began = time.perf_counter()
    for _ in range(epochs):
        for index in torch.randperm(len(labels))[: per_epoch // batch * batch].split(batch):
            x = images[index].float().div(255).sub(MEAN[0]).div(STD[0]).to(device)
            x, targets = mixed(
                x, nn.functional.one_hot(labels[index], model.config.num_labels).float().to(device)
            )
            with (
                torch.autocast(device, torch.bfloat16, enabled=config.get("bfloat16", False)),
                attention_probabilities(model) as attentions,
            ):
                logits = model(pixel_values=x).logits
            loss = nn.functional.cross_entropy(logits.float(), targets) + extra(
                model, attentions, x
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval(), (time.perf_counter() - began) / max(1, steps)


def measure(
    config: dict[str, Any], model: nn.Module, images: Tensor, labels: Tensor, device: str
) -> dict[str, Any]:
    """Everything about one network."""
    count = config["evaluate"]
    x, y = images[: count["attacks"]].float().div(255).to(device), labels[: count["attacks"]]
    cheap = [name for name in ATTACKS if not name.startswith("autoattack")]
    found: dict[str, Any] = robust_accuracy(model, x, y, mean=MEAN, std=STD, attacks=cheap)
    few = count["autoattack"]
    found |= robust_accuracy(
        model,
        x[:few],
        y[:few],
        mean=MEAN,
        std=STD,
        attacks=[name for name in ATTACKS if name not in cheap],
    )
    right = 0
    with torch.no_grad():
        for part, wanted in zip(
            images[: count["clean"]].split(500), labels[: count["clean"]].split(500), strict=True
        ):
            right += int(
                (
                    model(pixel_values=(part.float().div(255).to(device) - 0.5) / 0.5)
                    .logits.argmax(-1)
                    .cpu()
                    == wanted
                ).sum()
            )
    found["clean"] = 100 * right / min(count["clean"], len(labels))
    inputs = {"pixel_values": (images[: count["norms"]].float().div(255).to(device) - 0.5) / 0.5}
    found["network_norm"] = network_norm(model, inputs).lower.tolist()
    few = {"pixel_values": inputs["pixel_values"][:IMAGES_OF_HEADS]}
    with torch.no_grad(), attention_probabilities(model) as attentions:
        model(**few)
    found["head_norm"] = [
        spectral_norm(att, tol=1e-3).lower.log().mean(0).exp().tolist()
        for att in capture(model, few)
    ]
    found["softmax_norm"] = [
        softmax.jacobian_norm(p).upper.mean((0, 2)).tolist() for p in attentions
    ]
    found["largest_probability"] = [p.double().amax(-1).mean((0, 2)).tolist() for p in attentions]
    return found


def table(ds: xr.Dataset) -> str:
    """Mean and standard deviation over seeds, one line per method, as Markdown."""
    found = cells(ds)
    columns = ["method", *found]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in found.itertuples(name=None)]
    return "\n".join(lines)


def results(store: Path) -> list[dict[str, Any]]:
    """What has been measured so far."""
    return [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []


def card(config: dict[str, Any], method: dict[str, Any], seed: int, row: dict[str, Any]) -> str:
    """The model card of a kept network."""
    steps = config["epochs"] * (config.get("images", 50_000) // config["batch"])
    return CARD.format(
        start=config["start"],
        method=method["name"],
        steps=steps,
        batch=config["batch"],
        lr=config["lr"],
        seed=seed,
        clean=row["clean"],
        count=config["evaluate"]["clean"],
        pgd=row["pgd-2"],
        attacks=config["evaluate"]["attacks"],
        constant=np.median(row["network_norm"]),
        norms=config["evaluate"]["norms"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument(
        "--data",
        default="uoft-cs/cifar10",
        help="hub dataset id, or a folder with train.parquet and test.parquet",
    )
    parser.add_argument("--out", type=Path, default=Path("jasmin"))
    parser.add_argument("--only", help="one method of the configuration")
    parser.add_argument("--seed", type=int, help="one seed of the configuration")
    parser.add_argument("--keep", action="store_true", help="write the networks to OUT/networks")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    config = yaml.safe_load(args.config.read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    store = args.out / "results.jsonl"
    train, test = pixels(args.data, "train"), pixels(args.data, "test")
    for seed in config["seeds"]:
        for method in config["methods"]:
            name = method["name"]
            if (args.only and name != args.only) or (args.seed is not None and seed != args.seed):
                continue
            if any(row["method"] == name and row["seed"] == seed for row in results(store)):
                continue
            model, seconds = fine_tune(config, method, seed, *train, device)
            row = {"method": name, "seed": seed, "seconds_per_step": seconds} | measure(
                config, model, *test, device
            )
            if args.keep:
                folder = args.out / "networks" / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
                save(model, folder, card(config, method, seed, row))
                ViTImageProcessor(
                    size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3
                ).save_pretrained(folder)
            with store.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"seed {seed} {name}: "
                + ", ".join(f"{a} {row[a]:.1f}" for a in ATTACKS)
                + f", constant {np.median(row['network_norm']):.2f}",
                flush=True,
            )
    ds = studied(store, config, args.data)
    (args.out / "table.md").write_text(table(ds) + "\n")
    for name in ("yudin-4", "yudin-5"):
        FIGURES[name].render(ds, args.out)
    print(table(ds))


if __name__ == "__main__":
    main()

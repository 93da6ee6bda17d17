"""Train ``builtin:vit``: a small vision transformer on CIFAR-10 at its own resolution, 32 x 32 in
patches of 4.

    python benchmarks/training/train_vit.py --data uoft-cs/cifar10 --out lipbound/models/builtin/vit

``--data`` is a hub dataset id, or a folder with train.parquet and test.parquet of the same columns.
About an hour on one CPU core in bfloat16. The test accuracy of the float16 checkpoint goes into the
model card.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from common import decay_groups, one_cycle, save
from datasets import load_dataset
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

LABELS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CARD = """---
license: mit
library_name: transformers
---
# A small ViT, trained on CIFAR-10

ViT architecture, {layers} layers x {heads} heads, width {width}, images of 32 x 32 pixels in patches of 4 (65 tokens);
trained from scratch by `benchmarks/training/train_vit.py` for {epochs} epochs (AdamW, batch {batch}, random crops and flips, label
smoothing 0.1). CIFAR-10 test accuracy of these float16 weights, computed in float32: {accuracy:.2f} %.

It is a real, trained image classifier that fits in a Python package, there to try lipbound on; larger ones do far better.
"""  # noqa: E501


def pixels(data: str, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 3, 32, 32) in uint8 and labels (n,) of one split."""
    files = Path(data) / f"{split}.parquet"
    rows = (
        load_dataset("parquet", data_files=str(files), split="train")
        if files.exists()
        else load_dataset(data, split=split)
    )
    image = "image" if "image" in rows.column_names else "img"
    array = np.stack([np.asarray(picture.convert("RGB")) for picture in rows[image]])
    label = "label" if "label" in rows.column_names else "fine_label"  # as in CIFAR-100
    return torch.from_numpy(array).permute(0, 3, 1, 2).contiguous(), torch.tensor(rows[label])


def augment(batch: torch.Tensor) -> torch.Tensor:
    """Random horizontal flips, and random crops after padding by 4 pixels."""
    n = len(batch)
    flip = torch.rand(n) < 0.5
    batch = torch.where(flip[:, None, None, None], batch.flip(-1), batch)
    padded = torch.nn.functional.pad(batch, (4, 4, 4, 4))
    rows = torch.randint(9, (n, 1)) + torch.arange(32)
    cols = torch.randint(9, (n, 1)) + torch.arange(32)
    return padded[
        torch.arange(n)[:, None, None, None],
        torch.arange(3)[:, None, None],
        rows[:, None, :, None],
        cols[:, None, None],
    ]


def normalise(batch: torch.Tensor) -> torch.Tensor:
    """uint8 pixels to [-1, 1], as the shipped image processor does."""
    return batch.float() / 127.5 - 1


@torch.no_grad()
def accuracy(model: ViTForImageClassification, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Top-1 accuracy in percent."""
    model.eval()
    right = sum(
        int((model(normalise(x)).logits.argmax(-1) == y).sum())
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    model.train()
    return 100 * right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="uoft-cs/cifar10")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    images, labels = pixels(args.data, "train")
    test_images, test_labels = pixels(args.data, "test")
    config = ViTConfig(
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
        image_size=32,
        patch_size=4,
        id2label=dict(enumerate(LABELS)),
        label2id={name: k for k, name in enumerate(LABELS)},
    )
    model = ViTForImageClassification(config).train()
    steps = args.epochs * (len(labels) // args.batch)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.05), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: one_cycle(s, steps))
    began = time.time()
    for epoch in range(args.epochs):
        order = torch.randperm(len(labels))[: len(labels) // args.batch * args.batch]
        total = 0.0
        for index in order.split(args.batch):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(normalise(augment(images[index]))).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float(), labels[index], label_smoothing=0.1
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += float(loss)
        score = accuracy(model, test_images[:2000], test_labels[:2000])
        print(
            f"epoch {epoch + 1} loss {total * args.batch / len(order):.3f} first 2000 test "
            f"images {score:.1f} % {time.time() - began:.0f} s",
            flush=True,
        )

    model = model.half().float()  # the shipped weights are float16: measure those
    values = {name: getattr(args, name) for name in ("layers", "heads", "width", "epochs", "batch")}
    card = CARD.format(**values, accuracy=accuracy(model, test_images, test_labels))
    save(model, args.out, card)
    ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ).save_pretrained(args.out)
    print(card)


if __name__ == "__main__":
    main()

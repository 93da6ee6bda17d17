"""What a penalty adds to a training step of builtin:vit, batch 128: time and peak memory over the
step without it. Writes overhead.json."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import ViTForImageClassification

from lipbound.models.loading import load_checkpoint
from lipbound.models.training import attention_layers, attention_probabilities
from lipbound.regularizers import ExactNorm, JaSMin, SoundPenalty, Specformer
from lipbound.regularizers.penalties import LayerPenalty

REPEATS = 9


def main() -> None:
    """Medians of interleaved steps; memory by torch's profiler, in a step of its own."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = (
        ViTForImageClassification.from_pretrained(load_checkpoint("builtin:vit").source)
        .float()
        .train()
    )
    model.set_attn_implementation("sdpa")
    x, y = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
    specformer = Specformer(1e-4, 1e-4, 1e-4)

    def step(loss_of: Callable[[], Tensor]) -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    def task() -> Tensor:
        return nn.functional.cross_entropy(model(pixel_values=x).logits, y)

    def jasmin(penalty: JaSMin) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            with attention_probabilities(model) as attentions:
                value = task()
            return value + 1e-3 * penalty(attentions)

        return loss

    def on_four(penalty: LayerPenalty) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            value = task()
            with attention_layers(model) as layers:
                model(pixel_values=x[:4])
            return value + 1e-3 * penalty(layers).float()

        return loss

    ways = {
        f"JaSMin k={k}, {reduce}": jasmin(JaSMin(k, reduce))
        for k in (0, 10)
        for reduce in ("max", "mean")
    }
    ways = {
        "none": task,
        **ways,
        "Specformer": lambda: task() + specformer(model),
        "lipbound_block on 4 of 128 images": on_four(SoundPenalty("lipbound_block")),
        "exact norms on 4 of 128 images": on_four(ExactNorm()),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, loss in ways.items():
            start = time.perf_counter()
            step(loss)
            if repeat:
                times[name].append(time.perf_counter() - start)
    report = {}
    for name, loss in ways.items():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            step(loss)
        now = peak = 0
        for event in sorted(
            (e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"),
            key=lambda e: e.start_ns(),
        ):
            now += event.nbytes()
            peak = max(peak, now)
        report[name] = {"seconds": statistics.median(times[name]), "peak_megabytes": peak / 1e6}
    for row in report.values():
        row["time_ratio"] = row["seconds"] / report["none"]["seconds"]
        row["memory_ratio"] = row["peak_megabytes"] / report["none"]["peak_megabytes"]
    for name, row in report.items():
        print(
            f"{name:36} {row['seconds']:.3f} s ({row['time_ratio']:.2f})  "
            f"{row['peak_megabytes']:.0f} MB ({row['memory_ratio']:.2f})",
            flush=True,
        )
    result = {"torch": torch.__version__, "threads": torch.get_num_threads(), "steps": report}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What numbers of weights and of logits cost beside a training step, and of a checkpoint on disk.

python benchmarks/weight_norms.py                  # beside a step of 512 tokens
python benchmarks/weight_norms.py MODEL            # a name or folder: seconds, peak of memory
"""

import functools
import importlib
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lipbound as lb
from lipbound.models.training import largest_logits
from lipbound.runs.monitor import write_steps
from lipbound.schema import OF_WEIGHTS


def seconds(call: Callable[[], object], times: int = 3) -> float:
    """The least processor time of some calls, which other processes disturb least."""
    found = []
    for _ in range(times):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def beside_a_step(layers: int, width: int, heads: int, vocabulary: int) -> None:
    """Shares of a training step of 512 tokens of a decoder like GPT-2."""
    sizes: Any = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=512)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(0, vocabulary, (1, 512))

    def update() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    whole = seconds(update)
    print(f"{layers} layers of width {width}: {whole:.3f} s a step of {batch.numel()} tokens")

    def said(what: str, part: float) -> None:
        print(f"  {what}: {1000 * part:.1f} ms, {100 * part / whole:.2f} % of a step", flush=True)

    probe = batch[:, :64]
    for names in (["wqk_norm", "wqk_stable_rank"], list(OF_WEIGHTS)):
        monitor = lb.Monitor(model, probe, steps=[10**9], extras_every=1, extras=names)
        steps = itertools.count()
        step = functools.partial(lambda at, of: of.step(next(at)), steps, monitor)
        said(f"a step of {', '.join(names)}", seconds(step, 9))
    # as the model has them: heads behind tokens
    q, k = (torch.randn(1, 512, heads, width // heads).transpose(1, 2) for _ in range(2))
    look = functools.partial(largest_logits, q, k, None, None, True)
    said("logits of the batch", layers * seconds(look, 20))
    with tempfile.TemporaryDirectory() as folder:
        path, how = Path(folder) / "run.zarr", {"every": 100, "extras": "wqk_norm"}
        monitor = lb.Monitor(model, probe, extras_every=1, out=path, **how)
        like = monitor.step(0)
        monitor._slices += [monitor._looked(at) for at in range(1, 100)]
        last = like.assign_coords(step=100)
        alone = seconds(lambda: write_steps(path, [last], 1), 2)
        kept = seconds(lambda: monitor._keep(last, 100), 1)
        said("keeping and writing a step of extras", (kept - alone) / 99)
    said("norms of 64 tokens", seconds(lambda: lb.Monitor(model, probe, every=1).step(0), 1))


def of_checkpoint(model: str) -> None:
    """Seconds and memory of ``lb.weight_norms``, imports left out."""
    for package in ("accelerate", "gguf"):  # of GGUF files
        importlib.import_module(package)
    lb.weight_norms("builtin:gpt2")  # other imports, and what is built once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    wall, start = time.perf_counter(), time.process_time()
    ds = lb.weight_norms(model)
    wall, used = time.perf_counter() - wall, time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sizes = f"{ds.sizes['layer']} layers x {ds.sizes['head']} heads"
    print(f"{model}: {sizes}, {wall:.1f} s ({used:.1f} s of processor time)")
    print(f"peak of memory {peak:.0f} MB, {peak - before:.0f} MB above {before:.0f} MB before")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        of_checkpoint(sys.argv[1])
    else:
        beside_a_step(6, 384, 6, 8192)
        beside_a_step(12, 768, 12, 50257)  # GPT-2's own shape

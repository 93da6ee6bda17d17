"""What numbers of weights and of logits cost beside a training step, and of a checkpoint on disk.

python benchmarks/weight_norms.py                  # beside a step of 512 tokens
python benchmarks/weight_norms.py MODEL            # a name or folder: seconds, peak of memory
"""

import resource
import sys
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lipbound as lb
from lipbound.models.head_weights import head_weights
from lipbound.runs.head_extras import of_heads, of_weights


def seconds(call: Callable[[], object], times: int = 3) -> float:
    """The least processor time of some calls, which other processes disturb least."""
    found = []
    for _ in range(times):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def beside_a_step() -> None:
    """Shares of a training step of 512 tokens of a small GPT-2 (6 layers of width 384)."""
    config = GPT2Config(n_layer=6, n_embd=384, n_head=6, vocab_size=8192, n_positions=512)
    model = GPT2LMHeadModel(config).train()
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randint(0, 8192, (1, 512))

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> None:
        with torch.no_grad():
            for _, projections, scale in head_weights(model):
                of_weights(projections, scale)

    layers = lb.capture(model.transformer.eval(), {"input_ids": batch[:, :64]})
    whole = seconds(step)
    for name, call in (
        ("weights alone", weights),
        ("lb.weight_norms", lambda: lb.weight_norms(model.train())),
        (
            "largest logits of captured layers, 64 tokens",
            lambda: [of_heads(att.at(att.x, mask=att.mask), ["largest_logit"]) for att in layers],
        ),
        (
            "capture of 64 tokens",
            lambda: lb.capture(model.transformer, {"input_ids": batch[:, :64]}),
        ),
    ):
        part = seconds(call)
        print(f"{name}: {part:.3f} s, {100 * part / whole:.1f} % of a step of {whole:.3f} s")


def of_checkpoint(model: str) -> None:
    """Seconds and memory of ``lb.weight_norms``, imports left out."""
    lb.weight_norms("builtin:gpt2")  # imports, and what is built once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    wall, start = time.perf_counter(), time.process_time()
    ds = lb.weight_norms(model)
    wall, used = time.perf_counter() - wall, time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sizes = f"{ds.sizes['layer']} layers x {ds.sizes['head']} heads"
    print(f"{model}: {sizes}, {wall:.1f} s ({used:.1f} s of processor time)")
    print(f"peak of memory {peak:.0f} MB, {peak - before:.0f} MB above {before:.0f} MB before")


if __name__ == "__main__":
    of_checkpoint(sys.argv[1]) if len(sys.argv) > 1 else beside_a_step()

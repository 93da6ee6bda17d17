"""Time and peak memory of a checkpoint of 1.2 billion parameters in bfloat16, read layer by layer.
Writes by_layer.json.

The checkpoint has the shape of Llama 3.2 1B and random weights; it takes 2.5 GB in a temporary
folder, which is removed afterwards. Writing and work run in processes of their own (on Linux
ru_maxrss of a process starts at that of its parent, VmHWM at nothing). Peaks count file pages that
are mapped, too; the kernel may drop these at any time.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file

from lipbound.models.loading import load_checkpoint
from lipbound.models.weight_files import stored_tensors
from lipbound.runs.compare import compare

TOKENS = 128
DTYPES = ("float32", "float64")
CONFIG = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}


def write(folder: Path) -> None:
    """The checkpoint, one layer in memory at a time."""
    config = tf.LlamaConfig(**CONFIG, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {f"model.{name}": p.shape for name, p in tf.LlamaModel(config).named_parameters()}
    shards: dict[str, list[str]] = {}
    for name in shapes:
        shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    g = torch.Generator().manual_seed(0)
    where = {}
    for i, names in enumerate(shards.values()):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _weight(shapes[name], g) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )


def _weight(shape: torch.Size, g: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=g)


def work(folder: Path, dtype: str) -> None:
    """What is measured: one forward pass, and a run of `lipbound.compare` over all layers."""
    ids = torch.randint(
        0, CONFIG["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    checkpoint = load_checkpoint(folder, weights="layers", dtype=dtype)
    reached("load")
    with torch.no_grad():
        out = checkpoint.model(input_ids=ids, use_cache=False).last_hidden_state
    assert bool(torch.isfinite(out).all())
    reached("forward")
    if dtype != "float32":
        return
    ds = compare(
        folder,
        {"input_ids": ids},
        weights="layers",
        samples=1,
        device="cpu",
        bounds=["lipbound", "yudin"],
        progress=False,
    )
    assert bool((ds["lipbound"] >= ds["exact"]).all())
    reached("compare")


STAGES: dict[str, dict[str, float]] = {}
_start = time.perf_counter()


def reached(stage: str) -> None:
    """Seconds since the previous stage, and peaks so far in GB."""
    global _start
    now = time.perf_counter()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    STAGES[stage] = {
        "seconds": now - _start,
        "ru_maxrss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "vm_hwm_gb": int(status["VmHWM"].split()[0]) / 1e6,
    }
    _start = now


def stages(*args: str) -> dict[str, Any]:
    """What a fresh process of this script with these arguments prints."""
    done = subprocess.run(
        [sys.executable, __file__, *args], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Write the checkpoint, work on it, print, write."""
    if len(sys.argv) > 1:
        torch.set_num_threads(2)
        reached("import")
        folder, what = Path(sys.argv[1]), sys.argv[2]
        if what == "write":
            write(folder)
            reached("write")
        else:
            work(folder, what)
        print(json.dumps(STAGES))
        return
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": tf.__version__,
        "tokens": TOKENS,
    }
    with tempfile.TemporaryDirectory() as folder:
        report["write"] = stages(folder, "write")
        report["parameters"] = sum(
            prod(one.shape) for one in stored_tensors(Path(folder).iterdir()).values()
        )
        report |= {dtype: stages(folder, dtype) for dtype in DTYPES}
    print(json.dumps(report, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

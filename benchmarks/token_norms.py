"""What it costs to know how far the worst output token moves when every token does, and how far the
two ends are apart.

``python benchmarks/token_norms.py`` measures all heads of the builtin checkpoints on their default
inputs at N = 128 (65 for vit), one thread: share of heads closed to 1e-3, the widest enclosure, and
time beside certified Frobenius norms (``delta`` 1e-6, the same tolerance of 1e-3). ``--brute N``
sets N small heads against ascent from 1,000 starts and a convex solver. Prints, and writes
token_norms.json.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

import lipbound as lb
from lipbound.attention.layer import Attention

HERE = Path(__file__)
sys.path.insert(0, str(HERE.parents[1] / "tests"))
MODELS = ("minilm", "gpt2", "vit", "llama", "qwen3")
NORMS = ("every-token", "one-token", "token-pair", "output-token")
TOL = 1e-3


def layers(name: str) -> list[Attention]:
    """One input of a builtin checkpoint."""
    checkpoint = lb.load_checkpoint(f"builtin:{name}")
    return lb.capture(checkpoint.model, lb.prepare(checkpoint, samples=1, max_length=128))


def fresh(att: Attention) -> Attention:
    """The same layer with nothing computed."""
    return att.with_parts(surroundings=None)


def timed(measure: Any, atts: list[Attention], repeats: int) -> tuple[float, list[lb.Norm]]:
    """The shortest time of all layers, and what came of it."""
    best, norms = math.inf, []
    for _ in range(repeats):
        given = [fresh(att) for att in atts]
        start = time.process_time()
        norms = [measure(att) for att in given]
        best = min(best, time.process_time() - start)
    return best, norms


def of_model(name: str, repeats: int) -> dict[str, Any]:
    """All heads of a checkpoint."""
    atts = layers(name)
    frobenius, full = timed(lambda att: lb.spectral_norm(att, delta=1e-6, tol=TOL), atts, repeats)
    row: dict[str, Any] = {
        "model": name,
        "heads": sum(att.heads for att in atts),
        "tokens": atts[0].tokens,
        "frobenius_s": frobenius,
    }
    exact = torch.cat([norm.lower.flatten() for norm in full])
    for norm in NORMS:
        seconds, norms = timed(
            lambda att, norm=norm: lb.token_norm(att, norm, tol=TOL), atts, repeats
        )
        error = torch.cat([norm.error.flatten() for norm in norms])
        ratio = torch.cat([norm.lower.flatten() for norm in norms]) / exact
        row[norm] = {
            "seconds": seconds,
            "times_frobenius": seconds / frobenius,
            "closed": float((error <= TOL).double().mean()),
            "widest": float(error.max()),
            "over_frobenius": [
                float(ratio.min()),
                float(ratio.log().mean().exp()),
                float(ratio.max()),
            ],
        }
    return row


def brute(count: int, starts: int) -> dict[str, Any]:
    """Small random heads against search from below and a convex solver from above."""
    from support import token_oracle

    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    outside, gaps, found, widths = 0, [], [], []
    for k in range(count // 8):
        n, d, d_v, width = (
            int(torch.randint(low, high, (), generator=g))
            for low, high in ((2, 9), (1, 5), (1, 6), (3, 10))
        )
        size = 10 ** float(torch.rand((), generator=g) * 2.5 - 1.5)
        mask = torch.full((n, n), -math.inf).triu(1).double() if k % 2 else None
        att = Attention(
            draw(1, n, width),
            size * draw(8, width, d),
            draw(8, width, d),
            draw(8, width, d_v),
            b_q=draw(8, d),
            mask=mask,
        )
        norm = lb.token_norm(att, tol=TOL)
        blocks = token_oracle.blocks(att, 0, "head")
        for h in range(8):
            below = float(token_oracle.every_from_below(blocks[h], starts, steps=30))
            above = float(token_oracle.every_from_above(blocks[h]))
            lower, upper = float(norm.lower[0, h]), float(norm.upper[0, h])
            outside += below > upper * (1 + 1e-12) or lower > above * (1 + 1e-9)
            gaps.append(upper / above - 1)
            found.append(lower / below - 1)
            widths.append(upper / lower - 1)
    return {
        "heads": len(gaps),
        "starts": starts,
        "outside": outside,
        "closed": sum(w <= TOL for w in widths) / len(widths),
        "widest": max(widths),
        "upper_over_convex": [min(gaps), max(gaps)],
        "lower_over_search": [min(found), max(found)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--brute", type=int, default=2000)
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=HERE.with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"torch": torch.__version__, "tol": TOL, "models": []}
    for name in args.models:
        result["models"].append(of_model(name, args.repeats))
        print(json.dumps(result["models"][-1], indent=1), flush=True)
    if args.brute:
        result["brute"] = brute(args.brute, args.starts)
        print(json.dumps(result["brute"], indent=1))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

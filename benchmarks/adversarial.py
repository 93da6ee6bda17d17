"""Every enclosure and every sound bound on families of hard heads, beside norms known to 80 digits:
``python benchmarks/adversarial.py``.

A miss is an enclosure that does not hold the norm, or a sound bound below it, by however little:
nothing is allowed for rounding. With ``--cases 20000`` it takes a night's part of one core;
``--first`` goes on where another run ended. Tables are printed, and ``--out`` keeps them as JSON.
The exit status is 1 where anything was missed.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import judge
from support.hard_heads import FAMILIES, SAMPLES
from support.judge import L2, METHODS, Verdict

from lipbound import bounds

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def verdicts(options: argparse.Namespace, dtype: str, family: str) -> Iterator[Verdict]:
    """Of one family, in a dtype: its share of the cases."""
    judged, seed = 0, options.first
    while judged < options.cases / len(options.families) / len(options.dtypes):
        att = judge.case(family, DTYPES[dtype], seed)
        yield from judge.judge(
            att,
            f"{family}({seed})",
            map=options.map,
            tol=options.tol,
            delta=options.delta,
            methods=options.methods,
            chosen=options.bounds,
            l2=not options.no_l2,
        )
        judged += att.samples * (1 if options.map in judge.WHOLE else att.heads)
        seed += 1


def row(found: list[Verdict]) -> dict[str, Any]:
    """The counts of one method."""
    judged = [v for v in found if not v.refused]
    wrong = [v for v in judged if v.miss > 0]
    worst = max(wrong, key=lambda v: v.miss, default=None)
    widths = sorted(v.width for v in judged if not math.isnan(v.width))
    open_ends = [v for v in judged if v.converged is False]
    return {
        "cases": len(judged),
        "refused": len(found) - len(judged),
        "misses": len(wrong),
        "worst_miss": worst.miss if worst else 0.0,
        "worst_case": worst.case if worst else "",
        "misses_beyond_1e-12": sum(v.miss > 1e-12 for v in wrong),
        "misses_beyond_1e-6": sum(v.miss > 1e-6 for v in wrong),
        "misses_that_converged": sum(v.converged is True for v in wrong),
        "not_converged": len(open_ends) / len(judged)
        if judged and judged[0].converged is not None
        else None,
        "median_width": widths[len(widths) // 2] if widths else None,
        "width_of_99_percent": widths[math.ceil(0.99 * len(widths)) - 1] if widths else None,
        "wider_than_1e-3": sum(w > 1e-3 for w in widths) / len(widths) if widths else None,
    }


def small(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def show(results: dict[str, dict[str, dict[str, Any]]], total: dict[str, dict[str, Any]]) -> None:
    """Two tables: methods over all families, and the misses of each method on each family with the
    worst of them."""
    print(
        f"{'method':26s}{'cases':>8s}{'refused':>8s}{'misses':>8s}{'>1e-12':>8s}{'>1e-6':>8s}{'worst':>9s}{'open':>8s}{'median':>9s}{'99 %':>9s}"  # noqa: E501
    )
    for method, r in total.items():
        share = "-" if r["not_converged"] is None else f"{100 * r['not_converged']:.2f} %"
        print(
            f"{method:26s}{r['cases']:8d}{r['refused']:8d}{r['misses']:8d}{r['misses_beyond_1e-12']:8d}{r['misses_beyond_1e-6']:8d}"
            f"{small(r['worst_miss']):>9s}{share:>8s}{small(r['median_width']):>9s}{small(r['width_of_99_percent']):>9s} "  # noqa: E501
            f" {r['worst_case']}"
        )
    shown = [method for method, r in total.items() if r["misses"]]
    if shown:
        print(
            "\nmisses and the worst of them\n"
            + f"{'family':26s}"
            + "".join(f"{method[-16:]:>18s}" for method in shown)
        )
    for family, by_method in results.items() if shown else ():
        cells = [by_method.get(method, {"misses": 0, "worst_miss": 0.0}) for method in shown]
        print(
            f"{family:26s}"
            + "".join(
                f"{cell['misses'] or '':>9} "
                f"{small(cell['worst_miss']) if cell['misses'] else '':>8s}"
                for cell in cells
            )
        )


def grouped(found: list[Verdict]) -> dict[str, list[Verdict]]:
    groups: dict[str, list[Verdict]] = {}
    for verdict in found:
        groups.setdefault(verdict.method, []).append(verdict)
    return groups


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=int, default=2000, help="norms in all, shared among families and dtypes"
    )
    parser.add_argument("--first", type=int, default=1000, help="seed of each family's first layer")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--bounds", nargs="*", default=bounds.names(), choices=bounds.names())
    parser.add_argument(
        "--no-l2", action="store_true", help=f"leave out {L2} and bounds on L2 attention"
    )
    parser.add_argument("--map", default="head", choices=["head", "head_out", *judge.WHOLE])
    parser.add_argument("--tol", type=float, default=1e-4)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "tol": options.tol,
        "delta": options.delta,
        "map": options.map,
        "samples_per_layer": SAMPLES,
    }
    missed = False
    for dtype in options.dtypes:
        start, everything, results = time.perf_counter(), [], {}
        for family in options.families:
            found = list(verdicts(options, dtype, family))
            everything += found
            results[family] = {method: row(part) for method, part in grouped(found).items()}
            misses = sum(r["misses"] for r in results[family].values())
            print(
                f"{time.perf_counter() - start:6.0f} s  {dtype} {family}: {len(found)} verdicts, "
                f"{misses} misses",
                file=sys.stderr,
                flush=True,
            )
        total = {method: row(part) for method, part in grouped(everything).items()}
        print(
            f"\n{dtype}, map {options.map}, tol {options.tol:g}, delta {options.delta:g}: "
            f"{time.perf_counter() - start:.0f} s"
        )
        show(results, total)
        record[dtype] = {"total": total, "families": results}
        missed = missed or any(r["misses"] for r in total.values())
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(int(missed))


if __name__ == "__main__":
    main()

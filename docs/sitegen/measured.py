"""Pages of what was measured, from the JSON files in benchmarks/, each with the machine it was
measured on."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lipbound.attention.variants import VARIANTS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TIMED = {
    "lanczos": "`spectral_norm`",
    "enclosure": "`spectral_norm`, enclosed to 1e-3 at delta 1e-10",
    "power_iteration": "power iteration",
    "patient_power_iteration": "power iteration, stopped on the change over 20 steps",
    "arpack": "`svds`, ARPACK",
    "propack": "`svds`, PROPACK",
    "lobpcg": "`svds`, LOBPCG",
    "torch_lobpcg": "`torch.lobpcg` of dense J J^T",
    "torch_svd_lowrank": "`torch.svd_lowrank` of dense J",
    "dense_svd": "all singular values of dense J",
}
"""Methods of exact_norms.json."""
TOKEN_NORMS = {
    "every-token": "every token moves, worst output token",
    "one-token": "one token moves, all outputs",
    "token-pair": "one token moves, worst output token",
    "output-token": "all tokens move, worst output token",
}


def report(name: str) -> Any:
    """What a file of benchmarks/ holds."""
    return json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))


def measured_with(found: dict[str, Any]) -> str:
    """Machine and versions that a file names, as a line."""
    versions = {
        **found.get("versions", {}),
        **{name: found[name] for name in ("torch", "transformers") if name in found},
    }
    parts = [str(found["device"])] if "device" in found else []
    parts += [f"{found['threads']} threads"] if "threads" in found else []
    parts += [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    return f"Measured with {', '.join(parts)}."


def accuracy() -> str:
    """What benchmarks/accuracy.py has measured."""
    lines = [
        "| heads | method | dtype | device | largest error | widest enclosure | outside |",
        "|---|---|---|---|---|---|---|",
    ]
    found = report("accuracy.json")
    for row in found["rows"]:
        width = "none" if row["width"] is None else f"{row['width']:.1e}"
        outside = "none" if row["outside"] is None else str(row["outside"])
        lines.append(
            f"| {row['heads']} | `{row['method']}` | {row['dtype']} | {row['device']} | "
            f"{row['error']:.1e} | {width} | {outside} |"
        )
    return "\n".join([*lines, "", measured_with(found)])


def speed() -> str:
    """What benchmarks/exact_norms.py has measured."""
    found = report("exact_norms.json")
    lines = [
        "| shape | method | ms per head | largest error | time over ours |",
        "|---|---|---|---|---|",
    ]
    for shape, entry in found["shapes"].items():
        for name, row in entry["methods"].items():
            times = row["speedup"] if name != "enclosure" else 1 / row["speedup"]
            missed = (
                " (not reached)" if name != "enclosure" and row["error"] > found["accuracy"] else ""
            )
            lines.append(
                f"| {shape} | {TIMED[name]} | {1e3 * row['seconds_per_head']:.3g} | "
                f"{row['error']:.0e}{missed} | {times:.3g} |"
            )
    return "\n".join([*lines, "", measured_with(found)])


def gemm() -> str:
    """How near exact norms come to the rate of large matrix products on the machine."""
    found = report("exact_norms.json")
    lines = [
        f"On {found['device']}, large float32 matrix products run at {found['gemm_gflops']:.0f} "
        "GFLOP/s. Of that rate is reached:",
        "",
    ]
    lines += ["| shape | by one product with J J^T | by all of `spectral_norm` |", "|---|---|---|"]
    for shape, entry in found["shapes"].items():
        rate = entry["fraction_of_gemm_rate"]
        lines.append(f"| {shape} | {100 * rate['product']:.0f} % | {100 * rate['whole']:.0f} % |")
    return "\n".join(lines)


def compiled() -> str:
    """What benchmarks/compiled.py has measured."""
    found = report("compiled.json")
    lines = [f"One product with J J^T, in ms ({found['device']}, torch {found['torch']}):", ""]
    lines += [
        "| shape | ours | autograd products | the same through `torch.compile` |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {shape} | {row['ours']:.3g} | {row['eager']:.3g} | {row['compiled']:.3g} |"
        for shape, row in found["ms"].items()
    ]
    return "\n".join(lines)


def long() -> str:
    """What benchmarks/long.py has measured."""
    found = report("long.json")
    lines = [
        "| tokens | seconds | products | estimated error | peak memory, GB |",
        "|---|---|---|---|---|",
    ]
    for tokens, row in found["runs"].items():
        lines.append(
            f"| {tokens} | {row['seconds']:.3g} | {row['steps']} | {row['error']:.0e} | "
            f"{row['peak_gb']:.2g} |"
        )
    lines += ["", f"Time grows as N^{found['time_exponent']:.1f}. With one thread:", ""]
    lines += ["| | tokens | seconds of the processor | peak memory, GB |", "|---|---|---|---|"]
    for tokens, row in found["one_thread"].items():
        lines.append(
            f"| norm, enclosed to 1e-3 | {tokens} | {row['processor_seconds']:.3g} | "
            f"{row['peak_gb']:.2g} |"
        )
    return "\n".join(lines)


def bound_costs() -> str:
    """What benchmarks/bounds.py has measured on builtin:minilm."""
    found = report("bounds.json")["minilm"]
    lines = [
        "| | time over plain exact norms | bound / exact, geometric mean | largest |",
        "|---|---|---|---|",
    ]
    lines += [f"| exact norms, enclosed | {found['enclosure']['time_over_exact']:.2g} | | |"]
    for name in ("lipbound_block", "lipbound"):
        row = found[name]
        lines.append(
            f"| `{name}` | {row['time_over_exact']:.3g} | {row['geomean']:.3g} | {row['max']:.3g} |"
        )
    return "\n".join(lines)


def default_costs() -> str:
    """What benchmarks/bounds.py has measured of all default bounds together."""
    lines = [
        "| tokens | all default bounds but `yudin_sqrt_n` | `yudin_sqrt_n` | `lipbound` alone |",
        "|---|---|---|---|",
    ]
    for tokens, row in report("bounds.json")["default"].items():
        numbers = (row[f"{name}_over_exact"] for name in ("default", "yudin_sqrt_n", "lipbound"))
        lines.append(f"| {tokens} | {' | '.join(f'{x:.2g}' for x in numbers)} |")
    return "\n".join(lines)


def balls() -> str:
    """What benchmarks/balls.py has measured."""
    found = report("balls.json")
    lines = [
        "| ball | radius / token | bound / adversary | worst head | by entries alone | worst "
        "head |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        numbers = (*row["after_over_adversary"], *row["before_over_adversary"])
        lines.append(
            f"| {row['ball']} | {row['radius']:g} | {' | '.join(f'{x:.3g}' for x in numbers)} |"
        )
    plain, variants = found["attacked"], found["attacked_variants"]
    said = (
        f"{plain['balls']} balls around small plain heads and {variants['balls']} around heads "
        "with rotary position embeddings, caps and sinks were "
        f"attacked in float64: {plain['below'] + variants['below']} of the bounds were below "
        "what was found."
    )
    return "\n".join([*lines, "", said, "", measured_with(found)])


def families() -> str:
    """What benchmarks/families.py has measured."""
    lines = [
        "| family | its attention | capture, off by | exact, off by | `lipbound` / exact | "
        "`lipbound_block` / exact | sharpest published / exact |",
        "|---|---|---|---|---|---|---|",
    ]
    found = report("families.json")
    for name, row in found["families"].items():
        what = (
            ", ".join(
                [title for name, title in VARIANTS.items() if name in row["variants"]]
                + ["mask"] * row["masked"]
            )
            or "plain"
        )
        module = f"{row['module']:.0e}" if "module" in row else ""
        ours = [
            f"{row[key]['geomean']:.2f} ({row[key]['max']:.2f})"
            for key in ("lipbound", "lipbound_block")
        ]
        best = f"{row['published']['geomean']:.3g}, `{row['published']['name']}`"
        lines.append(
            f"| {name} | {what} | {row['capture']:.0e} | {module} | {ours[0]} | {ours[1]} | "
            f"{best} |"
        )
    return "\n".join([*lines, "", measured_with(found)])


def census() -> str:
    """What benchmarks/census.py has measured."""
    found = report("census.json")
    types: dict[str, dict[str, Any]] = found["types"]
    by = {
        verdict: [kind for kind, row in types.items() if row["verdict"] == verdict]
        for verdict in ("closed form", "both", "automatic", "refused", "no attention", "not built")
    }
    measured = {kind: types[kind] for way in list(by)[:3] for kind in by[way]}
    errors = [row["error"] for row in measured.values() if row.get("error") is not None]
    said = (
        f"Of {len(types)} types {len(types) - len(by['not built'])} were built, and "
        f"{len(by['no attention'])} of them have no attention. {len(measured)} are measured: "
        f"{len(by['closed form'])} in closed form, {len(by['automatic'])} by automatic "
        f"differentiation, {len(by['both'])} by both; {len(by['refused'])} are refused. Closed "
        f"forms of {len(errors)} were compared: the largest difference is {max(errors):.0e}."
    )
    lines = ["| type | layers | measured | off by |", "|---|---|---|---|"]
    for kind, row in sorted(measured.items()):
        parts = f"{row['layers'] - row['automatic']} in closed form, {row['automatic']} automatic"
        way = parts if row["verdict"] == "both" else row["verdict"]
        off = "" if row.get("error") is None else f"{row['error']:.0e}"
        lines.append(f"| {kind} | {row['layers']} | {way} | {off} |")
    lines += ["", "## Refused", "", "| type | reason |", "|---|---|"]
    for kind in by["refused"]:
        reason = types[kind]["reason"].replace("|", "/")
        lines.append(f"| {kind} | {reason} |")
    lines += ["", "## Without attention", "", ", ".join(by["no attention"])]
    lines += ["", "## Not built by the script", "", ", ".join(by["not built"])]
    return "\n".join([said, "", *lines, "", measured_with(found)])


def memory() -> str:
    """What benchmarks/by_layer.py has measured."""
    found = report("by_layer.json")
    peak = found["float32"]["compare"]["vm_hwm_gb"]
    return (
        f"Comparing all 16 layers of a bfloat16 checkpoint of {found['parameters'] / 1e9:.2f} "
        "billion parameters (the shape of Llama 3.2 1B, random "
        f"weights, {found['tokens']} tokens) peaks at {peak:.1f} GB, mapped pages of its files "
        "included."
    )


def token_norms() -> str:
    """What benchmarks/token_norms.py has measured."""
    lines = [
        "| checkpoint | norm | time over Frobenius | closed to 1e-3 | over the Frobenius norm: "
        "least, median, most |",
        "|---|---|---|---|---|",
    ]
    found = report("token_norms.json")
    for row in found["models"]:
        for key, name in TOKEN_NORMS.items():
            if key in row:
                entry = row[key]
                over = ", ".join(f"{x:.2f}" for x in entry["over_frobenius"])
                lines.append(
                    f"| {row['model']} ({row['heads']} heads) | {name} | "
                    f"{entry['times_frobenius']:.1f} | {100 * entry['closed']:.0f} % | {over} |"
                )
    return "\n".join([*lines, "", measured_with(found)])


def startup() -> str:
    """What benchmarks/startup.py has measured."""
    found = report("startup.json")
    lines = [
        f"CPU time of a fresh process (Python {found['python']}, torch "
        f"{found['versions']['torch']}, {found['machine']}):",
        "",
    ]
    lines += ["| | seconds | times `import torch` |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {seconds:.2f} | {found['of_import_torch'][name]:.2f} |"
        for name, seconds in found["cpu_seconds"].items()
    ]
    return "\n".join(lines)


def cluster() -> str:
    """What benchmarks/cluster.py has measured."""
    found = report("cluster.json")
    one, two = found["one_worker_s"], found["two_workers_s"]
    times = f"{found['samples']} samples take {one:.0f} s with one worker and {two:.0f} s with two"
    return f"{times}; their results differ by {found['largest_difference']:g}."


def penalty_costs() -> str:
    """What benchmarks/jasmin/overhead.py has measured."""
    found = report("jasmin/overhead.json")
    lines = [
        f"A training step of `builtin:vit`, batches of 128 ({found['threads']} threads, torch "
        f"{found['torch']}):",
        "",
    ]
    lines += ["| penalty | seconds | time | memory |", "|---|---|---|---|"]
    for name, row in found["steps"].items():
        lines.append(
            f"| {name} | {row['seconds']:.2f} | {row['time_ratio']:.2f} | "
            f"{row['memory_ratio']:.2f} |"
        )
    return "\n".join(lines)


def study() -> str:
    """What benchmarks/jasmin/study.py has measured with small.yaml: means and standard deviations
    over seeds."""
    rows = [
        json.loads(line)
        for line in (BENCHMARKS / "jasmin" / "small" / "results.jsonl").read_text().splitlines()
    ]
    base = {row["seed"]: row for row in rows if row["method"] == "baseline"}
    lines = [
        "| method | clean | PGD 2/255 | AutoAttack 2/255 | constant of the network | against the "
        "baseline of the same seed | constants of heads |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(row["method"] for row in sorted(rows, key=lambda row: row["seed"])):
        mine = [row for row in rows if row["method"] == method]
        columns = [[row[name] for row in mine] for name in ("clean", "pgd-2", "autoattack-2")]
        medians = [statistics.median(row["network_norm"]) for row in mine]
        change = [
            100 * (m / statistics.median(base[row["seed"]]["network_norm"]) - 1)
            for m, row in zip(medians, mine, strict=True)
        ]
        heads = [
            math.exp(statistics.mean(math.log(x) for layer in row["head_norm"] for x in layer))
            for row in mine
        ]
        cells = [f"{statistics.mean(c):.1f} ± {statistics.stdev(c):.1f}" for c in columns]
        cells.append(f"{statistics.mean(medians):.2f} ± {statistics.stdev(medians):.2f}")
        cells.append(
            ""
            if method == "baseline"
            else f"{statistics.mean(change):+.1f} % ± {statistics.stdev(change):.1f}"
        )
        cells.append(f"{statistics.mean(heads):.2f} ± {statistics.stdev(heads):.2f}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        accuracy,
        speed,
        gemm,
        compiled,
        long,
        bound_costs,
        default_costs,
        balls,
        families,
        census,
        memory,
        token_norms,
        startup,
        cluster,
        penalty_costs,
        study,
    )
}
"""Tables and sentences by name: a page has one where ``<!-- table: NAME -->`` stands."""

"""Rewrite the generated parts of README.md: bounds, from the registry; families, memory, accuracy, speed and penalties, from what was measured."""

import json
import math
import re
import statistics
from pathlib import Path

from lipbound import bounds

ROOT = Path(__file__).parents[1]
HAS = {"rotation": "rotation", "qk_norm": "q/k-norm", "cap": "cap", "sinks": "sinks"}


def bounds_table() -> str:
    """Every registered bound with its statement, source, norm, assumptions and cost."""
    rows = ["| name | statement | norm | a bound when | covers besides plain heads | cost per head |", "|---|---|---|---|---|---|"]
    for bound in map(bounds.get, bounds.names(None)):
        statement = bound.statement.replace("|", "\\|")
        covers = ", ".join(HAS[v] for v in HAS if v in bound.covers) or "nothing"
        rows.append(f"| `{bound.name}` | {statement} [{bound.source}] | {bound.norm} | {bound.assumptions} | {covers} | {bound.cost} |")
    return "\n".join(rows)


def accuracy_table() -> str:
    """What benchmarks/accuracy.py has measured."""
    rows = json.loads((ROOT / "benchmarks" / "accuracy.json").read_text())["rows"]
    lines = ["| heads | method | dtype | device | largest error | widest enclosure | outside |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        width = "none" if row["width"] is None else f"{row['width']:.1e}"
        outside = "none" if row["outside"] is None else str(row["outside"])
        lines.append(f"| {row['heads']} | `{row['method']}` | {row['dtype']} | {row['device']} | {row['error']:.1e} | {width} | {outside} |")
    return "\n".join(lines)


def speed_table() -> str:
    """What benchmarks/exact_norms.py has measured."""
    report = json.loads((ROOT / "benchmarks" / "exact_norms.json").read_text())
    names = {
        "lanczos": "`spectral_norm`", "enclosure": "`spectral_norm`, enclosed to 1e-3 at delta 1e-10", "power_iteration": "power iteration",
        "patient_power_iteration": "power iteration, stopped on the change over 20 steps",
        "arpack": "`svds`, ARPACK", "propack": "`svds`, PROPACK", "lobpcg": "`svds`, LOBPCG", "torch_lobpcg": "`torch.lobpcg` of dense J J^T",
        "torch_svd_lowrank": "`torch.svd_lowrank` of dense J", "dense_svd": "all singular values of dense J",
    }  # fmt: skip
    lines = ["| shape | method | ms per head | largest error | time over ours |", "|---|---|---|---|---|"]
    for shape, entry in report["shapes"].items():
        for name, row in entry["methods"].items():
            times = row["speedup"] if name != "enclosure" else 1 / row["speedup"]
            missed = " (not reached)" if name != "enclosure" and row["error"] > report["accuracy"] else ""
            lines.append(f"| {shape} | {names[name]} | {1e3 * row['seconds_per_head']:.3g} | {row['error']:.0e}{missed} | {times:.3g} |")
    lines.append("")
    fractions = [
        f"{shape}: {100 * entry['fraction_of_gemm_rate']['product']:.0f} % and {100 * entry['fraction_of_gemm_rate']['whole']:.0f} %"
        for shape, entry in report["shapes"].items()
    ]
    lines.append(
        f"Float32, {report['device']}, whose large matrix products run at {report['gemm_gflops']:.0f} GFLOP/s; one product with J J^T, and all of "
        f"`spectral_norm`, reach these fractions of it: {'; '.join(fractions)}."
    )
    return "\n".join(lines)


def study_table() -> str:
    """What benchmarks/jasmin/study.py has measured with small.yaml: means and standard deviations over seeds."""
    rows = [json.loads(line) for line in (ROOT / "benchmarks" / "jasmin" / "small" / "results.jsonl").read_text().splitlines()]
    base = {row["seed"]: row for row in rows if row["method"] == "baseline"}
    lines = [
        "| method | clean | PGD 2/255 | AutoAttack 2/255 | constant of the network | against the baseline of the same seed | constants of heads |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(row["method"] for row in sorted(rows, key=lambda row: row["seed"])):
        mine = [row for row in rows if row["method"] == method]
        columns = [[row[name] for row in mine] for name in ("clean", "pgd-2", "autoattack-2")]
        medians = [statistics.median(row["network_norm"]) for row in mine]
        change = [100 * (m / statistics.median(base[row["seed"]]["network_norm"]) - 1) for m, row in zip(medians, mine, strict=True)]
        heads = [math.exp(statistics.mean(math.log(x) for layer in row["head_norm"] for x in layer)) for row in mine]
        cells = [f"{statistics.mean(c):.1f} ± {statistics.stdev(c):.1f}" for c in columns]
        cells.append(f"{statistics.mean(medians):.2f} ± {statistics.stdev(medians):.2f}")
        cells.append("" if method == "baseline" else f"{statistics.mean(change):+.1f} % ± {statistics.stdev(change):.1f}")
        cells.append(f"{statistics.mean(heads):.2f} ± {statistics.stdev(heads):.2f}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def families_table() -> str:
    """What benchmarks/families.py has measured."""
    rows = json.loads((ROOT / "benchmarks" / "families.json").read_text())["families"]
    lines = [
        "| family | its attention | capture, off by | exact, off by | `lipbound` / exact | `lipbound_block` / exact | sharpest published / exact |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        what = ", ".join([HAS[v] for v in HAS if v in row["variants"]] + ["mask"] * row["masked"]) or "plain"
        module = f"{row['module']:.0e}" if "module" in row else ""
        ours = [f"{row[key]['geomean']:.2f} ({row[key]['max']:.2f})" for key in ("lipbound", "lipbound_block")]
        best = f"{row['published']['geomean']:.3g}, `{row['published']['name']}`"
        lines.append(f"| {name} | {what} | {row['capture']:.0e} | {module} | {ours[0]} | {ours[1]} | {best} |")
    return "\n".join(lines)


def memory_sentence() -> str:
    """What benchmarks/by_layer.py has measured."""
    report = json.loads((ROOT / "benchmarks" / "by_layer.json").read_text())
    peak = report["float32"]["compare"]["vm_hwm_gb"]
    return (
        f"Comparing all 16 layers of a bfloat16 checkpoint of {report['parameters'] / 1e9:.2f} billion parameters (the shape of Llama 3.2 1B, random "
        f"weights, {report['tokens']} tokens) peaks at {peak:.1f} GB, mapped pages of its files included."
    )


TABLES = {
    "families": families_table,
    "memory": memory_sentence,
    "bounds": bounds_table,
    "accuracy": accuracy_table,
    "speed": speed_table,
    "study": study_table,
}


def written(text: str) -> str:
    """README.md with its generated tables as they should be."""
    for name, table in TABLES.items():
        text = re.sub(rf"(<!-- {name}: [^\n]*-->\n\n).*?(\n\n<!-- end -->)", lambda m, t=table: m[1] + t() + m[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text()))

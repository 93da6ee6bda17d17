"""Pages of what was measured, from the JSON files in benchmarks/, each with the machine it was
measured on."""

import json
import statistics
from collections.abc import Callable, Iterable
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


def table(columns: str, rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table: names of its columns, with ``|`` between them, and its cells."""
    width = columns.count("|") + 1
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {columns} |", "|" + "---|" * width, *lines]


def measured_with(found: dict[str, Any]) -> str:
    """Machine and versions that a file names, as a line."""
    versions = found.get("versions", {}) | found
    parts = [str(found["device"])] if "device" in found else []
    parts += [f"{found['threads']} threads"] if "threads" in found else []
    parts += [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    return f"Measured with {', '.join(parts)}."


def accuracy() -> str:
    """What benchmarks/accuracy.py has measured."""
    found, rows = report("accuracy.json"), []
    for row in found["rows"]:
        width = "none" if row["width"] is None else f"{row['width']:.1e}"
        outside = "none" if row["outside"] is None else row["outside"]
        what = (row["heads"], f"`{row['method']}`", row["dtype"], row["device"])
        rows.append((*what, f"{row['error']:.1e}", width, outside))
    head = "heads | method | dtype | device | largest error | widest enclosure | outside"
    return "\n".join([*table(head, rows), "", measured_with(found)])


def speed() -> str:
    """What benchmarks/exact_norms.py has measured."""
    found, rows = report("exact_norms.json"), []
    for shape, entry in found["shapes"].items():
        for name, row in entry["methods"].items():
            ours = name == "enclosure"
            times = 1 / row["speedup"] if ours else row["speedup"]
            missed = " (not reached)" if not ours and row["error"] > found["accuracy"] else ""
            ms, error = f"{1e3 * row['seconds_per_head']:.3g}", f"{row['error']:.0e}{missed}"
            rows.append((shape, TIMED[name], ms, error, f"{times:.3g}"))
    head = "shape | method | ms per head | largest error | time over ours"
    return "\n".join([*table(head, rows), "", measured_with(found)])


def gpu() -> str:
    """What benchmarks/gpu.py has measured: layers, bounds, checkpoints, long inputs, little
    memory."""
    if not (BENCHMARKS / "gpu.json").exists():
        return "Times of this version have not been measured."
    found = report("gpu.json")
    layers, checkpoints, long, crowded = (
        found.get(section, {}) for section in ("layers", "checkpoints", "long", "crowded")
    )
    ways = ("estimate", "enclosure", "prototype", "power_iteration")
    head = "ms | norms | enclosed | a prototype | power iteration"
    lines = table(head, ([name, *_ms(row, ways)] for name, row in layers.items()))

    bounds = ("lipbound", "yudin_sqrt_n", "yudin", "castin_bias", "kim")
    some = {name: row for name, row in layers.items() if "lipbound_ms" in row}
    head = f"ms | {' | '.join(f'`{name}`' for name in bounds)}"
    lines += ["", *table(head, ([name, *_ms(row, bounds)] for name, row in some.items()))]

    both = (
        [f"`{name}`", *_cells(row, ("seconds", "cpu_seconds"))] for name, row in checkpoints.items()
    )
    head = f"`lb.compare`, seconds | GPU | CPU of its host, {found['threads']} threads"
    lines += ["", *table(head, both)]
    single = ([name, *_cells(row, ("seconds", "peak_gb"))] for name, row in long.items())
    lines += ["", *table("one head of width 64 | seconds | peak memory, GB", single)]

    lines += [
        "",
        f"{sum(row.get('checked', 0) for row in layers.values())} heads were computed again on the "
        f"CPU in float64: lower ends are off {_most(layers, 'error')}. TF32 and autocast change "
        f"them {_most(layers, 'settings_change')}.",
    ]
    for name, row in crowded.items():
        seconds, gb = _cells(row, ("seconds", "peak_gb"))
        same = f"the same norms in {seconds} s, with {gb} GB" if seconds else "not measured"
        lines += ["", f"{name} of the card: {row.get('sentence', same)}."]
    lines += [f"\nWrong: {one}." for one in found["failed"]]
    return "\n".join([*lines, "", measured_with(found)])


def _cells(row: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Numbers of a row; nothing for those that are not there."""
    found = (row.get(name) for name in names)
    return ["" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in found]


def _ms(row: dict[str, Any], names: Iterable[str]) -> list[str]:
    return _cells(row, (f"{name}_ms" for name in names))


def _most(rows: dict[str, Any], name: str) -> str:
    most = max((row.get(name, 0.0) for row in rows.values()), default=0.0)
    return f"by {most:.0e} at most" if most else "by nothing"


def gemm() -> str:
    """How near exact norms come to the rate of large matrix products on the machine."""
    found = report("exact_norms.json")
    said = (
        f"On {found['device']}, large float32 matrix products run at {found['gemm_gflops']:.0f} "
        "GFLOP/s. Of that rate is reached:"
    )
    rates = {shape: entry["fraction_of_gemm_rate"] for shape, entry in found["shapes"].items()}
    rows = (
        (shape, *(f"{100 * rate[part]:.0f} %" for part in ("product", "whole")))
        for shape, rate in rates.items()
    )
    head = "shape | by one product with J J^T | by all of `spectral_norm`"
    return "\n".join([said, "", *table(head, rows)])


def compiled() -> str:
    """What benchmarks/compiled.py has measured."""
    found = report("compiled.json")
    said = f"One product with J J^T, in ms ({found['device']}, torch {found['torch']}):"
    rows = (
        (shape, *(f"{row[way]:.3g}" for way in ("ours", "eager", "compiled")))
        for shape, row in found["ms"].items()
    )
    head = "shape | ours | autograd products | the same through `torch.compile`"
    return "\n".join([said, "", *table(head, rows)])


def long() -> str:
    """What benchmarks/long.py has measured."""
    found = report("long.json")
    runs = (
        (tokens, f"{row['seconds']:.3g}", row["steps"], f"{row['error']:.0e}", _gb(row))
        for tokens, row in found["runs"].items()
    )
    single = (
        ("norm, enclosed to 1e-3", tokens, f"{row['processor_seconds']:.3g}", _gb(row))
        for tokens, row in found["one_thread"].items()
    )
    said = f"Time grows as N^{found['time_exponent']:.1f}. With one thread:"
    first = table("tokens | seconds | products | estimated error | peak memory, GB", runs)
    second = table(" | tokens | seconds of the processor | peak memory, GB", single)
    return "\n".join([*first, "", said, "", *second])


def _gb(row: dict[str, Any]) -> str:
    return f"{row['peak_gb']:.2g}"


def bound_costs() -> str:
    """What benchmarks/bounds.py has measured on builtin:minilm."""
    found = report("bounds.json")["minilm"]
    rows = [["exact norms, enclosed", f"{found['enclosure']['time_over_exact']:.2g}", "", ""]]
    for name in ("lipbound_block", "lipbound"):
        numbers = (found[name][key] for key in ("time_over_exact", "geomean", "max"))
        rows.append([f"`{name}`", *(f"{x:.3g}" for x in numbers)])
    head = " | time over plain exact norms | bound / exact, geometric mean | largest"
    return "\n".join(table(head, rows))


def default_costs() -> str:
    """What benchmarks/bounds.py has measured of all default bounds together."""
    names = ("default", "yudin_sqrt_n", "lipbound")
    rows = (
        (tokens, *(f"{row[f'{name}_over_exact']:.2g}" for name in names))
        for tokens, row in report("bounds.json")["default"].items()
    )
    head = "tokens | all default bounds but `yudin_sqrt_n` | `yudin_sqrt_n` | `lipbound` alone"
    return "\n".join(table(head, rows))


def balls() -> str:
    """What benchmarks/balls.py has measured."""
    found, rows = report("balls.json"), []
    for row in found["rows"]:
        numbers = (f"{x:.3g}" for x in row["bound_over_adversary"])
        rows.append((row["ball"], f"{row['radius']:g}", *numbers))
    plain, variants = found["attacked"], found["attacked_variants"]
    said = (
        f"{plain['balls']} balls around small plain heads and {variants['balls']} around heads "
        "with rotary position embeddings, caps and sinks were "
        f"attacked in float64: {plain['below'] + variants['below']} of the bounds were below "
        "what was found."
    )
    head = "ball | radius / token | bound / adversary | worst head"
    return "\n".join([*table(head, rows), "", said, "", measured_with(found)])


def families() -> str:
    """What benchmarks/families.py has measured."""
    found, rows = report("families.json"), []
    for name, row in found["families"].items():
        parts = [title for name, title in VARIANTS.items() if name in row["variants"]]
        parts += ["mask"] * row["masked"]
        module = f"{row['module']:.0e}" if "module" in row else ""
        ours = [
            f"{row[key]['geomean']:.2f} ({row[key]['max']:.2f})"
            for key in ("lipbound", "lipbound_block")
        ]
        best = f"{row['published']['geomean']:.3g}, `{row['published']['name']}`"
        what = ", ".join(parts) or "plain"
        rows.append((name, what, f"{row['capture']:.0e}", module, *ours, best))
    head = (
        "family | its attention | capture, off by | exact, off by | `lipbound` / exact | "
        "`lipbound_block` / exact | sharpest published / exact"
    )
    return "\n".join([*table(head, rows), "", measured_with(found)])


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
    rows = []
    for kind, row in sorted(measured.items()):
        parts = f"{row['layers'] - row['automatic']} in closed form, {row['automatic']} automatic"
        way = parts if row["verdict"] == "both" else row["verdict"]
        off = "" if row.get("error") is None else f"{row['error']:.0e}"
        rows.append((kind, row["layers"], way, off))
    refused = ((kind, types[kind]["reason"].replace("|", "/")) for kind in by["refused"])
    lines = table("type | layers | measured | off by", rows)
    lines += ["", "## Refused", "", *table("type | reason", refused)]
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
    found, rows = report("token_norms.json"), []
    for row in found["models"]:
        for key, name in TOKEN_NORMS.items():
            if key in row:
                entry = row[key]
                over = ", ".join(f"{x:.2f}" for x in entry["over_frobenius"])
                model = f"{row['model']} ({row['heads']} heads)"
                closed = f"{100 * entry['closed']:.0f} %"
                rows.append((model, name, f"{entry['times_frobenius']:.1f}", closed, over))
    head = (
        "checkpoint | norm | time over Frobenius | closed to 1e-3 | over the Frobenius norm: "
        "least, median, most"
    )
    return "\n".join([*table(head, rows), "", measured_with(found)])


def startup() -> str:
    """What benchmarks/commands.py has measured of imports, and without files in memory."""
    found = report("commands.json")
    rows = dict(found["imports"])
    if "first_use" in found:
        rows["lipbound compare builtin:gpt2 --samples 1, files not in memory"] = found["first_use"]
    lines = ([name, *_in_turn(row)] for name, row in rows.items())
    return "\n".join(table(f" | {IN_TURN}", lines))


def commands() -> str:
    """What benchmarks/commands.py has measured of whole commands."""
    found = report("commands.json")
    rows = (
        (f"`lipbound {words}`", state, *_in_turn(row))
        for state, entries in found["states"].items()
        for words, row in entries.items()
    )
    note = f"{found['rounds']} rounds against commit {found['against'][:9]}."
    if found["provisional"]:
        note += (
            f" Provisional: the machine was busy with other things (load {found['load']:.1f}), and "
            "times are longer than they need be."
        )
    return "\n".join(
        [*table(f"command | state | {IN_TURN}", rows), "", note, "", measured_with(found)]
    )


def layers_once() -> str:
    """What benchmarks/commands.py has measured of one layer, measured once."""
    found = report("commands.json")["layers"]
    names = dict.fromkeys(key.rpartition(": ")[0] for key in found["after"])

    def least(name: str, what: str) -> float:
        return float(found["after"][f"{name}: {what}"]["least"])

    rows = (
        (
            name,
            f"{1e3 * least(name, 'seconds'):.3g}",
            f"{found['ratio'][f'{name}: seconds']:.2f}",
            f"{least(name, 'power iteration') / least(name, 'seconds'):.3g}",
            f"{least(name, 'error'):.0e}",
            f"{least(name, 'error of power iteration'):.0e}",
        )
        for name in names
    )
    head = "layer | ms | over before | power iteration over ours | error | error of power iteration"
    return "\n".join(table(head, rows))


IN_TURN = "seconds | over before | processor seconds | over before"
"""Columns of `_in_turn`."""


def _in_turn(row: dict[str, Any]) -> list[str]:
    """Least times of what two sides measured in turn, and their ratios."""
    return [
        text
        for name in ("wall", "processor")
        for text in (f"{row['after'][name]['least']:.2f}", f"{row['ratio'][name]:.2f}")
    ]


def cluster() -> str:
    """What benchmarks/cluster.py has measured."""
    found = report("cluster.json")
    one, two = found["one_worker_s"], found["two_workers_s"]
    times = f"{found['samples']} samples take {one:.0f} s with one worker and {two:.0f} s with two"
    return f"{times}; their results differ by {found['largest_difference']:g}."


def penalty_costs() -> str:
    """What benchmarks/jasmin/overhead.py has measured."""
    found = report("jasmin/overhead.json")
    said = (
        f"A training step of `builtin:vit`, batches of 128 ({found['threads']} threads, torch "
        f"{found['torch']}):"
    )
    numbers = ("seconds", "time_ratio", "memory_ratio")
    rows = (
        (name, *(f"{row[number]:.2f}" for number in numbers))
        for name, row in found["steps"].items()
    )
    return "\n".join([said, "", *table("penalty | seconds | time | memory", rows)])


def monitor() -> str:
    """What benchmarks/monitor.py has measured."""
    found = report("monitor.json")
    said = (
        f"Exact norms of all heads of a decoder of the shape of GPT-2 small, on one sample of 128 "
        f"tokens, beside a step of its training with AdamW, in seconds of processors. "
        f"{measured_with(found)}"
    )
    every = found["every"]
    rows = (
        (
            row["batch"] * 128,
            *(f"{row[name]:.2f} s" for name in ("step", "measurement")),
            f"{row['share']:.0%}",
        )
        for row in found["costs"]
    )
    columns = (
        f"tokens in a batch | step of training | measurement | added by one every {every} steps"
    )
    return "\n".join([said, "", *table(columns, rows)])


def study() -> str:
    """What benchmarks/jasmin/study.py has measured with small.yaml: means and standard deviations
    over seeds."""
    text = (BENCHMARKS / "jasmin" / "small" / "results.jsonl").read_text(encoding="utf-8")
    found = sorted(map(json.loads, text.splitlines()), key=lambda row: row["seed"])
    base = {row["seed"]: row for row in found if row["method"] == "baseline"}
    rows = []
    for method in dict.fromkeys(row["method"] for row in found):
        mine = [row for row in found if row["method"] == method]
        medians = [statistics.median(row["network_norm"]) for row in mine]
        change = [
            100 * (m / statistics.median(base[row["seed"]]["network_norm"]) - 1)
            for m, row in zip(medians, mine, strict=True)
        ]
        heads = [
            statistics.geometric_mean(x for layer in row["head_norm"] for x in layer)
            for row in mine
        ]
        accuracies = ([row[name] for row in mine] for name in ("clean", "pgd-2", "autoattack-2"))
        against = f"{statistics.mean(change):+.1f} % ± {statistics.stdev(change):.1f}"
        rows.append(
            (
                method,
                *(_spread(column, 1) for column in accuracies),
                _spread(medians, 2),
                "" if method == "baseline" else against,
                _spread(heads, 2),
            )
        )
    head = (
        "method | clean | PGD 2/255 | AutoAttack 2/255 | constant of the network | against the "
        "baseline of the same seed | constants of heads"
    )
    return "\n".join(table(head, rows))


def _spread(values: list[float], places: int) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.{places}f} ± {statistics.stdev(values):.{places}f}"


def cache() -> str:
    """What benchmarks/cache_bits.py has measured."""
    found, parts = report("cache_bits.json"), []
    head = (
        "bits | median bound | median expected | median measured | above the bound | rank of "
        "bound | rank of expected | rank of the size alone"
    )
    shown: list[tuple[str, str]] = [("keys", "channel"), ("keys", "token"), ("values", "token")]
    for side, group in shown:
        rows = [row for row in found[group]["rows"] if row["side"] == side]
        cells = (
            (
                row["bits"],
                *(f"{row[name]:.3g}" for name in ("bound", "expected", "measured")),
                f"{100 * row['above']:.1f} %",
                *(f"{row[f'rank_{name}']:.2f}" for name in ("bound", "expected", "size")),
            )
            for row in rows
        )
        parts += [f"{side.capitalize()}, by {group}:", "", *table(head, cells), ""]
    one, first = found["channel"], found["first_token"]
    bits = {name: f"{row['median']:.1f}" for name, row in one["bits"].items()}
    said = (
        f"For an error of {100 * one['error']:g} %, {100 * one['keys_need_more']:.0f} % of the "
        f"{one['heads']} heads (at {one['samples']} windows) need more bits for keys (by channel) "
        "than for values as `expected`: "
        f"medians {bits['keys_expected']} and {bits['values_expected']} bits, and "
        f"{bits['keys_bound']} and {bits['values_bound']} by `bound`. By values, "
        f"{100 * first['share']:.0f} % of the steepest direction (median) is a move of the first "
        f"token, whose value has {first['range']:.2f} times the range of the median token's."
    )
    rules = found["rules"]

    def both(rule: str, what: str) -> str:
        return " and ".join(f"{rules[side][rule][what]:.2g}" for side in ("keys", "values"))

    error = "root_mean_square"
    beside = (
        "A rule that looks at attention alone gives a head (mean H - H) / 4 bits more than the "
        "average, H its entropy of order 2. At 4 bits its rank correlations with the errors are "
        f"{both('entropy', 'rank')} (keys and values), those of `expected` "
        f"{both('expected', 'rank')}. Whole bits shared out by either, 4 on average, gain nothing "
        f"here: root mean squares of errors are {both('entropy', error)} by entropies, "
        f"{both('expected', error)} by `expected` and {both('even', error)} with 4 bits "
        "everywhere. Most heads differ by less than a bit, and the few that get 2 lose most."
    )
    return "\n".join([*parts, said, "", beside, "", measured_with(one)])


WATCHED = {
    "loss": "training loss",
    "exact": "exact norm",
    "kappa_softmax": "kappa_softmax",
    "largest_logit": "largest logit",
    "entropy": "entropy (smallest)",
    "row_norm": "largest norm of a softmax Jacobian's row",
    "wqk_norm": "norm of W_Q W_K^T",
}
"""Numbers of early_warning.json."""


def warning() -> str:
    """What benchmarks/early_warning.py has found: a row for each number, columns by model."""
    found = report("early_warning.json")["summary"]
    kinds = [kind for kind in found if kind != "all"]

    def cell(kind: str, name: str) -> str:
        row = found[kind]["numbers"][name]
        lead = "" if row["median lead"] is None else f", {row['median lead']:g} steps before"
        early = f", {row['too early']} too early" if row["too early"] else ""
        return f"{row['warned']} of {found[kind]['spikes']}{lead}{early}"

    rows = [
        (said, *(cell(kind, name) for kind in kinds), f"{found['all']['numbers'][name]['false']}")
        for name, said in WATCHED.items()
    ]
    calm, numbers = found["all"]["calm"], found["all"]["numbers"]
    head = f"number | {' | '.join(kinds)} | false, of {calm} calm runs"
    name_of = {name: f"the {said}" for name, said in WATCHED.items()}
    name_of |= {"entropy": "the entropy", "kappa_softmax": "kappa_softmax"}
    sooner = [
        f"{said} in {count}"
        for name, said in name_of.items()
        if (count := numbers[name]["false from step 100 on"])
    ]
    pairs = []
    for names, (before, _, after) in found["all"]["first"].items():
        one, other = map(name_of.__getitem__, names.split(" and "))
        both = sum(found["all"]["first"][names])
        pairs.append(f"{one} came before {other} in {before} of {both}, after it in {after}")
    words = (
        "Steps before 150 do not count: in a pilot numbers still grew until then in calm runs. The "
        "last column is of those late steps alone. From step 100 on there would have been false "
        f"warnings in calm runs: by {', '.join(sooner)}, and by no others. Leads of two numbers "
        "are not of the same breakdowns. Of those that both warned of in time, "
        f"{'; '.join(pairs)}."
    )
    return "\n".join([*table(head, rows), "", words])


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        *(accuracy, speed, gpu, gemm, compiled, long, bound_costs, default_costs, balls, families),
        *(census, memory, token_norms, startup, commands, layers_once, cluster),
        *(penalty_costs, monitor, study, cache, warning),
    )
}
"""Tables and sentences by name: a page has one where ``<!-- table: NAME -->`` stands."""

"""Render the figures of this folder from saved runs: ``make figures``.

Runs are kept in figures/runs (not in git) and computed where they are missing: heatmaps of each
builtin checkpoint, bounds over balls, and the figures of `castin2024`, `yudin2025` and `ours2026`
on builtin:minilm; those of networks trained with penalties show what benchmarks/jasmin measured.
Each is a PDF, a PNG and its caption. ``--text`` gives texts to the figures that the paper made of
text (``--text alice.txt --text ag_news.csv --column 2 --sequences 10``); without it they take the
text that comes with lipbound.
"""

import argparse
from copy import copy
from dataclasses import replace
from pathlib import Path

import castin2024  # noqa: F401  (importing a paper's file registers its figures)
import ours2026  # noqa: F401
import torch
import xarray as xr
import yudin2025  # noqa: F401
from paper_figure import FIGURES, Setting
from transformers import AutoTokenizer, GPT2Config, GPT2Model

import lipbound as lb
from lipbound.models.catalogue import BUILTINS

HERE = Path(__file__).parent
RUNS = HERE / "runs"


def main() -> None:
    """Compute what is missing, then draw everything and write the captions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        help="texts for the growth study; may be given several times",
    )
    parser.add_argument("--column", help="column of those that are tables")
    parser.add_argument("--sequences", type=int, help="sequences of each length")
    options = parser.parse_args()
    RUNS.mkdir(exist_ok=True)
    for name in ("minilm", "gpt2", "vit", "vit-baseline", "vit-jasmin", "smollm2"):
        path = RUNS / f"{name}.zarr"
        ds = (
            lb.load(path)
            if path.exists()
            else lb.compare(
                f"builtin:{name}", samples=2 if name == "smollm2" else 8, max_length=128, out=path
            )
        )
        for kind in ("pdf", "png"):
            lb.plots.heatmaps(ds, HERE / f"{name}.{kind}")
        (HERE / f"{name}.txt").write_text(
            lb.plots.caption(ds) + "\n\n" + lb.tables.render(ds) + "\n"
        )
        print(f"figures/{name}.pdf, .png and .txt", flush=True)
    ball()
    growth = Setting(data=tuple(options.text), column=options.column, samples=options.sequences)
    for name, figure in FIGURES.items():
        if name == "yudin-6":  # the heatmaps above
            continue
        figure.render(
            figure.saved(
                growth if figure.stored == FIGURES["castin-1"].stored else Setting(), RUNS
            ),
            HERE,
        )
        print(f"figures/{name}.pdf, .png and .txt", flush=True)
    first = growth.data[:1]
    column = None if first and Path(first[0]).suffix == ".txt" else growth.column
    others = {
        "castin-4-gpt2": replace(growth, model="builtin:gpt2", data=first, column=column),
        "castin-1-random": Setting(model=random_gpt2(), samples=1),
    }
    for name, setting in others.items():
        figure = copy(FIGURES["castin-1"])
        figure.name = figure.run = name
        figure.render(figure.saved(setting, RUNS), HERE)
        print(f"figures/{name}.pdf, .png and .txt", flush=True)


def random_gpt2() -> Path:
    """A folder with a GPT-2 of its published shape and random weights, as Castin et al. take it.

    With the tokens of builtin:gpt2, of which there are fewer.
    """
    folder = RUNS / "gpt2-random"
    if not (folder / "model.safetensors").exists():
        tokenizer = AutoTokenizer.from_pretrained(BUILTINS["gpt2"].place("gpt2"))
        torch.manual_seed(0)
        end = tokenizer.eos_token_id
        config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end)
        GPT2Model(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def ball() -> None:
    """Bounds over balls for four real heads, from 1e-4 of the tokens' length to three times it,
    with an adversary."""
    path = RUNS / "ball.zarr"
    if not path.exists():
        checkpoint = lb.load_checkpoint("builtin:minilm")
        inputs = lb.prepare(checkpoint, samples=1, max_length=128)
        att = lb.capture(checkpoint.model, inputs, layers=[2])[0].select(heads=slice(0, 4))
        length = float(att.x.norm(dim=-1).mean())
        parts = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
        lb.radius_curve(att, [length * part for part in parts]).to_zarr(path)
    title = "builtin:minilm, layer 2, 128 tokens"
    for kind in ("pdf", "png"):
        lb.plots.ball_curve(xr.open_zarr(path).load(), HERE / f"ball.{kind}", title=title)
    (HERE / "ball.txt").write_text(
        "Bounds over balls, and what an adversary finds in them, against the radius, for four "
        f"heads of {title}: every token moves by at most the "
        "radius. The true supremum lies in the shaded gap.\n"
    )
    print("figures/ball.pdf, .png and .txt", flush=True)


if __name__ == "__main__":
    main()

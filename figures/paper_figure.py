"""PaperFigures and the table of them.

One is computed and drawn for any checkpoint: ``python figures/castin2024.py castin-1 MODEL``.
"""

import argparse
import shlex
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from lipbound.analysis import provenance, tabled
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import in_closed_form
from lipbound.devices import resolve_device
from lipbound.errors import LipboundError, StoreError, choice, shown, tell, whole
from lipbound.formatting import replacing
from lipbound.models.capture.capture import Capturer
from lipbound.models.inputs import Inputs, prepare
from lipbound.models.loading import Checkpoint, load_checkpoint
from lipbound.reporting.labels import builtin_name, model_name
from lipbound.reporting.styles import BASE, Drawing, written
from lipbound.reporting.tables import typeset
from lipbound.runs import store
from lipbound.runs.config import check_folder_name


@dataclass(frozen=True)
class Setting:
    """Model, data and sizes that a figure is made of.

    Attributes:
        model: as for `lipbound.compare`.
        data: texts or image sets, as for `lipbound.compare`; none for the default. column, split:
            of tables.
        samples: how many samples, or sequences of a length; None for the figure's own number.
        full: the paper's sizes rather than the small ones.
        device, dtype, seed: as for `lipbound.compare`.
    """

    model: Any = "builtin:minilm"
    data: tuple[Any, ...] = ()
    column: str | None = None
    split: str | None = None
    samples: int | None = None
    full: bool = False
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0

    def count(self, small: int, full: int) -> int:
        """Number of samples: asked for, or the small or the paper's number."""
        return self.samples if self.samples is not None else (full if self.full else small)

    @property
    def texts(self) -> tuple[Any, ...]:
        """The data, at least the default one."""
        return self.data or (None,)

    def options(self, *names: str) -> dict[str, Any]:
        """Some settings by name, or those that `lipbound.compare` and `sequence_growth` take."""
        names = names or ("column", "split", "device", "dtype", "seed")
        return {name: getattr(self, name) for name in names}

    def asked(self) -> dict[str, Any]:
        """Settings asked for, in JSON's types; objects in memory by their types."""
        model, *data = (
            str(one) if isinstance(one, str | Path) else type(one).__name__
            for one in (self.model, *self.data)
        )
        rest = self.options("column", "split", "samples", "full", "seed")
        return {"model": model, "data": data, "dtype": str(self.dtype)} | rest

    def capture(
        self, samples: int, max_length: int = 128
    ) -> tuple[Checkpoint, list[Attention], Inputs]:
        """The checkpoint, its layers at some samples, and the samples."""
        device = resolve_device(self.device)
        checkpoint = load_checkpoint(self.model, dtype=self.dtype, device=device)
        options = self.options("column", "split") | {"samples": samples, "max_length": max_length}
        inputs = prepare(checkpoint, self.texts[0], **options)
        found = Capturer(checkpoint.model, around=True).run(inputs.block(0, samples, device))
        layers = in_closed_form((layer.attention for layer in found), "this figure")
        return checkpoint, layers, inputs

    def measured(
        self, samples: int, measure: Callable[[Attention], dict[str, Tensor]], *axes: str
    ) -> xr.Dataset:
        """Measure each layer at some samples; return the results by layer, with provenance."""
        checkpoint, layers, inputs = self.capture(samples)
        ds = tabled([measure(att) for att in layers], *axes)
        return ds.assign_attrs(self.attributes(checkpoint, inputs))

    def attributes(
        self, checkpoint: Checkpoint | None = None, inputs: Inputs | None = None
    ) -> dict[str, Any]:
        """Provenance."""
        data = inputs.description if inputs else "no data"
        device = resolve_device(self.device)
        return provenance(checkpoint, data, device, self.dtype, self.seed) | {
            "full": int(self.full),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        }


class PaperFigure(ABC):
    """One figure or claim; a subclass is a row of the table `FIGURES`.

    Attributes:
        name: what it is called on the command line. source: paper and place.
        title: the first line of the docstring.
        cost: time of the small setting on two CPU cores.
        run: name of the stored Dataset, by default that of the figure: one that inherits from
            another draws the same measurements.
        of_model: whether it measures a model at all.
    """

    name: str
    source: str
    cost: str
    title: str
    run: str
    of_model = True

    def __init_subclass__(cls) -> None:
        cls.run = getattr(cls, "run", cls.name)
        cls.title = (cls.__doc__ or cls.name).splitlines()[0].removesuffix(".")
        FIGURES[cls.name] = cls()

    @abstractmethod
    def compute(self, setting: Setting) -> xr.Dataset:
        """Return the measured Dataset, with provenance."""

    @abstractmethod
    def draw(self, ds: xr.Dataset) -> Figure:
        """Its figure."""

    @abstractmethod
    def caption(self, ds: xr.Dataset) -> str:
        """Return the caption: the content of the figure and its main numbers."""

    @property
    def stored(self) -> str:
        """Name of the Zarr store of what it measures, in the folder of its figure."""
        return f"{self.run}.zarr"

    def saved(self, setting: Setting, folder: Path) -> xr.Dataset:
        """Load the store in ``folder``, or compute and store it where it is missing.

        Raises:
            StoreError: the store is of another setting, or cannot be written.
        """
        path = folder / self.stored
        if path.exists():
            ds = store.load(path)
            check_same(path, ds, setting)
            return ds
        store.check_target(path)
        ds = self.compute(setting)
        ds.attrs |= {"figure": self.run, "asked": setting.asked()}
        store.save(ds, path)
        return store.load(path)

    def render(self, ds: xr.Dataset, folder: Path) -> None:
        """Figure, and caption as plain text and for LaTeX, of a computed Dataset."""
        caption = f"{self.title} ({self.source}). {self.caption(ds)}"
        texts = {".txt": caption, ".tex": f"\\caption{{{typeset(caption)}}}"}
        for kind in ("pdf", "png"):
            written(self.draw(ds), folder / f"{self.name}.{kind}")
        for suffix, text in texts.items():
            lines = textwrap.wrap(text, 140, break_long_words=False, break_on_hyphens=False)
            with replacing(folder / f"{self.name}{suffix}") as (target,):
                target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def check_same(path: Path, ds: xr.Dataset, setting: Setting) -> None:
    """Raise StoreError where a store was computed for something else than is asked for.

    Where nothing is asked for, tell what it is.
    """
    asked, usual = setting.asked(), Setting().asked()
    stored = ds.attrs.get("asked", {})
    other = {name: shown(value) for name, value in stored.items() if value != asked.get(name)}
    said = ", ".join(f"{name} {value}" for name, value in other.items())
    wrong = [f"{name} {shown(asked[name])}" for name in other if asked[name] != usual[name]]
    if wrong:
        raise StoreError(
            f"{path} holds the same figure of {said}, not of {', '.join(wrong)}; choose another "
            "folder with output=, or remove it"
        )
    if other:
        tell(f"{path} is drawn as it is: {said}")


PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Colours that are told apart without an order."""

FIGURES: dict[str, PaperFigure] = {}
"""PaperFigures by name, in the order of their papers' files."""


def figure_named(name: str) -> PaperFigure:
    """The figure of that name; UnknownNameError with the nearest one otherwise."""
    return FIGURES[choice("figure", name, FIGURES)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and draw figures of the script that is run: of one paper, for any checkpoint."""
    listed = "\n".join(
        f"{one.name}: {one.title}\n    {one.source}; about {one.cost} with small settings on two "
        "cores"
        for one in FIGURES.values()
    )
    parser = argparse.ArgumentParser(
        description=f"{main.__doc__}\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="one of the figures below, or 'all'")
    parser.add_argument("model", nargs="?", default=Setting.model, help="as for lipbound compare")
    parser.add_argument("--data", action="append", default=[], help="may be given several times")
    parser.add_argument("--split", help="split of a hub dataset")
    parser.add_argument("--column", help="column of a table")
    parser.add_argument("--samples", type=int, help="samples, or sequences of each length")
    parser.add_argument("--full", action="store_true", help="the paper's sizes, not small ones")
    parser.add_argument("--device", default=Setting.device, help="as for lipbound compare")
    parser.add_argument("--dtype", default=Setting.dtype, help="as for lipbound compare")
    parser.add_argument("--seed", type=int, default=Setting.seed, help="as for lipbound compare")
    parser.add_argument("--output", "-o", type=Path, default=Path("reproduced"), help="a folder")
    given = vars(parser.parse_args(arguments))
    name, output, data = given.pop("name"), given.pop("output"), tuple(given.pop("data"))
    try:
        chosen = [*FIGURES.values()] if name == "all" else [figure_named(name)]
        check_folder_name("output", output, "holds data, figures and captions")
        if given["samples"] is not None:
            whole("samples", given["samples"], least=1)
        setting = Setting(data=data, **given)
        for one in chosen:
            ds = one.saved(setting, output)
            one.render(ds, output)
            print(
                f"{one.title} ({one.source}).\n{one.caption(ds)}\nwrote {output / one.name}.pdf, "
                f".png, .txt and .tex, from {output / one.stored}\n"
            )
    except LipboundError as error:
        sys.exit(f"error: {error}")


def colours(count: int) -> list[Any]:
    """Colours of so many lines, no two alike.

    A palette for seven lines and fewer, as they have no order; above, a sequential map from the
    first line to the last.
    """
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, count)))


def plain_ticks(axis: Axis) -> None:
    """Set ticks of a logarithmic axis: 1, 2, 5, 10, 20, 50, ... as plain numbers.

    A power of ten per decade leaves the numbers between to guess.
    """
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


@contextmanager
def sheet(
    rows: int, columns: int, *, height: float = 2.1, width: float = 7.1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of the house style that pyplot does not know of, and its axes, row by row."""
    type_ = {"font.size": 7.0, "legend.fontsize": 7.0, "legend.frameon": False}
    with matplotlib.rc_context(BASE | type_):
        figure = Drawing(figsize=(width, rows * height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        yield figure, list(axes.ravel())


def of(ds: xr.Dataset) -> str:
    """Model and data of a Dataset, for captions."""
    called = f" ({ds.attrs['model']})" if builtin_name(ds) else ""
    return f"{model_name(ds)}{called}; data: {ds.attrs['data']}; {ds.attrs['dtype']}"

"""Recipes and the table of them.

A recipe is one figure or claim of a paper, computed and drawn for any checkpoint.
"""

import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import in_closed_form
from lipbound.devices import device_name, resolve_device, versions
from lipbound.errors import StoreError, UnknownNameError, nearest, shown, tell
from lipbound.models.capture.capture import Capturer
from lipbound.models.inputs import Inputs, prepare
from lipbound.models.loading import Checkpoint, load_checkpoint
from lipbound.reporting.labels import builtin_name, model_name
from lipbound.reporting.styles import BASE, Drawing, latex_caption, write
from lipbound.runs import store


@dataclass(frozen=True)
class Setting:
    """Model, data and sizes that a recipe runs on.

    Attributes:
        model: as for `lipbound.compare`.
        data: texts or image sets, as for `lipbound.compare`; none for the default. column, split:
            of tables.
        samples: how many samples, or sequences of a length; None for the recipe's own number.
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

    def asked(self) -> dict[str, Any]:
        """Settings asked for, in JSON's types; objects in memory by their types."""
        named = [
            str(one) if isinstance(one, str | Path) else type(one).__name__
            for one in (self.model, *self.data)
        ]
        rest = {
            "column": self.column,
            "split": self.split,
            "samples": self.samples,
            "full": self.full,
            "dtype": str(self.dtype),
            "seed": self.seed,
        }
        return {"model": named[0], "data": named[1:]} | rest

    def read(self, samples: int, max_length: int = 128) -> tuple[Checkpoint, Inputs]:
        """The checkpoint, and some samples."""
        checkpoint = load_checkpoint(
            self.model, dtype=self.dtype, device=resolve_device(self.device)
        )
        return checkpoint, prepare(
            checkpoint,
            self.texts[0],
            samples=samples,
            max_length=max_length,
            column=self.column,
            split=self.split,
        )

    def layers(self, checkpoint: Checkpoint, inputs: Inputs, samples: int) -> list[Attention]:
        """The checkpoint's layers at the first samples."""
        found = Capturer(checkpoint.model, around=True).run(
            inputs.block(0, samples, resolve_device(self.device))
        )
        return in_closed_form((layer.attention for layer in found), "this recipe")

    def capture(
        self, samples: int, max_length: int = 128
    ) -> tuple[Checkpoint, list[Attention], str]:
        """The checkpoint, its layers at some samples, and what the samples are."""
        checkpoint, inputs = self.read(samples, max_length)
        return checkpoint, self.layers(checkpoint, inputs, samples), inputs.description

    def attributes(self, checkpoint: Checkpoint | None, data: str) -> dict[str, Any]:
        """Provenance."""
        found = versions()
        return {
            "lipbound": found["lipbound"],
            "versions": found,
            "data": data,
            "dtype": self.dtype,
            "device": device_name(resolve_device(self.device)),
            "seed": self.seed,
            "full": int(self.full),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        } | (
            {}
            if checkpoint is None
            else {"model": checkpoint.name, "revision": checkpoint.revision}
        )


@dataclass(frozen=True)
class Recipe:
    """One figure or claim.

    Attributes:
        name: what it is called on the command line. title: one line. source: paper and place.
        compute: what it measures. draw: its figure. caption: what exactly the figure shows, with
            the numbers that matter.
        cost: time of the small setting on two CPU cores.
        run: name of the stored Dataset; recipes that draw the same measurements share it. The
            recipe's own name by default.
        of_model: whether it measures a model at all.
    """

    name: str
    title: str
    source: str
    compute: Callable[[Setting], xr.Dataset]
    draw: Callable[[xr.Dataset], Figure]
    caption: Callable[[xr.Dataset], str]
    cost: str
    run: str = ""
    of_model: bool = True

    @property
    def stored(self) -> str:
        """Name of the Zarr store of what it measures, in the folder of its figure."""
        return f"{self.run or self.name}.zarr"

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
        ds.attrs |= {"recipe": self.run or self.name, "asked": setting.asked()}
        store.save(ds, path)
        return store.load(path)

    def reproduce(
        self, setting: Setting, folder: Path, *, kinds: Sequence[str] = ("pdf", "png")
    ) -> xr.Dataset:
        """`saved`, and figure and caption in the same folder."""
        ds = self.saved(setting, folder)
        self.render(ds, folder, kinds=kinds)
        return ds

    def render(
        self, ds: xr.Dataset, folder: Path, *, kinds: Sequence[str] = ("pdf", "png")
    ) -> None:
        """Figure, and caption as plain text and for LaTeX, of a computed Dataset."""
        caption = f"{self.title} ({self.source}). {self.caption(ds)}"
        texts = {".txt": caption, ".tex": f"\\caption{{{latex_caption(caption)}}}"}
        beside = {
            folder / f"{self.name}{suffix}": "\n".join(
                textwrap.wrap(text, 140, break_long_words=False, break_on_hyphens=False)
            )
            + "\n"
            for suffix, text in texts.items()
        }
        for kind in kinds:
            write(self.draw(ds), folder / f"{self.name}.{kind}", beside)


def check_same(path: Path, ds: xr.Dataset, setting: Setting) -> None:
    """Raise StoreError where a store was computed for something else than is asked for.

    Where nothing is asked for, tell what it is.
    """
    asked, usual = setting.asked(), Setting().asked()
    stored = ds.attrs.get("asked", {})
    other = [name for name in stored if stored[name] != asked.get(name)]
    if wrong := [
        f"{name} was {shown(stored[name])} and is now {shown(asked[name])}"
        for name in other
        if asked[name] != usual[name]
    ]:
        raise StoreError(
            f"{path} holds the same figure of other things: {'; '.join(wrong)}; choose another "
            "folder with output=, or remove it"
        )
    if other:
        tell(
            f"{path} is drawn as it is: "
            f"{', '.join(f'{name} {shown(stored[name])}' for name in other)}"
        )


RECIPES: dict[str, Recipe] = {}


def recipe(name: str) -> Recipe:
    """The recipe of that name; UnknownNameError with the nearest one otherwise."""
    if name not in RECIPES:
        raise UnknownNameError(f"unknown recipe {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]


def register(**fields: Any) -> None:
    """Enter a recipe in the table."""
    RECIPES[fields["name"]] = Recipe(**fields)


def tick_lengths(axes: Axes, lengths: Any) -> None:
    """Set ticks of a logarithmic axis of sequence lengths: 2, 5, 10, 20, 50, ...

    They are plain numbers; a power of ten per decade leaves the lengths between to guess.
    """
    shown = [
        k * 10**e for e in range(7) for k in (1, 2, 5) if min(lengths) <= k * 10**e <= max(lengths)
    ]
    axes.set_xticks(shown, [f"{x:,}" for x in shown])
    axes.minorticks_off()


@contextmanager
def sheet(
    rows: int, columns: int, *, height: float = 2.1, width: float = 7.1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of the house style that pyplot does not know of, and its axes, row by row."""
    with matplotlib.rc_context(
        BASE | {"font.size": 7.0, "legend.fontsize": 7.0, "legend.frameon": False}
    ):
        figure = Drawing(figsize=(width, rows * height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        yield figure, list(axes.ravel())


def of(ds: xr.Dataset) -> str:
    """Model and data of a Dataset, for captions."""
    called = f" ({ds.attrs['model']})" if builtin_name(ds) else ""
    return f"{model_name(ds)}{called}; data: {ds.attrs['data']}; {ds.attrs['dtype']}"

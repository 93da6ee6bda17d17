"""What a run computes, from what and where: one validated object behind `lipbound.compare`, the
command line, sweeps and replays."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from lipbound.bounds.audit import norm_of
from lipbound.bounds.bound import check_norm
from lipbound.bounds.registry import resolve
from lipbound.bounds.whole_layer_rules import names_for
from lipbound.devices import check_weights, dtype_name
from lipbound.errors import (
    AlteredRunError,
    LipboundError,
    StoreError,
    adapter_name,
    choice,
    flag,
    indices,
    is_number,
    name_or_none,
    real,
    sample_count,
    shown,
    whole,
)
from lipbound.jacobians.maps import MAPS
from lipbound.jacobians.token_norms.token_norm import TOKEN_MAPS
from lipbound.runs.provenance import DRAWN

if TYPE_CHECKING:
    import xarray as xr
    from transformers import PreTrainedModel

DELTA = "a probability between 0 and 1, or None for plain estimates without upper ends"
EXPORTS = {
    **{
        f".{kind}": f"lipbound table {{run}} --format {format}"
        for kind, format in {
            "csv": "csv",
            "tsv": "csv",
            "xlsx": "csv",
            "xls": "csv",
            "parquet": "csv",
            "feather": "csv",
            "md": "markdown",
            "tex": "latex",
            "txt": "text",
        }.items()
    },
    **{
        f".{kind}": f"lipbound heatmap {{run}} -o heatmap.{kind}"
        for kind in ("pdf", "png", "svg", "jpg", "jpeg", "tif", "tiff", "webp", "eps", "ps", "pgf")
    },
    ".json": "lipbound table {run} --json",
    ".html": "lipbound report {run} -o report.html",
    ".bib": "lipbound cite {run}",
    **dict.fromkeys((".nc", ".h5", ".hdf5"), "lb.save(lb.load('{run}'), 'run.nc') in Python"),
    **dict.fromkeys((".npy", ".npz", ".pkl", ".pt"), "lb.load('{run}') in Python"),
}
"""What makes a file of such an ending from a run."""
LEAST_MEMORY = 1e6
"""Bytes that no unit need be written behind."""
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class RunConfig:
    """The arguments of `lipbound.compare` that decide what is computed, from what and where; its
    docstring explains each.

    Arguments of nearly the right type are brought into theirs: numbers of numpy, ``torch.device``,
    ``torch.dtype``, one layer, layers as text.

    Raises:
        LipboundError: an unknown map, norm or bound, a bound that says nothing about the map or is
            of another norm, a map or an option that the norm does not have, an argument of another
            type or out of its range, resume without out. Models, data and devices are looked at
            when they are opened.
    """

    model: str | Path | PreTrainedModel
    data: Any = None
    _: KW_ONLY
    bounds: str | Iterable[str] = "default"
    map: str = "head"
    norm: str = "frobenius"
    samples: int | str = 8
    exact_samples: int | None = None
    max_length: int = 128
    layers: Sequence[int] | int | str | None = None
    split: str | None = None
    column: str | None = None
    revision: str | None = None
    tol: float = 1e-3
    delta: float | None = 1e-6
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0
    out: str | Path | None = None
    resume: bool = False
    memory: str | float = "auto"
    weights: str = "auto"
    gguf_file: str | None = None
    shuffle: int | None = None
    tokenizer: str | Path | None = None
    processor: str | Path | None = None
    adapter: str | Path | Literal[False] | None = None

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        if self.norm != "frobenius":
            self._check_deterministic()
        if self.resume and self.out is None:
            raise LipboundError("resume=True needs out=, the name of the run to take up")

    def _checked(self) -> dict[str, Any]:
        """The arguments in the types that everything behind relies on."""
        if isinstance(self.model, str | Path) and not str(self.model).strip():
            raise LipboundError(
                "model is empty; give a hub id, a checkpoint directory or a builtin such as "
                "'builtin:minilm'"
            )
        if isinstance(self.data, str) and not self.data.strip():
            raise LipboundError(
                "data is empty; give a file, a folder, a hub dataset or a text, or leave it out "
                "for the default"
            )
        check_run_name(self.out)
        bounds = (
            self.bounds if isinstance(self.bounds, str) else tuple(resolve(self.bounds))
        )  # an iterator could be read once only
        map, norm = choice("map", self.map, MAPS), check_norm(self.norm)
        if norm != "frobenius" and map not in TOKEN_MAPS:
            raise LipboundError(
                f"map {map!r} has exact norms for norm='frobenius' alone; with norm={norm!r} "
                f"take one of {', '.join(TOKEN_MAPS)}"
            )
        names_for(bounds if isinstance(bounds, str) else list(bounds), map, norm)
        return {
            "bounds": bounds,
            "map": map,
            "norm": norm,
            "samples": sample_count(self.samples) or "all",
            "seed": whole("seed", self.seed),
            "exact_samples": None
            if self.exact_samples is None
            else whole("exact_samples", self.exact_samples, least=1),
            "shuffle": None if self.shuffle is None else whole("shuffle", self.shuffle, least=0),
            "max_length": whole("max_length", self.max_length, least=1),
            "layers": None if self.layers is None else tuple(indices("layers", self.layers)),
            "tol": real(
                "tol",
                self.tol,
                "between 0 and 1 (relative width of the enclosures)",
                above=0,
                below=1,
            ),
            "delta": None
            if self.delta is None
            else real("delta", self.delta, DELTA, above=0, below=1),
            "weights": check_weights(self.weights),
            "dtype": dtype_name(self.dtype),
            "resume": flag("resume", self.resume),
            "memory": _memory(self.memory),
            "adapter": adapter_name(self.adapter),
        } | {
            name: name_or_none(name, getattr(self, name))
            for name in ("split", "column", "revision", "gguf_file")
        }

    def _check_deterministic(self) -> None:
        """Refuse options of norms that are found from random vectors, where nothing is random;
        delta is None then, and the seed 0."""
        if self.delta not in (None, RunConfig.delta):
            refuse_drawn("delta", self.delta, self.norm)
        if self.seed != RunConfig.seed:
            refuse_drawn("seed", self.seed, self.norm)
        object.__setattr__(self, "delta", None)

    @classmethod
    def of(
        cls,
        ds: xr.Dataset,
        *,
        model: Any = None,
        data: Any = None,
        device: str = "auto",
        dtype: str | None = None,
    ) -> Self:
        """The configuration that computes a run again, from the provenance it recorded.

        Args:
            ds: a run.
            model, data: in place of what the run recorded; needed where it was made from objects in
                memory.
            device: a torch device, or "auto". dtype: that of the run by default.

        Raises:
            StoreError: the run does not record where its model or data came from.
            AlteredRunError: it records settings that no run can have.
        """
        a = ds.attrs
        source = a.get("source")
        if "runs" in a:
            raise StoreError(
                f"the run was put together from {len(a['runs'])} runs, which cannot be computed "
                "again as one; give one of them"
            )
        if source is None:
            raise StoreError(
                "the run was written by a version of lipbound that did not record enough to "
                "repeat it"
            )
        if model is None and a["loaded"]:
            raise StoreError(
                f"the run was made from a {a['architecture']} in memory, which no name leads "
                "back to; give it as model="
            )
        if data is None and source["data"] is False:
            raise StoreError(
                f"the run was made from data in memory ({a['data']}), which no name leads back "
                "to; give it as data="
            )
        recorded, commit = source["model"] or a["model"], a["commit"]
        if (
            model is None and commit is not None
        ):  # the commit that was used, whatever branch or tag the name says
            recorded = recorded.partition("@")[0]
        try:
            return cls(
                recorded if model is None else model,
                source["data"] if data is None else data,
                bounds=tuple(a["bounds"]),
                map=a["map"],
                norm=norm_of(ds),
                samples=a["samples"],
                exact_samples=a["exact_samples"],
                max_length=source["max_length"],
                layers=tuple(ds["layer"].values.tolist()),
                split=source["split"],
                column=source["column"],
                revision=commit if model is None else None,
                tol=a["tol"],
                device=device,
                dtype=dtype or a["dtype"],
                **{name: a[name] for name in ("delta", "seed") if name in a},
                gguf_file=source.get("gguf_file") if model is None else None,
                **{name: source.get(name) for name in ("shuffle", "tokenizer", "processor")},
                adapter=source.get("adapter")
                if model is None or isinstance(model, (str, Path))
                else None,
            )
        except LipboundError as error:
            raise AlteredRunError(
                f"the run's settings (attributes) were changed, no run can have them: {error}"
            ) from error

    @property
    def _bounds(self) -> str | list[str]:
        return self.bounds if isinstance(self.bounds, str) else list(self.bounds)

    @property
    def names(self) -> list[str]:
        """Registry names of the bounds that are asked for, those about other maps left out of
        "default" and "all"."""
        return names_for(self._bounds, self.map, self.norm)

    @property
    def drawn(self) -> dict[str, Any]:
        """The settings `DRAWN` of exact norms that are found from random vectors; none in norms
        whose ends are deterministic."""
        return (
            dict(zip(DRAWN, ("lanczos", self.delta, self.seed), strict=True))
            if self.norm == "frobenius"
            else {}
        )

    @property
    def chosen_layers(self) -> tuple[int, ...] | None:
        """Numbers of the layers, those from the end below zero; None for all."""
        return None if self.layers is None else tuple(indices("layers", self.layers))

    @property
    def everything(self) -> bool:
        """Whether bounds are asked for together, so that those that do not apply to the model are
        left out rather than refused."""
        return self.bounds in ("default", "all")

    @property
    def target(self) -> Path | None:
        """Where the run is saved."""
        return None if self.out is None else Path(self.out).expanduser()

    def exact_count(self, samples: int) -> int:
        """How many of so many samples get exact norms."""
        return samples if self.exact_samples is None else min(self.exact_samples, samples)


def check_run_name(out: Any, argument: str = "out") -> None:
    """Raise LipboundError for what cannot be the name of a run, or is that of a file which other
    commands write."""
    if out is not None and (not isinstance(out, str | Path) or not str(out).strip()):
        raise LipboundError(
            f"{argument} is {shown(out)}; give the name of a run that does not exist yet, such as "
            "'run.zarr'"
        )
    if out is not None and (command := EXPORTS.get(Path(out).suffix.lower())):
        run = shlex.quote(str(Path(out).with_suffix(".zarr")))
        raise LipboundError(
            f"{argument} is {shown(str(out))}, and a run is a folder of its own kind; name it "
            f"{run}, then: {command.format(run=run)}"
        )


def check_folder_name(name: str, folder: str | Path, what: str) -> None:
    """Raise LipboundError where a folder that is to be made has the ending of a file; ``what`` it
    holds, with its verb."""
    if Path(folder).suffix.lower() in EXPORTS:
        raise LipboundError(
            f"{name} is {shown(str(folder))}, which {what}; give a folder, such as "
            f"{str(Path(folder).with_suffix(''))!r}"
        )


def refuse_drawn(name: str, value: Any, norm: str) -> None:
    """Raise LipboundError about an option, one of `DRAWN`, that was given with a norm whose ends
    are deterministic."""
    raise LipboundError(
        f"{name} is {shown(value)}, which norm={norm!r} does not take, since both its ends are "
        "deterministic; leave it out"
    )


def _memory(memory: Any) -> str | float:
    """ "auto", or bytes."""
    if isinstance(memory, str) and memory == "auto":
        return "auto"
    size = memory
    if isinstance(memory, str):
        match = re.fullmatch(
            r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgt]?)i?b?", memory.strip().lower()
        )
        size = float(match[1]) * UNITS[match[2]] if match else None
        if (
            size is not None
            and 0 < size < LEAST_MEMORY
            and not re.search("[a-z]", memory.lower().replace("e", ""))
        ):
            raise LipboundError(
                f"memory is {shown(memory)}, which is {size:g} bytes; give it with its unit, "
                f"such as '{memory.strip()}GB', or 'auto'"
            )
    if isinstance(size, bool) or not is_number(size) or not 0 < float(size) < math.inf:
        raise LipboundError(
            f"memory is {shown(memory)}; give a size such as '4GB', a number of bytes, or 'auto'"
        )
    return float(size)

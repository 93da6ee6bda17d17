"""Facts about the Dataset that is shown, for captions and tables: what of a run is there, of how
much, and whether it is as it was computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from lipbound.runs.provenance import CHECKSUM, altered, lacks_variables, repeated, settings_altered


@dataclass(frozen=True)
class Standing:
    """Contents of a Dataset, counted from its values and coordinates, beside what the run was made
    with.

    Attributes:
        samples: that are there. exact_samples: of them, those with an exact norm.
        samples_made: that the run was made of; None in runs that do not say.
        layers: numbers of the layers that are there. model_layers: how many attention layers the
            model has; None in runs that do not say.
        heads: least and most heads of a layer that have a value; (0, 0) for maps of whole layers.
        heads_made: places for heads that the run was made with; None for maps of whole layers, and
            in runs that do not say.
        tokens: of the longest sample that is there.
        norms: exact norms that are there.
        closed: of them, those whose two ends are within ``tol`` (estimates: those that converged).
        runs: how many runs were put together; 1 for one.
        shown: the Dataset.
    """

    samples: int
    exact_samples: int
    samples_made: int | None
    layers: tuple[int, ...]
    model_layers: int | None
    heads: tuple[int, int]
    heads_made: int | None
    tokens: int
    norms: int
    closed: int
    runs: int
    shown: xr.Dataset = field(repr=False, compare=False)

    @cached_property
    def edited(self) -> bool | None:
        """`edited`, which takes a hash of every place, where somebody asks."""
        return edited(self.shown)

    @property
    def all_closed(self) -> bool:
        """True where every exact norm that is there was found to the tolerance."""
        return self.closed == self.norms

    @property
    def all_layers(self) -> bool | None:
        """True where every attention layer of the model is there; None where the run does not say
        how many it has."""
        return None if self.model_layers is None else len(set(self.layers)) == self.model_layers


def standing(ds: xr.Dataset) -> Standing:
    """`Standing` of a run, or of a part of one that has the axes sample and layer
    (`lipbound.runs.run_argument.run_of` gives it them)."""
    made = ds.attrs.get("made", {})
    exact = ds["exact"]
    there = exact.notnull()
    counts = there.any("sample").sum("head").values if "head" in ds.dims else np.zeros(1, dtype=int)
    return Standing(
        samples=int(ds.sizes["sample"]),
        exact_samples=int(with_exact(ds).sum()),
        samples_made=made.get("samples"),
        layers=tuple(int(layer) for layer in ds["layer"].values),
        model_layers=made.get("model_layers"),
        heads=(int(counts.min()), int(counts.max())),
        heads_made=made.get("heads"),
        tokens=int(ds["length"].max()) if "length" in ds.variables else int(ds.attrs["tokens"]),
        norms=int(there.sum()),
        closed=int(closed(ds).sum()),
        runs=len(origins(ds)),
        shown=ds,
    )


def with_exact(ds: xr.Dataset) -> np.ndarray:
    """(samples,) bool: samples that have an exact norm."""
    return np.asarray(
        ds["exact"].notnull().any([dim for dim in ds["exact"].dims if dim != "sample"]).values
    )


def closed(ds: xr.Dataset) -> np.ndarray:
    """Places whose exact norm was found to the run's tolerance, bool, as ``exact``: converged, and
    both ends (where there are two) that near."""
    exact = ds["exact"].values
    good = ~np.isnan(exact) & ds["exact_converged"].values.astype(bool)
    if "exact_upper" in ds:
        upper = ds["exact_upper"].values
        with np.errstate(all="ignore"):
            good &= (upper <= exact * (1 + float(ds.attrs["tol"])) * (1 + 1e-9)) | (exact == 0)
    return np.asarray(good)


def edited(ds: xr.Dataset) -> bool | None:
    """Tell whether values, coordinates or settings are not those that were computed; None where
    that cannot be told.

    Parts of a run (``ds.isel(sample=[0])``) are as they were computed; arithmetic, and runs joined
    by ``xarray.concat``, whose attributes are those of one of them, are not.
    """
    if "settings_checksum" not in ds.attrs or "made" not in ds.attrs:
        return True if "made" in ds.attrs else None  # arithmetic on two runs drops what differs
    if settings_altered(ds) or CHECKSUM not in ds.variables or repeated(ds):
        return True
    return None if lacks_variables(ds) else bool(altered(ds))


def origins(ds: xr.Dataset) -> list[dict[str, Any]]:
    """The attributes of every run that was put together by `lipbound.concat`, those of which
    something is left; of any other run, its own."""
    if "runs" not in ds.attrs:
        return [dict(ds.attrs)]
    return [
        dict(ds.attrs["runs"][k]) for k in sorted({int(k) for k in np.unique(ds["run"].values)})
    ]

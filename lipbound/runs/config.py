"""What a run computes, from what and where: one validated object behind `lipbound.compare`, the command line, sweeps and replays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lipbound.bounds.multihead import names_for
from lipbound.errors import AlteredRunError, LipboundError, StoreError, UnknownNameError, nearest
from lipbound.jacobians.maps import MAPS

if TYPE_CHECKING:
    import xarray as xr
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RunConfig:
    """The arguments of `lipbound.compare` that decide what is computed, from what and where; its docstring explains each.

    Raises:
        LipboundError: an unknown map or bound, a bound that says nothing about the map, tol outside (0, 1), exact_samples below 1, resume without
            out. Models, data and devices are looked at when they are opened.
    """

    model: str | Path | PreTrainedModel
    data: Any = None
    _: KW_ONLY
    bounds: str | Iterable[str] = "default"
    map: str = "head"
    samples: int = 8
    exact_samples: int | None = None
    max_length: int = 128
    layers: Sequence[int] | None = None
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

    def __post_init__(self) -> None:
        if not isinstance(self.bounds, str):
            object.__setattr__(self, "bounds", tuple(self.bounds))  # an iterator could be read once only
        if self.map not in MAPS:
            raise UnknownNameError(f"unknown map {self.map!r}; {nearest(self.map, MAPS)}")
        names_for(self._bounds, self.map)
        if not 0 < self.tol < 1:
            raise LipboundError(f"tol is {self.tol}; it must be between 0 and 1 (relative error of the exact norms)")
        if self.exact_samples is not None and self.exact_samples < 1:
            raise LipboundError(f"exact_samples is {self.exact_samples}; at least one sample is needed")
        if self.resume and self.out is None:
            raise LipboundError("resume=True needs out, the name of the run to take up")

    @classmethod
    def of(cls, ds: xr.Dataset, *, model: Any = None, data: Any = None, device: str = "auto", dtype: str | None = None) -> Self:
        """The configuration that computes a run again, from the provenance it recorded.

        Args:
            ds: a run.
            model, data: in place of what the run recorded; needed where it was made from objects in memory.
            device: a torch device, or "auto". dtype: that of the run by default.

        Raises:
            StoreError: the run does not record where its model or data came from.
            AlteredRunError: it records settings that no run can have.
        """
        a = ds.attrs
        source = a.get("source")
        if source is None:
            raise StoreError("the run was written by a version of lipbound that did not record enough to repeat it")
        if model is None and a["loaded"]:
            raise StoreError(f"the run was made from a {a['architecture']} in memory, which no name leads back to; give it as model=")
        if data is None and source["data"] is False:
            raise StoreError(f"the run was made from data in memory ({a['data']}), which no name leads back to; give it as data=")
        recorded, commit = source["model"] or a["model"], a["commit"]
        if model is None and commit is not None:  # the commit that was used, whatever branch or tag the name says
            recorded = recorded.partition("@")[0]
        try:
            return cls(
                recorded if model is None else model, source["data"] if data is None else data, bounds=tuple(a["bounds"]), map=a["map"],
                samples=a["samples"], exact_samples=a["exact_samples"], max_length=source["max_length"], layers=tuple(ds["layer"].values.tolist()),
                split=source["split"], column=source["column"], revision=commit if model is None else None, tol=a["tol"], delta=a["delta"],
                device=device, dtype=dtype or a["dtype"], seed=a["seed"],
            )  # fmt: skip
        except LipboundError as error:
            raise AlteredRunError(f"the run's settings (attributes) were changed, no run can have them: {error}") from error

    @property
    def _bounds(self) -> str | list[str]:
        return self.bounds if isinstance(self.bounds, str) else list(self.bounds)

    @property
    def names(self) -> list[str]:
        """Registry names of the bounds that are asked for, those about other maps left out of "default" and "all"."""
        return names_for(self._bounds, self.map)

    @property
    def everything(self) -> bool:
        """Whether bounds are asked for together, so that those that do not apply to the model are left out rather than refused."""
        return self.bounds in ("default", "all")

    @property
    def target(self) -> Path | None:
        """Where the run is saved."""
        return None if self.out is None else Path(self.out).expanduser()

    def exact_count(self, samples: int) -> int:
        """How many of so many samples get exact norms."""
        return samples if self.exact_samples is None else min(self.exact_samples, samples)

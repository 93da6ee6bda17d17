"""Do the numbers of a run still hold? Some of them are computed again from the recorded provenance."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.errors import AlteredRunError, LipboundError
from lipbound.formatting import plain
from lipbound.runs.provenance import FORMER, altered, own, settings_checksum
from lipbound.runs.replay import Replay, changed_versions, measure_again, replay

ALLOWED = {"float32": 1e-4, "float64": 1e-8}
"""Relative difference that rounding explains, per unit of the logarithm's size: the exponentials in some bounds amplify it."""
SHOWN = 20
"""Differences that are told one by one."""


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        problems: a sentence for everything that does not hold; none when the run holds.
        notes: what differs without harm, such as versions of packages.
        table: per variable ``values`` compared, the ``largest`` relative difference, how many were ``off``.
        places: the (sample, layer) coordinates whose heads were computed again.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    table: pd.DataFrame
    places: tuple[tuple[int, int], ...]

    @property
    def ok(self) -> bool:
        """Whether everything that was looked at holds."""
        return not self.problems

    def __str__(self) -> str:
        where = ", ".join(f"sample {s} layer {layer}" for s, layer in self.places)
        lines = [f"computed again: all heads of {where}" if where else "nothing could be computed again"]
        if len(self.table):
            shown = self.table.assign(largest=self.table["largest"].map("{:.1e}".format))
            lines += [shown.rename(columns={"largest": "largest relative difference"}).to_string()]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"DIFFERS: {problem}" for problem in self.problems[:SHOWN]] or ["the numbers hold"]
        lines += [f"and {len(self.problems) - SHOWN} more"] if len(self.problems) > SHOWN else []
        return "\n".join(plain(line) for text in lines for line in text.split("\n"))


def verify(
    ds: xr.Dataset,
    *,
    places: int = 4,
    seed: int = 0,
    model: Any = None,
    data: Any = None,
    device: str = "auto",
    dtype: str | None = None,
) -> Verification:
    """Compute some of a run's numbers again, from the provenance it recorded, and compare.

    Looked at: the checksums of the settings and of every sample and layer; the weights and inputs the provenance leads to; and, at random places
    and wherever a checksum does not fit, the numbers of every head (all but the counts of steps). Both ends of exact norms must be where they were
    within the width of the enclosures (the tolerance, for estimates), bounds to 1e-4 (float32) or 1e-8 (float64) relative, times the size of their
    logarithm where that is above one; each up to rounding.

    In another dtype than the run's, the model's own activations differ too: numbers that do not agree are then told, but are no problem.

    Args:
        ds: a run, from `lipbound.load` or `lipbound.compare`.
        places: how many random pairs of sample and layer; all of them where there are fewer.
        seed: which ones.
        model, data: in place of those recorded; needed for runs on objects in memory.
        device, dtype: to compute on and in; a run in float32 can be checked in "float64".

    Returns:
        A `Verification`; ``print`` it, or look at ``.ok`` and ``.problems``.

    Raises:
        LipboundError: places below 1; the model or the data is no longer to be found.
    """
    if places < 1:
        raise LipboundError(f"places is {places}; at least one sample and layer must be computed again")
    try:
        rerun = replay(ds, model=model, data=data, device=device, dtype=dtype)
    except AlteredRunError as error:  # nothing can be computed with such settings
        return Verification((str(error),), (), _table({}), ())
    other_dtype = dtype not in (None, ds.attrs["dtype"])
    problems = list(rerun.differences)
    if "settings_checksum" in ds.attrs and settings_checksum(ds) != ds.attrs["settings_checksum"]:
        problems.append("the run's settings (attributes) are not those that were recorded when it was computed (checksum)")
    if json.dumps(audit(ds), sort_keys=True) != json.dumps(ds.attrs["audit"], sort_keys=True):  # as text, since NaN differs from itself
        problems.append("the audit stored with the run is not that of its numbers")
    broken = altered(ds)
    problems += [f"{_place(ds, s, i)}: the stored numbers are not those that were computed (checksum)" for s, i in broken or []]
    notes = [] if broken is not None else ["the run has no checksums, so numbers that were changed by hand show only where they are computed again"]
    notes += [f"{name} was {then}, is {now}" for name, (then, now) in changed_versions(ds).items()] + rerun.notes
    shapes = rerun.inputs.samples == ds.sizes["sample"]
    chosen = _choose(ds, places, seed, broken or []) if shapes else []
    if not shapes:
        problems.append(f"the data now has {rerun.inputs.samples} samples, the run {ds.sizes['sample']}")
    found: dict[str, tuple[int, float, int]] = {}
    for s, i in chosen:
        for name, difference, sentence in _compare(ds, rerun, s, i):
            count, largest, off = found.get(name, (0, 0.0, 0))
            found[name] = (count + 1, max(largest, difference), off + bool(sentence))
            if sentence:
                (notes if other_dtype else problems).append(sentence)
    where = tuple((int(ds["sample"][s]), int(ds["layer"][i])) for s, i in chosen)
    return Verification(tuple(problems), tuple(notes), _table(found), where)


def _table(found: dict[str, tuple[int, float, int]]) -> pd.DataFrame:
    """Per variable how many values were compared, the largest relative difference, how many were off."""
    return pd.DataFrame([(name, *row) for name, row in found.items()], columns=["variable", "values", "largest", "off"]).set_index("variable")


def _choose(ds: xr.Dataset, places: int, seed: int, broken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Random positions, those with exact norms first, and after them all ``broken`` ones."""
    samples, layers = ds.sizes["sample"], ds.sizes["layer"]
    order = np.random.default_rng(seed).permutation(samples * layers)
    pairs = [(int(k) // layers, int(k) % layers) for k in order]
    pairs.sort(key=lambda pair: pair[0] >= ds.attrs["exact_samples"])
    picked = pairs[:places]
    return sorted({*picked, *broken})


def _place(ds: xr.Dataset, sample: int, layer: int, head: int | None = None) -> str:
    where = f"sample {int(ds['sample'][sample])}, layer {int(ds['layer'][layer])}"
    return where if head is None or "head" not in ds.dims else f"{where}, head {int(ds['head'][head])}"


def _compare(ds: xr.Dataset, rerun: Replay, s: int, i: int) -> Iterator[tuple[str, float, str]]:
    """Name, relative difference and, where it is too large, a sentence, for every number of a place."""
    new = measure_again(rerun, ds, s, i)
    heads = len(next(iter(new.values())))
    slack = max(ALLOWED[ds.attrs["dtype"]], ALLOWED[str(rerun.checkpoint.model.dtype).removeprefix("torch.")])
    for name in own(ds):
        if name in ("exact_steps", FORMER):  # depends on the machine, or is no longer computed
            continue
        old = np.atleast_1d(ds[name].isel(sample=s, layer=i).values)
        for h, stored in enumerate(old):
            empty = False if old.dtype == bool else float("nan")
            now = new[name][h] if name in new and h < heads else empty
            difference = _difference(float(stored), float(now))
            if np.isnan(float(stored)) and np.isnan(float(now)):
                continue
            good = stored == now or (old.dtype != bool and difference <= _tolerance(ds, new, name, h, slack))
            shown = (bool(stored), bool(now)) if old.dtype == bool else (f"{float(stored):.8g}", f"{float(now):.8g}")
            yield name, difference, "" if good else f"{name} at {_place(ds, s, i, h)}: stored {shown[0]}, now {shown[1]}"


def _tolerance(ds: xr.Dataset, new: dict[str, np.ndarray], name: str, h: int, slack: float) -> float:
    """Relative difference that a number may have, from the numbers computed now alone: those stored may be wrong."""
    value = float(new[name][h]) if name in new and h < len(new[name]) else float("nan")
    if not np.isfinite(value):
        return -1.0  # nothing but the same
    if name not in ds.attrs["bounds"]:
        exact, tol = float(new["exact"][h]), float(ds.attrs["tol"])
        wide = max(tol * exact, float(new["exact_upper"][h]) - exact) if "exact_upper" in new and name != "exact_l2" else 2 * tol * value
        return wide / max(value, 1e-300) + slack
    return slack * max(1.0, abs(float(np.log(max(value, 1e-300)))))


def _difference(a: float, b: float) -> float:
    """Relative, 0 for equal values, infinite ones included."""
    if a == b:
        return 0.0
    return float(abs(a - b) / max(abs(b), 1e-300)) if np.isfinite(a) and np.isfinite(b) else float("inf")

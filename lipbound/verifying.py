"""Do the numbers of a run still hold? Some of them are computed again from the recorded provenance."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.checksums import altered
from lipbound.errors import LipboundError
from lipbound.rerun import Rerun, again, changed_versions, measure

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
        lines += [f"DIFFERS: {problem}" for problem in self.problems] or ["the numbers hold"]
        return "\n".join(lines)


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

    Looked at: the checksum of every sample and layer; the weights and inputs the provenance leads to; and, at random places and wherever a checksum
    does not fit, every number of every head. Enclosures of exact norms must overlap, up to rounding; estimates without certificate must agree
    within their tolerances, bounds to 1e-4 (float32) or 1e-8 (float64) relative, times the size of their logarithm where that is above one.

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
    broken = altered(ds)
    problems = [f"{_place(ds, s, i)}: the stored numbers are not those that were computed (checksum)" for s, i in broken or []]
    notes = [] if broken is not None else ["the run has no checksums, so numbers that were changed by hand show only where they are computed again"]
    notes += [f"{name} was {then}, is {now}" for name, (then, now) in changed_versions(ds).items()]
    rerun = again(ds, model=model, data=data, device=device, dtype=dtype)
    problems += rerun.differences
    shapes = rerun.inputs.samples == ds.sizes["sample"]
    chosen = _choose(ds, places, seed, broken or []) if shapes else []
    if not shapes:
        problems.append(f"the data now has {rerun.inputs.samples} samples, the run {ds.sizes['sample']}")
    counts: dict[str, list[float]] = {}
    for s, i in chosen:
        for name, difference, sentence in _compare(ds, rerun, s, i):
            counts.setdefault(name, []).append(difference)
            if sentence:
                problems.append(sentence)
                counts[f"{name} off"] = [*counts.get(f"{name} off", []), 1]
    names = [name for name in counts if not name.endswith(" off")]
    rows = [(name, len(counts[name]), max(counts[name]), len(counts.get(f"{name} off", []))) for name in names]
    table = pd.DataFrame(rows, columns=["variable", "values", "largest", "off"]).set_index("variable")
    if len(problems) > SHOWN:
        problems = [*problems[:SHOWN], f"and {len(problems) - SHOWN} more"]
    return Verification(tuple(problems), tuple(notes), table, tuple((int(ds["sample"][s]), int(ds["layer"][i])) for s, i in chosen))


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


def _compare(ds: xr.Dataset, rerun: Rerun, s: int, i: int) -> Iterator[tuple[str, float, str]]:
    """Name, relative difference and, where it is too large, a sentence, for every number of a place."""
    new = measure(rerun, ds, s, i)
    old = {str(name): np.atleast_1d(ds[name].isel(sample=s, layer=i).values) for name in ds.data_vars}
    slack = ALLOWED[ds.attrs["dtype"]]
    rounding = old["exact_rounding"] + new["exact_rounding"]
    tests: dict[str, Callable[[int], bool]] = {}
    tol = ds.attrs["tol"]
    if "exact_upper" in old:
        tests["exact"] = lambda h: bool(old["exact"][h] <= new["exact_upper"][h] * (1 + slack) + rounding[h])
        tests["exact_upper"] = lambda h: bool(new["exact"][h] <= old["exact_upper"][h] * (1 + slack) + rounding[h])
    else:
        tests["exact"] = lambda h: bool(abs(old["exact"][h] - new["exact"][h]) <= 2 * tol * new["exact"][h] + rounding[h])
    if "exact_l2" in old:
        tests["exact_l2"] = lambda h: bool(abs(old["exact_l2"][h] - new["exact_l2"][h]) <= 2 * tol * new["exact_l2"][h] + slack * new["exact_l2"][h])

    def same(name: str) -> Callable[[int], bool]:
        return lambda h: _difference(old[name][h], new[name][h]) <= slack * max(1.0, abs(np.log(np.maximum(new[name][h], 1e-300))))

    for name in ds.attrs["bounds"]:
        tests[name] = same(name)
    for name, test in tests.items():
        if name not in new:  # exact norms are there for the first samples only
            continue
        for h in range(len(old[name])):
            a, b = float(old[name][h]), float(new[name][h]) if h < len(new[name]) else float("nan")
            if np.isnan(a) and np.isnan(b):
                continue
            good = h < len(new[name]) and not np.isnan(a) and not np.isnan(b) and test(h)
            sentence = "" if good else f"{name} at {_place(ds, s, i, h)}: stored {a:.8g}, now {b:.8g}"
            yield name, _difference(a, b), sentence
    for name in ds.attrs["bounds"]:
        flags = f"{name}_sound"
        for h in np.flatnonzero(old[flags][: len(new[flags])] != new[flags]).tolist():
            yield flags, 1.0, f"{flags} at {_place(ds, s, i, h)}: stored {bool(old[flags][h])}, now {bool(new[flags][h])}"


def _difference(a: float, b: float) -> float:
    """Relative, 0 for equal values, infinite ones included."""
    if a == b:
        return 0.0
    return float(abs(a - b) / max(abs(b), 1e-300)) if np.isfinite(a) and np.isfinite(b) else float("inf")

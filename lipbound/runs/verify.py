"""Do the numbers of a run still hold? Some of them are computed again from the recorded
provenance."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds.audit import audit, norm_of
from lipbound.devices import dtype_name
from lipbound.errors import AlteredRunError, CaptureError, StoreError, whole
from lipbound.formatting import plain
from lipbound.runs.concat import split
from lipbound.runs.provenance import altered, lacks_variables, own, settings_altered, strange
from lipbound.runs.replay import OtherModelError, Replay, changed_versions, measure_again, replay
from lipbound.runs.run_argument import whole_run
from lipbound.runs.standing import with_exact

ALLOWED = {"float32": 1e-4, "float64": 1e-8}
"""Relative difference that rounding explains, per unit of the logarithm's size: the exponentials in
some bounds amplify it."""
FLAGS = ("_sound", "_converged")
"""Ends of names of variables that are true or false."""


@dataclass(frozen=True)
class Difference:
    """A number that does not agree: of which variable, where, as text then and now, and the
    relative difference."""

    variable: str
    place: str
    stored: str
    now: str
    relative: float

    def __str__(self) -> str:
        return f"{self.variable} at {self.place}: stored {self.stored}, now {self.now}"


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        faults: a sentence for everything that does not hold beside single numbers: weights, data,
            settings, checksums.
        numbers: those that do not agree.
        remarks: what differs without harm, such as versions of packages.
        table: per variable ``values`` compared, the ``largest`` relative difference, how many were
            ``off``.
        places: the (sample, layer) coordinates whose heads were computed again.
        judged: whether numbers that do not agree count against the run; not where it was computed
            again in another dtype.
        dtype: what was computed in.
        norm: of the run, which is that of what was computed again.
        runs: how many runs were put together; samples of ``places`` are then those of each run, one
            run after the other.
    """

    faults: tuple[str, ...]
    numbers: tuple[Difference, ...]
    remarks: tuple[str, ...]
    table: pd.DataFrame
    places: tuple[tuple[int, int], ...]
    judged: bool
    dtype: str
    norm: str = "frobenius"
    runs: int = 1

    @property
    def ok(self) -> bool:
        """Whether everything that was looked at holds."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for everything that does not hold; none when the run holds."""
        return self.faults + (tuple(map(str, self.numbers)) if self.judged else ())

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for what differs without harm."""
        return self.remarks + (() if self.judged else tuple(map(str, self.numbers)))

    def __str__(self) -> str:
        lines = [
            self._recomputed(),
            *self._holding(),
            *(f"note: {remark}" for remark in self.remarks),
        ]
        lines += [f"DIFFERS: {fault}" for fault in self.faults]
        lines += [f"{'DIFFERS' if self.judged else 'note'}: {group}" for group in self._differing()]
        if not self.ok:
            lines.append("the run does not hold")
        elif self.numbers:
            lines.append(
                f"nothing speaks against the run; what {self.dtype} tells differently is noted "
                "above"
            )
        else:
            lines.append("the numbers hold")
        return "\n".join(plain(line) for line in lines)

    def _recomputed(self) -> str:
        if not self.places:
            return "nothing was computed again"
        layers: dict[int, list[str]] = {}
        for sample, layer in self.places:
            layers.setdefault(sample, []).append(str(layer))
        where = "; ".join(
            f"sample {s}, layer{'s' if len(found) > 1 else ''} {', '.join(found)}"
            for s, found in layers.items()
        )
        norm = "" if self.norm == "frobenius" else f" and the {self.norm} norm"
        each = (
            ""
            if self.runs == 1
            else f", of {self.runs} runs that were put together, each by its own numbers"
        )
        return f"computed again, in {self.dtype}{norm}{each}: all heads at {where}"

    def _holding(self) -> list[str]:
        """What agrees, the same numbers and those within rounding apart."""
        good = self.table[self.table["off"] == 0]
        lines = []
        same, near = good[good["largest"] == 0], good[good["largest"] > 0]
        if len(same):
            lines.append(
                f"the same: {', '.join(map(str, same.index))} ({int(same['values'].sum())} values)"
            )
        if len(near):
            most = near["largest"].idxmax()
            lines.append(
                f"equal up to what rounding and tol explain: {', '.join(map(str, near.index))} "
                f"({int(near['values'].sum())} values), "
                f"the largest relative difference {near['largest'].max():.1e}, of {most}"
            )
        return lines

    def _differing(self) -> list[str]:
        """A sentence for every variable that has numbers which do not agree."""
        groups: dict[str, list[Difference]] = {}
        for one in self.numbers:
            groups.setdefault(one.variable, []).append(one)
        sentences = []
        for name, found in groups.items():
            worst = max(found, key=lambda one: one.relative)
            count = f"{len(found)} of {int(self.table.loc[name, 'values'])} values"
            by = (
                f", by up to {100 * worst.relative:.2g} %"
                if np.isfinite(worst.relative) and not name.endswith(FLAGS)
                else ""
            )
            rest = f", and {len(found) - 1} more" if len(found) > 1 else ""
            sentences.append(
                f"{name}, {count}{by}: at {worst.place} stored {worst.stored}, now "
                f"{worst.now}{rest}"
            )
        return sentences


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

    Looked at: the checksums of the settings and of every sample and layer; the weights and inputs
    the provenance leads to; and, at random places and wherever a checksum does not fit, the numbers
    of every head (all but the counts of steps). Both ends of exact norms must be where they were
    within the width of the enclosures (the tolerance, for estimates), bounds to 1e-4 (float32) or
    1e-8 (float64) relative, times the size of their logarithm where that is above one; each up to
    rounding.

    In another dtype than the run's, the model's own activations differ too: numbers that do not
    agree are then told, but are no problem.

    Args:
        ds: a run, from `lipbound.load` or `lipbound.compare`, a selection of its samples, layers or
            heads, or its path; of what `lipbound.concat` put together, every run is verified by
            itself.
        places: how many random pairs of sample and layer; all of them where there are fewer; of
            each run where several were put together.
        seed: which ones.
        model, data: in place of those recorded; needed for runs on objects in memory.
        device, dtype: to compute on and in; a run in float32 can be checked in "float64".

    Returns:
        A `Verification`; ``print`` it, or look at ``.ok`` and ``.problems``.

    Raises:
        LipboundError: places below 1; the model or the data is no longer to be found.
    """
    ds = whole_run(ds)
    places, seed = whole("places", places, least=1), whole("seed", seed, least=0)
    if "runs" not in ds.attrs:
        return _verify_one(ds, places, seed, model, data, device, dtype)
    found = [_verify_one(part, places, seed, model, data, device, dtype) for part in split(ds)]
    return _together(found, _own_faults(ds))


def _own_faults(ds: xr.Dataset) -> list[str]:
    """Sentences about what a run says of itself and its numbers that does not hold: settings,
    audit."""
    faults = []
    if settings_altered(ds):
        faults.append(
            "the run's settings (attributes) are not those that were recorded when it was "
            "computed (checksum)"
        )
    now, then = (
        json.dumps(one, sort_keys=True) for one in (audit(ds), ds.attrs["audit"])
    )  # as text, since NaN differs from itself
    if now != then and _is_whole(ds):
        faults.append("the audit stored with the run is not that of its numbers")
    return faults


def _is_whole(ds: xr.Dataset) -> bool:
    """Tell whether the whole of a run is there, not a selection."""
    made = ds.attrs.get("made")
    return made is None or (ds.sizes["sample"], ds.sizes["layer"], ds.sizes.get("head")) == (
        made["samples"],
        len(made["layers"]),
        made["heads"],
    )


def _together(found: list[Verification], faults: list[str]) -> Verification:
    """Join the verifications of several runs, which are told apart by their place in
    ``attrs["runs"]``."""
    named = [f"run {number}: " for number in range(len(found))]
    faults = faults + [
        name + fault for name, one in zip(named, found, strict=True) for fault in one.faults
    ]
    numbers = [
        replace(d, place=f"{name}{d.place}")
        for name, one in zip(named, found, strict=True)
        for d in one.numbers
    ]
    remarks = [
        name + remark for name, one in zip(named, found, strict=True) for remark in one.remarks
    ]
    rows = pd.concat([one.table for one in found]).groupby(level=0, sort=False)
    table = rows.agg({"values": "sum", "largest": "max", "off": "sum"})
    places = tuple(place for one in found for place in one.places)
    first = found[0]
    return Verification(
        tuple(faults),
        tuple(numbers),
        tuple(remarks),
        table,
        places,
        all(one.judged for one in found),
        first.dtype,
        first.norm,
        len(found),
    )


def _verify_one(
    ds: xr.Dataset, places: int, seed: int, model: Any, data: Any, device: str, dtype: str | None
) -> Verification:
    """`verify` of one run."""
    if "dtype" not in ds.attrs or "source" not in ds.attrs:
        raise StoreError(
            "the run was written by a version of lipbound that did not record enough to repeat it"
        )
    wanted = ds.attrs["dtype"] if dtype is None else dtype_name(dtype)
    nothing = partial(
        Verification,
        numbers=(),
        remarks=(),
        table=_table({}),
        places=(),
        judged=True,
        dtype=wanted,
        norm=norm_of(ds),
    )
    try:
        rerun = replay(ds, model=model, data=data, device=device, dtype=wanted)
    except (
        AlteredRunError,
        OtherModelError,
    ) as error:  # nothing can be computed with such settings, or such a model
        return nothing((str(error),))
    faults = list(rerun.differences) + _own_faults(ds)
    unknown = "made" in ds.attrs and lacks_variables(ds)
    broken = None if unknown else altered(ds)
    wrong_axes = strange(ds) if broken else []
    faults += (
        [f"the coordinates {', '.join(wrong_axes)} cannot be those of the run"]
        if wrong_axes
        else []
    )
    faults += [
        f"{_place(ds, s, i)}: the stored numbers are not those that were computed (checksum)"
        for s, i in broken or []
    ]
    why = (
        "variables that its checksums are over were left out of the run"
        if unknown
        else "the run has no checksums"
    )
    remarks = (
        []
        if broken is not None
        else [
            f"{why}, so numbers that were changed by hand show only where they are computed again"
        ]
    )
    remarks += [
        f"{name} was {then}, is {now}" for name, (then, now) in changed_versions(ds).items()
    ] + rerun.notes
    samples = int(ds.attrs["samples"])
    shapes = rerun.inputs.samples == samples and not {"sample", "layer", "head"} & set(wrong_axes)
    if rerun.inputs.samples != samples:
        faults.append(f"the data now has {rerun.inputs.samples} samples, the run {samples}")
    chosen = _choose(ds, places, seed, broken or []) if shapes else []
    found: dict[str, tuple[int, float, int]] = {}
    wrong: list[Difference] = []
    try:
        for s, i in chosen:
            for name, relative, difference in _compare(ds, rerun, s, i):
                count, largest, off = found.get(name, (0, 0.0, 0))
                found[name] = (count + 1, max(largest, relative), off + (difference is not None))
                wrong += [] if difference is None else [difference]
    except CaptureError as error:
        if not rerun.differences:
            raise
        return nothing((*faults, f"with it nothing can be computed again: {error}"))
    where = tuple((int(ds["sample"][s]), int(ds["layer"][i])) for s, i in chosen)
    return Verification(
        tuple(faults),
        tuple(wrong),
        tuple(remarks),
        _table(found),
        where,
        wanted == ds.attrs["dtype"],
        wanted,
        norm_of(ds),
    )


def _table(found: dict[str, tuple[int, float, int]]) -> pd.DataFrame:
    """Per variable how many values were compared, the largest relative difference, how many were
    off."""
    return pd.DataFrame(
        [(name, *row) for name, row in found.items()],
        columns=["variable", "values", "largest", "off"],
    ).set_index("variable")


def _choose(
    ds: xr.Dataset, places: int, seed: int, broken: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Random positions, those with exact norms first, and after them all ``broken`` ones."""
    samples, layers = ds.sizes["sample"], ds.sizes["layer"]
    order = np.random.default_rng(seed).permutation(samples * layers)
    pairs = [(int(k) // layers, int(k) % layers) for k in order]
    known = with_exact(ds)
    pairs.sort(key=lambda pair: not known[pair[0]])
    picked = pairs[:places]
    return sorted({*picked, *broken})


def _place(ds: xr.Dataset, sample: int, layer: int, head: int | None = None) -> str:
    where = f"sample {int(ds['sample'][sample])}, layer {int(ds['layer'][layer])}"
    return (
        where if head is None or "head" not in ds.dims else f"{where}, head {int(ds['head'][head])}"
    )


def _compare(
    ds: xr.Dataset, rerun: Replay, s: int, i: int
) -> Iterator[tuple[str, float, Difference | None]]:
    """Name, relative difference and, where it is too large, what differs, for every number of a
    place."""
    new = measure_again(rerun, ds, s, i)
    heads = len(next(iter(new.values())))
    slack = max(
        ALLOWED[ds.attrs["dtype"]],
        ALLOWED[str(rerun.checkpoint.model.dtype).removeprefix("torch.")],
    )
    for name in own(ds):
        if name == "exact_steps":  # depends on the machine
            continue
        old = np.atleast_1d(ds[name].isel(sample=s, layer=i).values)
        for h, stored in enumerate(old):
            empty = False if old.dtype == bool else float("nan")
            now = new[name][h] if name in new and h < heads else empty
            difference = _difference(float(stored), float(now))
            if np.isnan(float(stored)) and np.isnan(float(now)):
                continue
            good = stored == now or (
                old.dtype != bool and difference <= _tolerance(ds, new, name, h, slack)
            )
            shown = (
                (bool(stored), bool(now))
                if old.dtype == bool
                else (f"{float(stored):.8g}", f"{float(now):.8g}")
            )
            told = Difference(name, _place(ds, s, i, h), str(shown[0]), str(shown[1]), difference)
            yield name, difference, None if good else told


def _tolerance(
    ds: xr.Dataset, new: dict[str, np.ndarray], name: str, h: int, slack: float
) -> float:
    """Relative difference that a number may have, from the numbers computed now alone: those stored
    may be wrong."""
    value = float(new[name][h]) if name in new and h < len(new[name]) else float("nan")
    if not np.isfinite(value):
        return -1.0  # nothing but the same
    if name not in ds.attrs["bounds"]:
        exact, tol = float(new["exact"][h]), float(ds.attrs["tol"])
        wide = (
            max(tol * exact, float(new["exact_upper"][h]) - exact)
            if "exact_upper" in new and name != "exact_l2"
            else 2 * tol * value
        )
        return wide / max(value, 1e-300) + slack
    return slack * max(1.0, abs(float(np.log(max(value, 1e-300)))))


def _difference(a: float, b: float) -> float:
    """Relative, 0 for equal values, infinite ones included."""
    if a == b:
        return 0.0
    return (
        float(abs(a - b) / max(abs(b), 1e-300))
        if np.isfinite(a) and np.isfinite(b)
        else float("inf")
    )

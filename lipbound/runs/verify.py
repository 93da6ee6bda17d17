"""Check that the numbers of a run still hold, by computing some of them again."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lipbound.bounds.audit import audit
from lipbound.devices import dtype_name
from lipbound.errors import AlteredRunError, CaptureError, flag, whole
from lipbound.formatting import plain
from lipbound.runs.checksums import altered, impossible, settings_altered
from lipbound.runs.concat import split
from lipbound.runs.replay import OtherModelError, Replay, changed_versions, measure_again, replay
from lipbound.runs.store import whole_run
from lipbound.schema import AXES, Extent, lacks_variables, norm_of, own, with_exact

ALLOWED = {"float32": 1e-4, "float64": 1e-8}
"""Relative difference that rounding explains, per unit of the logarithm's size: the exponentials in
some bounds amplify it."""
AUTOMATICALLY = "exact by automatic differentiation"
"""Name, in the table, of exact norms that were computed through the model's own modules."""
FLAGS = ("_sound", "_converged")
"""Ends of names of variables that are true or false."""


@dataclass(frozen=True)
class Difference:
    """A number that does not agree, as text then and now, with the relative difference."""

    variable: str
    place: str
    stored: str
    now: str
    relative: float

    def __str__(self) -> str:
        return f"{self.variable} at {self.place}: stored {self.stored}, now {self.now}"


@dataclass(frozen=True)
class Verification:
    """Findings of `verify`.

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
        """Everything that was looked at holds."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences on everything that does not hold; none when the run holds."""
        return self.faults + (tuple(map(str, self.numbers)) if self.judged else ())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what differs without harm."""
        return self.remarks + (() if self.judged else tuple(map(str, self.numbers)))

    def __str__(self) -> str:
        lines = [self._recomputed(), *self._holding()]
        lines += [f"note: {remark}" for remark in self.remarks]
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
        """Say what was computed again."""
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
        """Sentences on what agrees: the same numbers, and those within rounding."""
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
        """Sentences on every variable with numbers that do not agree."""
        groups: dict[str, list[Difference]] = {}
        for one in self.numbers:
            groups.setdefault(one.variable, []).append(one)
        sentences = []
        for name, found in groups.items():
            worst = max(found, key=lambda one: one.relative)
            count = f"{len(found)} of {int(self.table.loc[name, 'values'])} values"
            finite = np.isfinite(worst.relative) and not name.endswith(FLAGS)
            by = f", by up to {100 * worst.relative:.2g} %" if finite else ""
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
    automatic: bool = False,
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
        model: in place of the recorded one; needed where that was an object in memory.
        data: the same.
        device: to compute on, a torch device or "auto".
        dtype: to compute in, that of the run by default; a run in float32 can be checked in
            "float64".
        automatic: also compute the exact norms at these places by automatic differentiation of the
            model's own modules, which uses nothing that was read off them. Slower; for the
            Frobenius norm of heads and of layers.

    Returns:
        A `Verification`; ``print`` it, or look at ``.ok`` and ``.problems``.

    Raises:
        LipboundError: places below 1; the model or the data is no longer to be found.
    """
    ds = whole_run(ds)
    places, seed = whole("places", places, least=1), whole("seed", seed, least=0)
    asked = (places, seed, model, data, device, dtype, flag("automatic", automatic))
    if "runs" not in ds.attrs:
        return _verify_one(ds, *asked)
    found = [_verify_one(part, *asked) for part in split(ds)]
    return _together(found, _own_faults(ds))


def _own_faults(ds: xr.Dataset) -> list[str]:
    """Sentences on settings and audit that a run records and that do not hold."""
    faults = []
    if settings_altered(ds):
        faults.append(
            "the run's settings (attributes) are not those that were recorded when it was "
            "computed (checksum)"
        )
    # as text, since NaN differs from itself
    now, then = (json.dumps(one, sort_keys=True) for one in (audit(ds), ds.attrs["audit"]))
    if now != then and _is_whole(ds):
        faults.append("the audit stored with the run is not that of its numbers")
    return faults


def _is_whole(ds: xr.Dataset) -> bool:
    """Tell whether the whole of a run is there, not a selection."""
    made = Extent(**ds.attrs["made"])
    sizes = tuple(ds.sizes.get(axis) for axis in AXES)
    return sizes == (made.samples, len(made.layers), made.heads)


def _together(found: list[Verification], faults: list[str]) -> Verification:
    """Join the verifications of several runs, told apart by their place in ``attrs["runs"]``."""
    named = [(f"run {number}: ", one) for number, one in enumerate(found)]
    table = pd.concat([one.table for one in found]).groupby(level=0, sort=False)
    return Verification(
        faults=(*faults, *(name + fault for name, one in named for fault in one.faults)),
        numbers=tuple(
            replace(number, place=f"{name}{number.place}")
            for name, one in named
            for number in one.numbers
        ),
        remarks=tuple(name + remark for name, one in named for remark in one.remarks),
        table=table.agg({"values": "sum", "largest": "max", "off": "sum"}),
        places=tuple(place for one in found for place in one.places),
        judged=all(one.judged for one in found),
        dtype=found[0].dtype,
        norm=found[0].norm,
        runs=len(found),
    )


def _verify_one(
    ds: xr.Dataset,
    places: int,
    seed: int,
    model: Any,
    data: Any,
    device: str,
    dtype: str | None,
    automatic: bool,
) -> Verification:
    """Verify one run."""
    wanted = ds.attrs["dtype"] if dtype is None else dtype_name(dtype)
    found = Verification(
        faults=(),
        numbers=(),
        remarks=(),
        table=_table({}),
        places=(),
        judged=wanted == ds.attrs["dtype"],
        dtype=wanted,
        norm=norm_of(ds),
    )
    try:
        rerun = replay(ds, model=model, data=data, device=device, dtype=wanted)
    except (AlteredRunError, OtherModelError) as error:  # nothing can be computed with those
        return replace(found, faults=(str(error),), judged=True)
    broken, faults, remarks = _checked_sums(ds)
    faults = [*rerun.differences, *_own_faults(ds), *faults]
    remarks += [f"{name} was {old}, is {now}" for name, (old, now) in changed_versions(ds).items()]
    remarks += rerun.notes
    samples = int(ds.attrs["samples"])
    if rerun.inputs.samples != samples:
        faults.append(f"the data now has {rerun.inputs.samples} samples, the run {samples}")
    same_shape = rerun.inputs.samples == samples and not (broken and {*AXES} & {*impossible(ds)})
    chosen = _choose(ds, places, seed, broken) if same_shape else []
    counts: dict[str, tuple[int, float, int]] = {}
    wrong: list[Difference] = []
    try:
        for s, i in chosen:
            compared = [_compare(ds, rerun, s, i)]
            if automatic and bool(with_exact(ds)[s]):
                compared.append(_through_module(ds, rerun, s, i))
            for name, relative, difference in chain(*compared):
                count, largest, off = counts.get(name, (0, 0.0, 0))
                counts[name] = (count + 1, max(largest, relative), off + (difference is not None))
                wrong += [] if difference is None else [difference]
    except CaptureError as error:
        if not rerun.differences:
            raise
        faults.append(f"with it nothing can be computed again: {error}")
        return replace(found, faults=tuple(faults), judged=True)
    where = tuple((int(ds["sample"][s]), int(ds["layer"][i])) for s, i in chosen)
    return replace(
        found,
        faults=tuple(faults),
        numbers=tuple(wrong),
        remarks=tuple(remarks),
        table=_table(counts),
        places=where,
    )


def _checked_sums(ds: xr.Dataset) -> tuple[list[tuple[int, int]], list[str], list[str]]:
    """Positions (sample, layer) that do not fit their checksums, faults and remarks about them."""
    left_out = lacks_variables(ds)
    broken = None if left_out else altered(ds)
    if broken is None:
        why = "the run has no checksums"
        if left_out:
            why = "variables that its checksums are over were left out of the run"
        said = "numbers that were changed by hand show only where they are computed again"
        return [], [], [f"{why}, so {said}"]
    wrong = impossible(ds) if broken else []
    faults = [f"the coordinates {', '.join(wrong)} cannot be those of the run"] if wrong else []
    faults += [
        f"{_place(ds, s, i)}: the stored numbers are not those that were computed (checksum)"
        for s, i in broken
    ]
    return broken, faults, []


def _table(found: dict[str, tuple[int, float, int]]) -> pd.DataFrame:
    """Per variable: values compared, the largest relative difference, how many were off."""
    columns = ["variable", "values", "largest", "off"]
    rows = [(name, *row) for name, row in found.items()]
    return pd.DataFrame(rows, columns=columns).set_index("variable")


def _choose(
    ds: xr.Dataset, places: int, seed: int, broken: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Draw positions (sample, layer), those with exact norms first; ``broken`` ones are added."""
    samples, layers = ds.sizes["sample"], ds.sizes["layer"]
    order = np.random.default_rng(seed).permutation(samples * layers)
    known = with_exact(ds).values
    pairs = sorted(
        ((int(k) // layers, int(k) % layers) for k in order), key=lambda pair: not known[pair[0]]
    )
    return sorted({*pairs[:places], *broken})


def _place(ds: xr.Dataset, sample: int, layer: int, head: int | None = None) -> str:
    """Name a place by its numbers."""
    where = f"sample {int(ds['sample'][sample])}, layer {int(ds['layer'][layer])}"
    if head is None or "head" not in ds.dims:
        return where
    return f"{where}, head {int(ds['head'][head])}"


def _compare(
    ds: xr.Dataset, rerun: Replay, s: int, i: int
) -> Iterator[tuple[str, float, Difference | None]]:
    """Compare every number of a place with the one that is computed now.

    Yields:
        Name, relative difference and, where it is too large, what differs.
    """
    new = measure_again(rerun, ds, s, i)
    heads = len(next(iter(new.values())))
    dtypes = (ds.attrs["dtype"], str(rerun.checkpoint.dtype).removeprefix("torch."))
    slack = max(ALLOWED[dtype] for dtype in dtypes)
    for name in own(ds):
        if name == "exact_steps":  # depends on the machine
            continue
        old = np.atleast_1d(ds[name].isel(sample=s, layer=i).values)
        flag = old.dtype == bool
        for h, stored in enumerate(old):
            now = new[name][h] if name in new and h < heads else False if flag else float("nan")
            if np.isnan(float(stored)) and np.isnan(float(now)):
                continue
            difference = _difference(float(stored), float(now))
            near = not flag and difference <= _tolerance(ds, new, name, h, slack)
            told = None
            if stored != now and not near:
                then, found = (str(bool(x)) if flag else f"{float(x):.8g}" for x in (stored, now))
                told = Difference(name, _place(ds, s, i, h), then, found, difference)
            yield name, difference, told


def _through_module(
    ds: xr.Dataset, rerun: Replay, s: int, i: int
) -> Iterator[tuple[str, float, Difference | None]]:
    """Compare the enclosures of exact norms with those of automatic differentiation.

    Yields:
        Name, relative gap between the two and, where it is too large, what differs.
    """
    new = measure_again(rerun, ds, s, i, closed=False)
    slack = max(ALLOWED[t] for t in (ds.attrs["dtype"], "float64"))
    ends = []
    for found in (ds.isel(sample=s, layer=i), new):
        low = np.atleast_1d(found["exact"])
        wide = "exact_upper" in found
        ends.append((low, np.atleast_1d(found["exact_upper"]) if wide else low))
    allowed = slack if "exact_upper" in new else slack + 2 * float(ds.attrs["tol"])
    for h, (low, high, its_low, its_high) in enumerate(zip(*ends[0], *ends[1], strict=False)):
        if np.isnan(low):
            continue
        gap = max(0.0, float(low) / float(its_high) - 1, float(its_low) / float(high) - 1)
        told = None
        if not gap <= allowed:
            then, now = f"{low:.8g} to {high:.8g}", f"{its_low:.8g} to {its_high:.8g}"
            told = Difference(AUTOMATICALLY, _place(ds, s, i, h), then, now, gap)
        yield AUTOMATICALLY, gap, told


def _tolerance(
    ds: xr.Dataset, new: dict[str, np.ndarray], name: str, h: int, slack: float
) -> float:
    """Relative difference that a number may have, from the numbers computed now alone.

    Those stored may be wrong.
    """
    value = float(new[name][h]) if name in new and h < len(new[name]) else float("nan")
    if not np.isfinite(value):
        return -1.0  # nothing but the same
    if name in ds.attrs["bounds"]:
        return slack * max(1.0, abs(float(np.log(max(value, 1e-300)))))
    tol = float(ds.attrs["tol"])
    wide = 2 * tol * value
    if "exact_upper" in new and name != "exact_l2":
        exact = float(new["exact"][h])
        wide = max(tol * exact, float(new["exact_upper"][h]) - exact)
    return wide / max(value, 1e-300) + slack


def _difference(a: float, b: float) -> float:
    """Relative difference; 0 for equal values, infinite ones included."""
    if a == b:
        return 0.0
    finite = np.isfinite(a) and np.isfinite(b)
    return float(abs(a - b) / max(abs(b), 1e-300)) if finite else float("inf")

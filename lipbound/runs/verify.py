"""Check that the numbers of a run still hold, by computing some of them again.

Model and inputs are found by the provenance that the run recorded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import xarray as xr

from lipbound import errors, schema
from lipbound.devices import dtype_name, resolve_device, versions
from lipbound.formatting import plain
from lipbound.models.checkpoint import Inputs
from lipbound.models.loading import Checkpoint, load_checkpoint
from lipbound.runs.checksums import altered, faults
from lipbound.runs.compare import EMPTY, open_inputs
from lipbound.runs.concat import split
from lipbound.runs.config import LOADING, RunConfig
from lipbound.runs.measure import Arrays, Measurer, capturer_of
from lipbound.runs.store import Run, run_of

ALLOWED = {"float32": 1e-4, "float64": 1e-8}
"""Relative difference that rounding explains, per unit of the logarithm's size: the exponentials in
some bounds amplify it."""
AUTOMATICALLY = "exact by automatic differentiation"
"""Name, in the table, of exact norms that were computed through the model's own modules."""


class Replay(NamedTuple):
    """Model and inputs of a run, found again.

    Attributes:
        run: itself.
        config: the run's, read from what it recorded.
        checkpoint, inputs: loaded and prepared as they were for the run.
        device: where to.
        differences: a sentence for everything that is not what the run recorded: weights, data.
        notes: what could not be compared.
    """

    run: xr.Dataset
    config: RunConfig
    checkpoint: Checkpoint
    inputs: Inputs
    device: str
    differences: list[str]
    notes: list[str]


def replay(ds: xr.Dataset, **how: Any) -> Replay:
    """Load the model and prepare the inputs of a run anew.

    Args:
        ds: a run.
        how: other arguments of `RunConfig.of`.

    Raises:
        StoreError: see `RunConfig.of`.
        LipboundError: they are no longer there.
        AlteredRunError: the model is not the recorded one, and does not take the run's data.
    """
    config = RunConfig.of(ds, **how)
    where = resolve_device(config.device)
    checkpoint = load_checkpoint(config.model, device=where, **config.options(*LOADING))
    info, differences, notes = schema.RunInfo.of(ds), [], []
    kinds = {revision.startswith("sha256:") for revision in (checkpoint.revision, info.revision)}
    # the hash of a model in memory is that of its numbers, rounded
    rounded = checkpoint.loaded and config.dtype != info.dtype
    if len(kinds) > 1 or checkpoint.loaded != info.loaded or rounded:
        notes.append(f"only numbers tell whether the weights of {checkpoint.name} are the run's")
    else:
        weights = "weights" if how.get("model") is None else "model"
        named = f"{checkpoint.name} ({type(checkpoint.model).__name__})"
        for what, name in ((weights, "revision"), ("configuration", "configuration")):
            then, now = getattr(info, name), getattr(checkpoint, name)
            if None not in (then, now) and then != now:
                before = f"the run is of {info.model} ({info.architecture}, {then})"
                differences.append(f"not the recorded {what}: {before}, {named} has {now}")
    try:
        inputs = open_inputs(config, checkpoint)
    except errors.InputsError as error:
        if differences:
            raise errors.AlteredRunError(differences[0]) from error
        raise
    if inputs.fingerprint != info.data_fingerprint:
        now = f"{inputs.description} now gives {inputs.fingerprint}"
        differences.append(f"not the recorded data: the run has {info.data_fingerprint}, {now}")
    return Replay(ds, config, checkpoint, inputs, where, differences, notes)


def measure_again(rerun: Replay, s: int, i: int, *, closed: bool = True) -> Arrays:
    """Compute again what the run stores about the sample and layer at some positions.

    Args:
        rerun: of the run.
        s: position of the sample.
        i: position of the layer.
        closed: False for the exact norms alone, by automatic differentiation.

    Returns:
        By name, (heads,), as the run has them: NaN or False for heads that the layer does not have.
    """
    ds, made = rerun.run, schema.Extent(**rerun.run.attrs["made"])
    names = rerun.config.names if closed else []
    spec = rerun.config.of_places(names, made.exact_samples, (len(made.layers), made.heads or 1))
    statistics = closed and schema.STATISTICS[0] in ds.variables
    one = replace(spec, layers=[int(ds["layer"][i])])
    capturer = capturer_of(rerun.checkpoint.model, one, closed=closed)
    number = int(ds["sample"][s])
    block = rerun.inputs.block(number, number + 1, rerun.device)
    with torch.no_grad():
        (measured,) = Measurer(capturer, spec, statistics=statistics).block(block, number)
    there = ds["head"].values if "head" in ds.dims else np.zeros(1, dtype=int)
    return {
        name: np.append(value, EMPTY[value.dtype.kind])[there.clip(max=len(value))]
        for name, (value,) in measured.values.items()
    }


class Comparison(NamedTuple):
    """A number as text then and now, with the relative difference, and whether that is too much."""

    variable: str
    place: str
    stored: str
    now: str
    relative: float
    off: bool

    def __str__(self) -> str:
        return f"{self.variable} at {self.place}: stored {self.stored}, now {self.now}"


@dataclass
class Verification:
    """Findings of `verify`.

    Attributes:
        dtype: what was computed in.
        norm: of the run, which is that of what was computed again.
        judged: whether numbers that do not agree count against the run; not where it was computed
            again in another dtype.
        runs: how many runs were put together.
        faults: a sentence for everything that does not hold beside single numbers: weights, data,
            settings, checksums.
        remarks: what differs without harm, such as versions of packages.
        compared: the numbers that were computed again.
        places: the (sample, layer) coordinates whose heads were computed again; of runs that were
            put together, samples are those of each, one run after the other.
    """

    dtype: str
    norm: str
    judged: bool
    runs: int = 1
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    compared: list[Comparison] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def numbers(self) -> list[Comparison]:
        """Numbers that do not agree."""
        return [one for one in self.compared if one.off]

    @property
    def table(self) -> pd.DataFrame:
        """Per variable: ``values`` compared, the ``largest`` relative difference, the ``off``."""
        rows = pd.DataFrame(self.compared, columns=Comparison._fields)
        groups = rows.groupby("variable", sort=False)
        return groups.agg(values=("off", "size"), largest=("relative", "max"), off=("off", "sum"))

    @property
    def ok(self) -> bool:
        """Everything that was looked at holds."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """Sentences on everything that does not hold; none when the run holds."""
        return self.faults + [str(one) for one in self.numbers if self.judged]

    @property
    def notes(self) -> list[str]:
        """Sentences on what differs without harm."""
        return self.remarks + [str(one) for one in self.numbers if not self.judged]

    def __str__(self) -> str:
        norm = "" if self.norm == "frobenius" else f" and the {self.norm} norm"
        runs = "" if self.runs == 1 else f", of {self.runs} runs that were put together"
        where = ", ".join(f"sample {s} layer {layer}" for s, layer in self.places)
        again = f"computed again, in {self.dtype}{norm}{runs}: all heads at {where}"
        lines = [again if self.places else "nothing was computed again"]
        table = self.table
        good = table[table["off"] == 0]
        for words, rows in (
            ("the same", good[good["largest"] == 0]),
            ("equal up to what rounding and tol explain", good[good["largest"] > 0]),
        ):
            if len(rows):
                largest = float(rows["largest"].max())
                most = f", the largest relative difference {largest:.1e}" if largest else ""
                names, count = ", ".join(map(str, rows.index)), int(rows["values"].sum())
                lines.append(f"{words}: {names} ({count} values){most}")
        lines += [f"note: {remark}" for remark in self.remarks]
        lines += [f"DIFFERS: {fault}" for fault in self.faults]
        word = "DIFFERS" if self.judged else "note"
        for name, row in table[table["off"] > 0].iterrows():
            worst = max(self.numbers, key=lambda one: (one.variable == name, one.relative))
            off = f"{name}, {row['off']:.0f} of {row['values']:.0f} values"
            most = f"{worst.place}: stored {worst.stored}, now {worst.now}"
            lines.append(f"{word}: {off}, most at {most}")
        held = "nothing speaks against the run" if self.numbers else "the numbers hold"
        return "\n".join(map(plain, [*lines, held if self.ok else "the run does not hold"]))


@errors.knows_options
def verify(
    ds: Run,
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
    ds = run_of(ds)
    places, seed = errors.whole("places", places, least=1), errors.whole("seed", seed, least=0)
    automatic = errors.flag("automatic", automatic)
    if automatic and ds.attrs["wrt"] != schema.INPUT:
        raise errors.LipboundError("automatic=True differentiates by the input alone; leave it out")
    wanted = ds.attrs["dtype"] if dtype is None else dtype_name(dtype)
    how = {"model": model, "data": data, "device": device, "dtype": wanted}
    parts, several = split(ds), "runs" in ds.attrs
    found = Verification(wanted, schema.norm_of(ds), wanted == ds.attrs["dtype"], len(parts))
    found.faults += faults(ds) * several
    for number, part in enumerate(parts):
        _verify_one(part, f"run {number}: " * several, places, seed, automatic, how, found)
    return found


def _verify_one(
    ds: xr.Dataset, name: str, count: int, seed: int, automatic: bool, how: Any, found: Verification
) -> None:
    """Verify one run by its name; ``how`` it is found again are the arguments of `replay`."""
    try:
        rerun = replay(ds, **how)
    except errors.AlteredRunError as error:  # nothing can be computed with those
        found.faults.append(f"{name}{error}")
        return
    wrong, compared = [*rerun.differences, *faults(ds)], list[Comparison]()
    was, now = ds.attrs["versions"], versions(ds.attrs["versions"])
    remarks = [f"{name} was {was[name]}, is {v}" for name, v in now.items() if was[name] != v]
    if schema.BATCH_LOGIT in ds.variables:
        remarks.append("batch_logit is of batches of the training, and cannot be computed again")
    samples, there = int(ds.attrs["samples"]), rerun.inputs.samples
    if there != samples:
        wrong.append(f"the data now has {there} samples, the run {samples}")
    if impossible := _impossible(ds):
        wrong.append(f"the coordinates {', '.join(impossible)} cannot be those of the run")
    chosen = [] if impossible or there != samples else _choose(ds, count, seed)
    try:
        for s, i in chosen:
            compared += _compared(rerun, s, i)
            if automatic and bool(schema.with_exact(ds)[s]):
                compared += _through_module(rerun, s, i)
    except errors.CaptureError as error:
        if not rerun.differences:
            raise
        wrong.append(f"with it nothing can be computed again: {error}")
        chosen, compared = [], []
    found.faults += [name + fault for fault in wrong]
    found.remarks += [name + remark for remark in (*rerun.notes, *remarks)]
    found.compared += [one._replace(place=name + one.place) for one in compared]
    found.places += [(int(ds["sample"][s]), int(ds["layer"][i])) for s, i in chosen]


def _impossible(ds: xr.Dataset) -> list[str]:
    """List the axes with numbers that the run did not have, or that are there twice."""
    made = schema.Extent(**ds.attrs["made"])
    known = {"sample": range(made.samples), "layer": made.layers, "head": range(made.heads or 0)}
    there = {axis: {*ds[axis].values.tolist()} for axis in known if axis in ds.dims}
    return schema.repeated(ds) + [axis for axis, now in there.items() if not now <= {*known[axis]}]


def _choose(ds: xr.Dataset, places: int, seed: int) -> list[tuple[int, int]]:
    """Draw positions (sample, layer), those with exact norms first, and add altered ones."""
    samples, layers = ds.sizes["sample"], ds.sizes["layer"]
    order = np.random.default_rng(seed).permutation(samples * layers)
    known = schema.with_exact(ds).values
    pairs = sorted((divmod(int(k), layers) for k in order), key=lambda pair: not known[pair[0]])
    return sorted({*pairs[:places], *altered(ds)})


def _place(ds: xr.Dataset, *at: int) -> str:
    """Name a place, at some positions, by its numbers."""
    axes = [axis for axis in schema.AXES if axis in ds.dims]
    return ", ".join(f"{axis} {int(ds[axis][i])}" for axis, i in zip(axes, at, strict=False))


def _compared(rerun: Replay, s: int, i: int) -> Iterator[Comparison]:
    """Compare every number of a place with the one that is computed now."""
    ds, new = rerun.run, measure_again(rerun, s, i)
    for name in schema.own(ds):
        if name in ("exact_steps", schema.BATCH_LOGIT):  # of the machine, and of lost batches
            continue
        old = np.atleast_1d(ds[name].isel(sample=s, layer=i).values)
        flags = old.dtype == bool
        now = new.get(name, np.full(old.shape, False if flags else np.nan))
        there = ~(np.isnan(old) & np.isnan(now))
        gap = _difference(old.astype(float), now.astype(float))
        # a logit is a sum that may cancel, and counts in an exponential
        if name in (*schema.STATISTICS, "row_norm"):
            gap = np.abs(old - now) / np.maximum(1, np.abs(now))
        off = old != now if flags else ~(gap <= _tolerance(rerun, new, name, now))
        for h in map(int, np.flatnonzero(there)):
            then, found = (str(bool(x)) if flags else f"{x:.8g}" for x in (old[h], now[h]))
            yield Comparison(name, _place(ds, s, i, h), then, found, float(gap[h]), bool(off[h]))


def _through_module(rerun: Replay, s: int, i: int) -> Iterator[Comparison]:
    """Compare the enclosures of exact norms with those of automatic differentiation."""
    ds, new = rerun.run, measure_again(rerun, s, i, closed=False)
    slack = max(ALLOWED[t] for t in (ds.attrs["dtype"], "float64"))
    allowed = slack if "exact_upper" in new else slack + 2 * float(ds.attrs["tol"])
    ends = []
    for found in (ds.isel(sample=s, layer=i), new):
        upper = "exact_upper" if "exact_upper" in found else "exact"
        ends += [np.atleast_1d(found["exact"]), np.atleast_1d(found[upper])]
    for h, (low, high, its_low, its_high) in enumerate(zip(*ends, strict=True)):
        if not np.isnan(low):
            gaps = ((a - b) / max(b, 1e-300) for a, b in ((low, its_high), (its_low, high)))
            gap = float(np.max([0.0, *gaps]))
            then, now = f"{low:.8g} to {high:.8g}", f"{its_low:.8g} to {its_high:.8g}"
            yield Comparison(AUTOMATICALLY, _place(ds, s, i, h), then, now, gap, not gap <= allowed)


def _tolerance(rerun: Replay, new: Arrays, name: str, now: np.ndarray) -> np.ndarray:
    """Relative differences that numbers may have, from those computed now alone.

    Those stored may be wrong.
    """
    attrs, size = rerun.run.attrs, np.maximum(now, 1e-300)
    tol, slack = float(attrs["tol"]), max(ALLOWED[t] for t in (attrs["dtype"], rerun.config.dtype))
    if name == schema.EXTRAS["condition"]:  # as badly conditioned as the Jacobian itself
        allowed = slack * np.maximum(1, now)
    elif name in (*schema.STATISTICS, *schema.CONDITIONING, *schema.OF_HEADS):
        allowed = np.full(now.shape, slack)
    elif name in attrs["bounds"]:
        allowed = slack * np.maximum(1, np.abs(np.log(size)))
    elif "exact_upper" in new and name != "exact_l2":
        exact = new["exact"]
        allowed = np.maximum(tol * exact, new["exact_upper"] - exact) / size + slack
    else:
        allowed = 2 * tol * now / size + slack
    return np.where(np.isfinite(now), allowed, 0)  # nothing but the same


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Relative differences; 0 for equal values, infinite ones included."""
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(finite, np.abs(a - b) / np.maximum(np.abs(b), 1e-300), np.inf)
    return np.where(a == b, 0.0, gap)

"""Names in a run's Dataset, what a run says about itself, and checks of both.

Needs neither torch nor numpy, so that commands start and stored runs are read quickly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import xarray as xr

NORMS = {
    "frobenius": "all tokens move, by 1 together in the Frobenius norm, which measures outputs too",
    "every-token": "every token moves by at most 1, and the output token that moves furthest "
    "counts",
    "one-token": "one token alone moves, by 1, and outputs are measured in the Frobenius norm",
}
"""Norms of perturbations and outputs. Numbers are compared within one norm only."""
TOKEN_NORMS = ("every-token", "one-token")
"""Norms that tell tokens apart; both ends of their exact values are deterministic."""

AXES = ("sample", "layer", "head")
"""Axes of every variable, in this order; runs of whole layers have no heads."""
LAYER_WORDS = ("layer_name", "kind", "stream", "measured")
"""Coordinates of layers in words: the module, self- or cross-attention, which of its inputs is
perturbed, and how its norms are found."""
AUTOMATIC, CLOSED_FORM = "automatic", "closed form"
"""Ways to find norms: by automatic differentiation of the module, without bounds, or with both."""
INPUT, QUERIES, MEMORY = "input", "queries", "memory"
"""Streams that are perturbed: of self-attention, and the two of cross-attention."""
KEYS, VALUES = "keys", "values"
WRT = {
    INPUT: "the tokens that the layer is given",
    KEYS: "its keys alone, as they enter the scores and a cache holds them",
    VALUES: "its values alone, as they are averaged and a cache holds them",
    QUERIES: "its queries alone, as they enter the scores",
}
"""Arguments that a head is a function of, everything else held fixed."""
EXACT = ("exact", "exact_upper", "exact_l2", "exact_steps", "exact_converged")
"""Variables about exact norms: lower ends, upper ends, norms of L2 attention, cost, convergence."""
CONDITIONING = ("kappa_softmax", "chi_score", "kappa_val", "rho_ln")
"""Condition numbers of attention in low precision: `lipbound.attention.conditioning`."""
OF_WEIGHTS = ("wqk_norm", "wqk_stable_rank", "wov_norm", "wov_stable_rank")
"""Extras of the weights of heads alone, whatever the inputs."""
BATCH_LOGIT = "batch_logit"
"""Extra of the batches of a training, of `lipbound.Monitor` alone."""
OF_HEADS = (*OF_WEIGHTS, "row_norm", "largest_logit", "qk_clip", BATCH_LOGIT)
"""Extras of heads themselves, whatever map and norm are measured."""
EXTRAS = {"frobenius": "jacobian_frobenius", "condition": "jacobian_condition"}
EXTRAS |= {name: name for name in (*CONDITIONING, *OF_HEADS)}
"""Variables that a run has where they are asked for, by the names of what is asked."""
STATISTICS = ("largest_logit", "entropy", "first_token")
"""Variables about attention itself, where they are asked for: `Attention.statistics`."""
MEANS = STATISTICS[1:]
"""Statistics that are means over queries."""
STEP = "step"
"""Axis before all others, of runs over the steps of a training; coordinate of one such step."""
CHECKSUM = "checksum"
RUN, RUN_SAMPLE = "run", "run_sample"
"""Coordinates of runs put together: the run that a place is from, and its sample's number there."""

ALIKE = ("map", "norm", "wrt")
"""Attributes without which the numbers of two runs are of different things."""
IDENTITY = ("revision", "data_fingerprint", *ALIKE, "method", "tol", "delta", "seed", "dtype")
"""Attributes that decide what the numbers are."""
DRAWN = ("method", "delta", "seed")
"""Attributes of exact norms that are found from random vectors: in the Frobenius norm alone."""
AGREE: tuple[str, ...] = ("revision", "architecture", "loaded", "commit", "quantization", *ALIKE)
AGREE += ("method", "tol", "dtype", "seed", "bounds", "extras", "tau", "variants", "not_applicable")
"""Attributes that runs put together share, since a number means something else without."""
JOINED: tuple[str, ...] = ("lipbound", "model", "data", "data_fingerprint", "preprocessing")
JOINED += ("device", "python", "date", "command")
"""Attributes that runs put together list, each text once."""
SIDES = ("a", "b")
"""Runs of a diff, in order. A diff has all of their variables, with ``_a`` and ``_b`` behind."""
DIFF = "diff"
"""Attribute of a diff: the attributes of its runs by side."""
TOLD = ("method", "tol", "delta", "dtype", "seed", "lipbound")
"""Attributes about how numbers were found; where the runs of a diff differ in them, it is told."""
CHOICES = {"norm": tuple(NORMS), "wrt": tuple(WRT), "dtype": ("float32", "float64")}
"""Attributes that are one of some names."""
STORED: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": int | float, "list": list}
STORED |= {"dict": dict, "Extent": dict, "None": type(None)}
"""Types of values in a store, by those that are declared."""
OPTIONAL: tuple[str, ...] = ("notes", "quantization", "configuration", "runs")
OPTIONAL += ("block", "block_bytes", "extras", "tau")
"""Attributes that stand only where there is something to tell."""


@dataclass(frozen=True)
class Extent:
    """Extent of a whole run, recorded for whoever sees a part of it.

    Attributes:
        samples: how many. exact_samples: on how many of them norms are exact.
        layers: their numbers. model_layers: how many attention layers the model has.
        heads: most heads of a layer; None for maps of whole layers.
        variables: names of everything that was computed.
        identity: hash over the attributes `IDENTITY`.
    """

    samples: int
    exact_samples: int
    layers: list[int]
    heads: int | None
    model_layers: int
    variables: list[str] = field(default_factory=list)
    identity: str = ""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Attributes of a run, which say what it is, under the names and in the types stored.

    Attributes:
        lipbound: the version that computed it. versions: of the packages that numbers depend on.
        model, revision, architecture, quantization: the checkpoint, and how its weights are stored.
        loaded: whether the model was an object in memory. commit: on the hub, where it is known.
        configuration: hash of the model's configuration.
        data, data_fingerprint, preprocessing: the inputs.
        source: where model and data are found again (see `lipbound.runs.config.RunConfig.source`).
        bounds, extras, tau, map, map_description, norm, wrt, tol, dtype, device: as in
            `lipbound.compare`.
        method, delta, seed: of exact norms that are found from random vectors; of a run over steps
            of training ``delta`` is that of each step.
        python, date, command: when and how.
        samples, exact_samples, tokens: what was measured; ``tokens`` of the longest sample.
        capture_error: the largest relative error of the captured layers.
        block: samples measured at a time. block_bytes: of working memory that they were expected
            to take, to within a factor of about 1.5.
        variants: what its attention has besides softmax.
        not_applicable: bounds left out, and why. notes: what is not as it was asked for.
        made: extent of the whole run. runs: attributes of each run that was put together.
        settings_checksum: see `lipbound.runs.checksums`.
    """

    lipbound: str
    model: str
    revision: str
    loaded: bool
    commit: str | None
    architecture: str
    data: str
    data_fingerprint: str
    source: dict[str, Any] | None
    preprocessing: str
    bounds: list[str]
    extras: list[str] = field(default_factory=list)
    tau: float | None = None
    map: str
    map_description: str
    norm: str
    wrt: str
    method: str = ""
    tol: float
    delta: float | None = None
    seed: int = 0
    dtype: str
    device: str
    versions: dict[str, str]
    python: str
    date: str
    command: str
    samples: int
    exact_samples: int
    tokens: int = 0
    capture_error: float
    block: int | None = None
    block_bytes: int | None = None
    variants: list[str]
    not_applicable: dict[str, str]
    notes: list[str] = field(default_factory=list)
    quantization: str | None = None
    configuration: str | None = None
    made: Extent
    runs: list[dict[str, Any]] = field(default_factory=list)
    settings_checksum: str = ""

    @classmethod
    def of(cls, ds: xr.Dataset) -> Self:
        """Read what a run says, where `lacking_settings` finds nothing."""
        said = {one.name: ds.attrs[one.name] for one in fields(cls) if one.name in ds.attrs}
        return cls(**said | {"made": Extent(**said["made"])})

    def attributes(self) -> dict[str, Any]:
        """Attributes to store: all but the `OPTIONAL` that are empty, and `DRAWN` in other norms.

        The checksum is not among them, since it is made from the others.
        """
        said = asdict(self)
        for name in ("settings_checksum", *(DRAWN if self.norm != "frobenius" else ())):
            del said[name]
        return {name: value for name, value in said.items() if value or name not in OPTIONAL}


@dataclass(frozen=True)
class Contents:
    """Contents of a run, or of a part of one, counted from its values and coordinates.

    Attributes:
        samples: how many. exact_samples: of them, those with an exact norm.
        layers: numbers of the layers.
        heads: least and most heads of a layer that have a value; (0, 0) for maps of whole layers.
        tokens: of the longest sample.
        norms: exact norms. closed: of them, those found to the tolerance.
        made: extent of the whole run.
    """

    samples: int
    exact_samples: int
    layers: tuple[int, ...]
    heads: tuple[int, int]
    tokens: int
    norms: int
    closed: int
    made: Extent

    @classmethod
    def of(cls, ds: xr.Dataset) -> Self:
        """Count what of a run is there; it has the axes that `lipbound.runs.store.run_of` gives."""
        there = ds.variables["exact"].notnull()
        others = [dim for dim in there.dims if dim not in AXES[1:]]  # a step may have no norms
        heads = there.any(others).sum("head") if "head" in ds.dims else there.any() * 0
        return cls(
            samples=int(ds.sizes["sample"]),
            exact_samples=int(with_exact(ds).sum()),
            layers=tuple(ds["layer"].values.tolist()),
            heads=(int(heads.min()), int(heads.max())),
            tokens=int(ds["length"].max()),
            norms=int(there.sum()),
            closed=int(closed(ds).sum()),
            made=Extent(**ds.attrs["made"]),
        )


def sound(bound: str) -> str:
    """Name the variable that says where the assumptions of a bound hold."""
    return f"{bound}_sound"


def own(ds: xr.Dataset) -> list[str]:
    """List the variables that a run computed, whatever was added to it since."""
    bounds = list(ds.attrs["bounds"])
    extras = map(EXTRAS.__getitem__, ds.attrs.get("extras", ()))
    names = (*EXACT, *STATISTICS, *extras, *bounds, *map(sound, bounds))
    return [name for name in dict.fromkeys(names) if name in ds.variables]


def extras_there(ds: xr.Dataset) -> list[str]:
    """List the variables of a run's extras: of `OF_HEADS`, which monitors add, those asked for."""
    own = {*EXTRAS} - {*OF_HEADS} | {*ds.attrs.get("extras", ())}
    return [one for name, one in EXTRAS.items() if name in own and one in ds.variables]


def flags(ds: xr.Dataset) -> list[str]:
    """List the variables that annotate places: truth values, checksums, where a place is from.

    They are coordinates, so that arithmetic leaves them alone.
    """
    names = ("exact_converged", *map(sound, ds.attrs["bounds"]), CHECKSUM, RUN, RUN_SAMPLE)
    return [name for name in names if name in ds.variables]


def is_diff(ds: object) -> bool:
    """Tell whether data are two runs side by side, from `lipbound.diff`."""
    return DIFF in getattr(ds, "attrs", {})


def of_weights_alone(ds: xr.Dataset) -> bool:
    """Tell whether a run is of weights without data, from `lipbound.weight_norms`."""
    return not ds.attrs.get("exact_samples", 1)


def lacks_variables(ds: xr.Dataset) -> bool:
    """Tell whether variables of the run were left out, so that checksums, over all, say nothing."""
    return not set(ds.attrs["made"]["variables"]) <= set(own(ds))


def bounds_there(ds: xr.Dataset) -> list[str]:
    """List the bounds that are there with the exact norms that they are compared with."""
    there = [str(name) for name in ds.attrs["bounds"] if name in ds.variables]
    return [name for name in there if compared_with(ds, name) in ds.variables]


def compared_with(ds: xr.Dataset, name: str) -> str:
    """Name the variable with the exact norm of a bound's own map, "exact" or "exact_l2"."""
    return str(ds.variables[name].attrs["compared_with"])


def norm_of(ds: xr.Dataset) -> str:
    """Name the norm of a run's numbers, one of `NORMS`."""
    return str(ds.attrs["norm"])


def automatic(ds: xr.Dataset) -> xr.DataArray:
    """Layers that were measured by automatic differentiation and have no bounds, bool (layers,)."""
    if "measured" not in ds.variables:
        return ds["layer"].astype(bool) & False
    return ds["measured"].reset_coords(drop=True) == AUTOMATIC


def with_exact(ds: xr.Dataset, axis: str = "sample") -> xr.Variable:
    """Samples, or steps of training, that have an exact norm, bool (samples,)."""
    exact = ds.variables["exact"]
    return exact.notnull().any([dim for dim in exact.dims if dim != axis])


def closed(ds: xr.Dataset) -> xr.Variable:
    """Places whose exact norm was found to the run's tolerance, bool, as ``exact``.

    These converged, and where there are two ends, they are that near.
    """
    exact = ds.variables["exact"]
    good = exact.notnull() & ds.variables["exact_converged"].astype(bool)
    if "exact_upper" in ds:
        near = ds.variables["exact_upper"] <= exact * (1 + float(ds.attrs["tol"])) * (1 + 1e-9)
        good &= near | (exact == 0)
    return good.transpose(*exact.dims)


def origins(ds: xr.Dataset) -> list[dict[str, Any]]:
    """Attributes of every run put together of which something is left; of one run, its own."""
    if "runs" not in ds.attrs:
        return [dict(ds.attrs)]
    return [dict(ds.attrs["runs"][k]) for k in sorted(set(ds[RUN].values.ravel().tolist()))]


def repeated(ds: xr.Dataset) -> list[str]:
    """List the axes on which a number is there twice, as after joining runs by xarray.concat."""
    return [axis for axis in AXES if axis in ds.dims and not ds.get_index(axis).is_unique]


def lacking_settings(ds: xr.Dataset) -> str:
    """Describe the first setting that is missing or of a wrong kind; empty where all are good.

    Of the run, or of those put together.
    """
    fault = _lacking(ds.attrs)
    return fault or next(filter(None, map(_lacking, ds.attrs.get("runs", ()))), "")


def _lacking(attrs: Mapping[Any, Any]) -> str:
    """Describe the first of a run's own settings that is missing or of a wrong kind."""
    drawn = DRAWN if attrs.get("norm") == "frobenius" else ()
    if fault := _fault(RunInfo, attrs, (*drawn, "tokens", "settings_checksum")):
        return fault
    for name, known in CHOICES.items():
        if attrs[name] not in known:
            return f"its setting {name!r} is {attrs[name]!r}"
    if unknown := [name for name in attrs.get("extras", ()) if name not in EXTRAS]:
        return f"its setting 'extras' has {unknown[0]!r}"
    return _fault(Extent, attrs["made"], ("variables", "identity"))


def _fault(kind: type, said: Mapping[str, Any], needed: Collection[str] = ()) -> str:
    """Describe the first field that is missing, though it has no default, or of a wrong type."""
    for one in fields(kind):
        required = one.default is one.default_factory is MISSING or one.name in needed
        if required and one.name not in said:
            return f"its setting {one.name!r} is missing"
        value, kinds = said.get(one.name), [k.partition("[")[0] for k in one.type.split(" | ")]
        good = isinstance(value, tuple(STORED[kind] for kind in kinds))
        if one.name in said and not (good and isinstance(value, bool) <= ("bool" in kinds)):
            return f"its setting {one.name!r} is {value!r}"
    return ""


def lacking_variables(ds: xr.Dataset) -> str:
    """Describe the first variable that is missing or of a wrong kind; empty where all are good."""
    bounds = [str(name) for name in ds.attrs["bounds"]]
    needed = ("sample", "layer", "length", "exact", "exact_converged", *bounds, *map(sound, bounds))
    if missing := [name for name in needed if name not in ds.variables]:
        return f"{missing[0]!r} is missing"
    for name in own(ds):
        axes = tuple(dim for dim in ds[name].dims if dim != STEP)
        if axes not in (AXES, AXES[:2]) or ds[name].dtype.kind not in "fib":
            return f"{name!r} is no table of numbers by sample, layer and head"
    if "runs" in ds.attrs and any(name not in ds.variables for name in (RUN, RUN_SAMPLE)):
        return "which of its places are from which run is missing"
    for name in bounds:
        for key in ("label", "source", "compared_with", "caveat"):
            if not isinstance(ds.variables[name].attrs.get(key), str):
                return f"the {key} of {name!r} is missing"
        if compared_with(ds, name) not in ds:
            return f"{compared_with(ds, name)!r} is missing"
    return ""

"""Configuration of a run: the options of `lipbound.compare`, each said once.

The command line and sweeps are made from the fields of `RunConfig`, so that importing this module
loads nothing of size; what checks the options is imported where that happens.
"""

from __future__ import annotations

import inspect
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from lipbound import errors
from lipbound.errors import LipboundError, P, StoreError, T, real, shown, whole
from lipbound.schema import EXTRAS, INPUT, NORMS, OF_HEADS, TOKEN_NORMS, RunInfo

if TYPE_CHECKING:
    import xarray as xr

    from lipbound.models.checkpoint import AnyModel

_TOL = "between 0 and 1 (relative width of the enclosures)"
_DELTA = "a probability between 0 and 1, or None for plain estimates (on the command line, 0)"
EXPORTS = {".csv", ".tsv", ".xlsx", ".xls", ".parquet", ".feather", ".md", ".tex", ".txt", ".json"}
EXPORTS |= {".pdf", ".png", ".svg", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".eps", ".ps"}
EXPORTS |= {".html", ".bib", ".nc", ".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pt", ".pgf"}
"""Endings of files that are made from a run, and are none."""
LEAST_MEMORY = 1e6
"""Bytes that no unit need be written behind."""
IN_PYTHON = ("inputs", "client", "progress")
"""Options that are objects of Python, or that the command line has in a way of its own."""
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class RunConfig:
    """Options of `lipbound.compare`: what is computed, from what, where, and how it is saved.

    Arguments of nearly the right type are brought into theirs: numbers of numpy, ``torch.device``,
    ``torch.dtype``, one layer, layers as text. The command line shows the following as help.

    Attributes:
        model: Hub id (owner/name or owner/name@revision), checkpoint directory, GGUF file, a
            builtin such as builtin:minilm (see `lipbound models`).
        data: Hub dataset (id or id:config), text file, folder of texts or images,
            parquet/csv/tsv/json, safetensors of inputs, or a text.
        split: Split of a hub dataset.
        column: Column of a dataset that holds the text or image.
        samples: How many samples, or 'all'.
        shuffle: Draw the samples from all of the data, with this seed; the first ones otherwise.
        exact_samples: Exact norms on the first so many samples only.
        max_length: Tokens per text, special tokens included; a text alone is cut into windows of
            so many.
        tokenizer: Directory or hub id of the tokenizer, where the checkpoint has none.
        processor: Directory or hub id of the image processor, where the checkpoint has none.
        layers: Layer numbers, e.g. 0,5,11 or 0-3,7; -1 is the last; all by default.
        bounds: 'default', 'all', 'none' (exact norms alone), or names separated by commas (see
            `lipbound bounds`).
        extras: More of the Jacobian of each head at each sample with an exact norm: frobenius (its
            Frobenius norm), condition (its condition number, up to 1,024 outputs: short inputs);
            kappa_softmax, chi_score, kappa_val, rho_ln (condition numbers in low precision);
            of weights alone wqk_norm, wqk_stable_rank, wov_norm, wov_stable_rank; of attention
            row_norm, largest_logit, qk_clip (with --tau).
        tau: Largest logit that QK-clip allows, such as 100: of the extra qk_clip.
        map: head, head_out (with its slice of the output projection), heads, layer (all together),
            residual, pre_norm or post_norm.
        norm: frobenius, every-token (each moves by at most 1, the worst output counts) or
            one-token (one moves alone).
        wrt: What heads are functions of, all else held: input (tokens), or keys, values or queries
            alone, as a cache holds them.
        tol: Relative width (or error, with --delta 0) of exact norms.
        delta: Total failure probability of exact_upper; 0 for plain estimates.
        device: 'auto', 'cpu', 'cuda', 'cuda:1', ...
        dtype: 'float32' or 'float64'.
        seed: Seed of the start vectors.
        revision: Branch, tag or commit of a hub model.
        out: Save the run here, a Zarr store that does not exist yet.
        resume: Take up the unfinished run of --out where it stopped.
        memory: Working memory with its unit, e.g. 4GB: how many samples are taken at a time.
        weights: 'whole' in memory, 'layers' (read layer by layer, for large models), or 'auto'.
        gguf_file: Which GGUF file of a directory or of a hub model; the file itself is a model,
            too.
        adapter: LoRA adapter to merge into the weights: a directory or a hub id; 'none' leaves out
            one that lies beside the weights.
        inputs: Ready inputs of the model, which become the data.
        client: A dask.distributed client whose workers share the run.
        progress: Whether signs of progress are given.

    Raises:
        LipboundError: an unknown map, norm, wrt or bound, a bound that says nothing about the map,
            is of another norm or of functions of the input, a map or an option that the norm does
            not have, an argument of another type or out of its range, resume without out. Models,
            data and devices are looked at when they are opened.
    """

    model: AnyModel
    data: Any = None
    _: KW_ONLY
    split: str | None = None
    column: str | None = None
    samples: int | str = 8
    shuffle: int | None = None
    exact_samples: int | None = None
    max_length: int = 128
    tokenizer: str | Path | None = None
    processor: str | Path | None = None
    layers: Sequence[int] | int | str | None = None
    bounds: str | Iterable[str] = "default"
    extras: Sequence[str] | str | None = None
    tau: float | None = None
    map: str = "head"
    norm: str = "frobenius"
    wrt: str = INPUT
    tol: float = 1e-3
    delta: float | None = 1e-6
    device: Any = "auto"
    dtype: Any = "float32"
    seed: int = 0
    revision: str | None = None
    out: str | Path | None = None
    resume: bool = False
    memory: str | float = "auto"
    weights: str = "auto"
    gguf_file: str | None = None
    adapter: str | Path | Literal[False] | None = None
    inputs: Any = None
    client: Any = None
    progress: bool = True

    def __post_init__(self) -> None:
        if self.inputs is not None and self.data is not None:
            raise LipboundError("data and inputs are both given; inputs are data: give one")
        if isinstance(self.inputs, str | Path):
            what = f"inputs is {shown(str(self.inputs))}; give a tensor, several, or a dict of them"
            raise LipboundError(f"{what} by name; a text, a file or a dataset is given as data=")
        data = self.data if self.inputs is None else self.inputs
        for name, value in (self._checked() | {"data": data, "inputs": None}).items():
            object.__setattr__(self, name, value)
        if self.norm != "frobenius":  # nothing is random there
            for name in ("delta", "seed"):
                if (value := getattr(self, name)) not in (None, getattr(RunConfig, name)):
                    what = f"{name} is {shown(value)}, which norm={self.norm!r} does not take"
                    raise LipboundError(f"{what}, as nothing in it is random; leave it out")
            object.__setattr__(self, "delta", None)
        if ("qk_clip" in (self.extras or ())) != (self.tau is not None):
            what = "the extra 'qk_clip' and tau, the largest logit that it allows, go together"
            raise LipboundError(f"{what}; give both, as extras='qk_clip', tau=100, or neither")
        if self.resume and self.out is None:
            raise LipboundError("resume needs out, the name of the run to take up")
        if self.client is not None and not isinstance(self.model, str | Path):
            raise LipboundError("with a client, model must be a name that every worker can load")
        if self.client is not None and not hasattr(self.client, "ncores"):
            raise LipboundError(f"client is {shown(self.client)}; give a dask.distributed.Client")

    def _checked(self) -> dict[str, Any]:
        """The arguments in the types that everything behind relies on."""
        from lipbound.devices import WEIGHTS, dtype_name

        check_run_name(self.out)
        for name in ("split", "column", "revision", "gguf_file"):
            errors.name_or_none(name, getattr(self, name))

        def optional(name: str, check: Callable[..., Any], *args: Any, **limits: Any) -> Any:
            value = getattr(self, name)
            return None if value is None else check(name, value, *args, **limits)

        return self._checked_map() | {
            "extras": self._checked_extras(),
            "tau": optional("tau", real, "a logit above 0, such as 100", above=0),
            "samples": errors.sample_count(self.samples) or "all",
            "seed": whole("seed", self.seed),
            "exact_samples": optional("exact_samples", whole, least=1),
            "shuffle": optional("shuffle", whole, least=0),
            "max_length": whole("max_length", self.max_length, least=1),
            "layers": optional("layers", lambda *layers: tuple(errors.indices(*layers))),
            "tol": real("tol", self.tol, _TOL, above=0, below=1),
            "delta": optional("delta", real, _DELTA, above=0, below=1),
            "weights": errors.choice("weights", self.weights, WEIGHTS),
            "dtype": dtype_name(self.dtype),
            "resume": errors.flag("resume", self.resume),
            "progress": errors.flag("progress", self.progress),
            "memory": _memory(self.memory),
            "adapter": errors.adapter_name(self.adapter),
        }

    def _checked_map(self) -> dict[str, Any]:
        """Bounds, map, norm and wrt, which go together."""
        from lipbound.bounds.registry import resolve
        from lipbound.bounds.whole_layer_rules import names_for
        from lipbound.jacobians.maps import MAPS, check_wrt
        from lipbound.jacobians.token_norms.token_norm import TOKEN_MAPS

        # an iterator could be read once only
        bounds = self.bounds if isinstance(self.bounds, str) else tuple(resolve(self.bounds))
        map, norm = errors.choice("map", self.map, MAPS), errors.choice("norm", self.norm, NORMS)
        if norm != "frobenius" and map not in TOKEN_MAPS:
            what = f"map {map!r} has exact norms for norm='frobenius' alone"
            raise LipboundError(f"{what}; with norm={norm!r} take one of {', '.join(TOKEN_MAPS)}")
        names = names_for(bounds if isinstance(bounds, str) else list(bounds), map, norm)
        if check_wrt(self.wrt, map) is not None:
            if norm != "frobenius":
                raise LipboundError(f"wrt={self.wrt!r} has exact norms for norm='frobenius' alone")
            if names and bounds not in ("default", "all"):
                what = f"bound {names[0]!r} is stated for heads as functions of their input"
                raise LipboundError(f"{what}, not with wrt={self.wrt!r}; leave it out")
        return {"bounds": bounds, "map": map, "norm": norm, "wrt": self.wrt}

    def _checked_extras(self) -> tuple[str, ...]:
        """Names of `EXTRAS`, which are of the maps and the norm that they are measured in."""
        from lipbound.jacobians.maps import WHOLE
        from lipbound.jacobians.token_norms.token_norm import TOKEN_MAPS

        given: Any = self.extras or ()
        if not isinstance(given, str | Iterable):
            raise LipboundError(f"extras is {shown(given)}; give names, as 'frobenius,condition'")
        names = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
        extras = tuple(dict.fromkeys(errors.choice("extra", name, EXTRAS) for name in names))
        of_input = self.norm == "frobenius" and self.wrt == INPUT
        own = [name for name in extras if name in OF_HEADS]
        if len(own) < len(extras) and not (of_input and self.map in TOKEN_MAPS):
            what = "extras are of norm='frobenius', wrt='input' and the maps"
            raise LipboundError(f"{what} {', '.join(TOKEN_MAPS)}; leave them out of others")
        if own and self.map in WHOLE:
            what = f"the extra {own[0]!r} is of single heads, and map {self.map!r} of whole layers"
            raise LipboundError(f"{what}; take map='head' or map='head_out', or leave it out")
        return extras

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
        """Read the configuration that computes a run again from the provenance it recorded.

        Args:
            ds: a run.
            model: in place of what the run recorded; needed where that was in memory.
            data: the same for the data.
            device: a torch device, or "auto".
            dtype: that of the run by default.

        Raises:
            StoreError: the run does not record where its model or data came from.
            AlteredRunError: it records settings that no run can have.
        """
        info = RunInfo.of(ds)
        source = {"model": None, "data": False} | (info.source or {})
        if not info.exact_samples:
            raise StoreError("the run is of weights alone; lipbound weights computes it again")
        if info.runs:
            raise StoreError("runs put together cannot be computed again as one; give one of them")
        lost = (f"a {info.architecture}", "model") if model is None and info.loaded else None
        if not lost and data is None and source["data"] is False:
            lost = f"data ({info.data})", "data"
        if lost:
            what = f"the run was made from {lost[0]} in memory, which no name leads back to"
            raise StoreError(f"{what}; give it as {lost[1]}=")
        said: dict[str, Any] = {name: getattr(info, name) for name in _ATTRS}
        said |= {name: source.get(name) for name in _SOURCE}
        said |= {"bounds": tuple(info.bounds), "layers": tuple(ds["layer"].values.tolist())}
        if model is None or isinstance(model, str | Path):
            said["adapter"] = source.get("adapter")
        if model is None:
            said |= {"revision": info.commit, "gguf_file": source.get("gguf_file")}
            model = source["model"] or info.model
            if info.commit is not None:  # whatever branch the name says
                model = model.partition("@")[0]
        data = source["data"] if data is None else data
        try:
            return cls(model, data, device=device, dtype=dtype or info.dtype, **said)
        except LipboundError as error:
            what = "the run's settings (attributes) were changed, no run can have them"
            raise errors.AlteredRunError(f"{what}: {error}") from error

    @property
    def source(self) -> dict[str, Any]:
        """Where model and data are found again, paths absolute.

        ``model`` is None for one in memory; ``data`` is None for the default, False for objects in
        memory.
        """
        found = self.options(*_SOURCE, "gguf_file")
        for name in ("model", "data", "tokenizer", "processor", "adapter"):
            value = getattr(self, name)
            found[name] = absolute(value) if isinstance(value, str | Path) else None
        return found if found["data"] or self.data is None else found | {"data": False}

    @property
    def names(self) -> list[str]:
        """Registry names of the bounds that are asked for.

        Those about other maps are left out of "default" and "all".
        """
        from lipbound.bounds.whole_layer_rules import names_for

        bounds = self.bounds if isinstance(self.bounds, str) else list(self.bounds)
        return names_for(bounds, self.map, self.norm)

    def options(self, *names: str) -> dict[str, Any]:
        """Some of the options, by their names."""
        return {name: getattr(self, name) for name in names}

    @property
    def target(self) -> Path | None:
        """Path of the store; None where the run is not saved."""
        return None if self.out is None else Path(self.out).expanduser()

    @property
    def encloses(self) -> bool:
        """Exact norms have upper ends, those of `TOKEN_NORMS` without ``delta``."""
        return self.delta is not None or self.norm in TOKEN_NORMS

    def of_places(self, names: Sequence[str], samples: int, shape: Sequence[int]) -> Self:
        """Return what is measured at every place, with an equal share of delta for each exact norm.

        Args:
            names: of the bounds that are evaluated.
            samples: how many have exact norms.
            shape: of the exact norms of each of them.
        """
        share = None if self.delta is None else self.delta / (samples * math.prod(shape))
        return replace(self, bounds=tuple(names), exact_samples=samples, delta=share)

    def exact_count(self, samples: int) -> int:
        """Count the samples, of so many, that get exact norms."""
        return samples if self.exact_samples is None else min(self.exact_samples, samples)


def from_options(make: Callable[P, Any]) -> Callable[[Callable[[Any], T]], Callable[P, T]]:
    """Let a function of one object take the arguments of which that is made."""

    def decorate(function: Callable[[Any], T]) -> Callable[P, T]:
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(make).replace(return_annotation=returned)

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # which does not name what was called
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(make(*args, **kwargs))

        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


READING = ("samples", "max_length", "split", "column", "shuffle")
"""Options of `lipbound.models.inputs.prepare`."""
LOADING = ("revision", "dtype", "weights", "gguf_file", "tokenizer", "processor", "adapter")
"""Options of `lipbound.load_checkpoint`, but for the device."""
_ATTRS = ("extras", "tau", "map", "norm", "wrt", "samples", "exact_samples", "tol", "delta", "seed")
_SOURCE = ("max_length", "split", "column", "shuffle", "tokenizer", "processor")
"""Options that a run records as attributes, and in its attribute ``source``."""


def absolute(name: str | Path) -> str:
    """Resolve a path that is there, so that it leads to the same files from elsewhere.

    Any other name, or text, stays as it is.
    """
    with suppress(OSError, ValueError, RuntimeError):
        if name != "none" and (path := Path(name).expanduser()).exists():
            return str(path.resolve())
    return str(name)


def check_run_name(out: Any, argument: str = "out") -> None:
    """Refuse what cannot be the name of a run, or is that of a file which other commands write."""
    if out is None:
        return
    if not isinstance(out, str | Path) or not str(out).strip():
        raise LipboundError(f"{argument} is {shown(out)}; give the name of a run, as 'run.zarr'")
    if Path(out).suffix.lower() in EXPORTS:
        run = shlex.quote(str(Path(out).with_suffix(".zarr")))
        what = f"{argument} is {shown(str(out))}, and a run is a folder of its own kind"
        raise LipboundError(f"{what}; name it {run}, from which lipbound table makes files")


def check_folder_name(name: str, folder: str | Path, what: str) -> None:
    """Refuse the ending of a file for a folder; ``what`` it holds, with its verb."""
    if not isinstance(folder, str | Path) or Path(folder).suffix.lower() in EXPORTS:
        given = errors.shown(str(folder) if isinstance(folder, Path) else folder)
        raise LipboundError(f"{name} is {given}, which {what}; give the name of a folder")


def _memory(memory: Any) -> str | float:
    """Read a size in bytes, or "auto"."""
    if isinstance(memory, str):
        if memory == "auto":
            return "auto"
        size = r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgt]?)i?b?"
        if match := re.fullmatch(size, memory.strip().lower()):
            memory = float(match[1]) * _UNITS[match[2]]
    return real("memory", memory, "a size such as '4GB', a number of bytes, or 'auto'", above=0)

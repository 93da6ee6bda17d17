"""Norms of attention heads over the steps of a training run, on a fixed batch of probes."""

import importlib
import shutil
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed
import xarray as xr
import zarr
from torch import nn

from lipbound import errors, schema
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, StoreError, shown, tell, whole
from lipbound.formatting import counted
from lipbound.models.checkpoint import bare_module, in_dtype, in_training
from lipbound.models.head_weights import head_weights
from lipbound.models.training import BatchLogits, uncompiled
from lipbound.runs import compare
from lipbound.runs.checksums import sealed, settings_checksum
from lipbound.runs.config import RunConfig
from lipbound.runs.head_extras import of_weights
from lipbound.runs.measure import Measurer, Sources, capturer_of, seed_of
from lipbound.runs.store import check_target, hold, load, same_configuration, save
from lipbound.schema import AXES, CHECKSUM, EXTRAS, MEANS, STATISTICS, STEP, RunInfo

WITHOUT = ("audit", "violations")
"""Attributes of one run that a run over steps has not: bounds may fall below at some of them."""
_WRITERS: weakref.WeakValueDictionary[Path, "Monitor"] = weakref.WeakValueDictionary()
"""The last monitor that this process made for each store; it alone writes there."""

LIGHTNING = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Packages of Lightning, and the modules that hold their callbacks."""
Log = Callable[[dict[str, float], int], object]
"""Function that logs numbers by name, at a step."""


class Monitor:
    """Measure every attention head of a model while it is trained, on a fixed batch of probes.

    A step is how many updates the weights have seen: call ``step(0)`` before the first update. What
    is measured at a step does not depend on other steps. The model is left as it was: training
    mode, attention implementation, gradients, random numbers, hooks.

    Where measuring fails (weights that are no longer finite, a full disk), a
    `lipbound.errors.Notice` says why, and the training goes on. Of several processes of
    torch.distributed the first one measures; all weights must be there.

    Args:
        model: that is trained: a transformers model, any torch module, or a wrapper of one
            (compile, DistributedDataParallel, PEFT). Of one in half precision a copy in float32 is
            measured.
        probe: inputs, always the same: ready ones by name, tokens, texts or anything that
            `lipbound.compare` takes as data.
        every: steps between two measurements; 100 by default.
        steps: the steps to measure at, in place of ``every``.
        extras_every: steps between two looks at the extras that need no pass of the probe: those of
            weights, of one of `lipbound.models.head_weights.FAMILIES`, and ``batch_logit``. Steps
            of extras alone have no norms, and are written to ``out`` with the next that has.
            None, the default, for steps with norms alone.
        out: where to keep the run, a Zarr store that can be read at any moment, also after the
            training was killed. Of several monitors of one store, the one made last writes it.
        resume: append to the run of ``out``, if it exists. Steps that come again are replaced.
        bounds: also evaluate these, as in `lipbound.compare`; none by default.
        extras, tau: as in `lipbound.compare`; the largest logit is always there. ``batch_logit`` is
            that of all samples of the batches that the model was given in training mode since
            ``step`` was called last, seen by hooks as its own passes compute them, in its dtype
            (`lipbound.models.training.BatchLogits`).
        map, norm, layers, tol, seed: as in `lipbound.compare`.
        delta: failure probability of all upper ends ``exact_upper`` of one step; None or 0, the
            default, for lower ends alone.
        samples, max_length, tokenizer: how texts are read, as in `lipbound.compare`.
        log: is called with numbers by name, and the step, after each measurement; `attach` logs to
            what a Trainer logs to.
        per_head: log every head, too, rather than layers alone.
        threshold: of the exact norm, or thresholds by name (also of ``largest_logit``, ...). A
            notice tells when the largest value has risen above it.

    Raises:
        LipboundError: options or a probe that cannot be; attention that cannot be captured.
        StoreError: ``out`` exists, is a run of another probe, model or options, or is filled by
            another process.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(vocab_size=9, num_hidden_layers=2, **sizes))
    >>> monitor = Monitor(model, torch.tensor([[1, 2, 3]]), every=10)
    >>> for step in range(21):  # here the weights would be trained
    ...     _ = monitor.step(step)
    >>> dict(monitor.run["exact"].sizes)
    {'step': 3, 'sample': 1, 'layer': 2, 'head': 2}
    """

    @errors.knows_options
    def __init__(
        self,
        model: nn.Module,
        probe: Any,
        *,
        every: int | None = None,
        steps: Iterable[int] | None = None,
        extras_every: int | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        bounds: str | Iterable[str] = "none",
        extras: Sequence[str] | str | None = None,
        tau: float | None = None,
        map: str = "head",
        norm: str = "frobenius",
        layers: Sequence[int] | int | str | None = None,
        tol: float = 1e-3,
        delta: float | None = None,
        seed: int = 0,
        samples: int | str = "all",
        max_length: int = 128,
        tokenizer: str | Path | None = None,
        log: Log | None = None,
        per_head: bool = False,
        threshold: float | Mapping[str, float] | None = None,
    ):
        given = dict(locals())
        if every is not None and steps is not None:
            raise LipboundError("every and steps are both given; give one of them")
        self._every = 100 if every is None else whole("every", every, least=1)
        self._at = None
        if steps is not None:
            self._at = frozenset(whole("steps", n, least=0) for n in errors.indices("steps", steps))
            if not self._at:  # how many there will be is not known
                raise LipboundError("steps is empty; give steps, as [0, 100, 1000], or every=")
        self._often = None if extras_every is None else whole("extras_every", extras_every, least=1)
        if not (log is None or callable(log)):
            raise LipboundError(f"log is {shown(log)}; give a function")
        self._model = bare_module(model)
        dtype = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), None)
        given |= {"data": probe, "delta": delta or None}
        given["dtype"] = "float64" if dtype == torch.float64 else "float32"
        of_run = [one.name for one in fields(RunConfig) if one.name in given]
        self._config = config = RunConfig(**{name: given[name] for name in of_run})
        self._logs, self._per_head = [] if log is None else [log], errors.flag("per_head", per_head)
        self._open(tokenizer)
        known = (*schema.OF_WEIGHTS, schema.BATCH_LOGIT)
        self._light = [name for name in config.extras or () if name in known]
        self._logits, self._batch = None, dict[int, torch.Tensor]()
        if schema.BATCH_LOGIT in self._light and not _other_process():
            self._logits = BatchLogits(layer() for layer in self._modules)
            weakref.finalize(self, self._logits.hooks.close)
        if self._often is not None:
            if not self._light:
                raise LipboundError(f"extras_every needs extras among {', '.join(known)}")
            self._looked(0)  # weights are found by their names
        self._above, self._thresholds = set[str](), dict[str, float]()
        limits: Any = threshold if isinstance(threshold, Mapping) else {"exact": threshold}
        for name, limit in () if threshold is None else limits.items():
            errors.choice("threshold of", name, self._logged)
            self._thresholds[name] = errors.real("threshold", limit, "a finite number")
        self._slices: list[xr.Dataset] = []
        self._target = None if _other_process() else config.target  # one process writes
        if self._target is not None:
            self._stored(self._target)
            _WRITERS[self._target] = self

    def __repr__(self) -> str:
        due = f"every {self._every} steps" if self._at is None else f"steps {sorted(self._at)}"
        what = type(self._model).__name__, counted(self._sources.inputs.samples, "sample")
        layers = counted(len(self._plan.layers), "layer")
        return f"Monitor({', '.join((*what, layers, due))}; measured: {len(self._slices)})"

    @in_own_modes
    @torch.no_grad()
    def _open(self, tokenizer: str | Path | None) -> None:
        """Prepare the probe and look at the layers."""
        config = self._config
        checkpoint = in_training(self._model, None if tokenizer is None else str(tokenizer))
        inputs = compare.open_inputs(config, checkpoint)
        measured, notes = in_dtype(self._model)
        checkpoint.notes += notes
        tell(*notes)
        capturer = capturer_of(measured, config)
        device = str(next(self._model.parameters()).device)
        self._sources = Sources(checkpoint, inputs, device, capturer)
        memory = compare.memory_bytes(config.memory, device)
        with uncompiled(self._model.modules()):
            self._plan = planned = compare.plan(config, self._sources, memory)
        self._modules = _modules_of(self._model, (one.layer_name for one in planned.layers))

    @property
    def _logged(self) -> list[str]:
        """Names of what is logged, and what may have a threshold."""
        ends = ["exact", *["exact_upper"] * self._plan.spec.encloses]
        extras = map(EXTRAS.__getitem__, self._config.extras or ())
        return list(dict.fromkeys([*ends, *STATISTICS, *extras, *self._plan.spec.names]))

    def _stored(self, target: Path) -> None:
        """Take up the run that is there, or check that one can be made.

        Raises:
            StoreError: it is another one, or another process fills it.
        """
        self._lock = hold(target, target.with_name(f".{target.name}.lock"), again=True)
        if not target.exists():
            check_target(target)
            return
        if not self._config.resume:
            raise StoreError(f"{target} exists already; resume=True appends to it")
        past = load(target, damaged="refuse")
        if STEP not in past.dims:
            raise StoreError(f"{target} is not a run over steps of training; choose another name")
        info = compare.run_info(self._config, self._sources, self._plan)
        # the model itself: a checkpoint of the training has a name of its own
        asked = compare.deciding(info.attributes(), info.made.layers) | {"model": None}
        same_configuration(target, compare.deciding_of(past) | {"model": None}, asked)
        self._slices = [past.isel({STEP: i}) for i in range(past.sizes[STEP])]

    @property
    def run(self) -> xr.Dataset:
        """Everything measured so far, (step, sample, layer, head), as `lipbound.load` reads it.

        Raises:
            LipboundError: nothing was measured.
        """
        if not self._norms:
            raise LipboundError("nothing was measured yet; call step at a step that is due")
        return stacked([as_run(one, self._norms[-1]) for one in self._slices])

    @property
    def _norms(self) -> list[xr.Dataset]:
        """Steps that are whole runs, rather than extras alone."""
        return [one for one in self._slices if CHECKSUM in one.variables]

    def attach(self, trainer: Any) -> Self:
        """Measure at the steps of a Trainer, and log to what it logs to.

        Args:
            trainer: of transformers, or of Lightning.

        Returns:
            This monitor.

        Raises:
            LipboundError: it is neither.
        """
        kinds = [one for one in type(trainer).__mro__ if one.__name__ == "Trainer"]
        package = next((one.__module__.partition(".")[0] for one in kinds), "")
        if package == "transformers":
            base = importlib.import_module(package).TrainerCallback
            moments, register = ("on_train_begin", "on_step_end"), trainer.add_callback
        elif package in LIGHTNING:
            base = importlib.import_module(f"{LIGHTNING[package]}.callbacks").Callback
            moments, register = ("on_train_start", "on_train_batch_end"), trainer.callbacks.append
        else:
            what = f"trainer is {shown(trainer)}; give a Trainer of transformers or of Lightning"
            raise LipboundError(f"{what}, or call step in a loop of your own")
        last = [-1]

        def measure(*_: Any, **__: Any) -> None:
            now = (trainer if package in LIGHTNING else trainer.state).global_step
            if now != last[0]:  # several batches may make one update
                last[0] = now
                self.step(now)

        def log(numbers: dict[str, float], at: int) -> None:
            if package in LIGHTNING:
                for logger in trainer.loggers:
                    logger.log_metrics(dict(numbers), step=at)
            else:
                wanted = trainer.control.should_log  # which logging ends
                trainer.log(dict(numbers))
                trainer.control.should_log = wanted

        register(type("MonitorCallback", (base,), dict.fromkeys(moments, measure))())
        self._logs.append(log)
        return self

    def step(self, step: int) -> xr.Dataset | None:
        """Measure after so many updates, where that is due.

        Args:
            step: how many updates the weights have seen.

        Returns:
            The run at this step, (sample, layer, head), or its extras alone; None where nothing was
            measured.
        """
        step = whole("step", step, least=0)
        if self._logits is not None:
            self._batch, self._logits.found = self._logits.found, {}
            if self._logits.is_watching and not self._batch:
                tell(f"no pass in training mode was seen before step {step}: batch_logit is NaN")
            self._logits.is_watching = any(self._due(step + 1))
        norms, often = self._due(step)
        if not (norms or often) or _other_process():
            return None
        try:
            target = self._target
            if target is not None and _WRITERS.get(target) is not self:
                raise StoreError(f"a later monitor has taken over {target}; give each its own out")
            ds = self._measured(step) if norms else self._looked(step)
            self._keep(ds, step)
        except Exception as error:  # a training is worth more than a number about it
            kind = "" if isinstance(error, LipboundError) else f"{type(error).__name__}: "
            tell(f"step {step} of the training was not measured or kept: {kind}{error}")
            return None
        every = logged_numbers(ds, self._logged, per_head=self._per_head) if self._logs else {}
        for log in self._logs:
            log(dict(every), step)
        self._alarm(ds, step)
        return ds

    def _due(self, step: int) -> tuple[bool, bool]:
        """Return whether norms, and whether extras that need no pass, are due at a step."""
        norms = step % self._every == 0 if self._at is None else step in self._at
        return norms, self._often is not None and step % self._often == 0

    @in_own_modes
    @torch.no_grad()
    def _looked(self, step: int) -> xr.Dataset:
        """Return the extras that need no pass of the probe, the same at every sample.

        Raises:
            CaptureError: weights are not found by their names.
        """
        found = {name: (AXES, np.full(self._plan.shape, np.nan)) for name in self._light}
        asked = [name for name in self._light if name in schema.OF_WEIGHTS]
        places = {one.layer_name: i for i, one in enumerate(self._plan.layers) if asked}
        for layer, projections, scale in head_weights(self._model) if asked else ():
            if (i := places.pop(layer, None)) is not None:
                for name, value in of_weights(projections, scale, asked).items():
                    found[name][1][:, i, : len(value)] = value.cpu()
        if places:
            lost = next(iter(places))
            raise errors.CaptureError(f"weights of {lost} are not found by their names")
        ds = xr.Dataset(found, self._plan.coords | {STEP: step})
        self._fill(ds)
        return ds

    def _fill(self, ds: xr.Dataset) -> None:
        """Put the logits of batches into a variable of NaN."""
        for i, layer in enumerate(self._modules):
            if (value := self._batch.get(id(layer()))) is not None:
                ds[schema.BATCH_LOGIT].values[:, i, : len(value)] = value.cpu()

    @in_own_modes
    @torch.no_grad()
    def _measured(self, step: int) -> xr.Dataset:
        """Measure the model as it is.

        Raises:
            CaptureError: it has other attention layers than when the monitor was made, or has them
                in another order.
        """
        capturer, planned = self._sources.capturer, self._plan
        capturer.model = in_dtype(self._model)[0]  # a copy, of one in half precision
        capturer.release()
        sources = self._sources._replace(device=str(next(self._model.parameters()).device))
        spec = planned.spec
        if spec.norm == "frobenius":  # nothing is random in the others
            spec = replace(spec, seed=seed_of(spec.seed, STEP, step))
        measurer = Measurer(capturer, spec, planned.room, verify=False, statistics=True)
        with uncompiled(self._model.modules()):
            results = list(measurer.each(sources, planned.blocks(())))
        modules = _modules_of(self._model, (one.name for one in results if one.start == 0))
        if modules != self._modules or capturer.count != planned.model_layers:
            raise errors.CaptureError("attention layers came, went or moved; make a new Monitor")
        ds, error = compare.dataset(planned, results)
        self._fill(ds)
        info = compare.run_info(self._config, sources, planned, error)
        if before := self._norms:
            first = RunInfo.of(before[-1])
            notes = list(dict.fromkeys([*first.notes, *info.notes]))
            info = replace(first, capture_error=max(error, first.capture_error), notes=notes)
        return sealed(ds.assign_coords({STEP: step}), info)

    def _keep(self, ds: xr.Dataset, step: int) -> None:
        """Put a step behind those before it, in memory, and on disk as soon as there are norms."""
        before = self._slices[: bisect_left(self._slices, step, key=lambda one: int(one[STEP]))]
        if again := len(self._slices) - len(before):
            what = f"{again} of {len(self._slices)} measured steps, from {step} on, come again"
            tell(f"{what} in this training, and are measured anew")
            if self._target is not None and not before:
                shutil.rmtree(self._target, ignore_errors=True)
        self._slices = before
        steps = [*before, ds]
        if CHECKSUM in ds.variables:
            written = sum(CHECKSUM in one.variables for one in before)
            steps = [as_run(one, ds) for one in steps]
            if self._target is not None:
                write_steps(self._target, steps[written:], written)
        self._slices = steps

    def _alarm(self, ds: xr.Dataset, step: int) -> None:
        """Tell what has risen above its threshold since the last measurement."""
        before = self._above
        for name, limit in ((n, t) for n, t in self._thresholds.items() if n in ds):
            found = ds[name].isel(ds[name].fillna(-np.inf).argmax(...))
            self._above = self._above - {name} | ({name} if found > limit else set())
            if name in self._above - before:
                axes = [axis for axis in ("layer", "head", "sample") if axis in found.coords]
                where = ", ".join(f"{axis} {int(found[axis])}" for axis in axes)
                what = f"{name} has risen above {limit:g} at step {step}"
                tell(f"{what}: {float(found):.4g} in {where}")


def stacked(steps: Sequence[xr.Dataset]) -> xr.Dataset:
    """Put steps of one training together, along an axis before all others.

    Args:
        steps: runs of one kind, at least one, with a coordinate `STEP` each, ascending. Settings
            are those of the last.
    """
    last = steps[-1]
    ds = last.assign_coords({STEP: [int(one[STEP]) for one in steps]})
    for name in [name for name, one in last.variables.items() if one.dims[:2] == AXES[:2]]:
        values = np.stack([one[name].values for one in steps])
        ds[name] = ((STEP, *last[name].dims), values, last[name].attrs)
    attrs = {name: value for name, value in last.attrs.items() if name not in WITHOUT}
    attrs["settings_checksum"] = settings_checksum(attrs)
    return ds.drop_attrs(deep=False).assign_attrs(attrs)


def as_run(extras: xr.Dataset, like: xr.Dataset) -> xr.Dataset:
    """Return a step of extras alone as a run, with NaN for all else that another step has."""
    if CHECKSUM in extras.variables:  # it has norms
        return extras
    ds, filled = like.drop_vars(CHECKSUM), dict[Hashable, Any]()
    for name, one in ds.variables.items():
        if one.dims[:2] == AXES[:2]:
            nothing = np.full(one.shape, compare.EMPTY[one.dtype.kind])
            filled[name] = one.dims, extras[name].values if name in extras else nothing, one.attrs
    ds = ds.assign(filled).assign_coords({STEP: int(extras[STEP])})
    return sealed(ds, RunInfo.of(like))


def write_steps(path: Path, steps: Sequence[xr.Dataset], position: int) -> None:
    """Write steps of a run over steps to its store, a Zarr store that grows.

    The store can be read, and its training be killed, at any moment. Steps are written behind those
    that are there, chunks of their own; then one file, which holds the shapes of all arrays and is
    replaced whole, lets readers see them. (``to_zarr(append_dim=...)`` writes the shapes of arrays
    one by one: killed between two of them, it leaves a store that cannot be read.)

    Args:
        path: of the store, which must not exist for the first step.
        steps: at least one, ascending.
        position: how many steps of the store stand before them; others are let go.

    Raises:
        StoreError: it cannot be written; what was there can still be read.
    """
    grown = stacked(steps)
    try:
        if position == 0:
            for one in grown.variables.values():
                if STEP in one.dims:  # a chunk for every step, so that none is written twice
                    one.encoding["chunks"] = (1, *one.shape[1:])
            save(grown, path)
            return
        _show(path, grown, position, filled=False)
        _show(path, grown, position + len(steps))
    except OSError as error:
        what = f"step {int(steps[-1][STEP])} could not be written to {path}"
        raise StoreError(f"{what}: {errors.one_line(error)}") from error


def _show(path: Path, ds: xr.Dataset, count: int, *, filled: bool = True) -> None:
    """Fill the last of so many steps by ``ds``, and show that many, with its attributes."""
    group = zarr.open_group(path, mode="r+", use_consolidated=True)
    for name, one in ds.variables.items():
        if STEP in one.dims:
            array: Any = group[str(name)]
            array.resize((count, *array.shape[1:]))
            if filled:
                array[count - len(one) :] = one.values.astype(array.dtype)
    if group.attrs.asdict() != ds.attrs:
        group.update_attributes(ds.attrs)  # in one write
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other readers of this format may not know the file
        zarr.consolidate_metadata(group.store)


def _modules_of(model: nn.Module, names: Iterable[str]) -> list[weakref.ref[nn.Module]]:
    """Identify layers by their modules, which stay the same where their names change."""
    named = dict(model.named_modules(remove_duplicate=False))
    return [weakref.ref(named.get(name, model)) for name in names]


def _other_process() -> bool:
    """Tell whether another process of torch.distributed measures."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_rank() != 0


def logged_numbers(
    ds: xr.Dataset, names: Iterable[str], *, per_head: bool = False
) -> dict[str, float]:
    """Reduce a step to the numbers that are logged, by their names there.

    Args:
        ds: a step of a run.
        names: of its variables; those that are not there are passed over.
        per_head: also of every head, rather than of layers alone.

    Returns:
        By ``lipbound/layer_L/NAME_max`` and, of norms and bounds, ``..._geomean``, over samples and
        heads; of what is a mean over queries ``..._mean``; of the factor of QK-clip ``..._min``;
        and ``lipbound/layer_L/head_H/NAME``, over samples. Values that are missing or infinite are
        left out.
    """
    found: dict[str, float] = {}
    for name in filter(ds.__contains__, names):
        of_layers = ds.variables[name].transpose("layer", ...).values
        for layer, values in zip(ds["layer"].values.tolist(), of_layers, strict=True):
            known, place = values[np.isfinite(values)], f"lipbound/layer_{layer}"
            if not known.size:
                continue
            how = "mean" if name in MEANS else "min" if name == "qk_clip" else "max"
            found[f"{place}/{name}_{how}"] = getattr(known, how)()
            if name not in (*STATISTICS, "qk_clip", "batch_logit") and (known > 0).all():
                found[f"{place}/{name}_geomean"] = np.exp(np.log(known).mean())
            for head, one in enumerate(values.T if per_head and values.ndim > 1 else ()):
                found[f"{place}/head_{head}/{name}"] = getattr(one, how)()
    return {name: float(value) for name, value in found.items() if np.isfinite(value)}

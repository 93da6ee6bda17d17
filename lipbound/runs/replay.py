"""Find the model and the inputs of a run again, by its provenance, and compute numbers again."""

import importlib.metadata
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr

from lipbound.devices import resolve_device
from lipbound.errors import InputsError, StoreError
from lipbound.models.checkpoint import Inputs
from lipbound.models.loading import Checkpoint
from lipbound.runs.config import RunConfig
from lipbound.runs.dataset import package_version
from lipbound.runs.measure import Measurer, capturer_of
from lipbound.runs.plan import measurement_spec, open_checkpoint, open_inputs
from lipbound.schema import Extent, RunInfo


class OtherModelError(StoreError):
    """A run cannot be computed again with a model that is not the recorded one."""


class Replay(NamedTuple):
    """Model and inputs of a run, found again.

    Attributes:
        config: the run's, read from what it recorded.
        checkpoint, inputs: loaded and prepared as they were for the run.
        device: where to.
        differences: a sentence for everything that is not what the run recorded: weights, data.
        notes: what could not be compared.
    """

    config: RunConfig
    checkpoint: Checkpoint
    inputs: Inputs
    device: str
    differences: list[str]
    notes: list[str]

    def measurer(self, ds: xr.Dataset, layer: int, *, closed: bool = True) -> Measurer:
        """Prepare to measure the layer at a position as the whole run did.

        ``closed=False`` measures exact norms alone, by automatic differentiation.
        """
        made = Extent(**ds.attrs["made"])
        shape = (len(made.layers), made.heads or 1)
        spec = measurement_spec(self.config, self.config.names, made.exact_samples, shape)
        number = int(ds["layer"][layer])
        spec = spec if closed else replace(spec, names=())
        return Measurer(capturer_of(self.checkpoint.model, [number], spec.map, closed=closed), spec)


def replay(
    ds: xr.Dataset,
    *,
    model: Any = None,
    data: Any = None,
    device: str = "auto",
    dtype: str | None = None,
) -> Replay:
    """Load the model and prepare the inputs of a run anew.

    Args:
        ds: a run.
        model: in place of the recorded one; needed where that was an object in memory.
        data: the same.
        device: a torch device, or "auto".
        dtype: that of the run by default.

    Raises:
        StoreError: see `RunConfig.of`.
        LipboundError: they are no longer there.
        OtherModelError: the model is not the recorded one, and does not take the run's data.
    """
    config = RunConfig.of(ds, model=model, data=data, device=device, dtype=dtype)
    where = resolve_device(device)
    checkpoint = open_checkpoint(config, where)
    info = RunInfo.of(ds)
    differences, notes = [], []
    kinds = {revision.startswith("sha256:") for revision in (checkpoint.revision, info.revision)}
    comparable = len(kinds) == 1 and checkpoint.loaded == info.loaded
    if checkpoint.loaded and dtype not in (None, info.dtype):
        comparable = False  # the hash of a model in memory is that of its numbers, rounded
    if not comparable:
        notes.append(
            f"the weights of {checkpoint.name} were found another way than the run's, so only "
            "the numbers tell whether they are the same"
        )
    elif checkpoint.revision != info.revision:
        kind = "not the recorded model" if model is not None else "not the recorded weights"
        now = "" if model is not None else "now "
        differences.append(
            f"{kind}: the run is of {info.model} ({info.architecture}, {info.revision}), "
            f"{checkpoint.name} ({type(checkpoint.model).__name__}) {now}has {checkpoint.revision}"
        )
    configurations = {checkpoint.configuration, info.configuration}
    if comparable and None not in configurations and len(configurations) > 1:
        differences.append(
            f"not the recorded configuration of the model: the run has {info.configuration}, "
            f"{checkpoint.name} now has {checkpoint.configuration}"
        )
    try:
        inputs = open_inputs(config, checkpoint)
    except InputsError as error:
        if differences:
            raise OtherModelError(differences[0]) from error
        raise
    if inputs.fingerprint != info.data_fingerprint:
        made = "model and data make other inputs" if differences else "not the recorded data"
        differences.append(
            f"{made}: the run has {info.data_fingerprint}, {inputs.description} now gives "
            f"{inputs.fingerprint}"
        )
    return Replay(config, checkpoint, inputs, where, differences, notes)


def changed_versions(ds: xr.Dataset) -> dict[str, tuple[str, str]]:
    """Find packages whose version differs from the run's: name -> (then, now)."""
    found = {}
    for name, then in ds.attrs["versions"].items():
        try:
            now = package_version(name)
        except importlib.metadata.PackageNotFoundError:
            now = "not installed"
        if now != then:
            found[name] = (then, now)
    return found


def measure_again(
    rerun: Replay, ds: xr.Dataset, sample: int, layer: int, *, closed: bool = True
) -> dict[str, np.ndarray]:
    """Compute again what the run stores about one sample and layer.

    Args:
        rerun: of the run.
        ds: the run.
        sample: position of the sample.
        layer: position of the layer.
        closed: False for the exact norms alone, by automatic differentiation.

    Returns:
        By name, (heads,) of the heads that are there.
    """
    number = int(ds["sample"][sample])
    block = rerun.inputs.block(number, number + 1, rerun.device)
    with torch.no_grad():
        (measured,) = rerun.measurer(ds, layer, closed=closed).block(block, number)
    there = ds["head"].values if "head" in ds.dims else [0]
    return {
        name: value[0, [head for head in there if head < value.shape[1]]]
        for name, value in measured.values.items()
    }

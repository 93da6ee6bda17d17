"""Bits that cached keys and values of heads need: how far does rounding them move outputs?"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor
from transformers import PreTrainedModel

from lipbound.analysis import annotated, provenance, tabled
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import in_closed_form
from lipbound.devices import resolve_device
from lipbound.errors import LipboundError, check_made, choice, indices, real, whole
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.capture.capture import Capturer
from lipbound.models.inputs import prepare
from lipbound.models.loading import load_checkpoint
from lipbound.schema import AXES, KEYS, VALUES

CACHED = (KEYS, VALUES)
PROBES = 16
"""Random moves that mean squares of first order are taken over. The standard error of a root is at
most 1 / sqrt(2 PROBES), 18 %: where all that moves a head moves its output along one line."""
KINDS = ("bound", "expected")
"""Predictions: what no rounding error of its size exceeds to first order, and the usual size."""
GROUPS = {"token": -1, "channel": -2}
"""Entries that share a scale of the quantiser, and their axis: those of one vector, or those of one
coordinate at all tokens."""
VARIABLES = {
    "norm": "norm of the head's Jacobian by its keys or values alone, upper end",
    "size": "largest Frobenius norm of the rounding error, times 2^bits - 1",
    "output": "Frobenius norm of the head's output",
    "bits_bound": "bits at which `bound` is the error asked for",
    "bits_expected": "bits at which `expected` is the error asked for",
    "bound": "norm times size over output: to first order no relative change is larger",
    "expected": "relative change, root mean square of independent errors to first order, estimated",
    "measured": "relative change of the output when keys or values are rounded",
}
"""Variables of a study, and what they are."""


def cache_bits(
    model: str | Path | PreTrainedModel,
    data: Any = None,
    *,
    error: float = 0.01,
    bits: int | str | Iterable[int] = range(2, 9),
    keys: str = "channel",
    values: str = "token",
    samples: int | str = 4,
    max_length: int = 128,
    layers: Sequence[int] | None = None,
    revision: str | None = None,
    delta: float = 1e-6,
    device: str = "auto",
    dtype: str = "float32",
    seed: int = 0,
) -> xr.Dataset:
    r"""Find how many bits the cached keys and values of every head need, and round them to see.

    The quantiser is asymmetric round-to-nearest: :math:`2^b` levels, evenly spaced from the least
    to the largest entry of each group, whose ends are stored exactly. An entry moves by half a step
    at most, so all entries together by ``size`` / (2^b - 1) in the Frobenius norm, and to first
    order the output of a head by at most that times the norm of its Jacobian by keys, or by values,
    alone (`lipbound.spectral_norm` with ``wrt=``): ``bound``. Outputs are linear in values, where
    it holds at any number of bits; in keys it does for small errors only. Rounding errors seldom
    point where a head is steepest, so ``expected`` is what independent ones do in the mean square,
    estimated from 16 random moves, to a standard error of a few percent in most heads and of 18 %,
    a quarter of a bit, at most. Each head is rounded alone, before its output projection; keys that
    several heads share need the most bits of any of them.

    Args:
        model, data, samples, max_length, layers, revision, device, dtype: as for
            `lipbound.compare`.
        error: relative error of a head's output that is asked for, in the Frobenius norm.
        bits: numbers of bits that keys and values are really rounded to, one after the other.
        keys, values: what shares a scale, "token" (the entries of one vector) or "channel" (those
            of one coordinate at all tokens).
        delta: total failure probability of the upper ends of all norms.
        seed: of their start vectors, and of the random signs of ``expected``.

    Returns:
        Dataset with dims side ("keys", "values"), bits, sample, layer, head; its variables are
        described in `VARIABLES` and in their attrs.

    Raises:
        LipboundError: arguments out of their range, layers without a closed form, or with different
            numbers of heads.
    """
    groups = {KEYS: choice("keys", keys, GROUPS), VALUES: choice("values", values, GROUPS)}
    error = real("error", error, "a number > 0", above=0)
    counts = sorted({whole("bits", b, least=1) for b in indices("bits", bits)})
    if not counts:
        raise LipboundError("bits is empty; give numbers of bits, as range(2, 9)")
    real("delta", delta, "between 0 and 1, a probability of failure", above=0, below=1)
    where = resolve_device(device)
    checkpoint = load_checkpoint(model, revision=revision, dtype=dtype, device=where)
    inputs = prepare(checkpoint, data, samples=samples, max_length=max_length)
    capturer, found = Capturer(checkpoint.model, layers), list[xr.Dataset]()
    for s in range(inputs.samples):
        captured = capturer.run(inputs.block(s, s + 1, where))
        atts = in_closed_form((layer.attention for layer in captured), "the study of caches")
        if {att.samples for att in atts} != {1} or len({att.heads for att in atts}) > 1:
            what = "the study of caches needs layers of as many heads, of whole samples"
            raise LipboundError(f"{what}; choose such layers by layers=")
        share = delta / (len(CACHED) * inputs.samples * len(atts))
        with torch.no_grad():
            tables = [_of_layer(att, groups, counts, error, share, seed + s) for att in atts]
        found.append(tabled(tables, "side", "head", "bits"))
    ds = xr.concat(found, "sample").transpose("side", "bits", "sample", "layer", "head")
    ds["output"] = ds["output"].isel(side=0, drop=True)
    ds = ds.assign_coords({"side": list(CACHED), "bits": counts})
    ds = annotated(ds, VARIABLES, [layer.index for layer in captured])
    shared = {side: f"asymmetric round-to-nearest, by {group}" for side, group in groups.items()}
    ds.attrs = provenance(checkpoint, inputs.description, where, dtype, seed)
    ds.attrs |= {"error": error, "delta": delta, "quantiser": shared}
    return ds


def rounded(y: Tensor, bits: int, group: str) -> Tensor:
    """Return vectors (..., N, n) rounded to 2^bits levels, those of `cache_bits`.

    Args:
        y: the vectors.
        bits: at least 1.
        group: "token" or "channel".
    """
    axis = GROUPS[group]
    low = y.amin(axis, keepdim=True)
    step = (y.amax(axis, keepdim=True) - low) / (2**bits - 1)
    levels = ((y - low) / torch.where(step > 0, step, 1.0)).round()
    return torch.where(step > 0, low + step * levels, y)


def half_steps(y: Tensor, group: str) -> Tensor:
    """Return how far `rounded` moves entries at most, times 2^bits - 1, shaped like y."""
    axis = GROUPS[group]
    return ((y.amax(axis, keepdim=True) - y.amin(axis, keepdim=True)) / 2).expand_as(y)


def _of_layer(
    att: Attention, groups: dict[str, str], bits: list[int], error: float, delta: float, seed: int
) -> dict[str, Tensor]:
    """Variables of a layer at one sample, (side, head, bits) or less."""
    att = att.unpadded(0)
    wide = att.double()
    cached = {KEYS: wide.wide_k, VALUES: wide.wide_v}
    exact = _outputs(wide, cached)
    output, rows = torch.linalg.matrix_norm(exact)[0], []
    steps = torch.tensor([2.0**b - 1 for b in bits], dtype=torch.float64, device=att.device)
    for side, group in groups.items():
        reach = half_steps(cached[side], group)
        found = spectral_norm(att, wrt=side, tol=1e-3, delta=delta, seed=seed)
        norm, size = found.upper[0].to(att.device), torch.linalg.matrix_norm(reach)[0]
        bound = norm * size / output
        expected = _root_mean_square(wide, cached, side, reach, seed) / output
        moved = (cached | {side: rounded(cached[side], b, group)} for b in bits)
        measured = [_outputs(wide, one) - exact for one in moved]
        row = {"norm": norm, "size": size, "output": output}
        for kind, t in (("bound", bound), ("expected", expected)):
            row |= {kind: t[:, None] / steps, f"bits_{kind}": torch.log2(1 + t / error)}
        row["measured"] = torch.linalg.matrix_norm(torch.cat(measured)).T / output[:, None]
        rows.append(row)
    return {name: torch.stack([row[name] for row in rows]) for name in VARIABLES}


def _root_mean_square(
    att: Attention, cached: dict[str, Tensor], side: str, reach: Tensor, seed: int
) -> Tensor:
    """Root mean square of changes of outputs to first order, (heads,).

    Every entry moves by a number of its own, uniform within its ``reach``, whose variance is a
    third of the square of that.
    """
    g, total = torch.Generator().manual_seed(seed), att.x.new_zeros(att.heads)
    for _ in range(PROBES):
        signs = torch.randint(0, 2, reach.shape, generator=g).to(reach) * 2 - 1
        moved = torch.func.jvp(
            lambda y: _outputs(att, cached | {side: y}), (cached[side],), (signs * reach,)
        )[1]
        total = total + moved.square().sum((-1, -2))[0]
    return (total / (3 * PROBES)).sqrt()


def _outputs(att: Attention, cached: dict[str, Tensor]) -> Tensor:
    """Outputs of all heads with such keys and values, (1, heads, N, d_v), float64."""
    out = att.probabilities(att.scores(att.wide_q, cached[KEYS])) @ cached[VALUES]
    return out if att.gate is None else att.gate.apply(att.x, out)


def ranking(ds: xr.Dataset, by: str = "expected") -> list[dict[str, Any]]:
    """Return layer, head and bits of keys and values of every head, the most demanding first.

    Numbers of bits are real, the largest over samples; infinite where an output vanishes.

    Args:
        ds: from `cache_bits`.
        by: "expected" or "bound": which bits, of keys and values together, decide the order.

    Raises:
        LipboundError: ``ds`` is no such study.
    """
    check_made(ds, (*VARIABLES, *AXES), "lipbound.cache_bits")
    choice("by", by, KINDS)
    most = {
        f"{side}_{kind}": ds[f"bits_{kind}"].sel(side=side, drop=True).max("sample")
        for kind in KINDS
        for side in CACHED
    }
    rows = xr.Dataset(most).to_dataframe(["layer", "head"]).reset_index().to_dict("records")
    return sorted(rows, key=lambda row: -np.nansum([row[f"{side}_{by}"] for side in CACHED]))


def agreement(ds: xr.Dataset) -> pd.DataFrame:
    """Set predicted against measured errors, over all heads and samples: a row a side and bits.

    Args:
        ds: from `cache_bits`.

    Returns:
        Columns, for all heads at all samples: medians of the errors; ``above``, the share that
        moved by more than ``bound``; Spearman's rank correlations of each prediction with
        ``measured``, and ``rank_size``, that of the relative size of the rounding error alone.

    Raises:
        LipboundError: ``ds`` is no such study.
    """
    check_made(ds, (*VARIABLES, *AXES), "lipbound.cache_bits")
    errors, ds = [*KINDS, "measured"], ds.assign(size=ds["size"] / ds["output"])
    every = ds[[*errors, "size"]].to_dataframe()[[*errors, "size"]]
    every["above"] = every["measured"] > every["bound"]
    groups = every.groupby(["side", "bits"], sort=False)
    table = groups[errors].median().join(groups["above"].mean())
    ranks = groups[[*errors, "size"]].corr("spearman").xs("measured", level=-1)
    return table.join(ranks[[*KINDS, "size"]].add_prefix("rank_")).reset_index()

"""Growth of local constants with the length of the input.

Castin, Ablin and Peyré 2024, section 5 and Figures 1, 4 and 6.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from lipbound.analysis import adversarial_inputs, annotated, provenance, tabled
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import in_closed_form
from lipbound.bounds.registry import get
from lipbound.bounds.whole_layer_rules import whole_layer
from lipbound.devices import resolve_device
from lipbound.errors import InputsError, LipboundError, check_made, whole
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.capture.capture import Capturer
from lipbound.models.loading import load_checkpoint
from lipbound.models.other_libraries import temporarily
from lipbound.models.readers import stream

LENGTHS = tuple(range(2, 101, 2))
SHORTEST = 10
"""Fewest tokens that count for an exponent."""
BOUND = "castin_bias"
QUANTITIES = {
    "head_exact": "exact local constant of a head",
    "layer_exact": "exact local constant of the whole layer, with its output projection",
    "head_bound": f"{BOUND}: Theorem 3.3 (4.3 with a causal mask), with biases",
    "layer_bound": f"{BOUND} of the heads, put together for the whole layer",
    "magnitude": "mean length of the tokens that enter the layer",
    "adversarial_head": "exact local constant of a head without biases at its adversarial input",
    "adversarial_lower": "lower bound of Proposition 3.4 there",
    "adversarial_upper": "Theorem 3.3 there",
    "adversarial_layer": "exact local constant of the whole layer at that of its steepest head",
    "adversarial_layer_bound": f"{BOUND} of the heads there, put together for the whole layer",
    "radius": "length of adversarial tokens: the mean magnitude of real ones",
}
"""Variables of a study, and what they are."""


def sequence_growth(
    model: str | Path | PreTrainedModel,
    data: Any = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    sequences: int = 10,
    causal: bool = False,
    layers: Sequence[int] | None = None,
    split: str | None = None,
    column: str | None = None,
    tol: float = 1e-3,
    device: str = "auto",
    dtype: str = "float32",
    seed: int = 0,
) -> xr.Dataset:
    r"""Compute local constants of every head and whole layer against the number of tokens.

    They are exact, on text and on adversarial inputs.

    The text (every row of a table) is tokenised without special tokens, and cut into ``sequences``
    sequences for every length, none of which overlap, as in the paper. Adversarial inputs are those
    of `lipbound.analysis.adversarial_inputs.adversarial_inputs`, of the mean length of real tokens.

    Args:
        model, data, split, column, device, dtype, layers: as for `lipbound.compare`; text models
            only.
        lengths: numbers of tokens; even ones from 2 to 100 in the paper.
        sequences: how many of each length.
        causal: run a BERT-like encoder as a decoder, with a causal mask.
        tol: relative error of exact norms (an estimate, no certificate). seed: of their start
            vectors.

    Returns:
        Dataset with dims sequence, length, layer, head; its variables are described in
        `QUANTITIES` and in their attrs.

    Raises:
        LipboundError: no lengths, or a model that cannot be run as a decoder; see also
            `lipbound.compare`.
        InputsError: too little text, or lengths the model does not take.
    """
    lengths = sorted({whole("length", n, least=1) for n in lengths})
    sequences = whole("sequences", sequences, least=1)
    if not lengths:
        raise LipboundError("lengths is empty; give numbers of tokens, such as range(10, 101, 10)")
    where = resolve_device(device)
    checkpoint = load_checkpoint(model, dtype=dtype, device=where)
    if (limit := checkpoint.positions) is not None and lengths[-1] > limit:
        raise InputsError(f"{lengths[-1]} tokens exceed the {limit} positions of {checkpoint.name}")
    counts = [sequences * n for n in lengths]
    tokens, description = stream(checkpoint, data, sum(counts), split=split, column=column)
    capturer = Capturer(checkpoint.model, layers)
    real: list[xr.Dataset] = []
    with decoder(checkpoint.model, causal):
        for part in tokens.split(counts):
            ids = part.view(sequences, -1).to(where)
            captured = capturer.run({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            last = in_closed_form((layer.attention for layer in captured), "the study of growth")
            for att in last:
                _check(att, causal, checkpoint.name)
            real.append(tabled([_real(att, tol, seed) for att in last], "sequence", "head"))
    ds = xr.concat(real, "length")
    ds["radius"] = ds["magnitude"].mean(("sequence", "length"))
    pairs = list(zip(last, ds["radius"].values.tolist(), strict=True))
    steep = [[_adversarial(att, n, r, tol, seed) for att, r in pairs] for n in lengths]
    ds = ds.merge(xr.concat([tabled(found, "head") for found in steep], "length"))
    ds = ds.transpose("sequence", "length", "layer", "head").assign_coords(length=lengths)
    ds = annotated(ds, QUANTITIES, [layer.index for layer in captured])
    how = {"causal": int(last[0].mask is not None), "tol": tol}
    ds.attrs = provenance(checkpoint, description, where, dtype, seed) | how
    return ds


def _real(att: Attention, tol: float, seed: int) -> dict[str, Tensor]:
    """Constants of a layer at the sequences of one length."""
    seeds = [seed + s for s in range(att.samples)]
    return {
        "head_exact": spectral_norm(att, tol=tol, seed=seeds).lower,
        "layer_exact": spectral_norm(att, map="layer", tol=tol, seed=seeds).lower,
        "head_bound": get(BOUND)(att),
        "layer_bound": whole_layer(att, BOUND, map="layer"),
        "magnitude": att.x.norm(dim=-1).mean(-1).double(),
    }


def _adversarial(att: Attention, n: int, radius: float, tol: float, seed: int) -> dict[str, Tensor]:
    """Constants of a layer at the adversarial inputs of one length."""
    plain = att.at(att.x[:1], mask=None, valid=None).without_biases()
    mask = None if att.mask is None else causal_mask(n, att)
    x = adversarial_inputs.adversarial_inputs(plain, n, radius)
    heads = [plain.select(heads=slice(h, h + 1)).at(x[h][None], mask=mask) for h in range(len(x))]
    steepest = int(adversarial_inputs.steepness(plain).gamma.argmax())
    at_steepest = att.at(x[steepest][None], mask=mask, valid=None)
    norms = [spectral_norm(one, tol=tol, seed=seed).lower[0, 0] for one in heads]
    return {
        "adversarial_head": torch.stack(norms),
        "adversarial_lower": adversarial_inputs.lower_bound(plain, n, radius),
        "adversarial_upper": torch.stack([get("castin")(one)[0, 0] for one in heads]),
        "adversarial_layer": spectral_norm(at_steepest, map="layer", tol=tol, seed=seed).lower[0],
        "adversarial_layer_bound": whole_layer(at_steepest, BOUND, map="layer")[0],
    }


def causal_mask(n: int, att: Attention) -> Tensor:
    """Additive causal mask (n, n), in the dtype and on the device of a layer."""
    return torch.full((n, n), -torch.inf, dtype=att.dtype, device=att.device).triu(1)


@contextmanager
def decoder(model: PreTrainedModel, causal: bool) -> Iterator[None]:
    """The model with a causal mask, where its class (BERT and its kin) makes one for decoders."""
    if not causal or not hasattr(model.config, "is_decoder"):
        yield  # models that are decoders anyway; `_check` says where this is not so
        return
    # transformers before 5 asks modules too
    told = [one for one in (model.config, *model.modules()) if hasattr(one, "is_decoder")]
    with temporarily("is_decoder", True, *told):
        yield


def _check(att: Attention, causal: bool, name: str) -> None:
    """Refuse a layer that the study does not cover, or that is not causal as it was asked for."""
    att.only("the study of growth, which has inputs without biases and positions,")
    mask = causal_mask(att.tokens, att)
    if causal and not bool((att.forbid(torch.zeros_like(mask)[None, None]) == mask).all()):
        raise LipboundError(f"{name} has no causal mask even as a decoder; leave out causal=True")


def exponents(values: xr.DataArray) -> xr.Dataset:
    """Fit the slope of log(values) over log(length) by least squares.

    One per entry of the other axes; all sequences of 10 tokens and more count as measurements.

    Args:
        values: positive, with the axis "length" and perhaps "sequence".

    Returns:
        Dataset of ``exponent``, and of ``low`` and ``high``, its 95 % interval by Student's t with
        independent errors: sequences do not overlap, but text is correlated, so it is a guide.

    Raises:
        LipboundError: fewer than three lengths, or no such axis.
    """
    check_made(values, ["length"], "lipbound.analysis.length_growth.sequence_growth")
    kept = values.where(values["length"] >= SHORTEST, drop=True)
    if kept.sizes["length"] < 3:
        what = f"a slope needs at least three lengths of {SHORTEST} and more"
        raise LipboundError(f"{what}; the study has {kept.sizes['length']}")
    kept = kept.stack(point=[d for d in ("sequence", "length") if d in kept.dims])
    x = np.log(kept["length"].values)

    def fit(y: np.ndarray) -> np.ndarray:
        line = stats.linregress(x, np.log(y))
        half = stats.t.ppf(0.975, len(x) - 2) * line.stderr
        return line.slope + half * np.array([0, -1, 1])

    how: Any = {"input_core_dims": [["point"]], "output_core_dims": [["value"]]}
    found = xr.apply_ufunc(fit, kept, vectorize=True, **how)
    return found.assign_coords(value=["exponent", "low", "high"]).to_dataset("value")

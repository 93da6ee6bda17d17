"""Growth of local constants with the length of the input.

Castin, Ablin and Peyré 2024, section 5 and Figures 1, 4 and 6.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from scipy import stats
from torch import Tensor

from lipbound.analysis import adversarial_inputs
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import in_closed_form
from lipbound.bounds.registry import get
from lipbound.bounds.whole_layer_rules import whole_layer
from lipbound.devices import device_name, resolve_device, versions
from lipbound.errors import InputsError, LipboundError
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.capture.capture import Capturer
from lipbound.models.loading import load_checkpoint
from lipbound.models.readers.text import stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = tuple(range(2, 101, 2))
BOUND = "castin_bias"
VARIABLES = {
    "head_exact": (("sequence", "length", "layer", "head"), "exact local constant of a head"),
    "layer_exact": (
        ("sequence", "length", "layer"),
        "exact local constant of the whole layer, with its output projection",
    ),
    "head_bound": (
        ("sequence", "length", "layer", "head"),
        f"{BOUND}: Theorem 3.3 (4.3 with a causal mask), with biases",
    ),
    "layer_bound": (
        ("sequence", "length", "layer"),
        f"{BOUND} of the heads, put together for the whole layer",
    ),
    "magnitude": (
        ("sequence", "length", "layer"),
        "mean length of the tokens that enter the layer",
    ),
    "adversarial_head": (
        ("length", "layer", "head"),
        "exact local constant of a head without biases at its adversarial input",
    ),
    "adversarial_lower": (("length", "layer", "head"), "lower bound of Proposition 3.4 there"),
    "adversarial_upper": (("length", "layer", "head"), "Theorem 3.3 there"),
    "adversarial_layer": (
        ("length", "layer"),
        "exact local constant of the whole layer at the adversarial input of its steepest head",
    ),
    "adversarial_layer_bound": (
        ("length", "layer"),
        f"{BOUND} of the heads there, put together for the whole layer",
    ),
    "radius": (("layer",), "length of adversarial tokens: the mean magnitude of real ones"),
}


def sequence_growth(
    model: "str | Path | PreTrainedModel",
    data: Any = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    sequences: int = 10,
    causal: bool = False,
    radius: float | None = None,
    layers: Sequence[int] | None = None,
    split: str | None = None,
    column: str | None = None,
    revision: str | None = None,
    tol: float = 1e-3,
    device: str = "auto",
    dtype: str = "float32",
    seed: int = 0,
) -> xr.Dataset:
    r"""Compute local constants of every head and whole layer against the number of tokens.

    They are exact, on text and on adversarial inputs.

    The text (every row of a table) is tokenised without special tokens, and cut into ``sequences``
    sequences for every length, none of which overlap, as in the paper. Adversarial inputs are those
    of `lipbound.analysis.adversarial_inputs.adversarial_inputs`, of the mean length of real tokens
    (or ``radius``).

    Args:
        model, data, split, column, revision, device, dtype, layers: as for `lipbound.compare`; text
            models only.
        lengths: numbers of tokens; even ones from 2 to 100 in the paper.
        sequences: how many of each length.
        causal: run a BERT-like encoder as a decoder, with a causal mask.
        radius: length of adversarial tokens.
        tol: relative error of exact norms (an estimate, no certificate). seed: of their start
            vectors.

    Returns:
        Dataset with dims sequence, length, layer, head; its variables are described in `VARIABLES`
        and in their attrs.

    Raises:
        LipboundError: too little text, lengths the model does not take, a model that cannot be run
            as a decoder; see also `lipbound.compare`.
    """
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 1 or sequences < 1:
        raise LipboundError(
            f"{sequences} sequences of lengths {lengths} were asked for; give at least one, of "
            "at least one token"
        )
    where = resolve_device(device)
    checkpoint = load_checkpoint(model, revision=revision, dtype=dtype, device=where)
    limit = checkpoint.positions
    if limit is not None and lengths[-1] > limit:
        raise InputsError(
            f"length {lengths[-1]} exceeds the {limit} positions of {checkpoint.name}; give at "
            f"most {limit}"
        )
    tokens, description = stream(
        checkpoint, data, sequences * sum(lengths), split=split, column=column
    )
    capturer = Capturer(checkpoint.model, layers)
    parts: dict[str, list[Any]] = {}
    start, last, captured = 0, [], []
    with decoder(checkpoint.model, causal):
        for n in lengths:
            ids = tokens[start : start + sequences * n].view(sequences, n).to(where)
            start += sequences * n
            captured = capturer.run({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            last = in_closed_form((layer.attention for layer in captured), "the study of growth")
            for att in last:
                att.only("the study of growth, which has inputs without biases and positions,")
            if causal and n > 1:
                _check_causal(last, checkpoint.name)
            for name, values in _real(last, tol, seed).items():
                parts.setdefault(name, []).append(values)
    radii = (
        np.full(len(last), float(radius))
        if radius is not None
        else np.mean(parts["magnitude"], axis=(0, 1))
    )
    plain = [att.at(att.x[:1], mask=None, valid=None).without_biases() for att in last]
    for n in lengths:
        for name, values in _adversarial(last, plain, n, radii, tol, seed).items():
            parts.setdefault(name, []).append(values)
    tables = {
        name: np.stack(rows, axis=VARIABLES[name][0].index("length"))
        for name, rows in parts.items()
    } | {"radius": radii}
    ds = xr.Dataset(
        {
            name: (dims, tables[name], {"description": text})
            for name, (dims, text) in VARIABLES.items()
        },
        coords={"length": lengths, "layer": [layer.index for layer in captured]},
    )
    ds.attrs = {
        "model": checkpoint.name,
        "revision": checkpoint.revision,
        "data": description,
        "causal": int(_masked(last)),
        "tol": tol,
        "seed": seed,
        "dtype": dtype,
        "device": device_name(where),
        "versions": versions(),
        "lipbound": versions()["lipbound"],
    }
    return ds


def _real(layers: list[Attention], tol: float, seed: int) -> dict[str, np.ndarray]:
    """Constants at the sequences of one length, each with the axis of sequences first."""
    seeds = [seed + s for s in range(layers[0].samples)]
    rows: dict[str, list[Tensor]] = {
        name: [] for name in ("head_exact", "layer_exact", "head_bound", "layer_bound", "magnitude")
    }
    for att in layers:
        rows["head_exact"].append(spectral_norm(att, tol=tol, seed=seeds).lower)
        rows["layer_exact"].append(spectral_norm(att, map="layer", tol=tol, seed=seeds).lower)
        rows["head_bound"].append(get(BOUND)(att))
        rows["layer_bound"].append(whole_layer(att, BOUND, map="layer"))
        rows["magnitude"].append(att.x.norm(dim=-1).mean(-1))
    return {name: torch.stack(values, 1).cpu().double().numpy() for name, values in rows.items()}


def _adversarial(
    layers: list[Attention],
    without_biases: list[Attention],
    n: int,
    radii: np.ndarray,
    tol: float,
    seed: int,
) -> dict[str, np.ndarray]:
    """Constants at the adversarial inputs of one length, each with the axis of layers first."""
    rows: dict[str, list[Tensor]] = {
        name: [] for name in VARIABLES if name.startswith("adversarial")
    }
    for real, plain, r in zip(layers, without_biases, radii.tolist(), strict=True):
        mask = None if real.mask is None else causal_mask(n, real)
        x = adversarial_inputs.adversarial_inputs(plain, n, r)
        heads = [
            plain.select(heads=slice(h, h + 1)).at(x[h][None], mask=mask) for h in range(len(x))
        ]
        rows["adversarial_head"].append(
            torch.stack([spectral_norm(one, tol=tol, seed=seed).lower[0, 0] for one in heads])
        )
        rows["adversarial_lower"].append(adversarial_inputs.lower_bound(plain, n, r))
        rows["adversarial_upper"].append(torch.stack([get("castin")(one)[0, 0] for one in heads]))
        steepest = int(adversarial_inputs.steepness(plain).gamma.argmax())
        whole = real.at(x[steepest][None], mask=mask, valid=None)
        rows["adversarial_layer"].append(
            spectral_norm(whole, map="layer", tol=tol, seed=seed).lower[0]
        )
        rows["adversarial_layer_bound"].append(whole_layer(whole, BOUND, map="layer")[0])
    return {name: torch.stack(values).cpu().double().numpy() for name, values in rows.items()}


def causal_mask(n: int, att: Attention) -> Tensor:
    """Additive causal mask (n, n), in the dtype and on the device of a layer."""
    return torch.full((n, n), -torch.inf, dtype=att.dtype, device=att.device).triu(1)


def _masked(layers: list[Attention]) -> bool:
    return layers[0].mask is not None


@contextmanager
def decoder(model: "PreTrainedModel", causal: bool) -> Iterator[None]:
    """The model with a causal mask, where its class (BERT and its kin) makes one for decoders."""
    if not causal or not hasattr(model.config, "is_decoder"):
        yield  # models that are decoders anyway; `_check_causal` says where this is not so
        return
    before = model.config.is_decoder
    model.config.is_decoder = True
    try:
        yield
    finally:
        model.config.is_decoder = before


def _check_causal(layers: list[Attention], name: str) -> None:
    for att in layers:
        n = att.tokens
        blocked = (
            att.forbid(torch.zeros(1, 1, n, n, dtype=att.dtype, device=att.device)) == -torch.inf
        )
        if not bool((blocked == torch.ones(n, n, device=att.device).triu(1).bool()).all()):
            raise LipboundError(
                f"{name} cannot be run with a causal mask: its attention is not causal even as a "
                "decoder"
            )


def exponents(values: xr.DataArray, *, shortest: int = 10, confidence: float = 0.95) -> xr.Dataset:
    """Fit the slope of log(values) over log(length) by least squares.

    One per entry of the other axes; all sequences count as measurements.

    Args:
        values: positive, with the axis "length" and perhaps "sequence".
        shortest: shorter lengths are left out.
        confidence: of the interval, by Student's t with independent errors: sequences do not
            overlap, but text is correlated, so it is a guide.

    Returns:
        Dataset of ``exponent``, ``low`` and ``high``.
    """
    kept = values.where(values["length"] >= shortest, drop=True)
    if kept.sizes["length"] < 3:
        raise LipboundError(
            f"a slope needs at least three lengths of {shortest} and more; the study has "
            f"{kept.sizes['length']}"
        )
    points = [d for d in ("sequence", "length") if d in kept.dims]
    others = [d for d in kept.dims if d not in points]
    x = np.log(np.broadcast_to(kept["length"].values, [kept.sizes[d] for d in points])).ravel()

    def fit(y: np.ndarray) -> np.ndarray:
        line = stats.linregress(x, np.log(y.ravel()))
        half = stats.t.ppf((1 + confidence) / 2, len(x) - 2) * line.stderr
        return np.array([line.slope, line.slope - half, line.slope + half])

    found = xr.apply_ufunc(
        fit,
        kept.transpose(*others, *points),
        input_core_dims=[points],
        output_core_dims=[["end"]],
        vectorize=True,
    )
    return xr.Dataset(
        {name: found.isel(end=i) for i, name in enumerate(("exponent", "low", "high"))}
    )

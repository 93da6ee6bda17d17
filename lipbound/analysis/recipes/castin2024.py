"""Recipes from Castin, Ablin and Peyré 2024, "How Smooth Is Attention?"."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor

from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.analysis.length_growth import LENGTHS, exponents, sequence_growth
from lipbound.analysis.recipes.registry import Setting, of, register, sheet, tick_lengths
from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import unit_values
from lipbound.formatting import counted
from lipbound.jacobians.head import HeadJacobian
from lipbound.linalg.operator_norm import operator_norm

PAPER = "Castin, Ablin, Peyré 2024"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


# -- Figures 1, 4, 5 and 6 -------------------------------------------------------------------------


def growth(setting: Setting) -> xr.Dataset:
    """`sequence_growth` for every text, as an encoder and (models that are none) as a decoder.

    The text that comes with lipbound is short: without other data one sequence of every third
    length is taken. Of several texts, column and split are for those that are tables, not for .txt
    files.
    """
    parts = []
    lengths = LENGTHS if setting.full or setting.data else LENGTHS[::3]
    sequences = setting.count(3 if setting.data else 1, 10)
    for text in setting.texts:
        plain = (
            len(setting.data) > 1 and isinstance(text, str | Path) and Path(text).suffix == ".txt"
        )
        column, split = (None, None) if plain else (setting.column, setting.split)
        modes = {}
        for causal in (False, True):
            ds = sequence_growth(
                setting.model,
                text,
                lengths=lengths,
                sequences=sequences,
                causal=causal,
                device=setting.device,
                dtype=setting.dtype,
                seed=setting.seed,
                column=column,
                split=split,
            )
            modes["decoder" if ds.attrs["causal"] else "encoder"] = ds
            if "decoder" in modes:  # the model is one anyway
                break
        parts.append(
            xr.concat(
                list(modes.values()),
                pd.Index(list(modes), name="mode", dtype=object),
                combine_attrs="override",
            )
        )
    whole = xr.concat(
        parts,
        pd.Index([part.attrs["data"] for part in parts], name="text", dtype=object),
        combine_attrs="override",
    )
    whole.attrs = parts[0].attrs | {"data": ", ".join(whole["text"].values.tolist())}
    return whole


def draw_growth(ds: xr.Dataset) -> Figure:
    """Draw constants against the length, a row for each mode.

    Points of whole layers, geometric means of heads, adversarial inputs with their bounds.
    """
    modes = ds["mode"].values.tolist()
    with sheet(len(modes), 3, height=2.3, sharex=True) as (figure, axes):
        for row, mode in enumerate(modes):
            part = ds.sel(mode=mode)
            layers, heads, hard = axes[3 * row : 3 * row + 3]
            n = ds["length"].values
            for i, layer in enumerate(ds["layer"].values):
                colour = COLOURS[i % len(COLOURS)]
                one = part.sel(layer=layer)
                cloud = (
                    one["layer_exact"]
                    .stack(point=("text", "sequence"))
                    .transpose("length", "point")
                    .values
                )
                layers.plot(n, cloud, ".", color=colour, markersize=1.8, alpha=0.5)
                heads.plot(
                    n,
                    geomean(one["head_exact"], "text", "sequence", "head"),
                    color=colour,
                    linewidth=0.9,
                    label=f"layer {layer}",
                )
                hard.plot(n, one["adversarial_layer"].isel(text=0), color=colour, linewidth=0.9)
            for axes_, name in ((layers, "layer_bound"), (heads, "head_bound")):
                axes_.plot(
                    n,
                    part[name].min([d for d in part[name].dims if d != "length"]),
                    "k--",
                    linewidth=0.8,
                    label="Theorem 3.3, least",
                )
            hard.plot(
                n, part["adversarial_layer_bound"].isel(text=0).min("layer"), "k--", linewidth=0.8
            )
            for axes_, name, power in (
                (layers, "layer_exact", 0.25),
                (heads, "head_exact", 0.25),
                (hard, "adversarial_layer", 0.5),
            ):
                typical = float(
                    geomean(part[name].isel(length=-1), *map(str, part[name].isel(length=-1).dims))
                )
                axes_.plot(
                    n,
                    typical * (n / n[-1]) ** power,
                    color="black",
                    linewidth=0.7,
                    linestyle=":",
                    label=f"$N^{{{'1/4' if power < 0.5 else '1/2'}}}$",
                )
                axes_.set(xscale="log", yscale="log")
                axes_.set_title(
                    f"{mode}: "
                    + {"layer_exact": "whole layers, text", "head_exact": "heads, text"}.get(
                        name, "whole layers, adversarial"
                    )
                )
                tick_lengths(axes_, n)
                if row == len(modes) - 1:
                    axes_.set_xlabel("tokens N")
            layers.set_ylabel("local Lipschitz constant")
            hard.legend(loc="lower right")
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=8)
    return figure


def geomean(values: xr.DataArray, *dims: str) -> xr.DataArray:
    """Geometric mean over some axes."""
    return xr.apply_ufunc(
        lambda y: np.exp(np.log(y).mean(tuple(range(-len(dims), 0)))),
        values,
        input_core_dims=[dims],
    )


def caption_growth(ds: xr.Dataset) -> str:
    """The fitted exponents, text by text, and the smallest ratio of a bound to an exact norm."""
    sentences = [
        f"{of(ds)}: {counted(ds.sizes['sequence'], 'sequence')} of each of {ds.sizes['length']} "
        f"lengths N, from {int(ds['length'][0])} to {int(ds['length'][-1])} tokens. An exponent is "
        "the slope of the logarithm of the exact norm over that of N, fitted from N = 10 on."
    ]
    for mode in ds["mode"].values.tolist():
        for text in ds["text"].values.tolist():
            part = ds.sel(mode=mode, text=text)
            whole, heads = exponents(part["layer_exact"]), exponents(part["head_exact"])
            sentences.append(
                f"As {mode} on {text}, the median exponent is {_span(whole)} for whole layers and "
                f"{_span(heads)} for heads; its 95 % interval (Student's t) is "
                f"{_interval(whole.isel(layer=0))} in the first layer and "
                f"{_interval(whole.isel(layer=-1))} in the last."
            )
        part = ds.sel(mode=mode).isel(text=0)
        sentences.append(
            f"As {mode} on adversarial inputs, whose tokens are as long as real ones "
            f"({float(part['radius'].min()):.3g} to {float(part['radius'].max()):.3g}), it is "
            f"{_span(exponents(part['adversarial_layer']))} for whole layers and "
            f"{_span(exponents(part['adversarial_head']))} for heads without biases."
        )
    return (
        f"{' '.join(sentences)} The smallest ratio of a bound to the norm below it, over all of "
        f"these inputs, is {least_bound_ratio(ds):.3g}."
    )


def least_bound_ratio(ds: xr.Dataset) -> float:
    """Smallest bound / exact of a growth study: 1 or more."""
    pairs = [
        ("head_bound", "head_exact"),
        ("layer_bound", "layer_exact"),
        ("adversarial_upper", "adversarial_head"),
        ("adversarial_head", "adversarial_lower"),
        ("adversarial_layer_bound", "adversarial_layer"),
    ]
    return min(float((ds[a] / ds[b]).where(ds[b] > 0).min()) for a, b in pairs)


def _span(fits: xr.Dataset) -> str:
    """The median exponent and the range of all."""
    e = fits["exponent"]
    return f"{float(e.median()):.2f} ({float(e.min()):.2f} to {float(e.max()):.2f})"


def _interval(fit: xr.Dataset) -> str:
    """Both ends of the confidence interval of one exponent."""
    return f"{float(fit['low']):.2f} to {float(fit['high']):.2f}"


register(
    name="castin-1", title="Local constant against sequence length, on text and on adversarial "
                           "inputs", source=f"{PAPER}, Figures 1 and 4",
    compute=growth, draw=draw_growth, caption=caption_growth, cost="2 min",
)  # fmt: skip


def draw_magnitude(ds: xr.Dataset) -> Figure:
    """Mean token length against N, a line for each layer."""
    with sheet(1, 1, width=3.45) as (figure, (axes,)):
        for i, layer in enumerate(ds["layer"].values):
            values = ds["magnitude"].isel(mode=-1).sel(layer=layer).mean(("text", "sequence"))
            axes.plot(
                ds["length"],
                values,
                color=COLOURS[i % len(COLOURS)],
                linewidth=0.9,
                label=f"layer {layer}",
            )
        axes.set(xlabel="tokens N", ylabel="mean length of tokens", ylim=(0, None))
        axes.legend(ncols=2)
    return figure


def caption_magnitude(ds: xr.Dataset) -> str:
    """Sentence on how far the magnitude moves."""
    mean = ds["magnitude"].isel(mode=-1).mean(("text", "sequence"))
    ratio = mean.isel(length=-1) / mean.sel(length=10, method="nearest")
    return (
        f"{of(ds)}: from about 10 tokens to {int(ds['length'][-1])}, the mean length of the token "
        f"vectors of a layer changes by a factor of {float(ratio.min()):.3g} to "
        f"{float(ratio.max()):.3g}."
    )


register(
    name="castin-6",
    title="Magnitude of the tokens that enter attention, against sequence length",
    source=f"{PAPER}, Figures 5 and 6",
    compute=growth,
    draw=draw_magnitude,
    caption=caption_magnitude,
    cost="2 min",
    run="castin-1",
)


# -- Figure 2: gamma R^2 ---------------------------------------------------------------------------


def scaling_factor(setting: Setting) -> xr.Dataset:
    """Compute gamma R^2 per layer and head, and two lengths that limit its statements.

    They are N*, and the largest N for which Proposition 3.4 gives growth like the square root of N.
    """
    checkpoint, layers, data = setting.capture(setting.count(5, 5))
    gamma = np.stack([adversarial_inputs.steepness(att).gamma.cpu().numpy() for att in layers])
    radius = np.array(
        [
            float(
                att.x.norm(dim=-1)[att.valid].mean()
                if att.valid is not None
                else att.x.norm(dim=-1).mean()
            )
            for att in layers
        ]
    )
    crossover = np.stack(
        [adversarial_inputs.crossover_length(att).amin(0).cpu().numpy() for att in layers]
    )
    around = [att.surroundings.fed_by if att.surroundings else None for att in layers]
    ellipsoid = np.array([math.nan if norm is None else norm.radius() for norm in around])
    largest = np.array([float(att.x.norm(dim=-1).amax()) for att in layers])
    ds = xr.Dataset(
        {
            "gamma": (("layer", "head"), gamma),
            "radius": ("layer", radius),
            "scaling": (("layer", "head"), gamma * radius[:, None] ** 2),
            "log10_crossover": (("layer", "head"), crossover),
            "ellipsoid_radius": ("layer", ellipsoid),
            "largest_token": ("layer", largest),
        },
        coords={"layer": np.arange(len(layers))},
    )
    ds.attrs = setting.attributes(checkpoint, data)
    return ds


def draw_scaling(ds: xr.Dataset) -> Figure:
    """Points per head; tokens against the ellipsoid of the normalisation before the layer."""
    with sheet(1, 3) as (figure, (left, middle, right)):
        for axes, name, label in (
            (left, "scaling", r"$\gamma R^2$"),
            (middle, "log10_crossover", r"$\log_{10} N^*$"),
        ):
            axes.plot(
                np.repeat(ds["layer"].values, ds.sizes["head"]),
                ds[name].values.ravel(),
                "o",
                markersize=2,
                color=COLOURS[0],
            )
            axes.set(xlabel="layer", ylabel=label, yscale="log")
        right.plot(
            ds["layer"],
            ds["ellipsoid_radius"],
            "k_",
            markersize=8,
            label="ellipsoid of the normalisation",
        )
        right.plot(
            ds["layer"],
            ds["largest_token"],
            "^",
            markersize=3,
            color=COLOURS[1],
            label="longest token",
        )
        right.plot(
            ds["layer"], ds["radius"], "o", markersize=3, color=COLOURS[0], label="mean length"
        )
        right.set(xlabel="layer", ylabel="length of tokens", ylim=(0, None))
        right.legend()
    return figure


def caption_scaling(ds: xr.Dataset) -> str:
    """The ranges of what the three panels show."""
    s, c = ds["scaling"], ds["log10_crossover"]
    return (
        f"{of(ds)}. Left: gamma R^2 of Proposition 3.4, R being the mean length of token vectors. "
        f"It is {float(s.min()):.3g} to {float(s.max()):.3g}. Middle: log10 of N*, the number of "
        "tokens from which the mean-field bound (Theorem 3.5) is below that of Theorem 3.3, both "
        f"at the longest token vector. It is {float(c.min()):.3g} to {float(c.max()):.3g}. Right: "
        "the lengths of token vectors that the parameters of LayerNorm or RMSNorm allow, and those "
        "that occur."
    )


register(
    name="castin-2", title="Where the lower bound of Proposition 3.4 bites: gamma R^2, N* and "
                           "the radius of tokens",
    source=f"{PAPER}, Figure 2, appendix C.5",
    compute=scaling_factor, draw=draw_scaling, caption=caption_scaling, cost="10 s",
)  # fmt: skip


# -- Figure 3 and the limits: radius ---------------------------------------------------------------


def radius_regimes(setting: Setting) -> xr.Dataset:
    """Compute constants of the first layer's heads against the radius of their inputs.

    The heads are without biases; inputs are quadratic configurations, generic ones, two Diracs.
    """
    checkpoint, layers, data = setting.capture(1)
    att = layers[0].double()
    att.only("the study of growth with the radius")
    heads, width = att.heads, att.x.shape[2]
    radii = np.geomspace(0.25, 256, 41 if setting.full else 21)
    # radius squared times the smallest gap between scores
    gaps = np.geomspace(1e-3, 100, len(radii))
    tokens = 33
    g = torch.Generator().manual_seed(setting.seed)
    base = torch.randn(1, tokens, width, generator=g, dtype=torch.float64).to(att.device)
    base = base / base.norm(dim=-1).amax()
    plain = att.at(base, mask=None, valid=None).without_biases()
    limit = adversarial_inputs.large_radius_limit(plain)
    rate = adversarial_inputs.quadratic_direction(plain)[1]
    quadratic, generic = np.empty((len(radii), heads)), np.empty((len(radii), heads))
    direction = adversarial_inputs.quadratic_inputs(plain, tokens, 1.0)
    for h in range(heads):  # all radii of a head at once
        one = plain.select(heads=slice(h, h + 1))
        quadratic[:, h] = _norms(one.at(_times(radii, direction[h])))
        generic[:, h] = _norms(one.at(_times(np.sqrt(gaps / float(limit.gap[0, h])), base[0])))
    # two Diracs: W_V = I, the eigenvector of one head
    steep = adversarial_inputs.steepness(plain)
    h = int(steep.gamma.argmax())
    gamma, u = float(steep.gamma[h]), steep.direction[h]
    image = att.scale * att.w_k[h] @ (att.w_q[h].mT @ u)
    dirac_radii = np.sqrt(np.linspace(0.25, 16, len(radii)) / gamma)  # gamma R^2 from 1/4 to 16
    measured, predicted = [], []
    for r in dirac_radii.tolist():
        x, weights = mean_field.two_diracs(u, float(steep.eigenvalue[h]), r)
        identity = torch.eye(width, dtype=torch.float64, device=att.device)[None]
        pair = plain.select(heads=slice(h, h + 1)).at(x[None]).with_values(identity, None)
        predicted.append(mean_field.two_dirac_growth(float(steep.eigenvalue[h]), r, u, image))
        measured.append(float(mean_field.weighted_norm(pair, weights[None], tol=1e-8).lower))
    ds = xr.Dataset(
        {
            "quadratic": (("radius", "head"), quadratic),
            "rate": ("head", rate.cpu().numpy()),
            "generic": (("reach", "head"), generic),
            "limit": ("head", limit.norm[0].cpu().numpy()),
            "gap": ("head", limit.gap[0].cpu().numpy()),
            "dirac": ("scaling", np.array(measured)),
            "dirac_predicted": ("scaling", np.array(predicted)),
        },
        coords={"radius": radii, "reach": gaps, "scaling": gamma * dirac_radii**2},
    )
    ds.attrs = setting.attributes(checkpoint, data) | {"tokens": tokens, "dirac_head": h}
    return ds


def _times(factors: np.ndarray, x: Tensor) -> Tensor:
    """One input (N, D) times each of many factors, (factors, N, D)."""
    return torch.from_numpy(factors).to(x)[:, None, None] * x


def _norms(one: Attention) -> np.ndarray:
    """Norms of a single float64 head at all samples, without an allowance for rounding.

    Far out attention saturates, and what rounding may have done is more than the norm.
    """
    unit, size = unit_values(one)
    return (operator_norm(HeadJacobian(unit), tol=1e-6).lower * size.cpu()).numpy()


def draw_regimes(ds: xr.Dataset) -> Figure:
    """Three panels: quadratic growth, the large-radius limit, two Diracs."""
    n = ds.attrs["tokens"]
    with sheet(1, 3) as (figure, (left, middle, right)):
        for h in range(ds.sizes["head"]):
            colour = COLOURS[h % len(COLOURS)]
            left.loglog(ds["radius"], ds["quadratic"].isel(head=h), color=colour, linewidth=0.8)
            middle.semilogx(
                ds["reach"],
                ds["generic"].isel(head=h) / ds["limit"].isel(head=h),
                color=colour,
                linewidth=0.8,
            )
        left.loglog(
            ds["radius"],
            ds["radius"] ** 2 * (1 - 1 / n) * float(ds["rate"].min()),
            "k:",
            linewidth=0.8,
            label="$R^2$",
        )
        middle.axhline(1, color="black", linewidth=0.6, linestyle=":")
        right.semilogy(
            ds["scaling"], ds["dirac"], "o", markersize=2.5, color=COLOURS[0], label="measured"
        )
        right.semilogy(ds["scaling"], ds["dirac_predicted"], "k-", linewidth=0.7, label="predicted")
        left.set(xlabel="R", ylabel="local Lipschitz constant", title="tokens at 0, Ru and -Ru")
        middle.set(
            xlabel="$R^2$ x smallest gap",
            ylabel="over the limit of Theorem 3.7",
            title="generic tokens",
            yscale="log",
        )
        right.set(xlabel=r"$\gamma R^2$", ylabel="mean-field local constant", title="two Diracs")
        left.legend()
        right.legend()
    return figure


def caption_regimes(ds: xr.Dataset) -> str:
    """Slopes and errors."""
    far = ds["quadratic"].where(ds["radius"] >= 16, drop=True)
    slope = np.polyfit(np.log(far["radius"]), np.log(far), 1)[0]
    off = abs(ds["generic"].isel(reach=-1) / ds["limit"] - 1).max()
    two = abs(ds["dirac"] / ds["dirac_predicted"] - 1).where(ds["scaling"] >= 4).max()
    floor = (
        ds["quadratic"] / (ds["radius"] ** 2 * (1 - 1 / ds.attrs["tokens"]) * ds["rate"])
    ).min()
    powers = " to ".join(dict.fromkeys(f"{end:.3f}" for end in (slope.min(), slope.max())))
    return (
        f"Heads of layer 0 of {of(ds)}, without biases, in float64. Left: tokens at 0, Ru and -Ru "
        f"(appendix C.7). Beyond R = 16 the norm grows like R to the power of {powers}, "
        f"and it is at least {float(floor):.4g} times "
        "R^2 (1 - 1/N) |W_V^T u||A u|. Middle: random tokens, scaled until R^2 times the smallest "
        f"gap between scores is {float(ds['reach'][-1]):.3g}. There the norm is within "
        f"{float(off):.1e} of the limit of Theorem 3.7. Right: the family of two Diracs of "
        "Proposition 3.6, with W_V = I. From gamma R^2 = 4 on, the norm differs from the "
        f"prediction by at most {float(two):.1e} of it."
    )


register(
    name="castin-3",
    title="Growth with the radius: quadratic, bounded, exponential",
    source=f"{PAPER}, Figure 3, Theorem 3.7, Proposition 3.6",
    compute=radius_regimes,
    draw=draw_regimes,
    caption=caption_regimes,
    cost="20 s",
)

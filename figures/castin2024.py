"""Figures of Castin, Ablin and Peyré 2024, "How Smooth Is Attention?"."""

import itertools
import math
from pathlib import Path

import castin_inputs
import numpy as np
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure
from paper_figure import PALETTE, PaperFigure, Setting, colours, main, of, plain_ticks, sheet
from torch import Tensor

from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.analysis.length_growth import LENGTHS, exponents, sequence_growth
from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import unit_values
from lipbound.formatting import counted
from lipbound.jacobians.head import HeadJacobian
from lipbound.linalg.operator_norm import operator_norm

PAPER = "Castin, Ablin, Peyré 2024"
PANELS = (
    ("layer_exact", "layer_bound", "whole layers, text", 1 / 4),
    ("head_exact", "head_bound", "heads, text", 1 / 4),
    ("adversarial_layer", "adversarial_layer_bound", "whole layers, adversarial", 1 / 2),
)
"""Norms of Figures 1 and 4, bounds on them, titles, and the power of N drawn beside them."""
BELOW = [(exact, bound) for exact, bound, *_ in PANELS]
BELOW += [("adversarial_head", "adversarial_upper"), ("adversarial_lower", "adversarial_head")]
"""Variables of a growth study, and what is above them."""


class Growth(PaperFigure):
    """Local constant against sequence length, on text and on adversarial inputs."""

    name, cost = "castin-1", "2 min"
    source = f"{PAPER}, Figures 1 and 4"

    def compute(self, setting: Setting) -> xr.Dataset:
        """`sequence_growth` for every text, as an encoder and (models that are none) as a decoder.

        The text that comes with lipbound is short: without other data one sequence of every third
        length is taken. Of several texts, column and split are for those that are tables, not for
        .txt files.
        """
        lengths = LENGTHS if setting.full or setting.data else LENGTHS[::3]
        sequences = setting.count(3 if setting.data else 1, 10)
        texts = []
        for text in setting.texts:
            options = setting.options() | {"lengths": lengths, "sequences": sequences}
            if len(setting.data) > 1 and isinstance(text, str | Path) and str(text)[-4:] == ".txt":
                options |= {"column": None, "split": None}
            modes = {}
            for causal in (False, True):
                ds = sequence_growth(setting.model, text, causal=causal, **options)
                modes["decoder" if ds.attrs["causal"] else "encoder"] = ds
                if "decoder" in modes:  # the model is one anyway
                    break
            texts.append(_along("mode", modes))
        whole = _along("text", {part.attrs["data"]: part for part in texts})
        whole.attrs["data"] = ", ".join(whole["text"].values.tolist())
        return whole

    def draw(self, ds: xr.Dataset) -> Figure:
        """Draw constants against the length, a row for each mode.

        Points of whole layers, geometric means of heads, adversarial inputs with their bounds.
        """
        modes, n = ds["mode"].values.tolist(), ds["length"].values
        palette = colours(ds.sizes["layer"])
        with sheet(len(modes), 3, height=2.3, sharex=True) as (figure, axes):
            panels = itertools.product(modes, PANELS)
            for panel, (mode, (name, bound, title, power)) in zip(axes, panels, strict=True):
                part = ds.sel(mode=mode)
                exact, above = part[name], part[bound]
                if name.startswith("adversarial"):  # of the first text
                    exact, above = exact.isel(text=0), above.isel(text=0)
                for i, layer in enumerate(ds["layer"].values):
                    one, colour = exact.isel(layer=i), palette[i]
                    if name == "layer_exact":
                        cloud = one.stack(point=("text", "sequence")).transpose("length", "point")
                        panel.plot(n, cloud, ".", markersize=1.8, alpha=0.5, color=colour)
                    else:
                        label = f"layer {layer}"
                        panel.plot(n, geomean(one), color=colour, linewidth=0.9, label=label)
                least = above.min([d for d in above.dims if d != "length"])
                panel.plot(n, least, "k--", linewidth=0.8, label="Theorem 3.3, least")
                typical = float(geomean(part[name])[-1]) * (n / n[-1]) ** power
                label = f"$N^{{1/{1 / power:.0f}}}$"
                (line,) = panel.plot(n, typical, "k:", linewidth=0.7, label=label)
                if power == 1 / 2:
                    panel.legend(handles=[line], loc="lower right")
                panel.set(xscale="log", yscale="log", title=f"{mode}: {title}")
                panel.minorticks_off()
                plain_ticks(panel.xaxis)
            for panel in axes[::3]:
                panel.set_ylabel("local Lipschitz constant")
            for panel in axes[-3:]:
                panel.set_xlabel("tokens N")
            figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=8)
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """The fitted exponents, text by text, and the smallest ratio of a bound to a norm."""
        lengths = ds["length"].values
        sentences = [
            f"{of(ds)}: {counted(ds.sizes['sequence'], 'sequence')} of each of {len(lengths)} "
            f"lengths N, from {lengths[0]} to {lengths[-1]} tokens. An exponent is "
            "the slope of the logarithm of the exact norm over that of N, fitted from N = 10 on."
        ]
        for mode in ds["mode"].values.tolist():
            for text in ds["text"].values.tolist():
                part = ds.sel(mode=mode, text=text)
                whole, heads = exponents(part["layer_exact"]), exponents(part["head_exact"])
                sentences.append(
                    f"As {mode} on {text}, the median exponent is {_span(whole)} for whole layers "
                    f"and {_span(heads)} for heads; its 95 % interval (Student's t) is "
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
            f"{' '.join(sentences)} The smallest ratio of a bound to the norm below it, over all "
            f"of these inputs, is {least_bound_ratio(ds):.3g}."
        )


def _along(axis: str, parts: dict[str, xr.Dataset]) -> xr.Dataset:
    """Studies side by side, with the attributes of the first."""
    names = pd.Index(list(parts), name=axis, dtype=object)
    return xr.concat(list(parts.values()), names, combine_attrs="override")


def geomean(values: xr.DataArray) -> xr.DataArray:
    """Geometric mean over everything but the length."""
    rest = [d for d in values.dims if d != "length"]
    return np.exp(xr.apply_ufunc(np.log, values).mean(rest))


def least_bound_ratio(ds: xr.Dataset) -> float:
    """Smallest bound / exact of a growth study: 1 or more."""
    return min(float((ds[b] / ds[a]).where(ds[a] > 0).min()) for a, b in BELOW)


def _span(fits: xr.Dataset) -> str:
    """The median exponent and the range of all."""
    e = fits["exponent"]
    return f"{float(e.median()):.2f} ({float(e.min()):.2f} to {float(e.max()):.2f})"


def _interval(fit: xr.Dataset) -> str:
    """Both ends of the confidence interval of one exponent."""
    return f"{float(fit['low']):.2f} to {float(fit['high']):.2f}"


class Magnitude(Growth):
    """Magnitude of the tokens that enter attention, against sequence length."""

    name = "castin-6"
    source = f"{PAPER}, Figures 5 and 6"

    def draw(self, ds: xr.Dataset) -> Figure:
        """Mean token length against N, a line for each layer."""
        mean = _magnitude(ds).transpose("length", "layer")
        with sheet(1, 1, width=3.45) as (figure, (axes,)):
            axes.set_prop_cycle(color=colours(mean.sizes["layer"]))
            labels = [f"layer {layer}" for layer in ds["layer"].values]
            axes.plot(ds["length"], mean, linewidth=0.9, label=labels)
            axes.set(xlabel="tokens N", ylabel="mean length of tokens", ylim=(0, None))
            axes.legend(ncols=2)
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Sentence on how far the magnitude moves."""
        mean = _magnitude(ds)
        ratio = mean.isel(length=-1) / mean.sel(length=10, method="nearest")
        return (
            f"{of(ds)}: from about 10 tokens to {int(ds['length'][-1])}, the mean length of the "
            f"token vectors of a layer changes by a factor of {float(ratio.min()):.3g} to "
            f"{float(ratio.max()):.3g}."
        )


def _magnitude(ds: xr.Dataset) -> xr.DataArray:
    return ds["magnitude"].isel(mode=-1).mean(("text", "sequence"))


class Scaling(PaperFigure):
    """Where the lower bound of Proposition 3.4 bites: gamma R^2, N* and the radius of tokens."""

    name, cost = "castin-2", "10 s"
    source = f"{PAPER}, Figure 2, appendix C.5"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compute gamma R^2 per layer and head, and two lengths that limit its statements.

        They are N*, and the largest N for which Proposition 3.4 gives growth like the square root
        of N.
        """
        ds = setting.measured(setting.count(5, 5), _scaling, "head")
        return ds.assign_coords({"layer": np.arange(ds.sizes["layer"])})

    def draw(self, ds: xr.Dataset) -> Figure:
        """Points per head; tokens against the ellipsoid of the normalisation before the layer."""
        layer, blue, red = ds["layer"], PALETTE[0], PALETTE[1]
        with sheet(1, 3) as (figure, (left, middle, right)):
            for axes, name, label in (
                (left, "scaling", r"$\gamma R^2$"),
                (middle, "log10_crossover", r"$\log_{10} N^*$"),
            ):
                axes.plot(layer, ds[name], "o", markersize=2, color=blue)
                axes.set(xlabel="layer", ylabel=label, yscale="log")
            around, label = ds["ellipsoid_radius"], "ellipsoid of the normalisation"
            longest = ds["largest_token"]
            right.plot(layer, around, "k_", markersize=8, label=label)
            right.plot(layer, longest, "^", markersize=3, color=red, label="longest token")
            right.plot(layer, ds["radius"], "o", markersize=3, color=blue, label="mean length")
            right.set(xlabel="layer", ylabel="length of tokens", ylim=(0, None))
            right.legend()
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """The ranges of what the three panels show."""
        s, c = ds["scaling"], ds["log10_crossover"]
        return (
            f"{of(ds)}. Left: gamma R^2 of Proposition 3.4, R being the mean length of token "
            f"vectors. It is {float(s.min()):.3g} to {float(s.max()):.3g}. Middle: log10 of N*, "
            "the number of tokens from which the mean-field bound (Theorem 3.5) is below that of "
            f"Theorem 3.3, both at the longest token vector. It is {float(c.min()):.3g} to "
            f"{float(c.max()):.3g}. Right: the lengths of token vectors that the parameters of "
            "LayerNorm or RMSNorm allow, and those that occur."
        )


def _scaling(att: Attention) -> dict[str, Tensor]:
    length = att.x.norm(dim=-1)
    norm, around = att.surroundings and att.surroundings.fed_by, math.nan
    if norm is not None:
        around = castin_inputs.ellipsoid_radius(norm.weight, norm.bias, centred=norm.centred)
    gamma = adversarial_inputs.steepness(att).gamma
    radius = (length if att.valid is None else length[att.valid]).mean().double()
    return {
        "gamma": gamma,
        "radius": radius,
        "scaling": gamma * radius**2,
        "log10_crossover": adversarial_inputs.crossover_length(att).amin(0),
        "ellipsoid_radius": radius.new_tensor(around),
        "largest_token": length.amax().double(),
    }


class Radius(PaperFigure):
    """Growth with the radius: quadratic, bounded, exponential."""

    name, cost = "castin-3", "20 s"
    source = f"{PAPER}, Figure 3, Theorem 3.7, Proposition 3.6"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compute constants of the first layer's heads against the radius of their inputs.

        The heads are without biases; inputs are quadratic configurations, generic ones, two Diracs.
        """
        checkpoint, layers, inputs = setting.capture(1)
        att = layers[0].double()
        att.only("the study of growth with the radius")
        radii = np.geomspace(0.25, 256, 41 if setting.full else 21)
        # radius squared times the smallest gap between scores
        gaps = np.geomspace(1e-3, 100, len(radii))
        tokens = 33
        g = torch.Generator().manual_seed(setting.seed)
        base = torch.randn(1, tokens, att.x.shape[2], generator=g, dtype=torch.float64)
        base = (base / base.norm(dim=-1).amax()).to(att.device)
        plain = att.at(base, mask=None, valid=None).without_biases()
        limit = castin_inputs.large_radius_limit(plain)
        rate = castin_inputs.quadratic_direction(plain)[1]
        directions = castin_inputs.quadratic_inputs(plain, tokens, 1.0)
        quadratic, generic = [], []
        for h in range(att.heads):  # all radii of a head at once
            one = plain.select(heads=slice(h, h + 1))
            quadratic.append(_norms(one, directions[h], radii))
            generic.append(_norms(one, base[0], np.sqrt(gaps / float(limit.gap[0, h]))))
        h, scaling, measured, predicted = _diracs(plain, len(radii))
        ds = xr.Dataset(
            {
                "quadratic": (("radius", "head"), np.stack(quadratic, 1)),
                "rate": ("head", rate.cpu().numpy()),
                "generic": (("reach", "head"), np.stack(generic, 1)),
                "limit": ("head", limit.norm[0].cpu().numpy()),
                "gap": ("head", limit.gap[0].cpu().numpy()),
                "dirac": ("scaling", measured),
                "dirac_predicted": ("scaling", predicted),
            },
            coords={"radius": radii, "reach": gaps, "scaling": scaling},
        )
        ds.attrs = setting.attributes(checkpoint, inputs) | {"tokens": tokens, "dirac_head": h}
        return ds

    def draw(self, ds: xr.Dataset) -> Figure:
        """Three panels: quadratic growth, the large-radius limit, two Diracs."""
        over, slope = ds["generic"] / ds["limit"], 1 - 1 / ds.attrs["tokens"]
        floor = ds["radius"] ** 2 * slope * float(ds["rate"].min())
        with sheet(1, 3) as (figure, (left, middle, right)):
            for axes in (left, middle):
                axes.set_prop_cycle(color=PALETTE)
            left.loglog(ds["radius"], ds["quadratic"], linewidth=0.8)
            left.loglog(ds["radius"], floor, "k:", linewidth=0.8, label="$R^2$")
            left.set(xlabel="R", ylabel="local Lipschitz constant", title="tokens at 0, Ru and -Ru")
            middle.semilogx(ds["reach"], over, linewidth=0.8)
            middle.axhline(1, color="black", linewidth=0.6, linestyle=":")
            middle.set(xlabel="$R^2$ x smallest gap", ylabel="over the limit of Theorem 3.7")
            middle.set(title="generic tokens", yscale="log")
            x, predicted = ds["scaling"], ds["dirac_predicted"]
            right.semilogy(x, ds["dirac"], "o", markersize=2.5, color=PALETTE[0], label="measured")
            right.semilogy(x, predicted, "k-", linewidth=0.7, label="predicted")
            right.set(xlabel=r"$\gamma R^2$", ylabel="mean-field local constant")
            right.set(title="two Diracs")
            left.legend()
            right.legend()
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Slopes and errors."""
        far = ds["quadratic"].where(ds["radius"] >= 16, drop=True)
        slope = np.polyfit(np.log(far["radius"]), np.log(far), 1)[0]
        off = abs(ds["generic"].isel(reach=-1) / ds["limit"] - 1).max()
        two = abs(ds["dirac"] / ds["dirac_predicted"] - 1).where(ds["scaling"] >= 4).max()
        least = ds["radius"] ** 2 * (1 - 1 / ds.attrs["tokens"]) * ds["rate"]
        floor = (ds["quadratic"] / least).min()
        powers = " to ".join(dict.fromkeys(f"{end:.3f}" for end in (slope.min(), slope.max())))
        return (
            f"Heads of layer 0 of {of(ds)}, without biases, in float64. Left: tokens at 0, Ru and "
            "-Ru (appendix C.7). Beyond R = 16 the norm grows like R to the power of "
            f"{powers}, and it is at least {float(floor):.4g} times "
            "R^2 (1 - 1/N) |W_V^T u||A u|. Middle: random tokens, scaled until R^2 times the "
            f"smallest gap between scores is {float(ds['reach'][-1]):.3g}. There the norm is "
            f"within {float(off):.1e} of the limit of Theorem 3.7. Right: the family of two Diracs "
            "of Proposition 3.6, with W_V = I. From gamma R^2 = 4 on, the norm differs from the "
            f"prediction by at most {float(two):.1e} of it."
        )


def _diracs(plain: Attention, count: int) -> tuple[int, np.ndarray, list[float], list[float]]:
    """Norms at two Diracs along the eigenvector of one head, with W_V = I, and their prediction.

    With the number of the head, and gamma R^2 of each, from 1/4 to 16.
    """
    steep = adversarial_inputs.steepness(plain)
    h = int(steep.gamma.argmax())
    gamma, eigenvalue, u = float(steep.gamma[h]), float(steep.eigenvalue[h]), steep.direction[h]
    image = plain.scale * plain.w_k[h] @ (plain.w_q[h].mT @ u)
    radii = np.sqrt(np.linspace(0.25, 16, count) / gamma)
    identity = torch.eye(len(u), dtype=torch.float64, device=plain.device)[None]
    head = plain.select(heads=slice(h, h + 1)).with_parts(w_v=identity, b_v=None, w_o=None)
    measured, predicted = [], []
    for r in radii.tolist():
        x, weights = castin_inputs.two_diracs(u, eigenvalue, r)
        pair = head.at(x[None])
        predicted.append(castin_inputs.two_dirac_growth(eigenvalue, r, u, image))
        measured.append(float(mean_field.weighted_norm(pair, weights[None], tol=1e-8).lower))
    return h, gamma * radii**2, measured, predicted


def _norms(one: Attention, x: Tensor, factors: np.ndarray) -> np.ndarray:
    """Norms of a single float64 head at one input (N, D) times each of many factors.

    Without an allowance for rounding: far out attention saturates, and what rounding may have done
    is more than the norm.
    """
    unit, exponents = unit_values(one.at(torch.from_numpy(factors).to(x)[:, None, None] * x))
    return (operator_norm(HeadJacobian(unit), tol=1e-6).lower * 2.0**exponents).numpy()


if __name__ == "__main__":
    main()

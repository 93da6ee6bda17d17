"""Figures about questions of our own: which map, which norm, and mass splitting."""

from collections import Counter

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from paper_figure import PaperFigure, Setting, main, of, plain_ticks, sheet
from scipy.stats import spearmanr
from torch import Tensor

from lipbound.analysis import tabled
from lipbound.analysis.mean_field import duplicated_norm, query_block_norms
from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError
from lipbound.jacobians.maps import BLOCKS, MAPS, WHOLE
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.jacobians.token_norms.token_norm import TokenProfile, token_norm, token_profile
from lipbound.models.inputs import token_texts
from lipbound.reporting.charts import token_profile as draw_profile
from lipbound.schema import NORMS

OF_MAPS = ("head, largest", "head_out, largest", "head_out, sum over heads", *WHOLE)
"""Panels of `WhichMap` for a layer."""
ENDS = {"moved": "lower", "moved_upper": "upper"}
ENDS |= {"output": "output_lower", "output_upper": "output_upper"}
"""Names in a Dataset of the fields of a `TokenProfile`."""


class WhichMap(PaperFigure):
    """Exact constants of the maps that papers call attention."""

    name, cost = "which-map", "20 s"
    source = "definitions in lipbound.jacobians.spectral_norm and lipbound.jacobians.maps"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compute the exact norm of every map a layer has.

        And the sum over heads with their slices of the projection.
        """
        ds = setting.measured(setting.count(4, 100), _norms_of_maps, "map", "sample")
        ds = ds.assign_coords(map=np.array(OF_MAPS, dtype=object))
        return ds.dropna("map", how="all").transpose("map", "layer", "sample")

    def draw(self, ds: xr.Dataset) -> Figure:
        """A line for each map over layers."""
        mean = ds["norm"].mean("sample").transpose("layer", "map")
        with sheet(1, 1, width=4.8, height=2.8) as (figure, (axes,)):
            names = ds["map"].values.tolist()
            axes.plot(mean, "o-", markersize=2.5, linewidth=0.8, label=names)
            axes.set(xlabel="layer", ylabel="exact local Lipschitz constant", yscale="log")
            axes.legend(ncols=2)
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Sentences on the names of the maps, and how far apart their norms are."""
        ratio = ds["norm"].sel(map="head_out, sum over heads") / ds["norm"].sel(map="layer")
        names = {name.removesuffix(", largest") for name in ds["map"].values}
        meaning = "; ".join(f"{name}: {text}" for name, text in MAPS.items() if name in names)
        return (
            f"{of(ds)}, exact norms, mean over samples. {meaning}. The sum over heads is "
            f"{float(ratio.min()):.3g} to {float(ratio.max()):.3g} times the exact norm of the "
            "layer."
        )


def _norms_of_maps(att: Attention) -> dict[str, Tensor]:
    """Norms that `OF_MAPS` names, (maps, samples); NaN where the layer has no such map."""
    head, out = (spectral_norm(att, map=name, tol=1e-4).lower for name in ("head", "head_out"))
    found = [head.amax(-1), out.amax(-1), out.sum(-1)]
    for name in WHOLE:
        try:
            found.append(spectral_norm(att, map=name, tol=1e-4).lower)
        except LipboundError:
            if name not in BLOCKS:
                raise
            found.append(torch.full_like(found[0], torch.nan))
    return {"norm": torch.stack(found)}


class ThreeNorms(PaperFigure):
    """The same heads in three norms."""

    name, cost = "three-norms", "1 min"
    source = "lipbound.token_norm and docs/theory/token_norms.md"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compute the exact norm of every head for three kinds of perturbation.

        Tokens moved together, each by up to one, or one alone; lower ends of enclosures 1e-3 wide.
        """

        def measure(att: Attention) -> dict[str, Tensor]:
            found = {"frobenius": spectral_norm(att, tol=1e-4).lower}
            found |= {name: token_norm(att, name).lower for name in ("every-token", "one-token")}
            return found | {"length": att.lengths}

        ds = setting.measured(setting.count(2, 20), measure, "sample", "head")
        exact = ds.drop_vars("length").to_dataarray("norm", name="exact")
        exact = exact.assign_coords(norm=exact["norm"].astype(object)).drop_attrs()
        return xr.Dataset({"exact": exact, "length": ds["length"].isel(layer=0)}, attrs=ds.attrs)

    def draw(self, ds: xr.Dataset) -> Figure:
        """A point for each head and sample, in two norms; colours are layers."""
        exact = {name: ds["exact"].sel(norm=name).values for name in ds["norm"].values}
        x = exact.pop("frobenius")
        layer = np.indices(x.shape)[0]
        with sheet(1, 2, width=5.4, height=2.6) as (figure, axes):
            for panel, (norm, y) in zip(axes, exact.items(), strict=True):
                points = panel.scatter(x, y, c=layer, s=4, linewidths=0, cmap="viridis")
                panel.plot([x.min(), x.max()], [x.min(), x.max()], "k:", linewidth=0.8)
                panel.set(xlabel="exact, Frobenius norm", ylabel=f"exact, {norm} norm")
                panel.set(xscale="log", yscale="log")
                for axis in (panel.xaxis, panel.yaxis):
                    plain_ticks(axis)
            figure.colorbar(points, ax=axes, label="layer")
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Sentences on how far the norms are apart and how they rank the heads.

        They name the head that is the steepest in each.
        """
        base = ds["exact"].sel(norm="frobenius")
        said, heads = [], []
        for norm in ds["norm"].values.tolist():
            values = ds["exact"].sel(norm=norm)
            mean = values.mean("sample").values
            layer, head = np.unravel_index(int(mean.argmax()), mean.shape)
            heads.append(f"head {head} of layer {layer} ({norm})")
            if norm != "frobenius":
                ratio = (values / base).values
                rank = float(spearmanr(values.values.ravel(), base.values.ravel()).statistic)
                far = f"{np.nanmin(ratio):.3g} to {np.nanmax(ratio):.3g} times the Frobenius norm"
                said.append(f"{norm}: {NORMS[norm]}; {far}, rank correlation with it {rank:.2f}")
        return (
            f"{of(ds)}, {int(ds['length'].max())} tokens at most, one point for each head and "
            "sample; on the dotted line both norms are equal. "
            f"{'. '.join(said)}. Steepest, mean over samples: {', '.join(heads)}."
        )


class TokenProfiles(PaperFigure):
    """Which tokens a head is sensitive to."""

    name, cost = "token-profile", "20 s"
    source = "lipbound.token_profile and Lemma 92 of docs/theory/token_norms.md"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compute the effect of each token alone on all outputs, and of all on each output.

        For every head; both ends, with the text of the tokens.
        """
        samples = setting.count(1, 1)
        checkpoint, layers, inputs = setting.capture(samples, 128 if setting.full else 48)
        profiles = [token_profile(att) for att in layers]
        found = [{name: getattr(one, end) for name, end in ENDS.items()} for one in profiles]
        ds = tabled(found, "sample", "head", "token")
        shape, valid = (ds.sizes["sample"], ds.sizes["token"]), layers[0].valid
        real = np.ones(shape, dtype=bool) if valid is None else valid.cpu().numpy()
        texts = np.full(shape, "", dtype=object)
        for sample, kept in enumerate(real):
            words = token_texts(checkpoint, inputs, sample)
            numbers = [str(j) for j in np.flatnonzero(kept)]
            texts[sample, kept] = words if len(words) == kept.sum() else numbers
        ds["text"], ds["real"] = (("sample", "token"), texts), (("sample", "token"), real)
        return ds.assign_attrs(setting.attributes(checkpoint, inputs))

    def draw(self, ds: xr.Dataset) -> Figure:
        """All heads of the layer with the steepest one, at the first sample."""
        layer, real = _steepest(ds)[0], ds["real"].values[0]
        one = ds.isel(layer=layer, sample=slice(0, 1), token=real)
        lower, upper, *output = (torch.from_numpy(one[name].values) for name in ENDS)
        profile = TokenProfile(lower, upper, output[0], output[1])
        title = f"{ds.attrs['model']}, layer {layer}"
        return draw_profile(profile, one["text"].values[0].tolist(), title=title)

    def caption(self, ds: xr.Dataset) -> str:
        """Sentences on the profiles shown, and the tokens that do most in how many heads."""
        layer, head, token = _steepest(ds)
        words = ds["text"].values[0].tolist()
        first = ds["moved"].isel(sample=0)
        loudest = Counter(first.argmax("token").values.ravel().tolist()).most_common(3)
        most = ", ".join(f'"{words[j]}" (token {j}) in {count}' for j, count in loudest)
        return (
            f"{of(ds)}, first sample, {int(ds['real'][0].sum())} tokens, all heads of layer "
            f"{layer}. Above, how far all outputs of a head move "
            "(Frobenius norm) when one token alone moves by 1; below, how far an output moves when "
            "all tokens move, by 1 in all (Frobenius norm). "
            f'The steepest is head {head} at "{words[token]}", '
            f"{float(first[layer, head, token]):.3g}. The token that does most, of the "
            f"{ds.sizes['layer'] * ds.sizes['head']} heads of all layers, is {most}."
        )


def _steepest(ds: xr.Dataset) -> tuple[int, int, int]:
    """Layer, head and token of the largest norm of a single token at the first sample."""
    values = ds["moved"].isel(sample=0).values
    layer, head, token = np.unravel_index(int(values.argmax()), values.shape)
    return int(layer), int(head), int(token)


class MassSplitting(PaperFigure):
    """When copies of tokens make attention steeper."""

    name, cost = "mass-splitting", "20 s"
    source = "Lemma 64 (docs/theory/inputs.md)"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compute max_i ||B_i|| beside the exact norm, head by head.

        Where the former is larger, copies of tokens make the head steeper.
        """

        def measure(att: Attention) -> dict[str, Tensor]:
            exact, own = spectral_norm(att, tol=1e-4).lower, query_block_norms(att).amax(-1)
            return {"exact": exact, "own_query": own, "duplicated": duplicated_norm(att, exact)}

        return setting.measured(setting.count(4, 100), measure, "sample", "head")

    def draw(self, ds: xr.Dataset) -> Figure:
        """A point for each head."""
        x, y = ds["exact"].values.ravel(), ds["own_query"].values.ravel()
        with sheet(1, 1, width=3.45, height=2.8) as (figure, (axes,)):
            axes.loglog(x, y, "o", markersize=1.8, color="#4477aa")
            axes.loglog([x.min(), x.max()], [x.min(), x.max()], "k:", linewidth=0.8)
            axes.set(xlabel=r"exact $\|J\|$", ylabel=r"$\max_i \|B_i\|$")
            plain_ticks(axes.xaxis)
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Sentence on the number of heads that split."""
        ratio = ds["own_query"] / ds["exact"]
        return (
            f"{of(ds)}. Above the dotted line a head splits: with every token doubled its local "
            f"constant is max_i ||B_i||. {int((ratio > 1).sum())} of "
            f"{ratio.size} heads and samples do; the largest ratio is {float(ratio.max()):.3g}."
        )


if __name__ == "__main__":
    main()

"""Recipes about questions of our own: which map, which norm, and mass splitting."""

from collections import Counter

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from scipy.stats import spearmanr

from lipbound.analysis.mean_field import duplicated_norm, query_block_norms
from lipbound.analysis.recipes.registry import Setting, of, register, sheet
from lipbound.errors import LipboundError
from lipbound.jacobians.maps import BLOCKS, MAPS, WHOLE
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.jacobians.token_norms.token_norm import TokenProfile, token_norm, token_profile
from lipbound.models.inputs import token_texts
from lipbound.reporting.charts import token_profile as draw_profile
from lipbound.schema import NORMS


def which_map(setting: Setting) -> xr.Dataset:
    """Compute the exact norm of every map a layer has.

    And the sum over heads with their slices of the projection.
    """
    checkpoint, layers, data = setting.capture(setting.count(4, 100))
    tables: dict[str, list[torch.Tensor]] = {}
    for att in layers:
        heads = {
            name: spectral_norm(att, map=name, tol=1e-4).lower for name in ("head", "head_out")
        }
        for name, values in heads.items():
            tables.setdefault(f"{name}, largest", []).append(values.amax(-1))
        tables.setdefault("head_out, sum over heads", []).append(heads["head_out"].sum(-1))
        for name in WHOLE:
            try:
                tables.setdefault(name, []).append(spectral_norm(att, map=name, tol=1e-4).lower)
            except LipboundError:
                if name not in BLOCKS:
                    raise
                tables[name].append(torch.full((att.samples,), torch.nan, dtype=torch.float64))
    kept = {name: torch.stack(values).numpy() for name, values in tables.items()}
    kept = {name: values for name, values in kept.items() if not np.isnan(values).all()}
    ds = xr.Dataset(
        {"norm": (("map", "layer", "sample"), np.stack(list(kept.values())))},
        coords={"map": np.array(list(kept), dtype=object)},
    )
    ds.attrs = setting.attributes(checkpoint, data)
    return ds


def draw_which_map(ds: xr.Dataset) -> Figure:
    """A line for each map over layers."""
    with sheet(1, 1, width=4.8, height=2.8) as (figure, (axes,)):
        for name, values in zip(ds["map"].values, ds["norm"].mean("sample").values, strict=True):
            axes.plot(range(len(values)), values, "o-", markersize=2.5, linewidth=0.8, label=name)
        axes.set(xlabel="layer", ylabel="exact local Lipschitz constant", yscale="log")
        axes.legend(ncols=2)
    return figure


def caption_which_map(ds: xr.Dataset) -> str:
    """Sentences on the names of the maps, and how far apart their norms are."""
    ratio = ds["norm"].sel(map="head_out, sum over heads") / ds["norm"].sel(map="layer")
    names = ds["map"].values.tolist()
    meaning = "; ".join(
        f"{name}: {text}"
        for name, text in MAPS.items()
        if name in names or f"{name}, largest" in names
    )
    return (
        f"{of(ds)}, exact norms, mean over samples. {meaning}. The sum over heads is "
        f"{float(ratio.min()):.3g} to {float(ratio.max()):.3g} times the exact norm of the layer."
    )


register(
    name="which-map",
    title="Exact constants of the maps that papers call attention",
    source="definitions in lipbound.jacobians.spectral_norm and lipbound.jacobians.whole_layer",
    compute=which_map,
    draw=draw_which_map,
    caption=caption_which_map,
    cost="20 s",
)


def three_norms(setting: Setting) -> xr.Dataset:
    """Compute the exact norm of every head for three kinds of perturbation.

    Tokens moved together, each by up to one, or one alone; lower ends of enclosures 1e-3 wide.
    """
    checkpoint, layers, data = setting.capture(setting.count(2, 20))
    tables = {
        "frobenius": [spectral_norm(att, tol=1e-4).lower for att in layers],
        "every-token": [token_norm(att, "every-token").lower for att in layers],
        "one-token": [token_norm(att, "one-token").lower for att in layers],
    }
    stacked = np.stack([torch.stack(values).cpu().numpy() for values in tables.values()])
    ds = xr.Dataset(
        {
            "exact": (("norm", "layer", "sample", "head"), stacked),
            "length": ("sample", layers[0].lengths.cpu().numpy()),
        },
        coords={"norm": np.array(list(tables), dtype=object)},
    )
    ds.attrs = setting.attributes(checkpoint, data)
    return ds


def draw_three_norms(ds: xr.Dataset) -> Figure:
    """A point for each head and sample, in two norms; colours are layers."""
    layer = np.broadcast_to(
        np.arange(ds.sizes["layer"])[:, None, None], ds["exact"][0].shape
    ).ravel()
    with sheet(1, 2, width=5.4, height=2.6) as (figure, axes):
        x = ds["exact"].sel(norm="frobenius").values.ravel()
        for panel, norm in zip(axes, ("every-token", "one-token"), strict=True):
            points = panel.scatter(
                x,
                ds["exact"].sel(norm=norm).values.ravel(),
                c=layer,
                s=4,
                linewidths=0,
                cmap="viridis",
            )
            panel.plot([x.min(), x.max()], [x.min(), x.max()], "k:", linewidth=0.8)
            panel.set(
                xlabel="exact, Frobenius norm",
                ylabel=f"exact, {norm} norm",
                xscale="log",
                yscale="log",
            )
            for axis in (panel.xaxis, panel.yaxis):  # 2 and 5 too, as plain numbers
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(NullLocator())
        figure.colorbar(points, ax=axes, label="layer")
    return figure


def caption_three_norms(ds: xr.Dataset) -> str:
    """Sentences on how far the norms are apart and how they rank the heads.

    They name the head that is the steepest in each.
    """
    base = ds["exact"].sel(norm="frobenius")
    said, heads = [], []
    for norm in ds["norm"].values.tolist():
        values = ds["exact"].sel(norm=norm)
        layer, head = np.unravel_index(
            int(values.mean("sample").values.argmax()), (ds.sizes["layer"], ds.sizes["head"])
        )
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


register(
    name="three-norms",
    title="The same heads in three norms",
    source="lipbound.token_norm and docs/theory/token_norms.md",
    compute=three_norms,
    draw=draw_three_norms,
    caption=caption_three_norms,
    cost="1 min",
)


def token_profiles(setting: Setting) -> xr.Dataset:
    """Compute the effect of each token alone on all outputs, and of all on each output.

    For every head; both ends, with the text of the tokens.
    """
    samples = setting.count(1, 1)
    checkpoint, inputs = setting.read(samples, max_length=128 if setting.full else 48)
    layers = setting.layers(checkpoint, inputs, samples)
    found = [token_profile(att) for att in layers]
    ends = {
        "moved": "lower",
        "moved_upper": "upper",
        "output": "output_lower",
        "output_upper": "output_upper",
    }
    ds = xr.Dataset(
        {
            name: (
                ("layer", "sample", "head", "token"),
                torch.stack([getattr(one, end) for one in found]).numpy(),
            )
            for name, end in ends.items()
        }
    )
    valid = layers[0].valid
    real = (
        np.ones((ds.sizes["sample"], ds.sizes["token"]), dtype=bool)
        if valid is None
        else valid.cpu().numpy()
    )
    texts = np.full(real.shape, "", dtype=object)
    for sample, kept in enumerate(real):
        words = token_texts(checkpoint, inputs, sample)
        texts[sample, kept] = (
            words if len(words) == kept.sum() else [str(j) for j in np.flatnonzero(kept)]
        )
    ds["text"], ds["real"] = (("sample", "token"), texts), (("sample", "token"), real)
    ds.attrs = setting.attributes(checkpoint, inputs.description)
    return ds


def _steepest(ds: xr.Dataset) -> tuple[int, int, int]:
    """Layer, head and token of the largest norm of a single token at the first sample."""
    values = ds["moved"].isel(sample=0).values
    layer, head, token = np.unravel_index(int(values.argmax()), values.shape)
    return int(layer), int(head), int(token)


def draw_token_profiles(ds: xr.Dataset) -> Figure:
    """All heads of the layer with the steepest one, at the first sample."""
    layer = _steepest(ds)[0]
    one = ds.isel(layer=layer, sample=slice(0, 1))
    real = one["real"].values[0]
    moved, above, output, over = (
        torch.from_numpy(one[name].values[..., real])
        for name in ("moved", "moved_upper", "output", "output_upper")
    )
    return draw_profile(
        TokenProfile(moved, above, output, over),
        one["text"].values[0][real].tolist(),
        title=f"{ds.attrs['model']}, layer {layer}",
    )


def caption_token_profiles(ds: xr.Dataset) -> str:
    """Sentences on the profiles shown, and the tokens that do most in how many heads."""
    layer, head, token = _steepest(ds)
    words = ds["text"].values[0].tolist()
    loudest = Counter(
        ds["moved"].isel(sample=0).argmax("token").values.ravel().tolist()
    ).most_common(3)
    most = ", ".join(f'"{words[j]}" (token {j}) in {count}' for j, count in loudest)
    return (
        f"{of(ds)}, first sample, {int(ds['real'][0].sum())} tokens, all heads of layer {layer}. "
        "Above, how far all outputs of a head move "
        "(Frobenius norm) when one token alone moves by 1; below, how far an output moves when "
        "all tokens move, by 1 in all (Frobenius norm). "
        f'The steepest is head {head} at "{words[token]}", '
        f"{float(ds['moved'][layer, 0, head, token]):.3g}. The token that does most, of the "
        f"{ds.sizes['layer'] * ds.sizes['head']} heads of all layers, is {most}."
    )


register(
    name="token-profile",
    title="Which tokens a head is sensitive to",
    source="lipbound.token_profile and Lemma 92 of docs/theory/token_norms.md",
    compute=token_profiles,
    draw=draw_token_profiles,
    caption=caption_token_profiles,
    cost="20 s",
)


def splitting(setting: Setting) -> xr.Dataset:
    """Compute max_i ||B_i|| beside the exact norm, head by head.

    Where the former is larger, copies of tokens make the head steeper.
    """
    checkpoint, layers, data = setting.capture(setting.count(4, 100))
    exact = [spectral_norm(att, tol=1e-4).lower for att in layers]
    own = [query_block_norms(att).amax(-1) for att in layers]
    copies = [duplicated_norm(att, norm) for att, norm in zip(layers, exact, strict=True)]
    names = {"exact": exact, "own_query": own, "duplicated": copies}
    ds = xr.Dataset(
        {
            name: (("layer", "sample", "head"), torch.stack(values).cpu().numpy())
            for name, values in names.items()
        }
    )
    ds.attrs = setting.attributes(checkpoint, data)
    return ds


def draw_splitting(ds: xr.Dataset) -> Figure:
    """A point for each head."""
    with sheet(1, 1, width=3.45, height=2.8) as (figure, (axes,)):
        axes.loglog(
            ds["exact"].values.ravel(),
            ds["own_query"].values.ravel(),
            "o",
            markersize=1.8,
            color="#4477aa",
        )
        ends = [float(ds["exact"].min()), float(ds["exact"].max())]
        axes.loglog(ends, ends, "k:", linewidth=0.8)
        axes.set(xlabel=r"exact $\|J\|$", ylabel=r"$\max_i \|B_i\|$")
    return figure


def caption_splitting(ds: xr.Dataset) -> str:
    """Sentence on the number of heads that split."""
    ratio = ds["own_query"] / ds["exact"]
    return (
        f"{of(ds)}. Above the dotted line a head splits: with every token doubled its local "
        f"constant is max_i ||B_i||. {int((ratio > 1).sum())} of "
        f"{ratio.size} heads and samples do; the largest ratio is {float(ratio.max()):.3g}."
    )


register(
    name="mass-splitting",
    title="When copies of tokens make attention steeper",
    source="Lemma 64 (docs/theory/inputs.md)",
    compute=splitting,
    draw=draw_splitting,
    caption=caption_splitting,
    cost="20 s",
)

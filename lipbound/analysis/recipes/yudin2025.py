"""Recipes from Yudin, Gaponov, Kudriashov and Rakhuba 2025.

"Pay Attention to Attention Distribution".
"""

import itertools
from typing import Any

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor

from lipbound.analysis.recipes.registry import Setting, of, register, sheet
from lipbound.attention import softmax
from lipbound.attention.layer import Attention
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.reporting import plots
from lipbound.runs.compare import compare

PAPER = "Yudin et al. 2025"
LINKS = 10


def real_rows(att: Attention, sample: int) -> Tensor:
    """Attention rows of a sample's tokens that are no padding, over the keys that are none.

    (heads, n, n), float64, summing to one.
    """
    part = att.unpadded(sample)
    return softmax.normalised(part.double().p[0])


# -- Figure 1: the surface of g_1 ------------------------------------------------------------------


def surface(setting: Setting) -> xr.Dataset:
    """g_1 over the largest and second largest probability."""
    first, second = np.linspace(0, 1, 201), np.linspace(0, 0.5, 101)
    grid = first[:, None] * (1 - first[:, None] + second[None])
    allowed = (first[:, None] >= second[None]) & (first[:, None] + second[None] <= 1 + 1e-12)
    ds = xr.Dataset(
        {"g1": (("first", "second"), np.where(allowed, grid, np.nan))},
        coords={"first": first, "second": second},
    )
    ds.attrs = setting.attributes(None, "no data")
    return ds


def draw_surface(ds: xr.Dataset) -> Figure:
    """Filled contours."""
    with sheet(1, 1, width=3.45, height=2.4) as (figure, (axes,)):
        filled = axes.contourf(
            ds["first"],
            ds["second"],
            ds["g1"].values.T,
            levels=np.linspace(0, 0.5, 11),
            cmap=plots.COLORMAP,
        )
        figure.colorbar(filled, ax=axes, label="$g_1$")
        axes.set(xlabel="largest probability", ylabel="second largest")
    return figure


def caption_surface(ds: xr.Dataset) -> str:
    """Where the maximum is."""
    i, j = np.unravel_index(int(np.nanargmax(ds["g1"].values)), ds["g1"].shape)
    return (
        "g_1 = p_(1) (1 - p_(1) + p_(2)) over all pairs that rows can have; its maximum is "
        f"{float(ds['g1'].max()):.3g}, at "
        f"({float(ds['first'][i]):.2f}, "
        f"{float(ds['second'][j]):.2f}), and it vanishes at (1, 0) and (0, 0)."
    )


register(
    name="yudin-1", title="The bound g_1 on the softmax Jacobian", source=f"{PAPER}, Figure 1",
    compute=surface, draw=draw_surface, caption=caption_surface, cost="1 s", of_model=False,
)  # fmt: skip


# -- Figures 2 and 3: attention maps, g_1 against the norm -----------------------------------------


def attention_statistics(setting: Setting) -> xr.Dataset:
    """Compute mean attention maps and softmax norms and bounds per layer and head.

    Mean norm of the softmax Jacobian and of its bounds; histograms of bound over norm.
    """
    checkpoint, layers, data = setting.capture(setting.count(8, 1000))
    edges = np.linspace(1, 2, 101)
    names = ("half", "largest", "g1")
    rows: dict[str, list[Any]] = {name: [] for name in ("map", "norm", *names, "histogram")}
    below = 0
    for att in layers:
        norms: list[softmax.Enclosure] = []
        bounds: dict[str, list[Tensor]] = {name: [] for name in names}
        for s in range(att.samples):
            p = real_rows(att, s)
            norms.append(softmax.jacobian_norm(p))
            bounds["g1"].append(softmax.g(p))
            bounds["largest"].append(p.amax(-1))
            bounds["half"].append(torch.full_like(p[..., 0], 0.5))
        upper, lower = (
            torch.cat([getattr(n, end) for n in norms], -1) for end in ("upper", "lower")
        )
        flat = {name: torch.cat(values, -1) for name, values in bounds.items()}
        positive = upper > 0
        below += int((flat["g1"] * (1 + 1e-12) < lower).sum())
        rows["norm"].append(upper.mean(-1))
        for name in names:
            rows[name].append(flat[name].mean(-1))
        counts = [
            np.histogram(
                (flat[name][positive] / upper[positive]).clamp(max=1.9999).cpu().numpy(), edges
            )[0]
            for name in names
        ]
        rows["histogram"].append(counts)
        rows["map"].append(att.p.double().mean(0))
    tables = {name: torch.stack(rows[name]).cpu().numpy() for name in ("norm", *names)}
    ds = xr.Dataset(
        {name: (("layer", "head"), table) for name, table in tables.items()}
        | {
            "map": (
                ("layer", "head", "query", "key"),
                torch.stack(rows["map"]).cpu().numpy().astype(np.float32),
            ),
            "histogram": (("layer", "bound", "bin"), np.array(rows["histogram"])),
        },
        coords={"bound": np.array(names, dtype=object), "bin": edges[:-1]},
    )
    ds.attrs = setting.attributes(checkpoint, data) | {
        "below": below,
        "rows": int(ds["histogram"].isel(bound=0).sum()),
    }
    return ds


def draw_maps(ds: xr.Dataset) -> Figure:
    """Draw the heads with the smallest, middle and largest mean norm.

    Their maps are averaged over samples.
    """
    order = np.argsort(ds["norm"].values.ravel())
    chosen = [
        order[0],
        order[len(order) // 4],
        order[len(order) // 2],
        order[3 * len(order) // 4],
        order[-1],
    ]
    with sheet(1, len(chosen), height=1.9) as (figure, axes):
        for axis, k in zip(axes, chosen, strict=True):
            layer, head = np.unravel_index(int(k), ds["norm"].shape)
            one = ds.isel(layer=layer, head=head)
            axis.imshow(one["map"].values ** 0.5, cmap=plots.COLORMAP, vmin=0, vmax=1)
            axis.set_title(
                f"layer {layer}, head {head}\n$\\|M\\|$ {float(one['norm']):.3f}, $g_1$ "
                f"{float(one['g1']):.3f}"
            )
            axis.set_xticks([])
            axis.set_yticks([])
        axes[0].set(ylabel="query", xlabel="key")
    return figure


def caption_maps(ds: xr.Dataset) -> str:
    """Sentences on the heads shown, and in how many rows g_1 is below the norm."""
    return (
        f"{of(ds)}: attention maps, averaged over samples (colours are square roots), of the heads "
        "at the quartiles of the mean norm of the softmax Jacobian. Titles: that mean, over "
        "queries and samples, of the exact norm and of g_1. g_1 is below the exact norm in "
        f"{ds.attrs['below']:,} of {ds.attrs['rows']:,} rows."
    )


register(
    name="yudin-2",
    title="Attention maps with the norm of their softmax Jacobians and g_1",
    source=f"{PAPER}, Figure 2",
    compute=attention_statistics,
    draw=draw_maps,
    caption=caption_maps,
    cost="10 s",
)


def draw_histogram(ds: xr.Dataset) -> Figure:
    """Histograms of bound / norm over all rows."""
    labels = {"g1": "$g_1$", "largest": "$p_{(1)}$", "half": "1/2"}
    with sheet(1, 3, height=1.9) as (figure, axes):
        for axis, (name, label) in zip(axes, labels.items(), strict=True):
            counts = ds["histogram"].sel(bound=name).sum("layer")
            axis.bar(ds["bin"], counts / counts.sum(), width=0.01, align="edge", color="#4477aa")
            axis.set(xlabel=f"{label} / norm", yscale="log")
        axes[0].set_ylabel("share of rows")
    return figure


def caption_histogram(ds: xr.Dataset) -> str:
    """Shares of rows that are tight."""
    total = ds["histogram"].sum(("layer", "bin"))
    tight = (ds["histogram"].where(ds["bin"] < 1.1, 0).sum(("layer", "bin")) / total).to_series()
    return (
        f"{of(ds)}: a bound on the norm of the softmax Jacobian, divided by the exact norm, at "
        f"{ds.attrs['rows']:,} rows of attention where that is positive. The last bin holds all "
        f"ratios above 1.99. Within 10 % of the norm are g_1 in {tight['g1']:.1%} of the rows, the "
        f"largest probability in {tight['largest']:.1%} and the constant 1/2 in "
        f"{tight['half']:.1%}. (The older constant 1 is twice that one.)"
    )


register(
    name="yudin-3",
    title="Bounds on the softmax Jacobian over its exact norm",
    source=f"{PAPER}, Figure 3, with the older bounds",
    compute=attention_statistics,
    draw=draw_histogram,
    caption=caption_histogram,
    cost="10 s",
    run="yudin-2",
)


# -- Figure 6 --------------------------------------------------------------------------------------


def heatmaps(setting: Setting) -> xr.Dataset:
    """A run of `lipbound.compare`: bounds over all samples, exact norms over the first 100."""
    count = setting.count(8, 1000)
    return compare(
        setting.model,
        setting.texts[0],
        samples=count,
        exact_samples=min(count, 100),
        column=setting.column,
        split=setting.split,
        device=setting.device,
        dtype=setting.dtype,
        seed=setting.seed,
        progress=False,
    )


register(
    name="yudin-6",
    title="Exact local constants and every bound, layer by head",
    source=f"{PAPER}, Figure 6",
    compute=heatmaps,
    draw=plots.heatmaps,
    caption=plots.caption,
    cost="30 s",
)


# -- Theorem 4, (10), (11), Proposition 1 ----------------------------------------------------------


def interlacing(setting: Setting) -> xr.Dataset:
    """Compute the slack of the links of Theorem 4 on every attention row of a run.

    All links on some rows; Proposition 1, (10) and (11) on all.
    """
    checkpoint, layers, data = setting.capture(setting.count(8, 112))
    worst, worst_full, counts, fulls = [], [], 0, 0
    others: dict[str, list[Tensor]] = {"proposition_1": [], "equation_10": [], "equation_11": []}
    for att in layers:
        for s in range(att.samples):
            p = real_rows(att, s).flatten(0, 1)
            if p.shape[-1] < 5:
                continue
            worst.append(softmax.interlacing(p, LINKS).amin(0))
            counts += len(p)
            if fulls < (10_000 if setting.full else 500):
                part = p[:: max(1, len(p) // 64)]
                worst_full.append(softmax.interlacing(part, 3 * p.shape[-1] - 1).amin())
                fulls += len(part)
            for name, slack in consequences(p).items():
                others[name].append(slack)
    ds = xr.Dataset(
        {
            "worst_slack": ("link", torch.stack(worst).amin(0).cpu().numpy()),
            "worst_slack_full": float(torch.stack(worst_full).amin()),
        }
        | {name: float(torch.stack(values).amin()) for name, values in others.items()},
        coords={"link": np.arange(1, LINKS + 1)},
    )
    ds.attrs = setting.attributes(checkpoint, data) | {"rows": counts, "rows_full": fulls}
    return ds


def consequences(p: Tensor, k: int = 10) -> dict[str, Tensor]:
    r"""Smallest slack over rows p (n, N) of the consequences of Theorem 4.

    Never negative up to rounding.

    Proposition 1 with the smallest :math:`\gamma = g_1/g_k` it allows where :math:`\gamma \le k/4`:
    :math:`\|M\| \le (1 - \sqrt{1 - 4\gamma/k})/2`; equation (10): with
    :math:`\gamma = g_1 \le 1/4`, the largest probability is outside
    :math:`(1 \pm \sqrt{1 - 4\gamma})/2`; equation (11): :math:`\sigma_1/\sigma_{k-1} \le g_1/g_k`.
    """
    k = min(k, p.shape[-1])
    g1, gk = softmax.g(p), softmax.g(p, k)
    norm = softmax.jacobian_norm(p).lower
    infinite = torch.full_like(g1, torch.inf)
    gamma = torch.where(gk > 0, g1 / gk.clamp_min(1e-300), infinite)
    fits = gamma <= k / 4
    first = torch.where(
        fits, (1 - (1 - 4 * gamma.clamp(max=k / 4) / k).sqrt()) / 2 - norm, infinite
    )
    root = (1 - 4 * g1.clamp(max=0.25)).sqrt()
    top = p.amax(-1)
    second = torch.where(
        g1 <= 0.25, torch.maximum((1 - root) / 2 - top, top - (1 + root) / 2), infinite
    )
    inner = softmax.singular_value(p, k - 1).upper
    third = torch.where(
        (inner > 0) & torch.isfinite(gamma), gamma - norm / inner.clamp_min(1e-300), infinite
    )
    third = third / torch.where(torch.isfinite(gamma), gamma, 1.0)
    return {
        "proposition_1": first.amin(),
        "equation_10": second.amin(),
        "equation_11": third.amin(),
    }


def draw_interlacing(ds: xr.Dataset) -> Figure:
    """Worst slack of each link."""
    names = [f"{a} $\\geq$ {b}" for a, b in _links()]
    with sheet(1, 1, width=3.45, height=2.4) as (figure, (axes,)):
        axes.barh(names, np.maximum(ds["worst_slack"], 0), color="#4477aa")
        axes.axvline(0, color="black", linewidth=0.6)
        axes.invert_yaxis()
        axes.set_xscale("symlog", linthresh=1e-16)
        axes.set_xticks([0, 1e-15, 1e-12, 1e-9, 1e-6])
        axes.set_xlabel("worst relative slack")
    return figure


def _links() -> list[tuple[str, str]]:
    members = [m for k in range(1, 5) for m in (f"$p_{{({k})}}$", f"$g_{k}$", f"$\\sigma_{k}$")]
    return list(itertools.pairwise(members[: LINKS + 1]))


def caption_interlacing(ds: xr.Dataset) -> str:
    """Sentences on the number of inequalities checked, and each statement's smallest slack."""
    return (
        f"{of(ds)}; singular values and slack in float64. Theorem 4 is a chain of inequalities. "
        f"Its first {LINKS} have a relative slack of at least "
        f"{float(ds['worst_slack'].min()):.1e} at {ds.attrs['rows']:,} rows of attention, and all "
        f"of them one of at least {float(ds['worst_slack_full']) + 0.0:.1e} at "
        f"{ds.attrs['rows_full']:,} rows. (It is 0 where both sides coincide, which rounding may "
        f"make -1e-15.) The least slack of Proposition 1 (k = 10) is "
        f"{float(ds['proposition_1']):.1e}, of equation (10) {float(ds['equation_10']):.1e}, of "
        f"equation (11) (k = 10) {float(ds['equation_11']):.1e}; inf where no row meets the "
        "assumption."
    )


register(
    name="yudin-theorem-4",
    title="Interlacing of singular values of the softmax Jacobian with g_k",
    source=f"{PAPER}, Theorem 4, Proposition 1",
    compute=interlacing,
    draw=draw_interlacing,
    caption=caption_interlacing,
    cost="20 s",
)


# -- multi-head, biases ----------------------------------------------------------------------------


def multihead(setting: Setting) -> xr.Dataset:
    """Compare the exact norm of all heads together with sums of the heads' exact norms.

    With the root of the sum of squares, and with the plain sum.
    """
    checkpoint, layers, data = setting.capture(setting.count(4, 100))
    exact, root, total = [], [], []
    for att in layers:
        heads = spectral_norm(att, tol=1e-4).lower
        exact.append(spectral_norm(att, map="heads", tol=1e-4).lower)
        root.append(torch.linalg.vector_norm(heads, dim=-1))
        total.append(heads.sum(-1))
    names = {"exact": exact, "root_sum_square": root, "sum": total}
    ds = xr.Dataset(
        {name: (("layer", "sample"), torch.stack(values).numpy()) for name, values in names.items()}
    )
    ds.attrs = setting.attributes(checkpoint, data)
    return ds


def draw_multihead(ds: xr.Dataset) -> Figure:
    """Lines over layers."""
    with sheet(1, 1, width=3.45) as (figure, (axes,)):
        for name, label in (
            ("sum", "sum over heads"),
            ("root_sum_square", "root of the sum of squares"),
            ("exact", "exact, heads side by side"),
        ):
            axes.plot(
                ds["layer"],
                ds[name].mean("sample"),
                "o-",
                markersize=2.5,
                linewidth=0.8,
                label=label,
            )
        axes.set(xlabel="layer", ylabel="local Lipschitz constant", yscale="log")
        axes.legend()
    return figure


def caption_multihead(ds: xr.Dataset) -> str:
    """Ratios."""
    root, total = ds["root_sum_square"] / ds["exact"], ds["sum"] / ds["exact"]
    return (
        f"{of(ds)}: what the exact norms of heads say about the exact norm of all heads side by "
        f"side. The root of the sum of their squares is {float(root.min()):.3g} to "
        f"{float(root.max()):.3g} times that norm, and their sum {float(total.min()):.3g} to "
        f"{float(total.max()):.3g} times."
    )


register(
    name="yudin-multihead",
    title="Heads together against heads one by one",
    source=f"{PAPER}, section 3",
    compute=multihead,
    draw=draw_multihead,
    caption=caption_multihead,
    cost="10 s",
)

"""Figures of Yudin, Gaponov, Kudriashov and Rakhuba 2025.

"Pay Attention to Attention Distribution".
"""

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jasmin_study as study
import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from paper_figure import PaperFigure, Setting, colours, main, of, sheet
from singular_values import interlacing, singular_value
from torch import Tensor

from lipbound.analysis import tabled
from lipbound.attention import softmax
from lipbound.attention.layer import Attention
from lipbound.errors import InputsError
from lipbound.formatting import replacing
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.reporting import plots
from lipbound.runs.compare import compare

PAPER = "Yudin et al. 2025"
LINKS = 10
"""Links of Theorem 4 that are looked at in every row."""
ON_SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda p: torch.full_like(p[..., 0], 0.5),
    "largest": lambda p: p.amax(-1),
    "g1": softmax.g,
}
"""Bounds on the norm of the softmax Jacobian of rows."""


def real_rows(att: Attention, sample: int) -> Tensor:
    """Attention rows of a sample's tokens that are no padding, over the keys that are none.

    (heads, n, n), float64, summing to one.
    """
    return softmax.normalised(att.unpadded(sample).double().p[0])


class Surface(PaperFigure):
    """The bound g_1 on the softmax Jacobian."""

    name, cost = "yudin-1", "1 s"
    source = f"{PAPER}, Figure 1"
    of_model = False

    def compute(self, setting: Setting) -> xr.Dataset:
        """g_1 over the largest and second largest probability."""
        first, second = np.linspace(0, 1, 201), np.linspace(0, 0.5, 101)
        grid = first[:, None] * (1 - first[:, None] + second[None])
        allowed = (first[:, None] >= second[None]) & (first[:, None] + second[None] <= 1 + 1e-12)
        return xr.Dataset(
            {"g1": (("first", "second"), np.where(allowed, grid, np.nan))},
            coords={"first": first, "second": second},
            attrs=setting.attributes(),
        )

    def draw(self, ds: xr.Dataset) -> Figure:
        """Filled contours."""
        with sheet(1, 1, width=3.45, height=2.4) as (figure, (axes,)):
            levels = np.linspace(0, 0.5, 11)
            x, y, g1 = ds["first"], ds["second"], ds["g1"].values.T
            filled = axes.contourf(x, y, g1, levels=levels, cmap=plots.COLORMAP)
            figure.colorbar(filled, ax=axes, label="$g_1$")
            axes.set(xlabel="largest probability", ylabel="second largest")
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Where the maximum is."""
        i, j = np.unravel_index(int(np.nanargmax(ds["g1"].values)), ds["g1"].shape)
        return (
            "g_1 = p_(1) (1 - p_(1) + p_(2)) over all pairs that rows can have; its maximum is "
            f"{float(ds['g1'].max()):.3g}, at ({float(ds['first'][i]):.2f}, "
            f"{float(ds['second'][j]):.2f}), and it vanishes at (1, 0) and (0, 0)."
        )


class AttentionMaps(PaperFigure):
    """Attention maps with the norm of their softmax Jacobians and g_1."""

    name, cost = "yudin-2", "10 s"
    source = f"{PAPER}, Figure 2"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compute mean attention maps and softmax norms and bounds per layer and head.

        Mean norm of the softmax Jacobian and of its bounds; histograms of bound over norm.
        """
        checkpoint, layers, inputs = setting.capture(setting.count(8, 1000))
        edges = np.linspace(1, 2, 101)
        means, histograms, below = [], [], 0
        for att in layers:
            rows = [real_rows(att, s) for s in range(att.samples)]
            norms = [softmax.jacobian_norm(p) for p in rows]
            lower, upper = (torch.cat(ends, -1) for ends in zip(*norms, strict=True))
            bounds = {name: torch.cat([f(p) for p in rows], -1) for name, f in ON_SOFTMAX.items()}
            below += int((bounds["g1"] * (1 + 1e-12) < lower).sum())
            mean = {name: t.mean(-1) for name, t in {"norm": upper, **bounds}.items()}
            means.append(mean | {"map": att.p.double().mean(0).float()})
            positive = upper > 0
            ratios = [t[positive] / upper[positive] for t in bounds.values()]
            histograms.append([np.histogram(t.clamp(max=1.9999).cpu(), edges)[0] for t in ratios])
        ds = tabled(means, "head", "query", "key")
        ds["histogram"] = ("layer", "bound", "bin"), np.array(histograms)
        ds = ds.assign_coords(bound=np.array(list(ON_SOFTMAX), dtype=object), bin=edges[:-1])
        counts = {"below": below, "rows": int(ds["histogram"].isel(bound=0).sum())}
        return ds.assign_attrs(setting.attributes(checkpoint, inputs) | counts)

    def draw(self, ds: xr.Dataset) -> Figure:
        """Draw the heads with the smallest, middle and largest mean norm.

        Their maps are averaged over samples.
        """
        order = np.argsort(ds["norm"].values.ravel())
        chosen = [order[k * len(order) // 4] for k in range(4)] + [order[-1]]
        with sheet(1, len(chosen), height=1.9) as (figure, axes):
            for axis, k in zip(axes, chosen, strict=True):
                layer, head = np.unravel_index(int(k), ds["norm"].shape)
                one = ds.isel(layer=layer, head=head)
                axis.imshow(one["map"].values ** 0.5, cmap=plots.COLORMAP, vmin=0, vmax=1)
                axis.set_title(
                    f"layer {layer}, head {head}\n$\\|M\\|$ {float(one['norm']):.3f}, $g_1$ "
                    f"{float(one['g1']):.3f}"
                )
                axis.set(xticks=[], yticks=[])
            axes[0].set(ylabel="query", xlabel="key")
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Sentences on the heads shown, and in how many rows g_1 is below the norm."""
        return (
            f"{of(ds)}: attention maps, averaged over samples (colours are square roots), of the "
            "heads at the quartiles of the mean norm of the softmax Jacobian. Titles: that mean, "
            "over queries and samples, of the exact norm and of g_1. g_1 is below the exact norm "
            f"in {ds.attrs['below']:,} of {ds.attrs['rows']:,} rows."
        )


class BoundsOnSoftmax(AttentionMaps):
    """Bounds on the softmax Jacobian over its exact norm."""

    name = "yudin-3"
    source = f"{PAPER}, Figure 3, with the older bounds"

    def draw(self, ds: xr.Dataset) -> Figure:
        """Histograms of bound / norm over all rows."""
        labels = {"g1": "$g_1$", "largest": "$p_{(1)}$", "half": "1/2"}
        with sheet(1, 3, height=1.9) as (figure, axes):
            for axis, (name, label) in zip(axes, labels.items(), strict=True):
                counts = ds["histogram"].sel(bound=name).sum("layer")
                share = counts / counts.sum()
                axis.bar(ds["bin"], share, width=0.01, align="edge", color="#4477aa")
                axis.set(xlabel=f"{label} / norm", yscale="log")
            axes[0].set_ylabel("share of rows")
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Shares of rows that are tight."""
        total = ds["histogram"].sum(("layer", "bin"))
        tight = ds["histogram"].where(ds["bin"] < 1.1, 0).sum(("layer", "bin")) / total
        share = tight.to_series()
        return (
            f"{of(ds)}: a bound on the norm of the softmax Jacobian, divided by the exact norm, at "
            f"{ds.attrs['rows']:,} rows of attention where that is positive. The last bin holds "
            f"all ratios above 1.99. Within 10 % of the norm are g_1 in {share['g1']:.1%} of the "
            f"rows, the largest probability in {share['largest']:.1%} and the constant 1/2 in "
            f"{share['half']:.1%}. (The older constant 1 is twice that one.)"
        )


class NetworkConstants(PaperFigure):
    """Distribution of the network's local constant, without and with penalties."""

    name, cost = "yudin-4", "1 s"
    source = f"{PAPER}, Figure 4, there on CIFAR-100"
    of_model = False

    def compute(self, setting: Setting) -> xr.Dataset:
        """What was measured in benchmarks/jasmin/small."""
        return study.ours("small").assign_attrs(provenance(setting))

    def draw(self, ds: xr.Dataset) -> Figure:
        """Cumulative distributions over images and seeds."""
        penalised = [method for method in study.methods(ds) if method != "baseline"]
        looks = dict(zip(penalised, colours(len(penalised)), strict=True)) | {"baseline": "black"}
        styles = {"JaSMin": "-", "Specformer": "--", "baseline": "-"}
        with sheet(1, 1, width=3.45, height=3.0) as (figure, (axes,)):
            for method in study.methods(ds):
                values = of_method(ds["network_norm"], method).values.ravel()
                style = styles.get(method.split()[0], "-.")
                width = 1.4 if method == "baseline" else 0.9
                axes.ecdf(values, label=method, color=looks[method], ls=style, linewidth=width)
            ends = ds["network_norm"].quantile([0.002, 0.995])
            axes.set(xlim=ends, ylim=(0, 1), ylabel="share of images")
            axes.set_xlabel("local Lipschitz constant, embeddings to logits")
            figure.legend(loc="outside lower center", ncols=2)
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """What was trained, and each method's median beside the baseline's."""
        medians = study.averaged(ds)[0][study.NETWORK]
        change = 100 * (medians / medians.get("baseline", np.nan) - 1)
        told = [
            f"{value:.2f} for {method}"
            + (
                ""
                if method == "baseline" or np.isnan(change[method])
                else f" ({change[method]:+.1f} %)"
            )
            for method, value in medians.items()
        ]
        return (
            f"{study.trained(ds)} Share of the first {ds.sizes['image']:,} test images, for all "
            "seeds together, at which the exact spectral norm of the Jacobian of the whole "
            "network, from embeddings to logits, is at most the number below. The median over "
            f"images, averaged over seeds, is {'; '.join(told)}. The axis leaves out the lowest "
            "0.2 % and the highest 0.5 %."
        )


class FlatterAttention(NetworkConstants):
    """Softmax Jacobians and attention by layer and head, without and with penalties."""

    name, run = "yudin-5", NetworkConstants.name
    source = f"{PAPER}, Figure 5, there on CIFAR-100"
    quantities: ClassVar = {
        "softmax_norm": "norm of the\nsoftmax Jacobian",
        "largest_probability": "largest probability\nof a query",
    }

    def draw(self, ds: xr.Dataset) -> Figure:
        """A row of heatmaps for each quantity, one for each method."""
        names, heads = study.methods(ds), ds.sizes["head"]
        starts = [k * (heads + 1) for k in range(len(names))]
        places = [start + head for start in starts for head in range(0, heads, max(1, heads // 4))]
        wide = max(7.1, 0.85 * len(names))
        rows = len(self.quantities)
        with sheet(rows, 1, height=1.4, width=wide, sharex=True) as (figure, sheets):
            for axes, (name, label) in zip(sheets, self.quantities.items(), strict=True):
                grid = np.full((ds.sizes["layer"], starts[-1] + heads), np.nan)
                for start, method in zip(starts, names, strict=True):
                    grid[:, start : start + heads] = of_method(ds[name], method).mean("run")
                image = axes.imshow(grid, cmap=plots.COLORMAP, vmin=0)
                axes.spines[:].set_visible(False)
                axes.set(ylabel="layer", xticks=places)
                figure.colorbar(image, ax=axes, label=label)
            for start, method in zip(starts, names, strict=True):
                middle, title = start + (heads - 1) / 2, textwrap.fill(method, 14)
                sheets[0].text(middle, -0.8, title, ha="center", va="bottom", fontsize=6)
            sheets[-1].set(xlabel="head", xticklabels=[place % (heads + 1) for place in places])
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """What was trained, and the mean over heads of each method."""
        told = []
        for method in study.methods(ds):
            norm, top = (float(of_method(ds[name], method).mean()) for name in self.quantities)
            told.append(f"{method} {norm:.3f} and {top:.3f}")
        images = min(study.IMAGES_OF_HEADS, ds.sizes["image"])
        return (
            f"{study.trained(ds)} Above: the spectral norm of the softmax Jacobian; below: the "
            "largest probability that a query gives to a key; both averaged over queries, the "
            f"first {images} test images and seeds. Their means over all heads: {'; '.join(told)}. "
            "(The paper's figure is by layer and head too; its text does not say of what, but that "
            "JaSMin flattens attention.)"
        )


class AccuracyTables(PaperFigure):
    """Accuracy under attack, without and with penalties."""

    name, cost = "yudin-tables", "1 s"
    source = f"{PAPER}, Tables 1 to 4"
    of_model = False
    studies: ClassVar = {
        "small": "Methods side by side (Tables 1 and 2)",
        "search": "Search for strengths (Tables 3 and 4)",
    }

    def compute(self, setting: Setting) -> xr.Dataset:
        """What was measured in benchmarks/jasmin/small and search."""
        parts = {name: study.ours(name) for name in self.studies}
        kept = [
            part[["accuracy", "network_constant", "head_constant"]].assign_coords(
                study=("run", np.full(part.sizes["run"], name, dtype=object))
            )
            for name, part in parts.items()
        ]
        ds = xr.concat(kept, "run", combine_attrs="drop")
        studies = {name: part.attrs for name, part in parts.items()}
        return ds.assign_attrs(provenance(setting) | studies)

    def parts(self, ds: xr.Dataset) -> dict[str, xr.Dataset]:
        """Each study of the Dataset."""
        return {
            name: ds.isel(run=ds["study"].values == name).drop_attrs().assign_attrs(ds.attrs[name])
            for name in self.studies
        }

    def draw(self, ds: xr.Dataset) -> Figure:
        """A table for each study, the highest accuracy of each column in bold."""
        parts = self.parts(ds)
        rows = [len(study.methods(part)) + 3 for part in parts.values()]
        size = {"height": 0.085 * sum(rows), "height_ratios": rows}
        with sheet(len(parts), 1, **size) as (figure, sheets):
            for axes, (name, part) in zip(sheets, parts.items(), strict=True):
                text, mean = study.cells(part), study.averaged(part)[0]
                axes.axis("off")
                axes.set_title(self.studies[name], loc="left", fontsize=7)
                table = axes.table(
                    text.values.tolist(),
                    rowLabels=text.index.tolist(),
                    colLabels=[heading(column) for column in text],
                    colWidths=[0.06, *[0.12] * (text.shape[1] - 1)],
                    cellLoc="center",
                    bbox=(0.18, 0, 0.82, 1),
                    edges="horizontal",
                )
                table.set_in_layout(False)  # it is in its axes
                table.auto_set_font_size(False)
                table.set_fontsize(6)
                for (row, _), cell in table.get_celld().items():
                    cell.set_linewidth(0.3)
                    cell.set_height(1 if row else 1.6)
                for k, column in enumerate(text):
                    if column in ds["attack"].values:
                        for i in np.flatnonzero(np.isclose(mean[column], mean[column].max())):
                            table[int(i) + 1, k].set_text_props(weight="bold")
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """What was trained, over how many images an accuracy is, and how much of it is chance."""
        sentences = []
        for name, part in self.parts(ds).items():
            count = part.attrs["config"]["evaluate"]
            base = study.averaged(part)[0].loc["baseline"]
            shares = {"pgd-2": count["attacks"], "autoattack-2": count["autoattack"]}
            chance = [f"{np.sqrt(base[a] * (100 - base[a]) / n):.1f}" for a, n in shares.items()]
            sentences.append(
                f"{self.studies[name]}: {study.trained(part)} Accuracy in percent on the first "
                f"{count['clean']:,} test images (clean), {count['attacks']} (FGSM, PGD) and "
                f"{count['autoattack']} (AutoAttack, AA); from so few the baseline's has, with one "
                f"seed, a standard error of {chance[0]} points under PGD 2 and {chance[1]} under "
                f"AA 2. The constant of the network is the median over the first {count['norms']}."
            )
        return (
            f"{' '.join(sentences)} CIFAR-100 (Tables 1 and 3) and the paper's own grid of "
            "strengths were not run. Numbers behind attacks are budgets in 1/255, in the maximum "
            f"norm; {study.STEPS}. Mean and standard deviation over seeds, the highest accuracy of "
            "a column in bold. Constants are exact: of the network from embeddings to logits, of "
            f"heads the geometric mean, over the first {study.IMAGES_OF_HEADS} images."
        )

    def render(self, ds: xr.Dataset, folder: Path) -> None:
        """The tables as text below the caption, too."""
        super().render(ds, folder)
        path = folder / f"{self.name}.txt"
        lines = [path.read_text(encoding="utf-8")]
        for name, part in self.parts(ds).items():
            lines += [f"{self.studies[name]}\n", f"{study.cells(part).to_string()}\n"]
        with replacing(path) as (target,):
            target.write_text("\n".join(lines), encoding="utf-8")


def of_method(values: xr.DataArray, method: str) -> xr.DataArray:
    """The runs of one method."""
    return values.isel(run=values["method"].values == method)


def provenance(setting: Setting) -> dict[str, Any]:
    """What a Dataset of studied networks says of itself: nothing here was measured anew."""
    said = setting.attributes()
    return {name: said[name] for name in ("lipbound", "versions", "date", "command")}


def heading(column: str) -> str:
    """A column of the tables as the paper calls it, in two lines where it is long."""
    attack, _, budget = column.partition("-")
    if not budget:
        return "\n".join(column.rsplit(" ", 1))
    return f"{'AA' if attack == 'autoattack' else attack.upper()} {budget}"


class Heatmaps(PaperFigure):
    """Exact local constants and every bound, layer by head."""

    name, cost = "yudin-6", "30 s"
    source = f"{PAPER}, Figure 6"

    def compute(self, setting: Setting) -> xr.Dataset:
        """A run of `lipbound.compare`: bounds over all samples, exact norms over the first 100."""
        count = setting.count(8, 1000)
        return compare(
            setting.model,
            setting.texts[0],
            samples=count,
            exact_samples=min(count, 100),
            progress=False,
            **setting.options(),
        )

    def draw(self, ds: xr.Dataset) -> Figure:
        return plots.heatmaps(ds)

    def caption(self, ds: xr.Dataset) -> str:
        return plots.caption(ds)


class Interlacing(PaperFigure):
    """Interlacing of singular values of the softmax Jacobian with g_k."""

    name, cost = "yudin-theorem-4", "20 s"
    source = f"{PAPER}, Theorem 4, Proposition 1"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compute the slack of the links of Theorem 4 on every attention row of a run.

        All links on some rows; Proposition 1, (10) and (11) on all.
        """
        checkpoint, layers, inputs = setting.capture(setting.count(8, 112))
        rows = (real_rows(att, s).flatten(0, 1) for att in layers for s in range(att.samples))
        worst, worst_full, others, counts, fulls = [], [], [], 0, 0
        for p in rows:
            if p.shape[-1] < 5:
                continue
            worst.append(interlacing(p, LINKS).amin(0))
            counts += len(p)
            if fulls < (10_000 if setting.full else 500):
                part = p[:: max(1, len(p) // 64)]
                worst_full.append(interlacing(part, 3 * p.shape[-1] - 1).amin())
                fulls += len(part)
            others.append(consequences(p))
        if not others:
            raise InputsError(
                f"{self.name} looks at rows of 5 tokens and more, and every sample is shorter; "
                "give longer texts"
            )
        least = {name: float(min(one[name] for one in others)) for name in others[0]}
        least["worst_slack_full"] = float(min(worst_full))
        checked = {"rows": counts, "rows_full": fulls}
        return xr.Dataset(
            {"worst_slack": ("link", torch.stack(worst).amin(0).cpu().numpy()), **least},
            coords={"link": np.arange(1, LINKS + 1)},
            attrs=setting.attributes(checkpoint, inputs) | checked,
        )

    def draw(self, ds: xr.Dataset) -> Figure:
        """Worst slack of each link."""
        chain = [m for k in range(1, 5) for m in (f"$p_{{({k})}}$", f"$g_{k}$", f"$\\sigma_{k}$")]
        names = [f"{a} $\\geq$ {b}" for a, b in itertools.pairwise(chain[: LINKS + 1])]
        with sheet(1, 1, width=3.45, height=2.4) as (figure, (axes,)):
            axes.barh(names, np.maximum(ds["worst_slack"], 0), color="#4477aa")
            axes.axvline(0, color="black", linewidth=0.6)
            axes.invert_yaxis()
            axes.set_xscale("symlog", linthresh=1e-16)
            axes.set_xticks([0, 1e-15, 1e-12, 1e-9, 1e-6])
            axes.set_xlabel("worst relative slack")
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Sentences on the number of inequalities checked, and each statement's smallest slack."""
        slack = {name: f"{float(values.min()) + 0.0:.1e}" for name, values in ds.data_vars.items()}
        return (
            f"{of(ds)}; singular values and slack in float64. Theorem 4 is a chain of "
            f"inequalities. Its first {LINKS} have a relative slack of at least "
            f"{slack['worst_slack']} at {ds.attrs['rows']:,} rows of attention, and all "
            f"of them one of at least {slack['worst_slack_full']} at {ds.attrs['rows_full']:,} "
            "rows. (It is 0 where both sides coincide, which rounding may make -1e-15.) The least "
            f"slack of Proposition 1 (k = 10) is {slack['proposition_1']}, of equation (10) "
            f"{slack['equation_10']}, of equation (11) (k = 10) {slack['equation_11']}; inf where "
            "no row meets the assumption."
        )


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
    allowed = (1 - (1 - 4 * gamma.clamp(max=k / 4) / k).sqrt()) / 2
    first = torch.where(gamma <= k / 4, allowed - norm, infinite)
    root, top = (1 - 4 * g1.clamp(max=0.25)).sqrt(), p.amax(-1)
    outside = torch.maximum((1 - root) / 2 - top, top - (1 + root) / 2)
    second = torch.where(g1 <= 0.25, outside, infinite)
    inner = singular_value(p, k - 1).upper
    slack = (gamma - norm / inner.clamp_min(1e-300)) / gamma
    third = torch.where((inner > 0) & torch.isfinite(gamma), slack, infinite)
    slacks = {"proposition_1": first, "equation_10": second, "equation_11": third}
    return {name: slack.amin() for name, slack in slacks.items()}


class Multihead(PaperFigure):
    """Heads together against heads one by one."""

    name, cost = "yudin-multihead", "10 s"
    source = f"{PAPER}, section 3"

    def compute(self, setting: Setting) -> xr.Dataset:
        """Compare the exact norm of all heads together with sums of the heads' exact norms.

        With the root of the sum of squares, and with the plain sum.
        """

        def measure(att: Attention) -> dict[str, Tensor]:
            heads = spectral_norm(att, tol=1e-4).lower
            return {
                "exact": spectral_norm(att, map="heads", tol=1e-4).lower,
                "root_sum_square": torch.linalg.vector_norm(heads, dim=-1),
                "sum": heads.sum(-1),
            }

        return setting.measured(setting.count(4, 100), measure, "sample")

    def draw(self, ds: xr.Dataset) -> Figure:
        """Lines over layers."""
        labels = {"sum": "sum over heads", "root_sum_square": "root of the sum of squares"}
        labels["exact"] = "exact, heads side by side"
        with sheet(1, 1, width=3.45) as (figure, (axes,)):
            for name, label in labels.items():
                mean = ds[name].mean("sample")
                axes.plot(ds["layer"], mean, "o-", markersize=2.5, linewidth=0.8, label=label)
            axes.set(xlabel="layer", ylabel="local Lipschitz constant", yscale="log")
            axes.legend()
        return figure

    def caption(self, ds: xr.Dataset) -> str:
        """Ratios."""
        root, total = ds["root_sum_square"] / ds["exact"], ds["sum"] / ds["exact"]
        return (
            f"{of(ds)}: what the exact norms of heads say about the exact norm of all heads side "
            f"by side. The root of the sum of their squares is {float(root.min()):.3g} to "
            f"{float(root.max()):.3g} times that norm, and their sum {float(total.min()):.3g} to "
            f"{float(total.max()):.3g} times."
        )


if __name__ == "__main__":
    main()

"""Pictures of the pages, drawn by the package itself when the site is written."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lipbound as lb
from lipbound import bounds
from lipbound.jacobians.streaming import head_jacobian
from lipbound.linalg.operator_norm import operator_norm
from sitegen.bounds import shown_ratio, tightness

BLUE, GREY, ORANGE, GREEN = "#2563a8", "#b9bec6", "#c8641b", "#3b7d4f"
FAR = 1e11
"""Where the scale of ratios ends; the mean-field bound is beyond it on most checkpoints."""
TEXT = "How smooth is attention? It depends on the tokens."
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lipbound",
    "figure.facecolor": "white",
}
NORMS: dict[str, Callable[[lb.Attention], lb.Norm]] = {
    "all tokens together\n(frobenius)": lambda att: lb.spectral_norm(att, vectors=True),
    "every token a little\n(every-token)": lambda att: lb.token_norm(
        att, "every-token", vectors=True
    ),
    "one token alone\n(one-token)": lambda att: lb.token_norm(att, "one-token", vectors=True),
}
"""The three norms, and the steepest direction of each."""


@cache
def layers() -> list[Any]:
    """A small trained decoder at one sentence."""
    checkpoint = lb.load_checkpoint("builtin:gpt2")
    return lb.capture(
        checkpoint.model, lb.prepare(checkpoint, [TEXT], samples=1, max_length=16).batch
    )


@cache
def steep() -> lb.Attention:
    """The steepest head there."""
    found = [
        (float(norm), layer, head)
        for layer, att in enumerate(layers())
        for head, norm in enumerate(lb.spectral_norm(att).lower[0])
    ]
    _, layer, head = max(found)
    return layers()[layer].select(heads=slice(head, head + 1))


def saved(figure: Figure, target: Path) -> None:
    """An SVG that is the same whenever it is drawn."""
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")


def sheet(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure and its axes."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def styled(draw: Callable[[Path], None]) -> Callable[[Path], None]:
    """With the style of all pictures, whatever matplotlib is set to."""

    def with_style(target: Path) -> None:
        with mpl.rc_context(STYLE):
            draw(target)

    return with_style


@styled
def three_norms(target: Path) -> None:
    """What moves, and what is measured: the steepest perturbation of one head in each of the three
    norms."""
    att = steep().double()
    jacobian = lb.HeadJacobian(att)  # in the coordinates of what the weights see of a token
    figure, axes = sheet(2, 3, (7.6, 3.4))
    for column, (name, measure) in enumerate(NORMS.items()):
        norm = measure(att)
        assert norm.right is not None
        moves = norm.right[0, 0]
        outputs = jacobian.jvp((moves @ jacobian.rows.basis[0])[None])[0]
        for row, (values, colour) in enumerate(((moves, GREY), (outputs, BLUE))):
            ax = axes[row, column]
            ax.bar(range(att.tokens), values.norm(dim=-1), color=colour)
            ax.set_xticks(range(att.tokens), range(1, att.tokens + 1), fontsize=6)
            ax.set_ylim(0, None)
        axes[0, column].set_title(f"{name}: {float(norm.lower):.2f}", fontsize=9)
        axes[1, column].set_xlabel("token")
    axes[0, 0].set_ylabel("moves by")
    axes[1, 0].set_ylabel("output moves by")
    saved(figure, target)


@styled
def certificate(target: Path) -> None:
    """Both ends of the enclosure against the number of products, for one head."""
    operator = head_jacobian(steep().double())
    exact = float(operator_norm(operator, method="dense").lower)
    steps = range(2, 25)
    norms = [operator_norm(operator, delta=1e-6, tol=1e-9, max_steps=n) for n in steps]
    lower, upper = [float(n.lower) for n in norms], [float(n.upper) for n in norms]
    figure, axes = sheet(1, 1, (5.6, 2.8))
    ax: Axes = axes[0, 0]
    ax.fill_between(steps, lower, upper, color=BLUE, alpha=0.15, lw=0)
    ax.plot(steps, upper, color=ORANGE, marker="o", ms=3, label="exact_upper")
    ax.plot(steps, lower, color=BLUE, marker="o", ms=3, label="exact")
    ax.axhline(exact, color="black", lw=0.8, ls=":", label="norm of the dense Jacobian")
    ax.set(
        xlabel="products with J and its transpose",
        ylabel="local constant",
        ylim=(0.9 * exact, 1.6 * exact),
    )
    ax.legend(frameon=False)
    saved(figure, target)


CHAIN = (
    ("lipbound", "norms of the terms of the blocks of J Jᵀ"),
    ("lipbound_block", "norms of the blocks of J"),
    ("yudin_sqrt_n", "one worst row of P for all tokens; norms of X and A apart"),
    ("yudin", "norm of the softmax Jacobian instead of its effect on X"),
    ("yudin_g1", "its two largest probabilities alone"),
    ("yudin_closed", "no probabilities: the longest token and N"),
)
"""Bounds, each of which knows less of the head than the one before, and what it knows."""


@styled
def why_loose(target: Path) -> None:
    """What each simplification costs, on builtin:minilm."""
    entries = tightness()["checkpoints"]["builtin:minilm"]["norms"]["frobenius"]["bounds"]
    figure, axes = sheet(1, 1, (7.2, 3.0))
    ax: Axes = axes[0, 0]
    for place, (name, what) in enumerate(CHAIN):
        value = entries[name]["geomean"]
        ax.barh(place, value - 1, left=1, color=BLUE if name.startswith("lipbound") else GREY)
        ax.text(value * 1.1, place, f"{shown_ratio(value)}×  {what}", va="center", fontsize=8)
    ax.set_yticks(range(len(CHAIN)), [name for name, _ in CHAIN])
    ax.set(
        xscale="log", xlim=(1, 3e6), xlabel="bound / exact, geometric mean over 72 heads of MiniLM"
    )
    ax.invert_yaxis()
    saved(figure, target)


@styled
def terms(target: Path) -> None:
    """How the exact norm of heads is spread over a checkpoint, beside two bounds: what a heatmap
    shows."""
    ds = lb.compare(
        "builtin:gpt2", samples=1, max_length=48, bounds=["yudin", "lipbound"], progress=False
    )
    figure, axes = sheet(1, 3, (7.4, 2.3))
    for ax, name, title in zip(
        axes[0],
        ("exact", "lipbound", "yudin"),
        ("exact", "lipbound", "Yudin et al., Theorem 3"),
        strict=True,
    ):
        values = ds[name].mean("sample").values
        shared = (
            {"vmin": float(ds["exact"].min()), "vmax": float(ds["lipbound"].max())}
            if name != "yudin"
            else {}
        )
        image = ax.imshow(values, cmap="viridis", aspect="auto", **shared)
        ax.set(
            title=title, xlabel="head", xticks=range(values.shape[1]), yticks=range(values.shape[0])
        )
        figure.colorbar(image, ax=ax)
    axes[0, 0].set_ylabel("layer")
    saved(figure, target)


def tight(name: str, target: Path) -> None:
    """Bound / exact of one bound on every checkpoint, the others of its norm in grey."""
    norm = bounds.get(name).norm
    rows = tightness()["checkpoints"]
    figure, axes = sheet(1, 1, (6.4, 0.5 + 0.3 * len(rows)))
    ax: Axes = axes[0, 0]
    for place, row in enumerate(rows.values()):
        entries = row["norms"][norm]["bounds"]
        others = [
            entry["geomean"]
            for other, entry in entries.items()
            if other != name and entry["geomean"] is not None
        ]
        ax.plot(others, [place] * len(others), "|", color=GREY, ms=10)
        mine = entries.get(name)
        if mine is None or mine["geomean"] is None or mine["geomean"] > FAR:
            said = "not measured" if mine is None else "beyond the scale"
            ax.text(
                0.99,
                place,
                said,
                transform=ax.get_yaxis_transform(),
                fontsize=8,
                va="center",
                ha="right",
                color=GREY if mine is None else BLUE,
            )
        else:
            most = mine["max"] if mine["max"] is not None else FAR
            ax.plot([mine["min"], most], [place, place], color=BLUE, lw=1.5)
            ax.plot([mine["geomean"]], [place], "o", color=BLUE, ms=6)
    ax.axvline(1, color="black", lw=0.8)
    ax.set_yticks(range(len(rows)), [model.removeprefix("builtin:") for model in rows])
    ax.set(
        xscale="log",
        xlabel="bound / exact (1: the exact norm itself)",
        xlim=(0.7, FAR),
        ylim=(len(rows) - 0.5, -0.5),
    )
    saved(figure, target)


PICTURES: dict[str, Callable[[Path], None]] = {
    "three-norms": three_norms,
    "certificate": certificate,
    "why-loose": why_loose,
    "reading": terms,
} | {f"tight-{name}": styled(partial(tight, name)) for name in bounds.names(None)}
"""What draws each picture of the site, by name."""

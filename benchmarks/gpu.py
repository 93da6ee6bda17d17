"""Everything a GPU is asked for, measured and checked against the CPU in about three minutes:
``python benchmarks/gpu.py``. Writes gpu.json, after every part.

Layers of random weights, in float32: times of estimated and of enclosed norms; beside them, in the
same run, a prototype of what the card allows (`Prototype`) and what a user would write with
torch.func (`power_iteration`); on two of them bounds. Then whole checkpoints on the card and on the
same machine's CPU, long inputs, and a card whose memory is taken by others.

Checks: the CPU finds some heads' norms in float64 where the enclosure says; all enclosures are as
narrow as was asked for; estimates, and norms under a user's own settings of torch, agree with them;
`lipbound` is above; checkpoints have the CPU's numbers; with little memory left the same norms
come, or one sentence. What fails, or ends with an error, is said in the file, the rest goes on, and
the exit status is 1. What has not been begun when the time is over is left out, and said.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.func import jvp, vjp, vmap

import lipbound as lb
from lipbound import bounds
from lipbound.devices import device_name, resolve_device, versions
from lipbound.errors import LipboundError, MemoryFullError, one_line
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.solution import Norm

BOUNDS = ("lipbound", "yudin_sqrt_n", "yudin", "castin_bias", "kim")
REPEATS, LONGEST = 7, 3.0
"""Calls of which the median is taken, and seconds after which no other is made."""
Row = dict[str, Any]
ESTIMATE: Row = {"tol": 1e-4}
ENCLOSURE: Row = {"tol": 1e-3, "delta": 1e-6}
Array = np.ndarray[Any, Any]


class Failed(Exception):
    """A number that is not what it should be."""


def check(right: bool, sentence: str) -> None:
    """Raise `Failed` with the sentence where something is not right."""
    if not right:
        raise Failed(sentence)


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Tensors of a layer: x (samples, N, D), projections (heads, D, d) of queries, keys and values,
    and an additive mask (N, N) or None."""

    x: Tensor
    w: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None

    def to(self, device: str) -> "Inputs":
        """The same on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        w_q, w_k, w_v = (t.to(device) for t in self.w)
        return Inputs(self.x.to(device), (w_q, w_k, w_v), mask)

    def attention(self) -> lb.Attention:
        """A new layer of them, for which nothing has been computed."""
        return lb.Attention(self.x, *self.w, mask=self.mask)

    def norm(self, options: Row) -> Norm:
        """Norms of a new layer of them."""
        return spectral_norm(self.attention(), **options)


@dataclass(frozen=True)
class Shape:
    """A layer's shape. ``checked``: heads of the last sample that the CPU computes again."""

    name: str
    samples: int
    tokens: int
    width: int
    heads: int
    d: int
    causal: bool = False
    checked: int = 2
    bounds: bool = False

    def inputs(self) -> Inputs:
        """Random weights at a trained scale, of normalised tokens that have much in common."""
        g = torch.Generator().manual_seed(0)
        own, common = ((self.samples, n, self.width) for n in (self.tokens, 1))
        x = torch.randn(own, generator=g) + 2 * torch.randn(common, generator=g)
        w_q, w_k, w_v = (
            torch.randn(self.heads, self.width, self.d, generator=g)
            * size
            * (768 / self.width) ** 0.5
            for size in (0.06, 0.06, 0.04)
        )
        mask = torch.full((self.tokens, self.tokens), -math.inf).triu(1) if self.causal else None
        return Inputs(torch.nn.functional.layer_norm(x, x.shape[-1:]), (w_q, w_k, w_v), mask)


class Layer:
    """A shape's tensors on the CPU and on a device, and its enclosed norms there."""

    def __init__(self, shape: Shape, device: str, repeats: int):
        self.shape, self.device, self.repeats = shape, device, repeats

    @cached_property
    def near(self) -> Inputs:
        """On the CPU."""
        return self.shape.inputs()

    @cached_property
    def far(self) -> Inputs:
        """On the device."""
        return self.near.to(self.device)

    @cached_property
    def norm(self) -> Norm:
        """Enclosed on the device."""
        return self.far.norm(ENCLOSURE)

    def ms(self, f: Callable[[], object], warm: Callable[[], object] | None = None) -> float:
        """Milliseconds of a call there."""
        return 1e3 * seconds(f, self.device, self.repeats, warm)


LAYERS = (
    Shape("ViT-B/16, N = 197", 1, 197, 768, 12, 64, checked=12, bounds=True),
    Shape("ViT-B/16, 8 samples", 8, 197, 768, 12, 64),
    Shape("MiniLM, 8 samples", 8, 128, 384, 12, 32),
    Shape("GPT-2, N = 1024", 1, 1024, 768, 12, 64, causal=True, bounds=True),
    Shape("Llama 8B, N = 2048", 1, 2048, 4096, 32, 128, causal=True, checked=1),
)
SMALL = (
    Shape("plain, N = 24", 1, 24, 32, 4, 8, checked=4, bounds=True),
    Shape("causal, 2 samples", 2, 32, 48, 4, 8, causal=True),
)
LONG = (
    (Shape("131,072 tokens, to 1e-2", 1, 131_072, 256, 1, 64), {"tol": 1e-2}),
    (Shape("32,768 tokens, enclosed to 1e-3", 1, 32_768, 256, 1, 64), ENCLOSURE),
)
SMALL_LONG = ((Shape("256 tokens, enclosed to 1e-3", 1, 256, 32, 1, 8), ENCLOSURE),)
CROWDED = Shape("16 heads, N = 4096", 1, 4096, 768, 16, 64)
LEFT = (3, 1)
"""GB of a card that others leave."""
CHECKPOINTS: dict[str, Row] = {"builtin:vit": {"samples": 8}, "builtin:gpt2": {}}
SMALL_CHECKPOINTS: dict[str, Row] = {"builtin:gpt2": {"samples": 1, "max_length": 8, "layers": [0]}}


# -- clocks ----------------------------------------------------------------------------------------


def seconds(
    f: Callable[[], object],
    device: str,
    repeats: int = 1,
    warm: Callable[[], object] | None = None,
) -> float:
    """The median of a few calls after one to warm up, each after all work on the device has
    ended."""
    (warm or f)()
    spent: list[float] = []
    while len(spent) < repeats and sum(spent) < LONGEST:
        _wait(device)
        start = time.perf_counter()
        f()
        _wait(device)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def _wait(device: str) -> None:
    if _on_cuda(device):
        torch.cuda.synchronize(device)


def _on_cuda(device: str) -> bool:
    return device.startswith("cuda")


def peak_gb(f: Callable[[], object], device: str) -> float | None:
    """Memory at its peak in a call, more than was held before; of CUDA alone."""
    if not _on_cuda(device):
        f()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    f()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9


# -- what norms are set beside ---------------------------------------------------------------------


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """A function without arguments, which writes into tensors that stay where they are, as one CUDA
    graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def factors(inputs: Inputs) -> tuple[Tensor, ...]:
    """P, queries, keys, values and W^T W of every sample's heads, (samples * heads, ...); the scale
    of scores is in queries and their weights."""
    w_q, w_k, w_v = inputs.w
    w = w_q * w_q.shape[-1] ** -0.5, w_k, w_v
    q, k, v = (torch.einsum("snd,hde->shne", inputs.x, one).flatten(0, 1) for one in w)
    scores = q @ k.mT
    p = torch.softmax(scores if inputs.mask is None else scores + inputs.mask, -1)
    every = torch.cat(w, -1)
    return p, q, k, v, (every.mT @ every).repeat(len(inputs.x), 1, 1)


class Prototype:
    """What a card allows, of layers of one shape: Lanczos' method on J J^T of all heads, from
    W^T W, in the dtype of the layer and with full reorthogonalisation. A step is one CUDA graph (on
    other devices the same operations), and the host looks every few steps. Nothing is certified."""

    def __init__(self, inputs: Inputs, most: int = 48):
        self.factors = factors(inputs)
        p, _, _, v, _ = self.factors
        self.batch, self.size = len(p), v[0].numel()
        self.most = min(most, self.size - 1)
        # vectors that have not been found are zero
        self.basis = v.new_zeros(self.batch, self.most + 1, self.size)
        self.projected = v.new_zeros(self.batch, self.most + 1, self.most + 1)
        self.at = torch.zeros(1, dtype=torch.long, device=p.device)
        self.advance = graphed(self._step) if p.is_cuda else self._step

    def _product(self, y: Tensor) -> Tensor:
        """J J^T y, (batch, N, d)."""
        p, q, k, v, gram = self.factors
        d = q.shape[-1]
        slopes = p * (y @ v.mT)
        slopes = slopes - p * slopes.sum(-1, keepdim=True)
        z = torch.cat([slopes @ k, slopes.mT @ q, p.mT @ y], -1) @ gram
        moved = p * (torch.cat([z[..., :d], q], -1) @ torch.cat([k, z[..., d : 2 * d]], -1).mT)
        moved = moved - p * moved.sum(-1, keepdim=True)
        return torch.baddbmm(moved @ v, p, z[..., 2 * d :])

    def _step(self) -> None:
        last = self.basis.index_select(1, self.at)[:, 0]
        new = self._product(last.view(self.factors[3].shape)).flatten(1)[..., None]
        once = self.basis @ new
        new = new - self.basis.mT @ once
        twice = self.basis @ new
        new = new - self.basis.mT @ twice
        self.projected.index_copy_(2, self.at, once + twice)
        self.at += 1
        new = new / new.norm(dim=1, keepdim=True)
        self.basis.index_copy_(1, self.at, new.mT)

    def norms(self, inputs: Inputs, tol: float = 1e-5, every: int = 6) -> tuple[Tensor, int]:
        """Norms of a layer (batch,), float64 on the CPU, and steps: once those squared grow by
        ``tol`` at most between looks."""
        for kept, new in zip(self.factors, factors(inputs), strict=True):
            kept.copy_(new)
        for t in (self.basis, self.projected, self.at):
            t.zero_()
        self.basis[:, 0] = torch.nn.functional.normalize(torch.randn_like(self.basis[:, 0]))
        before = torch.zeros(self.batch, dtype=torch.float64)
        for steps in range(1, self.most + 1):
            self.advance()
            if steps % every == 0:
                seen = self.projected[:, :steps, :steps].cpu().double()
                found = torch.linalg.eigvalsh(seen, UPLO="U")[:, -1]
                if bool((found - before <= tol * found).all()):
                    return found.sqrt(), steps
                before = found
        raise Failed(f"the prototype has not converged in {self.most} steps")


def power_iteration(inputs: Inputs, tol: float = 1e-6, most: int = 300) -> tuple[Tensor, int]:
    """What a user would write: power iteration with torch.func on all heads at once, until no norm
    changes by more than ``tol``, relatively; norms (samples, heads) and steps."""

    def gram(
        x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, direction: Tensor
    ) -> tuple[Tensor, Tensor]:
        def head(x: Tensor) -> Tensor:
            scores = (x @ w_q) @ (x @ w_k).mT
            scores = scores if inputs.mask is None else scores + inputs.mask
            return torch.softmax(scores, -1) @ (x @ w_v)

        _, pushed = jvp(head, (x,), (direction,))
        _, pull = vjp(head, x)
        back = pull(pushed)[0]
        return pushed.norm(), back / back.norm()

    step = vmap(vmap(gram, in_dims=(None, 0, 0, 0, 0)), in_dims=(0, None, None, None, 0))
    w_q, w_k, w_v = inputs.w
    w_q = w_q * w_q.shape[-1] ** -0.5
    x = inputs.x[:, None].expand(-1, len(w_q), -1, -1)
    direction, before = torch.randn_like(x), x.new_zeros(x.shape[:2])
    for steps in range(1, most + 1):
        norm, direction = step(inputs.x, w_q, w_k, w_v, direction)
        if steps > 1 and bool(((norm - before).abs() <= tol * norm).all()):
            break
        before = norm
    return norm.double().cpu(), steps


# -- parts -----------------------------------------------------------------------------------------


def products(row: Row, order: int, device: str) -> None:
    """Rates of large matrix products."""
    for dtype in (torch.float32, torch.float64):
        a = torch.randn(order, order, dtype=dtype, device=device)
        spent = seconds(partial(torch.mm, a, a), device, REPEATS)
        row[f"{str(dtype).removeprefix('torch.')}_tflops"] = 2e-12 * order**3 / spent


def estimate(row: Row, layer: Layer) -> None:
    """Norms without upper ends; they are as near as was asked for."""
    row["estimate_ms"] = layer.ms(lambda: layer.far.norm(ESTIMATE))
    _check_estimates(layer.far.norm(ESTIMATE).lower, layer.norm)


def _check_estimates(found: Tensor, norm: Norm) -> None:
    near = (norm.lower <= found * (1 + ESTIMATE["tol"])) & (found <= norm.upper)
    check(bool(near.all()), f"{int((~near).sum())} estimates are not where enclosures say")


def enclosure(row: Row, layer: Layer) -> None:
    """Norms with both ends, at least as near each other as was asked for."""
    run = partial(layer.far.norm, ENCLOSURE)
    row["enclosure_ms"] = layer.ms(run)
    row["peak_gb"] = peak_gb(run, layer.device)
    norm = layer.norm
    row |= {"heads": norm.lower.numel(), "steps": int(norm.steps.max()), "width": _width(norm)}
    check(
        bool(norm.converged.all()),
        f"{int((~norm.converged).sum())} enclosures are wider than {ENCLOSURE['tol']:g}, up to "
        f"{row['width']:.1e}",
    )


def _width(norm: Norm) -> float:
    return float((norm.upper / norm.lower - 1).max())


def accuracy(row: Row, layer: Layer) -> None:
    """Some heads' norms, against the CPU in float64."""
    last, heads = slice(-1, None), slice(layer.shape.checked)
    some = layer.near.attention().select(last, heads).double()
    right = spectral_norm(some, tol=1e-8).lower
    lower, upper = (end[last, heads] for end in (layer.norm.lower, layer.norm.upper))
    row |= {"checked": right.numel(), "error": float((1 - lower / right).abs().max())}
    check(
        bool(((lower <= right * (1 + 1e-8)) & (right <= upper)).all()),
        f"the CPU finds {right.tolist()} in float64, outside {lower.tolist()} to {upper.tolist()}",
    )


def settings(row: Row, layer: Layer) -> None:
    """What TF32 and autocast of the caller change: no norm by more than was asked for."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cuda" if _on_cuda(layer.device) else "cpu", torch.bfloat16):
            estimated, found = layer.far.norm(ESTIMATE), layer.far.norm(ENCLOSURE)
    finally:
        torch.set_float32_matmul_precision(before)
    row["settings_change"] = float((found.lower / layer.norm.lower - 1).abs().max())
    meet = (found.lower <= layer.norm.upper) & (layer.norm.lower <= found.upper)
    check(bool((meet & found.converged).all()), "enclosures under TF32 and autocast are others")
    _check_estimates(estimated.lower, layer.norm)


def torch_func(row: Row, layer: Layer) -> None:
    """Power iteration with torch.func."""
    found: list[tuple[Tensor, int]] = []

    def run(most: int = 300) -> None:
        found.append(power_iteration(layer.far, most=most))

    row["power_iteration_ms"] = layer.ms(run, partial(run, 2))
    norms, row["power_iteration_steps"] = found[-1]
    row["power_iteration_error"] = float((norms / layer.norm.lower - 1).abs().max())


def prototype(row: Row, layer: Layer) -> None:
    """What the card allows, of a layer whose shape has been seen."""
    one = Prototype(layer.far)
    row["prototype_ms"] = layer.ms(lambda: one.norms(layer.far))
    found, row["prototype_steps"] = one.norms(layer.far)
    row["prototype_error"] = float((found / layer.norm.lower.flatten() - 1).abs().max())
    check(row["prototype_error"] <= 1e-3, "the prototype finds other norms")


def bound(row: Row, layer: Layer, name: str) -> None:
    """A bound; ours is above."""
    call = bounds.get(name)
    row[f"{name}_ms"] = layer.ms(lambda: call(layer.far.attention()))
    if name == "lipbound":
        over = call(layer.far.attention()).cpu() / layer.norm.lower
        row["lipbound_ratio"] = float(over.log().mean().exp())
        check(bool((over >= 1).all()), "lipbound is below the exact norm")


def checkpoint(row: Row, model: str, options: Row, device: str) -> None:
    """A whole run there and on the CPU, whose numbers are the same up to the tolerance."""
    runs: list[xr.Dataset] = []

    def run(where: str) -> None:
        runs.append(lb.compare(model, device=where, progress=False, **options))

    row["seconds"] = seconds(partial(run, device), device)
    row["cpu_seconds"] = seconds(partial(run, "cpu"), "cpu")
    far, near = runs[0], runs[-1]
    numbers = [str(name) for name, values in near.items() if values.dtype.kind == "f"]
    apart = {name: _apart(far[name].values, near[name].values) for name in numbers}
    worst = max(numbers, key=lambda name: apart[name])
    row |= {"apart": apart[worst], "worst": worst, "exact_apart": apart["exact"]}
    check(apart[worst] <= near.attrs["tol"], f"{worst} is {apart[worst]:.1e} from the CPU's")


def _apart(far: Array, near: Array) -> float:
    """The largest relative difference, absolute below 1e-6; infinite where one alone is NaN."""
    same = (far == near) | (np.isnan(far) & np.isnan(near))
    with np.errstate(invalid="ignore"):
        off = np.abs(far - near) / np.maximum(np.abs(near), 1e-6)
    return float(np.where(same, 0.0, np.nan_to_num(off, nan=np.inf)).max())


def long(row: Row, shape: Shape, options: Row, device: str) -> None:
    """The norm of one head of many tokens, measured once."""
    far, found = shape.inputs().to(device), []

    def run() -> None:
        found.append(far.norm(options))

    start = time.perf_counter()
    row["peak_gb"] = peak_gb(run, device)
    row |= {"seconds": time.perf_counter() - start, "steps": int(found[0].steps.max())}
    row["error"] = float(found[0].error.max())
    check(row["error"] <= options["tol"], f"the error is up to {row['error']:.1e}")


def crowded(row: Row, gb: float, device: str) -> None:
    """Norms of a layer on a card of which others leave little: the same ones, or one sentence."""
    if not _on_cuda(device):
        row["skipped"] = "the device is no CUDA device"
        return
    far = CROWDED.inputs().to(device)
    norms = [far.norm(ENCLOSURE)]
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    check(free > gb * 1e9, f"{free / 1e9:.2g} GB are free, and {gb:g} GB were to be left")
    taken = torch.empty(int(free - gb * 1e9), dtype=torch.uint8, device=device)
    start = time.perf_counter()
    try:
        row["peak_gb"] = peak_gb(lambda: norms.append(far.norm(ENCLOSURE)), device)
        row["seconds"] = time.perf_counter() - start
    except MemoryFullError as full:
        row["sentence"] = str(full)
        return
    finally:
        del taken
    whole, tight = norms
    row["apart"] = float((tight.lower / whole.lower - 1).abs().max())
    meet = (tight.lower <= whole.upper) & (whole.lower <= tight.upper) & tight.converged
    check(bool(meet.all()), f"{int((~meet).sum())} norms are others, or wider")


# -- all of them -----------------------------------------------------------------------------------


class Report:
    """What has been measured, in a file that is written after every part."""

    def __init__(self, device: str, out: Path, limit: float):
        self.device, self.out, self.limit, self.start = device, out, limit, time.perf_counter()
        self.found: Row = {
            "device": device_name(device),
            "versions": {"lipbound": lb.__version__} | versions(("torch", "transformers")),
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "seconds": 0.0,
            "failed": [],
            "left_out": [],
        }

    def part(self, section: str, name: str, what: str, f: Callable[[Row], None]) -> None:
        """Have one part fill the row of a section; an error of its is kept as text."""
        label, begun = f"{section}, {name}: {what}", time.perf_counter() - self.start
        if begun > self.limit:
            self.found["left_out"].append(label)
            print(f"{begun:.0f} s: {label} is left out", flush=True)
        else:
            row = self.found.setdefault(section, {}).setdefault(name, {})
            known = set(row)
            try:
                if _on_cuda(self.device):
                    torch.cuda.empty_cache()
                f(row)
            except Exception as error:  # whatever it is, the rest goes on
                kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
                self.found["failed"].append(f"{label}: {kind}{one_line(error)}"[:1000])
                print(f"wrong: {self.found['failed'][-1]}", file=sys.stderr, flush=True)
            self.found["seconds"] = time.perf_counter() - self.start
            new = {key: row[key] for key in row if key not in known}
            print(f"{self.found['seconds']:.0f} s: {label}: {new}", flush=True)
        self.write()

    def write(self) -> None:
        """Replace the file as a whole."""
        new = self.out.with_name(self.out.name + ".new")
        new.write_text(json.dumps(self.found, indent=1) + "\n")
        new.replace(self.out)


def measure(report: Report, small: bool) -> None:
    """All parts, layers first."""
    device, order = report.device, 256 if small else 8192
    run = partial(products, order=order, device=device)
    torch.manual_seed(0)
    report.part("products", f"of order {order}", "rates", run)
    for shape in SMALL if small else LAYERS:
        layer = Layer(shape, device, 1 if small else REPEATS)
        for f in (enclosure, estimate, accuracy, settings, torch_func, prototype):
            report.part("layers", shape.name, f.__name__, partial(f, layer=layer))
        for name in BOUNDS if shape.bounds else ():
            report.part("layers", shape.name, name, partial(bound, layer=layer, name=name))
    for model, options in (SMALL_CHECKPOINTS if small else CHECKPOINTS).items():
        compared = partial(checkpoint, model=model, options=options, device=device)
        report.part("checkpoints", model, "compare", compared)
    for shape, options in SMALL_LONG if small else LONG:
        measured = partial(long, shape=shape, options=options, device=device)
        report.part("long", shape.name, "norm", measured)
    for gb in LEFT:
        tight = partial(crowded, gb=gb, device=device)
        report.part("crowded", f"{CROWDED.name}, {gb} GB left", "norms", tight)


def main(arguments: list[str] | None = None) -> int:
    """Measure, check, write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="where to compute")
    parser.add_argument(
        "--small", action="store_true", help="small layers, to try the script itself, on any device"
    )
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="after which no other part is begun"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).with_suffix(".json"),
        help="the file that is written",
    )
    args = parser.parse_args(arguments)
    try:
        device = resolve_device(args.device)
    except LipboundError as unusable:
        print(unusable, file=sys.stderr)
        return 1
    if _on_cuda(device):
        torch.cuda.set_device(torch.device(device).index or 0)  # where graphs are captured
    report = Report(device, args.out, args.seconds)
    measure(report, args.small)
    return 1 if report.found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

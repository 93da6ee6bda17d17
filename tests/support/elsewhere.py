"""What is computed on the CPU and on the device beside it, `support.far_device`, in a process that
knows it: the numbers of both.

Functions to call by name in that process; what they take and return can be sent to another.
"""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import castin2024  # noqa: F401
import castin_inputs
import ours2026  # noqa: F401
import torch
import xarray as xr
import yudin2025  # noqa: F401
from paper_figure import Setting, figure_named
from support import far_device
from support.far_device import LACKING, NAME, REAL
from support.layers import random_attention
from support.models import AFFINE, MODERN, inputs_for
from support.variants import layer
from torch import Tensor

import lipbound as lb
from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.attention.layer import Attention
from lipbound.bounds.whole_layer_rules import whole_layer
from lipbound.jacobians import streaming
from lipbound.jacobians.maps import MAPS
from lipbound.jacobians.spectral_norm import l2_spectral_norm, spectral_norm
from lipbound.jacobians.spectrum import condition_number
from lipbound.linalg.operator_norm import operator_norm
from lipbound.models.capture.capture import Capturer
from lipbound.regularizers import JaSMin, SoundPenalty, Specformer
from lipbound.runs.measure import Memory

Pairs = dict[str, tuple[list[Any], list[Any], float]]
"""By what was computed: lists of numbers, on the CPU and on the other device, and how far apart
their methods let them be, relatively."""
Sides = tuple[Attention, Attention]
"""A layer on the CPU and on the other device. What is derived from it is kept for whatever is
measured of it, as in a run."""
METHODS: tuple[dict[str, Any], ...] = (
    {},
    {"delta": 1e-9, "vectors": True},
    {"method": "power", "max_steps": 12},
    {"method": "dense"},
)
TOL = {"float32": 1e-4, "float64": 1e-8}
OTHER_STARTS = 1e-2 if REAL else 0.0
"""How far iterations that have not converged may be apart, where a GPU starts them elsewhere."""
TOKEN_NORMS = ("every-token", "one-token", "token-pair", "output-token")


def refusals() -> list[str]:
    """The errors of what a GPU would refuse."""
    far, near = torch.ones(3, device=NAME), torch.ones(3)
    wrong: tuple[Callable[[], object], ...] = (
        lambda: far + near,
        lambda: near[far.long()],
        lambda: torch.cat([far, near]),
        lambda: torch.mv(far.outer(far), near),
        far.numpy,
        lambda: torch.rand(3, device=NAME, generator=torch.Generator()),
        lambda: torch.where(near > 0, far, 0.0),
    )
    found = []
    for f in wrong:
        try:
            f()
        except (RuntimeError, TypeError) as error:
            found.append(str(error))
    return found


def norms(has: tuple[str, ...], mask: str | None, dtype: str) -> Pairs:
    """Norms of every map by every method that covers it, and of L2 attention."""
    sides, found, tol = _layer(has, mask, dtype), {}, TOL[dtype]
    for map, options in product(MAPS, METHODS):
        measure = partial(spectral_norm, map=map, tol=tol, **options)
        unfinished = OTHER_STARTS if options.get("method") == "power" else 0.0
        _both(found, f"{map} {options}", sides, measure, tol + unfinished)
    _both(found, "L2", sides, partial(l2_spectral_norm, tol=tol), tol)
    streaming.WHOLE_BYTES["cpu"], kept = 0, streaming.WHOLE_BYTES["cpu"]
    measure = partial(spectral_norm, tol=tol, delta=1e-9)
    _both(found, "streamed", _layer(has, mask, dtype), measure, tol)
    streaming.WHOLE_BYTES["cpu"] = kept
    return found


def all_bounds(has: tuple[str, ...], mask: str | None, dtype: str) -> Pairs:
    """Every bound of heads and whole layers that covers them, and those over balls."""
    sides, found = _layer(has, mask, dtype), {}
    for name in lb.bounds.names(None):
        _both(found, name, sides, lb.bounds.get(name))
        _both(found, f"{name}, layer", sides, partial(whole_layer, name=name))
    for ball in ("token", "frobenius"):
        over_ball = partial(lb.bounds.over_ball, radius=0.1, ball=ball)
        _both(found, f"ball, {ball}", sides, over_ball, 4e-4)  # norms of P to 1e-4 enter it twice
    _both(found, "attack", sides, lambda one: lb.attack(one, 0.1, steps=1).norm, OTHER_STARTS)
    return found


def token_norms(has: tuple[str, ...], mask: str | None, dtype: str) -> Pairs:
    """Norms that tell tokens apart."""
    sides, found = _layer(has, mask, dtype), {}
    for norm in TOKEN_NORMS:
        allowed = 1e-3 if norm == "every-token" else 0.0  # the others have no tolerance
        _both(found, norm, sides, partial(lb.token_norm, norm=norm, tol=1e-3), allowed)
    _both(found, "profile", sides, lb.token_profile)
    return found


def captured(family: str) -> Pairs:
    """Queries and probabilities of a small model of a family, captured on either device."""
    near, far = (lb.capture(*side) for side in _sides(family))
    # on the CPU, where the device has no float64
    assert all((att.x.device.type == NAME) != bool(LACKING) for att in far)
    return {
        f"{name} of layer {k}": _in_units(getattr(one, name), getattr(other, name))
        for k, (one, other) in enumerate(zip(near, far, strict=True))
        for name in "qp"
    }


def run(folder: Path, options: dict[str, Any]) -> Pairs:
    """A whole run of a checkpoint's directory."""
    usual = {"tol": 1e-3 if "norm" in options else 1e-5, "samples": 2, "max_length": 8}
    options = usual | {"progress": False} | options
    runs = [lb.compare(folder, device=device, **options) for device in ("cpu", NAME)]
    assert runs[1].attrs["device"].startswith(NAME)  # and the name of a GPU
    allowed = dict.fromkeys(("exact", "exact_upper"), options["tol"])
    measured = [name for name, values in runs[0].items() if values.dtype.kind == "f"]
    return {
        name: (_numbers(runs[0][[name]]), _numbers(runs[1][[name]]), allowed.get(name, 0.0))
        for name in measured
    }


def decompositions() -> set[str]:
    """What is decomposed there where norms of several heads are measured."""
    att = random_attention("biases").select(slice(1)).to(NAME)
    for map, wrt in (("head_out", "input"), ("head", "queries"), ("head_out", "values")):
        spectral_norm(att, map=map, wrt=wrt, delta=1e-6, vectors=True)
    for norm in TOKEN_NORMS:
        lb.token_norm(att, norm, tol=1e-6)
    lb.singular_values(att, k=3)
    condition_number(att)
    mean_field.duplicated_norm(att, spectral_norm(att).lower)
    return far_device.DECOMPOSED


def figure_of(name: str) -> Pairs:
    """What a paper's figure measures of a small decoder."""
    sides = [Setting("builtin:gpt2", samples=1, device=device) for device in ("cpu", NAME)]
    runs = [figure_named(name).compute(one) for one in sides]
    return {name: (_numbers(runs[0]), _numbers(runs[1]), 1e-3)}


def gpu_benchmark(out: Path) -> int:
    """The exit status of the benchmark of GPUs on small layers, which checks itself against the
    CPU."""
    from integration.test_readme import benchmark

    status: int = benchmark("gpu").main(["--device", NAME, "--small", "--out", str(out)])
    return status


def around(family: str, map: str) -> Pairs:
    """Norms of the layers of a small model with what stands around them, and of its network."""
    layers, networks = [], []
    for model, inputs in _sides(family):
        seen, certified = lb.capture(model, inputs, around=True), {"delta": 1e-6}
        norms = [spectral_norm(a, map=map, tol=1e-3, **certified).lower for a in seen]
        layers.append(_numbers(norms))
        end = {"end": "last_hidden_state", "tol": 1e-4}
        networks.append(_numbers(lb.network_norm(model, inputs, **end, **certified)))
    return {"layers": (*layers, 1e-3), "network": (*networks, 1e-4)}


def inputs_and_measures() -> Pairs:
    """Adversarial inputs, and attention between measures."""
    att, found = random_attention("biases"), {}
    for name, f in {
        "adversarial": lambda a: adversarial_inputs.adversarial_inputs(a, 4, 1.0),
        "lower": lambda a: adversarial_inputs.lower_bound(a, 4, 1.0),
        "limit": castin_inputs.large_radius_limit,
        "crossover": adversarial_inputs.crossover_length,
        "copies": lambda a: mean_field.duplicated_norm(a, spectral_norm(a).lower),
        "weighted": lambda a: mean_field.weighted_norm(
            a, torch.full_like(a.x[..., 0], 1 / a.tokens)
        ),
    }.items():
        _both(found, name, (att, att.to(NAME)), f)
    return found


def derivatives() -> Pairs:
    """Penalties of a small model and their derivatives."""
    found: Pairs = {}
    for penalty in (_jasmin, _ours, lambda model, _: Specformer(1.0, 1.0, 1.0)(model)):
        values, slopes = [], []
        for model, inputs in _sides("bert"):
            value = penalty(model, inputs)
            value.backward()
            own = [p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None]
            values.append(value.detach())
            slopes.append(torch.cat(own))
        for what in (values, slopes):
            found[str(len(found))] = _in_units(*what)
    return found


def _sides(family: str) -> list[tuple[Any, dict[str, Tensor]]]:
    """A small model of a family and its inputs, on the CPU and on the other device."""
    torch.manual_seed(0)
    near = (AFFINE | MODERN)[family]().eval()
    inputs = inputs_for(near, padded=True)
    far = copy.deepcopy(near).to(NAME), {name: t.to(NAME) for name, t in inputs.items()}
    return [(near, inputs), far]


def _jasmin(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with lb.attention_probabilities(model) as seen:
        model(**inputs)
    return JaSMin(k=2)(seen)


def _ours(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with lb.attention_layers(model) as seen:
        model(**inputs)
    return SoundPenalty()(seen)


def _layer(has: tuple[str, ...], mask: str | None, dtype: str) -> Sides:
    wide = layer(1, frozenset(has), n=5, **({} if mask is None else {"mask": mask}))
    return (att := wide.to(getattr(torch, dtype))), att.to(NAME)


def _in_units(near: Tensor, far: Tensor) -> tuple[list[Any], list[Any], float]:
    """Entries of one tensor in units of its largest, which is what arithmetic rounds by."""
    unit = max(float(near.abs().max()), 1e-300)
    return _numbers(near / unit), _numbers(far / unit), 0.0


def _both(
    found: Pairs, name: str, sides: Sides, f: Callable[[Attention], Any], allowed: float = 0.0
) -> None:
    """Both results under a name; nothing where the CPU's layer is refused. ``allowed``: how far
    apart two results of f may be."""
    try:
        near = f(sides[0])
    except lb.LipboundError:
        return
    found[name] = (_numbers(near), _numbers(f(sides[1])), allowed)


def _numbers(result: Any) -> list[Any]:
    """All floating-point numbers of a result, flat; of singular vectors their lengths, since any
    mixtures would do where two values are close."""
    if isinstance(result, Tensor):
        real = result if result.is_floating_point() else torch.zeros(0)
        return real.detach().cpu().double().flatten().tolist()
    if isinstance(result, xr.Dataset):
        tables = [t for t in result.data_vars.values() if t.dtype.kind == "f"]
        return [x for t in tables for x in t.values.ravel().tolist()]
    if isinstance(result, lb.Norm):
        lengths = [t.flatten(2).norm(dim=-1) for t in (result.left, result.right) if t is not None]
        return _numbers([result.lower, result.upper, *lengths])
    if is_dataclass(result):
        return _numbers([getattr(result, field.name) for field in fields(result)])
    several = result if isinstance(result, list | tuple) else ()
    return [x for part in several for x in _numbers(part)]


def captures() -> list[tuple[int, int]]:
    """Passes of the model and reads of a first capture of a small ViT, and of one after it."""
    (_, (model, inputs)), found = _sides("vit"), []
    capturer, passes = Capturer(model), [0]
    model.register_forward_hook(lambda *_: passes.append(passes.pop() + 1))
    for _ in range(2):
        before = passes[0], far_device.COUNTED["reads"]
        capturer.run(inputs)
        found.append((passes[0] - before[0], far_device.COUNTED["reads"] - before[1]))
    return found


def counts(what: str, samples: int = 1, tokens: int = 197) -> dict[str, float]:
    """Operations, reads and memory of one call on a layer of ViT-B's shape, and of one step of
    Lanczos."""

    def drawn(samples: int, tokens: int, heads: int, width: int, d: int) -> Attention:
        draw = torch.Generator().manual_seed(0)
        shapes = (samples, tokens, width), (samples, 1, width), *[(heads, width, d)] * 3
        x, shift, q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
        x = torch.nn.functional.layer_norm(x + 2 * shift, (width,))
        return Attention(*(t.to(NAME) for t in (x, 0.06 * q, 0.06 * k, 0.04 * v)))

    calls = {
        "estimate": lambda att: lb.spectral_norm(att, tol=1e-4),
        "enclosure": lambda att: lb.spectral_norm(att, tol=1e-3, delta=1e-6),
        "longer": lambda att: operator_norm(lb.HeadJacobian(att), tol=0, max_steps=24),
        "shorter": lambda att: operator_norm(lb.HeadJacobian(att), tol=0, max_steps=12),
    }
    call = calls.get(what) or lb.bounds.get(what)
    call(drawn(samples, 5, 2, 24, 8))  # what is found once a process is not counted
    att, held = drawn(samples, tokens, 12, 768, 64), far_device.COUNTED
    before = held["bytes"]
    held.update(operations=0, reads=0, most=before)
    call(att)
    return held | {
        "most": held["most"] - before,
        "planned": Memory.of(att.of_samples(slice(0, 1)), [what]).at(samples),
    }

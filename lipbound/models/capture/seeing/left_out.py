"""What mixes tokens in a forward pass and is no attention that is followed, found by what it does.

Weights of sums are products of tokens, or a softmax of something else; a module that sums up with
them counts, unless each token is summed up by itself (experts, streams of residuals). Layers of a
list count if a token that is changed changes what they make of others.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lipbound.models.capture.seeing.call import ModuleRun, listed
from lipbound.models.capture.seeing.follower import FollowedSoftmax, Scores
from lipbound.models.capture.seeing.interface import RAISED, forward

NEAR = 4
"""Modules around an operation whose inputs tell how many tokens there are."""
FUSED_ATTENTION = re.compile(
    "_?scaled_dot_product|_native_multi_head_attention|_transformer_encoder_layer|_fused_sdp|"
    "_flash_attention|_efficient_attention"
)
"""Beginnings of the names of torch's operations that are attention by themselves."""
KNOWN = ("aten", "prims", "torchvision")
"""Packages whose other operations are none."""
NAMED = 4
"""Number of modules that a sentence names."""


class AttentionFinder(TorchDispatchMode):
    """The modules that weigh tokens in a way that is not followed.

    Beside sums these are torch's own attention where no function of Python calls it, and operations
    of other packages on three tensors that may be queries, keys and values.

    Args:
        recorder: of the pass, which knows what runs.
        samples: of the pass.

    Attributes:
        found: runs of modules, by what was found in them, with what must not be freed meanwhile.
        sampling: runs of modules that take values at places between tokens (deformable attention).
    """

    def __init__(self, recorder: Any, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Any, tuple[ModuleRun, Scores | None]] = {}
        self.sampling: set[int] = set()
        self._recorder, self._samples = recorder, samples

    def add(self, made: Scores | None = None) -> None:
        """Note the innermost module that runs and has parameters."""
        running = self._recorder.running
        own = (run for run in reversed(running) if any(True for _ in run.module.parameters()))
        run = next(own, running[-1])
        key = run.name if made is None else (id(made.left[0]), id(made.right[0]))
        self.found[key] = run, made

    def weighed(self, by: Scores | FollowedSoftmax, made: Scores | None) -> None:
        """Note a sum over tokens with weights, as `Follower.weighed` is told of it."""
        running = self._recorder.running
        counts = {n for run in running[-NEAR:] for n in _counts(run, self._samples)}
        terms, axes = by.extent if made is None else made.extent
        each = counts.intersection(axes) or counts.intersection(n // self._samples for n in axes)
        apart = bool(each) and id(running[-1]) not in self.sampling
        # keys by values, by which queries are multiplied then, together with others perhaps
        state = isinstance(by, Scores) and (terms == 1 or not counts.intersection(by.sides))
        if terms in counts or (state and by.extent[0] in counts) or (terms > 1 and not apart):
            self.add(made)

    def absolve(self, scores: Scores) -> None:
        """Forget products that are scores after all."""
        for place in zip(map(id, scores.left), map(id, scores.right), strict=True):
            self.found.pop(place, None)

    def names(self) -> str:
        """Return the number of modules, and names and types of some."""
        runs = {run.name: run.module for run, _ in self.found.values()}
        found = [f"{name or 'the model itself'} ({type(m).__name__})" for name, m in runs.items()]
        return f"{len(found)} module{'s' * (len(found) > 1)}: {listed(found, NAMED)}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, running = func(*args, **(kwargs or {})), self._recorder.running
        if self._recorder.is_paused or not running:
            return out
        package, _, operation = func._schema.name.rpartition("::")
        if operation.startswith("grid_sampler"):
            self.sampling.add(id(running[-1]))
        traced = operation == "_softmax" and isinstance(running[-1].module, torch.jit.ScriptModule)
        like = [t.shape for t in args if isinstance(t, Tensor) and t.ndim > 2][:3]
        qkv = len(like) == 3 and len({(len(shape), shape[-1]) for shape in like}) == 1
        if FUSED_ATTENTION.match(operation) or traced or (qkv and package not in KNOWN):
            self.add()
        return out


def _counts(run: ModuleRun, samples: int) -> Iterator[int]:
    """Yield what may be numbers of tokens of a module's inputs."""
    for t in tree_leaves((run.args, run.kwargs)):
        ids = isinstance(t, Tensor) and t.ndim == 2 and len(t) == samples
        if ids or (_is_floating(t) and t.ndim > 1):
            axes = (*t.shape, *(() if t.is_floating_point() else (1,)))
            axes = axes[1:] if axes[0] == samples else axes
            # pictures have channels first or last
            yield from {prod(axes[:-1]), prod(axes[1:]) if t.ndim > 3 else 0} - {0, 1}


def layers_left_out(
    model: nn.Module, inputs: Mapping[str, Any], captured: Collection[str]
) -> Iterator[str]:
    """Yield a sentence for each list of layers of which some attend and others mix tokens."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for name, module in lists.items():
        inside = [one.removeprefix(f"{name}.") for one in captured if one.startswith(f"{name}.")]
        attending = {one.partition(".")[0] for one in inside}
        others = [layer for i, layer in enumerate(module) if str(i) not in attending]
        within = any(name.startswith(f"{outer}.") for outer in lists)  # parts of one layer
        if attending and not within and (count := _mixing(model, inputs, others)):
            yield (
                f"softmax attention was found in {len(module) - len(others)} of {len(module)} "
                f"layers in {name}; the others that mix tokens ({count}) do it in another way, "
                "and are left out"
            )


def _mixing(model: nn.Module, inputs: Mapping[str, Any], layers: Collection[nn.Module]) -> int:
    """Return how many layers mix tokens, or may do so."""
    found: set[nn.Module] = set()
    inside: list[nn.Module] = []

    def enter(layer: nn.Module, module: nn.Module, *given: Any) -> None:
        inside.append(module)
        if len(inside) == 1 and not _keeps_apart(module, given):
            found.add(layer)

    def leave(*_: Any) -> None:
        inside.pop()

    with ExitStack() as hooks:
        for layer, module in [(one, module) for one in layers for module in one.modules()]:
            before = partial(enter, layer)
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leave))
        if layers:
            forward(model, inputs)
    return len(found)


def _keeps_apart(module: nn.Module, given: Any) -> bool:
    """Return whether a module makes the same of all tokens but the first if that one changes.

    False where it cannot be told, since it is given no tokens (samples, ..., D).
    """
    x = next((t for t in tree_leaves(given) if _is_floating(t) and t.ndim > 2), None)
    if x is None:
        return False
    first, moved = (slice(None), *(0 for _ in x.shape[1:-1])), x.clone()
    moved[first] = x[first].flip(-1)
    made = []
    try:
        for args, kwargs in (given, tree_map(lambda t: moved if t is x else t, given)):
            outputs = filter(_is_floating, tree_leaves(module.forward(*args, **kwargs)))
            made.append([t.clone() for t in outputs])
            for t in made[-1]:
                t[first] = 0
        return all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(*made, strict=True))
    except RAISED:
        return False


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()

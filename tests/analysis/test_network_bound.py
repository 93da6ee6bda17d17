"""Bounds over balls on several blocks, against the exact constants of the models themselves at points of the ball."""

from collections.abc import Callable

import pytest
import torch
import transformers as tf
from support.models import AFFINE, LLAMA, MODERN, TEXT, build, inputs_for
from torch import Tensor

import lipbound as lb
from lipbound.analysis.network import chain
from lipbound.analysis.network_bound import network_bound
from lipbound.errors import LipboundError

MODELS: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "bert": AFFINE["bert"],
    "vit": AFFINE["vit"],
    "gpt2": AFFINE["gpt2"],
    "llama": MODERN["Llama"],
    "bert, relu": lambda: tf.BertModel(tf.BertConfig(**TEXT, hidden_act="relu")),
}
SMALL = {"length": 4}
OWN = 1e-6
"""Relative rounding of the models' own float64 passes: Llama's normalisation computes in float32 whatever the model is in."""


def double(model: tf.PreTrainedModel, **options: object) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in inputs_for(model, **options).items()}


def dense(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobian of one sample by reverse mode, (outputs, inputs)."""
    with torch.enable_grad():
        found = torch.autograd.functional.jacobian(f, x, vectorize=True)
    return found.reshape(-1, x.numel())


def norms_at(model: tf.PreTrainedModel, inputs: dict[str, Tensor], moves: Tensor, start: str | int, end: str | int) -> Tensor:
    """Of the model's own Jacobian where the first sample has moved, dense, (moves,)."""
    one = {name: t[:1] for name, t in inputs.items()}
    with chain(model, one, start, end) as (f, x, real):
        free = moves if real is None else moves * real
        return torch.stack([torch.linalg.matrix_norm(dense(f, x + move), 2) for move in free])


def steepest_move(model: tf.PreTrainedModel, inputs: dict[str, Tensor], radius: float, start: str | int, end: str | int) -> Tensor:
    """A move that makes the norm larger: ascent on |J v| for the top singular vector, projected on the sphere, (1, N, D)."""
    one = {name: t[:1] for name, t in inputs.items()}
    with chain(model, one, start, end) as (f, x, real):
        move = torch.zeros_like(x)
        for _ in range(4):
            v = torch.linalg.svd(dense(f, x + move))[2][0].view_as(x)
            with torch.enable_grad():
                at = (x + move).requires_grad_()
                y = torch.func.jvp(f, (at,), (v,))[1]
                (up,) = torch.autograd.grad(y.norm(), at)
            up = up if real is None else up * real
            move = radius * up / up.norm().clamp_min(1e-300)
    return move


@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "bert")])
def test_nothing_in_the_ball_is_above(name: str) -> None:
    """Per model all of it and one block of it x 1 radius, 5 points each."""
    model = build(MODELS[name]).double()
    inputs = double(model, **SMALL)
    for start, end in (("embeddings", "last_hidden_state"), (1, 1)):
        radii = [0.0, 1e-2] if end == "last_hidden_state" else [0.0, 1e-3]
        found = network_bound(model, inputs, radii, start=start, end=end)
        exact = lb.network_norm(model, inputs, start=start, end=end, tol=1e-9).lower
        assert bool((found.lower <= exact * (1 + OWN)).all())
        assert bool((exact <= found.centre * (1 + OWN)).all())
        torch.testing.assert_close(found.lower, exact, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.upper[:, 0], exact, rtol=3e-3, atol=0)  # exact as the radius goes to 0
        assert bool((found.upper.diff(dim=1) >= 0).all())
        assert bool((found.upper <= found.product * (1 + 1e-9)).all())
        g = torch.Generator().manual_seed(2)
        with chain(model, {k: t[:1] for k, t in inputs.items()}, start, end) as (_, x, _real):
            moves = torch.randn(4, *x.shape, generator=g, dtype=torch.float64)
        moves = moves / moves.flatten(1).norm(dim=1)[:, None, None, None]
        for i, radius in enumerate(radii[1:], 1):
            points = torch.cat([radius * moves, steepest_move(model, inputs, radius, start, end)[None]])
            assert bool((norms_at(model, inputs, points, start, end) <= found.upper[0, i] * (1 + OWN)).all())


def test_padding_is_held_fixed() -> None:
    model = build(MODELS["bert"]).double()
    padded = double(model, padded=True, length=6)
    short = {"input_ids": padded["input_ids"][1:, :3], "attention_mask": padded["attention_mask"][1:, :3]}
    one, other = (network_bound(model, given, 1e-3) for given in (padded, short))
    torch.testing.assert_close(one.upper[1:], other.upper, rtol=1e-3, atol=0)  # upper ends are this wide
    assert one.upper.shape == (2,)
    assert one.sublayers == ("block 0, attention", "block 0, MLP", "block 1, attention", "block 1, MLP")


def test_telescoping_is_below_the_product_of_layers() -> None:
    model = build(MODELS["vit"]).double()
    found = network_bound(model, double(model), 1e-6)
    assert bool((found.upper < 0.5 * found.product).all())


def test_what_is_not_understood_is_refused() -> None:
    with pytest.raises(LipboundError, match="block 0"):
        network_bound(build(MODERN["GPT-NeoX"]), inputs_for(build(MODERN["GPT-NeoX"])), 0.1)  # attention and MLP side by side
    model = build(lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA)))
    inputs = inputs_for(model)
    for options, words in (
        ({"radius": -1.0}, "radius"), ({"radius": []}, "radius is empty"), ({"start": 5}, "start is 5"), ({"end": "logits"}, "end is 'logits'"),
        ({"start": 1, "end": 0}, "end is block 0 but start is block 1"), ({"delta": 0.0}, "delta"),
    ):  # fmt: skip
        with pytest.raises(LipboundError, match=words):
            network_bound(model, inputs, **({"radius": 0.1} | options))
    with pytest.raises(LipboundError, match="normalised queries"):
        network_bound(build(MODERN["Qwen 3"]), inputs_for(build(MODERN["Qwen 3"])), 0.1)


@pytest.mark.slow
def test_far_away_the_bound_is_infinite() -> None:
    model = build(MODELS["vit"]).double()
    found = network_bound(model, double(model), [1e-6, 1.0, 1e40, 1e59])
    assert bool(torch.isfinite(found.upper[:, 0]).all())
    assert bool((found.upper.diff(dim=1).nan_to_num(0) >= 0).all())
    assert bool(torch.isinf(found.upper[:, 2:]).all())
    assert bool(torch.isinf(found.product[:, 2:]).all())

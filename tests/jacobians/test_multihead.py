"""Whole layers: exact norms against autograd, bounds on them, and runs over them."""

import pytest
import torch
from support.layers import HARD, random_attention
from support.oracles import encloses, jacobians
from torch import Tensor

import lipbound as lb
from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError
from lipbound.jacobians.prepared_map import PreparedMap
from lipbound.jacobians.spectral_norm import spectral_norm

MAPS = ("heads", "layer")


def oracle(att: Attention, map: str) -> Tensor:
    """Float64 SVD of the autograd Jacobians of all heads, side by side or projected and added,
    (samples,)."""
    values = []
    for s in range(att.samples):
        j = jacobians(att.double(), s)
        j = (
            torch.einsum("nhvx,hvo->nox", j, att.w_o.double())
            if map == "layer"
            else j.flatten(1, 2)
        )
        values.append(torch.linalg.svdvals(j.reshape(-1, j.shape[-1]))[0])
    return torch.stack(values)


@pytest.mark.each_value
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_norms_of_layers_match_the_oracle(att: Attention, map: str, method: str) -> None:
    norm = spectral_norm(att, map=map, method=method, tol=1e-8, vectors=True)
    exact = oracle(att, map)
    assert norm.lower.shape == norm.steps.shape == (2,)
    assert norm.left is not None
    assert norm.right is not None
    assert norm.left.shape == (2, att.tokens, att.heads * att.d_v if map == "heads" else 9)
    assert norm.right.shape == att.x.shape
    measured = PreparedMap(att, map)
    error = measured.roundoff.tensors * 2.0 ** measured.exponents[0]
    assert encloses(norm, exact, 1e-7, error)
    assert bool((norm.converged | (error > 1e-9 * exact)).all())
    j = jacobians(att, 0)
    j = torch.einsum("nhvx,hvo->nox", j, att.w_o) if map == "layer" else j.flatten(1, 2)
    image = j.reshape(-1, j.shape[-1]) @ norm.right[0].flatten()
    assert float(image.norm() / exact[0]) == pytest.approx(1, rel=1e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("map", MAPS)
def test_float32_layers(kind: str, map: str) -> None:
    att = random_attention(kind, dtype=torch.float32)
    norm = spectral_norm(att, map=map, tol=1e-3, delta=1e-10)
    exact = oracle(att, map)
    measured = PreparedMap(att.double(), map)
    tiny = measured.roundoff.tensors * 2.0 ** measured.exponents[0]
    assert encloses(norm, exact, 1e-3, tiny)


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("rule", ["best", "sum", "root_sum_square", "folded"])
def test_no_sound_bound_is_below_a_layers_norm(att: Attention, map: str, rule: str) -> None:
    exact = oracle(att, map)
    for name in bounds.resolve("all"):
        if bounds.get(name).map == "head":
            value, sound = (
                bounds.whole_layer(att, name, map=map, rule=rule),
                bounds.get(name).sound(att).all(-1),
            )
            assert value.shape == exact.shape
            assert bool((~sound | (value >= exact * (1 - 1e-9))).all()), name


def test_rules_are_their_statements(att: Attention) -> None:
    heads = bounds.get("yudin")(att)
    slices = torch.linalg.matrix_norm(att.w_o, 2)
    whole = torch.linalg.matrix_norm(att.w_o.flatten(0, 1), 2)
    expected = {
        ("heads", "sum"): heads.sum(1),
        ("heads", "root_sum_square"): heads.square().sum(1).sqrt(),
        ("layer", "sum"): (heads * slices).sum(1),
        ("layer", "root_sum_square"): whole * heads.square().sum(1).sqrt(),
    }
    for (map, rule), value in expected.items():
        torch.testing.assert_close(
            bounds.whole_layer(att, "yudin", map=map, rule=rule), value, rtol=1e-10, atol=0
        )
    best = torch.minimum(expected["layer", "sum"], expected["layer", "root_sum_square"])
    torch.testing.assert_close(bounds.whole_layer(att, "yudin"), best, rtol=1e-10, atol=0)


def test_folded_heads_are_their_statement(att: Attention) -> None:
    folded, e = att.fold_output()
    values = bounds.get("lipbound")(folded)
    for s in range(att.samples):
        omega = torch.tensor(
            [[float(torch.linalg.matrix_norm(a.mT @ b, 2)) for b in e] for a in e],
            dtype=torch.float64,
        )
        pairs = float(values[s] @ omega @ values[s]) ** 0.5
        stacked = float(torch.linalg.matrix_norm(torch.cat(list(e), 1), 2) * values[s].norm())
        assert float(bounds.whole_layer(att, "lipbound", rule="folded")[s]) == pytest.approx(
            min(pairs, stacked), rel=1e-8
        )


def test_runs_over_layers() -> None:
    ds = lb.compare(
        "builtin:gpt2",
        samples=2,
        max_length=12,
        layers=[1, 4],
        map="layer",
        bounds="all",
        progress=False,
    )
    assert ds["exact"].dims == ("sample", "layer")
    assert "kim" not in ds
    assert "exact_l2" not in ds
    assert all(entry["broken"] == 0 for entry in ds.attrs["audit"].values())
    assert bool((ds["exact_upper"] <= ds["exact"] * 1.001).all())
    assert (
        lb.tables.summary(ds).loc["lipbound", "geomean"]
        < lb.tables.summary(ds).loc["lipbound_block", "geomean"]
    )
    assert "sample" in [axes.get_xlabel() for axes in lb.plots.heatmaps(ds, bounds=["yudin"]).axes]
    att = lb.capture(*_model())[1]
    direct = spectral_norm(att, map="layer", tol=1e-9).lower
    assert float(direct[0]) == pytest.approx(float(ds["exact"][0, 0]), rel=2e-3)


def _model() -> tuple:
    from lipbound.models.inputs import prepare
    from lipbound.models.loading import load_checkpoint

    checkpoint = load_checkpoint("builtin:gpt2")
    return checkpoint.model, prepare(checkpoint, samples=2, max_length=12).batch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "kim"}, "leave it out"),
        ({"name": "yudin", "map": "head"}, "unknown map of a whole layer 'head'"),
        ({"name": "yudin", "rule": "sums"}, "did you mean 'sum'"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(LipboundError, match=message):
        bounds.whole_layer(random_attention("plain"), **options)


def test_a_layer_needs_its_projection() -> None:
    att = random_attention("plain", w_o=False)
    for call in (lambda: spectral_norm(att, map="layer"), lambda: bounds.whole_layer(att, "yudin")):
        with pytest.raises(LipboundError, match="map='heads'"):
            call()


POWERS = {
    "a large scale": {"scale": 190, "w_q": -190},
    "a small scale": {"scale": -190, "w_q": 100, "w_k": 90},
    "large values": {"w_v": 180, "w_o": -190},
    "small values": {"w_v": -150, "w_o": -140},
}
"""By which powers of two tensors of a layer are multiplied, such that scores stay as they are."""


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("powers", POWERS)
def test_layers_of_extreme_sizes_have_the_numbers_of_ordinary_ones(powers: str, map: str) -> None:
    """What is multiplied by powers of two has the same norms, but for such a power."""
    by = POWERS[powers]
    att = random_attention("plain")
    tensors = {
        name: getattr(att, name) * 2.0 ** by.get(name, 0) for name in ("w_q", "w_k", "w_v", "w_o")
    }
    far = Attention(att.x, **tensors, scale=att.scale * 2.0 ** by.get("scale", 0))
    near = Attention(att.x, att.w_q, att.w_k, att.w_v, w_o=att.w_o)
    unit = 2.0 ** (by.get("w_v", 0) + (by.get("w_o", 0) if map == "layer" else 0))
    exact = spectral_norm(near, map=map, method="dense").lower * unit
    for method in ("lanczos", "dense"):
        norm = spectral_norm(far, map=map, method=method, tol=1e-6, delta=1e-6)
        torch.testing.assert_close(norm.lower, exact, rtol=2e-6, atol=0)
        torch.testing.assert_close(norm.upper, exact, rtol=2e-6, atol=0)
    for kind in ("every-token", "one-token", "output-token"):
        found, expected = (lb.token_norm(layer, kind, map=map) for layer in (far, near))
        assert bool((found.lower <= expected.upper * unit * (1 + 1e-9)).all())
        assert bool((found.upper >= expected.lower * unit * (1 - 1e-9)).all())
        assert bool(found.converged.all())


def test_residual_blocks_of_a_large_scale() -> None:
    att = random_attention("plain")
    near = Attention(att.x, att.w_q, att.w_k, att.w_v, w_o=att.w_o)
    far = Attention(
        att.x, att.w_q * 2.0**-190, att.w_k, att.w_v, w_o=att.w_o, scale=att.scale * 2.0**190
    )
    norm = spectral_norm(far, map="residual", delta=1e-6, tol=1e-6)
    exact = spectral_norm(near, map="residual", method="dense").lower
    torch.testing.assert_close(norm.lower, exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(norm.upper, exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("method", ["lanczos", "dense"])
@pytest.mark.parametrize("sink", [370.0, 745.0, 1500.0])
def test_heads_beside_each_other_that_attend_to_sinks(sink: float, method: str) -> None:
    """Probabilities, or their squares, underflow: the norm is tiny, but it is not zero."""
    att = random_attention("plain")
    sinks = torch.full((att.heads,), sink, dtype=torch.float64)
    att = Attention(att.x, att.w_q, att.w_k, att.w_v, sinks=sinks)
    for delta in (1e-6, None):
        norm = spectral_norm(att, map="heads", method=method, delta=delta)
        assert bool((norm.upper > 0).all())
        assert sink < 740 or not bool(norm.converged.any())

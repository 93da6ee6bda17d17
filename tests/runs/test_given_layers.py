"""Runs of layers that are given themselves, and of ready inputs under their own keyword."""

import numpy as np
import pytest
import torch
import xarray as xr
from support.checks import normal_layer, refused

import lipbound as lb


def layer(samples: int = 2, heads: int = 2, dtype: torch.dtype = torch.float64) -> lb.Attention:
    return normal_layer(heads, 5, 8, 4, samples=samples, heads=heads).to(dtype)


def test_a_run_of_layers_has_their_norms_and_bounds() -> None:
    layers = [layer(), layer(heads=3)]
    ds = lb.compare(layers, dtype="float64", bounds="lipbound,kim", progress=False)
    for i, att in enumerate(layers):
        norm = lb.spectral_norm(att, tol=1e-6).lower
        np.testing.assert_allclose(ds["exact"][:, i, : att.heads], norm, rtol=1e-3)
        bound = lb.bounds.get("lipbound")(att)
        np.testing.assert_allclose(ds["lipbound"][:, i, : att.heads], bound, rtol=1e-9)
    assert ds.attrs["model"] == "2 layers"
    assert bool(np.isnan(ds["exact"][:, 0, 2]).all())
    assert lb.verify(ds, model=layers).ok
    changed = [layers[0], layers[1].at(1.1 * layers[1].x)]
    assert not lb.verify(ds, model=changed).ok


def test_samples_are_taken_one_block_at_a_time() -> None:
    """A small memory measures layers sample by sample, with the same numbers."""
    given = [layer(samples=5)]
    whole, parts = (
        lb.compare(given, dtype="float64", bounds="none", memory=memory, progress=False)
        for memory in ("1GB", "9kB")
    )
    np.testing.assert_allclose(whole["exact"], parts["exact"], rtol=1e-9)
    first = lb.compare(given, dtype="float64", bounds="none", samples=2, progress=False)
    np.testing.assert_allclose(whole["exact"][:2], first["exact"], rtol=1e-9)


@pytest.mark.parametrize(
    "options", [{}, {"map": "layer"}, {"norm": "every-token"}], ids=["heads", "layer", "tokens"]
)
def test_layers_that_are_trained_have_the_numbers_of_others(options: dict[str, str]) -> None:
    """Nothing is differentiated, whatever of the layers takes derivatives."""
    plain = normal_layer(2, 5, 8, 4, samples=2, heads=2)
    plain = plain.with_parts(w_o=plain.w_v.mT.contiguous())
    trained = plain.with_parts(w_q=plain.w_q.clone().requires_grad_())
    given = ([plain], [trained])
    runs = [lb.compare(one, bounds="all", progress=False, **options) for one in given]
    xr.testing.assert_equal(*runs)


def test_layers_without_a_closed_form() -> None:
    model, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    given = lb.capture(model, {"query": x, "key": x, "value": x}, closed=False)
    ds = lb.compare([*given, layer(dtype=torch.float32)], bounds="none", progress=False)
    assert ds["measured"].values.tolist() == ["automatic", "closed form"]
    norm = lb.spectral_norm(given[0], tol=1e-6).lower
    np.testing.assert_allclose(ds["exact"][:, 0], norm, rtol=1e-3)
    with pytest.raises(lb.LipboundError, match="no module to run"):
        lb.verify(ds, model=[*given, layer(dtype=torch.float32)], automatic=True)


def test_what_layers_cannot_have() -> None:
    for given, words, error in (
        (
            ([layer(), layer(samples=3)],),
            "as many samples each; these have [2, 3]",
            lb.errors.CheckpointError,
        ),
        (([layer()], "a text"), "bring their own inputs", lb.errors.InputsError),
        (([],), "give a hub id", lb.errors.CheckpointError),
    ):
        refused(lambda given=given: lb.compare(*given, progress=False), words, error=error)
    with pytest.warns(lb.Notice, match="1 of 1 layers are measured in float32"):
        ds = lb.compare([layer()], bounds="none", progress=False)
    norm = lb.spectral_norm(layer(), tol=1e-6).lower
    np.testing.assert_allclose(ds["exact"][:, 0], norm, rtol=1e-3)


def test_numbers_without_an_axis_of_samples() -> None:
    """A time, one for each sample or one for all, and places of any layout, go in as they are."""

    class Timed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x: torch.Tensor, times: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            moved = x * times.view(-1, 1, 1) + grid.mean()
            return self.inner(moved)

    model, x, grid = Timed().eval(), torch.randn(2, 5, 8), torch.randn(7, 2)
    each = {"x": x, "times": torch.tensor([2.0, 2.0]), "grid": grid}
    with pytest.warns(lb.Notice, match=r"grid, of shape \(7, 2\), is given to Timed whole"):
        some = lb.compare(model, each, bounds="none", progress=False)
    one = each | {"times": torch.tensor(2.0)}
    others = lb.compare(model, one, bounds="none", progress=False)
    np.testing.assert_allclose(some["exact"], others["exact"], rtol=1e-6)
    changed = lb.compare(model, one | {"grid": grid + 1}, bounds="none", progress=False)
    assert changed.attrs["data_fingerprint"] != others.attrs["data_fingerprint"]


def test_automatic_differentiation_verifies_a_run() -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    ds = lb.compare(model, x, bounds="none", progress=False)
    found = lb.verify(ds, model=model, data=x, automatic=True)
    assert found.ok
    assert "exact by automatic differentiation" in str(found)
    ds["exact"][0, 0, 0] *= 1.1
    ds["exact_upper"][0, 0, 0] *= 1.1
    wrong = lb.verify(ds, model=model, data=x, automatic=True)
    assert any(one.startswith("exact by automatic differentiation at") for one in wrong.problems)

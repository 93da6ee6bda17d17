"""Our bounds on long heads with variants, 16 and 32 bits for every pair of tokens: never below the exact norm, and near those of float64 matrices."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import judge
from support.hard_heads import FAMILIES
from support.oracles import oracle
from support.strategies import examples
from support.variants import MASKS, VARIANTS, layer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lipbound import bounds, devices
from lipbound.attention.layer import Attention
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.bounds.lipbound2026 import variant_forms, variant_inner, variants
from lipbound.bounds.lipbound2026.parts import samples_of
from lipbound.bounds.lipbound2026.streaming import halves, parts, plain, rows
from lipbound.bounds.lipbound2026.streaming.halves import Halves
from lipbound.bounds.lipbound2026.streaming.rows import Rows
from lipbound.errors import LipboundError

HAS = [("rotation",), ("norm",), ("together", "cap"), ("sinks",), ("rotation", "norm"), ("rotation", "cap", "sinks")]
FAMILY = [name for name in sorted(FAMILIES) if judge.case(name, torch.float64, 0).variants]


@pytest.fixture
def nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No float64 matrix over all pairs of tokens is stored, rows come four at a time, tokens one by one, and two entries of a row are the largest."""
    monkeypatch.setattr(plain, "STORED", 0.0)
    monkeypatch.setattr(rows, "ROW_BYTES", 8 * 50)
    monkeypatch.setattr(parts, "ROW_BYTES", 8 * 50)
    monkeypatch.setattr(variant_forms, "FORM_BYTES", 8)
    monkeypatch.setattr(variant_forms, "PAIR_BYTES", 0)
    monkeypatch.setattr(variant_inner, "LARGEST", 2)
    monkeypatch.setattr(variant_inner, "CHUNK", 8 * 20)
    monkeypatch.setattr(halves, "ROWS", 4)


def all_four(att: Attention) -> Tensor:
    """Both bounds, and those in the norms of tokens that come with them."""
    return variants.together(att)


@pytest.mark.each_value
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("has", HAS)
def test_near_the_stored_form(has: tuple[str, ...], mask: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(variants, "ALL_PAIRS", 0)
    make = lambda: layer(4, frozenset(has), mask=mask, n=9)  # noqa: E731
    stored = all_four(make())
    request.getfixturevalue("nothing_fits")
    value, exact = all_four(make()), oracle(make())
    assert bool((value[..., :2] >= exact[..., None]).all())
    most = torch.tensor([1.06, 1.011, 1.002, 1.002], dtype=torch.float64)
    assert bool((value <= most * stored).all()), (value / stored).amax((0, 1))
    assert bool((value[..., 1:] >= stored[..., 1:] * (1 - 1e-5)).all()), (value / stored).amin((0, 1))


@pytest.mark.usefixtures("nothing_fits")
@settings(examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6), has=st.sets(st.sampled_from(VARIANTS), min_size=1, max_size=3), mask=st.sampled_from(MASKS),
    n=st.integers(1, 8), scale=st.sampled_from([1e-3, 0.1, 1.0, 10.0]), same=st.booleans(), biases=st.booleans(),
)  # fmt: skip
def test_never_below_the_dense_norm(seed: int, has: set[str], mask: str, n: int, scale: float, same: bool, biases: bool) -> None:
    att = layer(seed, frozenset(has), mask=mask, n=n, scale=scale, same=same, biases=biases)
    value, exact = all_four(att), oracle(att)
    assert not bool(value.isnan().any())
    assert bool((value[..., :2] >= exact[..., None] * (1 - 1e-9)).all()), float((value[..., 0] / exact).min())


def test_maps_of_padding_do_not_matter(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """At tokens of zeros the derivative of a normalisation is 1e15 times its weight."""
    x = layer(4, frozenset(), n=6).x.clone()
    x[1, 4:] = 0.0
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    weights = [torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)]
    norm = QKNorm(torch.ones(2, 4, dtype=torch.float64), None, 1e-30)
    make = lambda: Attention(x, *weights, norm_q=norm, valid=valid)  # noqa: E731
    stored = all_four(make())
    request.getfixturevalue("nothing_fits")
    value = all_four(make())
    assert bool((value[..., :2] >= oracle(make())[..., None]).all())
    assert bool((value <= 1.1 * stored).all()), (value / stored).amax((0, 1))


@pytest.mark.usefixtures("nothing_fits")
@pytest.mark.parametrize("family", FAMILY)
def test_nothing_is_wrong_on_hard_heads(family: str) -> None:
    """Norms are known to 80 digits; nothing is allowed for rounding."""
    att = judge.case(family, torch.float64, 0).select(slice(0, 2))
    verdicts = list(judge.judge(att, family, methods=(), chosen=["lipbound", "lipbound_block"], l2=False))
    assert verdicts
    wrong = [verdict for verdict in verdicts if verdict.miss > 0]
    assert not wrong, judge.summary(wrong)


@pytest.mark.usefixtures("nothing_fits")
@pytest.mark.parametrize("has", HAS)
def test_rows_are_those_of_the_layer(has: tuple[str, ...]) -> None:
    for mask in MASKS:
        for sample in samples_of(layer(4, frozenset(has), mask=mask, n=9)):
            one = sample.layer
            for head in range(one.heads):
                blocks = list(Rows(one, head, 1).with_weights())
                assert len(blocks) > 1
                torch.testing.assert_close(torch.cat([p for _, p, _ in blocks]), one.p[0, head])
                torch.testing.assert_close(torch.cat([t for _, _, t in blocks]), one.weights[0, head])


def test_halves_are_never_smaller() -> None:
    """Over the whole range of float64, row by row; zeros stay zero."""
    g = torch.Generator().manual_seed(0)
    n = 600
    sizes = 2.0 ** torch.randint(-40, 1, (n, n), generator=g)
    values = torch.rand(n, n, generator=g, dtype=torch.float64) * sizes * (torch.rand(n, n, generator=g) < 0.8)
    values *= 10.0 ** torch.linspace(-150, 150, n, dtype=torch.float64)[:, None]
    matrix = Halves(n, values.device, values.new_ones(()))
    for part in (slice(0, 100), slice(100, n)):
        matrix.put(part, values[part])
    found, largest = matrix.rows(slice(0, n)), values.amax(-1, keepdim=True)
    assert bool((found >= values).all())
    assert bool(((found == 0) == (values == 0)).all())
    assert bool((found <= values * (1 + 2.0**-9) + 2.0**-22 * largest).all())
    torch.testing.assert_close(matrix.columns(slice(3, 9)), found[:, 3:9].mT, rtol=0, atol=0)
    y = torch.rand(n, 2, generator=g, dtype=torch.float64)
    torch.testing.assert_close(matrix.times(y), found @ y)
    torch.testing.assert_close(matrix.transposed_times(y), found.mT @ y)

    matrix = Halves(n, values.device, values.new_full((), 3.0))
    matrix.put_columns(slice(0, n), 3 * sizes)
    assert bool((matrix.columns(slice(0, n)) >= 3 * sizes).all())
    assert bool((matrix.columns(slice(0, n)) <= 3 * sizes * (1 + 2.0**-9) + 2.0**-21).all())


class Largest(TorchDispatchMode):
    """How many bytes the largest tensors of each dtype have that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.numbers[t.dtype] = max(self.numbers.get(t.dtype, 0), t.untyped_storage().nbytes() // t.element_size())
        return out


def test_no_float64_tensor_has_an_entry_for_every_pair_of_tokens(nothing_fits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 160
    monkeypatch.setattr(rows, "ROW_BYTES", 8 * n * 16)
    monkeypatch.setattr(parts, "ROW_BYTES", 8 * n * 16)
    monkeypatch.setattr(variant_inner, "CHUNK", 8 * n * 16)
    with Largest() as largest:
        bounds.get("lipbound")(layer(4, frozenset({"rotation", "cap"}), n=n, samples=1))
    assert largest.numbers[torch.float16] == largest.numbers[torch.float32] == n * n
    assert largest.numbers[torch.float64] <= n * 64


def test_memory_that_is_not_free_is_refused_before_it_is_taken(nothing_fits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda device: 1000.0)
    with pytest.raises(LipboundError, match=r"our bounds of heads with rotation at 5 tokens keep three numbers .* GB of memory are free"):
        bounds.get("lipbound")(layer(4, frozenset({"rotation"})))


def test_derivatives_come_from_the_stored_form(nothing_fits: None) -> None:
    att = layer(4, frozenset({"rotation"}))
    x = att.x.clone().requires_grad_(True)
    bounds.get("lipbound")(att.with_parts(x=x)).sum().backward()
    assert x.grad is not None
    assert float(x.grad.abs().amax()) > 0

"""A variant that the package does not know, written as CONTRIBUTING says: everything about it comes
from its own methods."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from support.layers import causal
from torch import Tensor

import lipbound as lb
from lipbound.attention.variants.base import REGISTERED, UNIT, Shapes, Variant
from lipbound.errors import AttentionError
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.rounding import tensor_error
from lipbound.jacobians.streaming import StreamedHeadJacobian


@pytest.fixture
def root_cap() -> type[Variant]:
    """A cap by a root, known for the time of one test."""

    @dataclass(frozen=True)
    class RootCap(Variant):
        value: float

        name = "root_cap_of_this_test"
        title = "scores capped by a root"
        stage = 2
        place = 4
        shift_invariant = False

        def check(self, shapes: Shapes) -> None:
            if not self.value > 0:
                raise AttentionError(f"root cap is {self.value}; it must be a positive number")

        def scores(self, z: Tensor) -> Tensor:
            return z * (1 + (z / self.value) ** 2) ** -0.5

        def slopes(self, z: Tensor) -> Tensor:
            return (1 + (z / self.value) ** 2) ** -1.5

        def rounded_scores(self, error: Tensor, reach: Tensor) -> tuple[Tensor, Tensor | float]:
            # the slope is at most 1, and that of its logarithm at most 1.5 / value
            slopes = torch.expm1(1.5 * error / self.value) * (1 + 64 * UNIT) + 64 * UNIT
            return error + 16 * UNIT * reach.clamp_max(self.value), slopes

    REGISTERED.remove(RootCap)
    return RootCap


def layer(root_cap: type[Variant], **others: object) -> lb.Attention:
    g = torch.Generator().manual_seed(0)
    x, w_q, w_k, w_v = (
        torch.randn(s, generator=g, dtype=torch.float64)
        for s in [(2, 6, 9), (3, 9, 4), (3, 9, 4), (3, 9, 4)]
    )
    return lb.Attention(x, w_q, w_k, w_v, steps=[root_cap(0.7)], **others)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_exact_norms_of_a_new_variant(root_cap: type[Variant], cap: float | None) -> None:
    att = layer(root_cap, mask=causal(6), cap=cap)
    exact, error = lb.spectral_norm(att, method="dense"), tensor_error(att)
    for s in range(2):
        for h in range(3):

            def head(x: Tensor, h: int = h) -> Tensor:
                i = torch.arange(6.0, dtype=torch.float64)
                z = 0.5 * (x @ att.w_q[h]) @ (x @ att.w_k[h]).T
                z = z / (1 + z**2 / 0.49).sqrt()
                # of variants of one stage the one that was given first acts first
                z = z if cap is None else cap * torch.tanh(z / cap)
                return torch.softmax(z.masked_fill(i > i[:, None], -math.inf), -1) @ (
                    x @ att.w_v[h]
                )

            jacobian = torch.func.jacrev(head)(att.x[s]).reshape(24, 54)
            torch.testing.assert_close(
                exact.lower[s, h],
                torch.linalg.svdvals(jacobian)[0],
                rtol=1e-12,
                atol=2 * float(error[s, h]),
            )


def test_copies_and_streams_of_a_new_variant(root_cap: type[Variant]) -> None:
    att = layer(root_cap, valid=torch.tensor([[True] * 6, [True] * 4 + [False] * 2]))
    y = torch.randn(6, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        StreamedHeadJacobian(att).gram(y), HeadJacobian(att).gram(y), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(att.select(slice(1, 2), slice(2, 3)).p, att.p[1:, 2:])
    torch.testing.assert_close(att.unpadded(1).p[0], att.p[1, :, :4, :4])
    assert repr(att).endswith("with valid, root_cap_of_this_test)")


def test_nothing_claims_to_cover_a_new_variant(root_cap: type[Variant]) -> None:
    att = layer(root_cap)
    for name in lb.bounds.names():
        assert not lb.bounds.get(name).applies(att)
        with pytest.raises(
            AttentionError, match=f"bound '{name}' does not cover scores capped by a root"
        ):
            lb.bounds.get(name)(att)
    with pytest.raises(AttentionError, match="twice"):
        layer(root_cap, norm_q=None).with_parts(
            scoring=replace(att.scoring, steps=att.scoring.steps * 2)
        )
    with pytest.raises(AttentionError, match=r"root cap is -1.0; it must be a positive number"):
        att.with_parts(scoring=replace(att.scoring, steps=(root_cap(-1.0),)))


def test_nothing_is_said_of_scores_whose_rounding_is_unknown(
    root_cap: type[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_cap, "rounded_scores", Variant.rounded_scores)
    norm = lb.spectral_norm(layer(root_cap), delta=1e-6)
    assert not bool(norm.lower.any())
    assert bool(norm.upper.isinf().all())

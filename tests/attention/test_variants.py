"""A variant that the package does not know, written as CONTRIBUTING says: everything about it comes
from its own methods."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

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
def alibi() -> type[Variant]:
    """Linear biases of positions (Press et al. 2022), known for the time of one test."""

    @dataclass(frozen=True)
    class Alibi(Variant):
        falls: Tensor
        """(heads,): how much a score falls with every token between query and key."""

        name = "alibi_of_this_test"
        title = "linear position biases"
        stage = 2
        place = 4
        axes: ClassVar = {"falls": "h"}

        def tensors(self) -> dict[str, Tensor]:
            return {"alibi": self.falls}

        def check(self, shapes: Shapes) -> None:
            if tuple(self.falls.shape) != shapes.w_q[:1]:
                raise AttentionError(
                    f"alibi has shape {tuple(self.falls.shape)}; it must be {shapes.w_q[:1]}"
                )

        def scores(self, z: Tensor, heads: slice | int, rows: slice) -> Tensor:
            places = torch.arange(z.shape[-1], device=z.device)
            return z - self.falls[heads][..., None, None] * (places[rows, None] - places).abs()

        def rounded_scores(self, error: Tensor, reach: Tensor) -> tuple[Tensor, Tensor | float]:
            # where a probability does not vanish, what is taken away is at most 690 larger than the
            # scores
            return error + 8 * UNIT * (690 + 2 * reach), 0.0

    REGISTERED.remove(Alibi)
    return Alibi


def layer(alibi: type[Variant], **others: object) -> lb.Attention:
    g = torch.Generator().manual_seed(0)
    x, w_q, w_k, w_v = (
        torch.randn(s, generator=g, dtype=torch.float64)
        for s in [(2, 6, 9), (3, 9, 4), (3, 9, 4), (3, 9, 4)]
    )
    return lb.Attention(
        x,
        w_q,
        w_k,
        w_v,
        steps=[alibi(torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64))],
        **others,
    )


@pytest.mark.parametrize("cap", [None, 1.5])
def test_exact_norms_of_a_new_variant(alibi: type[Variant], cap: float | None) -> None:
    att = layer(alibi, mask=causal(6), cap=cap)
    falls = [0.0, 0.3, 2.0]
    exact, error = lb.spectral_norm(att, method="dense"), tensor_error(att)
    for s in range(2):
        for h in range(3):

            def head(x: Tensor, h: int = h) -> Tensor:
                i = torch.arange(6.0, dtype=torch.float64)
                z = 0.5 * (x @ att.w_q[h]) @ (x @ att.w_k[h]).T - falls[h] * (i[:, None] - i).abs()
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


def test_copies_and_streams_of_a_new_variant(alibi: type[Variant]) -> None:
    att = layer(alibi, valid=torch.tensor([[True] * 6, [True] * 4 + [False] * 2]))
    y = torch.randn(6, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        StreamedHeadJacobian(att).gram(y), HeadJacobian(att).gram(y), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(att.select(slice(1, 2), slice(2, 3)).p, att.p[1:, 2:])
    torch.testing.assert_close(att.unpadded(1).p[0], att.p[1, :, :4, :4])
    assert repr(att).endswith("with valid, alibi_of_this_test)")


def test_nothing_claims_to_cover_a_new_variant(alibi: type[Variant]) -> None:
    att = layer(alibi)
    for name in lb.bounds.names():
        assert not lb.bounds.get(name).applies(att)
        with pytest.raises(
            AttentionError, match=f"bound '{name}' does not cover linear position biases"
        ):
            lb.bounds.get(name)(att)
    with pytest.raises(AttentionError, match="twice"):
        layer(alibi, norm_q=None).with_parts(
            scoring=replace(att.scoring, steps=att.scoring.steps * 2)
        )
    with pytest.raises(AttentionError, match=r"alibi has shape \(2,\); it must be \(3,\)"):
        att.with_parts(
            scoring=replace(att.scoring, steps=(alibi(torch.ones(2, dtype=torch.float64)),))
        )


def test_nothing_is_said_of_scores_whose_rounding_is_unknown(
    alibi: type[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alibi, "rounded_scores", Variant.rounded_scores)
    norm = lb.spectral_norm(layer(alibi), delta=1e-6)
    assert not bool(norm.lower.any())
    assert bool(norm.upper.isinf().all())

"""Attacks: each head's result is its own."""

import pytest
import torch

from lipbound.analysis.adversarial_inputs import attack
from lipbound.attention.layer import Attention
from lipbound.jacobians.spectral_norm import spectral_norm


def layer() -> Attention:
    """Three heads at three inputs of 6 tokens, the second input padded."""
    g = torch.Generator().manual_seed(0)
    tensors = [
        2 * torch.randn(s, generator=g) for s in [(3, 6, 8), (3, 8, 4), (3, 8, 4), (3, 8, 4)]
    ]
    valid = torch.arange(6) < torch.tensor([6, 4, 6])[:, None]
    return Attention(*tensors, valid=valid)


@pytest.mark.parametrize("ball", ["token", "frobenius"])
def test_a_head_is_attacked_the_same_whatever_stands_beside_it(ball: str) -> None:
    """Exactly: other heads, other samples and padding change no number."""
    att = layer()
    together = attack(att, 0.5, ball=ball, steps=3, starts=9)
    for s in range(3):
        for h in (0, 2):
            alone = attack(
                att.select(slice(s, s + 1), slice(h, h + 1)), 0.5, ball=ball, steps=3, starts=9
            )
            torch.testing.assert_close(alone.norm[0, 0], together.norm[s, h], rtol=1e-9, atol=0)
    unpadded = attack(att.unpadded(1), 0.5, ball=ball, steps=3, starts=9)
    torch.testing.assert_close(unpadded.norm[0], together.norm[1], rtol=1e-9, atol=0)
    there = spectral_norm(
        att.select(slice(0, 1), slice(0, 1)).double().at(together.x[0, :1].double()), tol=1e-9
    ).lower
    torch.testing.assert_close(there[0, 0], together.norm[0, 0], rtol=1e-5, atol=0)


def test_seeds_differ_and_repeat() -> None:
    att = layer().select(slice(0, 1))
    first, again, other = (
        attack(att, 2.0, steps=1, starts=12, seed=seed).norm for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)

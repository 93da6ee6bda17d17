"""What the maps of single tokens do to vectors: rotations without matrices, other maps
with them."""

import pytest
import torch
from support.variants import layer

from lipbound.attention.layer import Attention
from lipbound.attention.variants.rotary import Rotation
from lipbound.jacobians.token_tangents import Tangents


def rotated(width: int) -> Attention:
    """A layer whose queries and keys of six coordinates are turned in some of them, and made
    longer."""
    g = torch.Generator().manual_seed(0)
    x, *w = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in [(1, 5, 7), (1, 7, 6), (1, 7, 6), (1, 7, 3)]
    )
    turn = Rotation.of_angles(torch.randn(5, width // 2, generator=g))
    return Attention(x, *w, rotation=Rotation(1.2 * turn.cos, 1.2 * turn.sin))


@pytest.mark.parametrize("tokens", [slice(1, 4), torch.tensor([4, 0, 2])])
@pytest.mark.parametrize(
    "kind", ["all turned", "some turned", "norm", "rotation and norm", "together", "plain"]
)
def test_maps_of_vectors_are_those_of_the_matrices(kind: str, tokens: slice | torch.Tensor) -> None:
    widths = {"all turned": 6, "some turned": 4}
    others = {
        "norm": {"norm"},
        "rotation and norm": {"rotation", "norm"},
        "together": {"together"},
        "plain": set(),
    }
    att = (
        rotated(widths[kind])
        if kind in widths
        else layer(1, frozenset(others[kind])).of_samples(slice(0, 1))
    )
    tangents, d = Tangents(att, 0, 0), att.d
    maps = tangents._passages["k"].matrices(0, tokens, d)
    maps = torch.eye(d, dtype=torch.float64)[None] if maps is None else maps
    g = torch.Generator().manual_seed(1)
    y, z = (
        torch.randn(len(maps), 4, width, generator=g, dtype=torch.float64)
        for width in (d, maps.shape[1])
    )
    torch.testing.assert_close(tangents.turned("k", y, tokens), y @ maps.mT)
    torch.testing.assert_close(tangents.returned("k", z, tokens), z @ maps)
    longest = tangents.longest("k", tokens)
    assert bool((longest >= torch.linalg.matrix_norm(maps.abs(), 2) * (1 - 1e-14)).all())
    torch.testing.assert_close(
        longest, (maps.abs().sum(-1).amax(-1) * maps.abs().sum(-2).amax(-1)).sqrt()
    )

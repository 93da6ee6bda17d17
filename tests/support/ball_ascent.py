"""Steepest ascent of the norm of J over balls around small plain heads: dense Jacobians of the
definition, in float64, many heads at once."""

import torch
from support.layers import normal
from support.oracles import dense_jacobians
from torch import Tensor

from lipbound.attention.layer import Attention


def length(move: Tensor, ball: str) -> Tensor:
    """Of every token, or of all of them."""
    dim = -1 if ball == "token" else (-2, -1)
    return torch.linalg.vector_norm(move, dim=dim, keepdim=True).clamp_min(1e-300)


def unit(move: Tensor, ball: str) -> Tensor:
    """Of length one for every token, or for all of them."""
    return move / length(move, ball)


def climb(att: Attention, radius: float, ball: str, *, steps: int = 12, seed: int = 0) -> Tensor:
    """The largest norm found in the ball around each sample, (samples, heads): from the centre and
    from a random point of the sphere."""
    draw, centre = normal(seed), att.x.double()[:, None].expand(-1, att.heads, -1, -1)
    best = torch.zeros(att.samples, att.heads, dtype=torch.float64)
    for start in (0.0, 1.0):
        move = start * radius * unit(draw(*centre.shape), ball)
        for step in range(steps + 1):
            x = (centre + move).requires_grad_()
            j = dense_jacobians(att, x=x).flatten(4).flatten(2, 3)
            u, s, vh = torch.linalg.svd(j.detach(), full_matrices=False)
            best = torch.maximum(best, s[..., 0])
            if step == steps or radius == 0:
                break
            top = torch.einsum("shm,shmn,shn->", u[..., 0], j, vh[..., 0, :])
            (up,) = torch.autograd.grad(top, x)
            up = up / up.abs().amax((-1, -2), keepdim=True).clamp_min(1e-300)
            move = move + radius * (1.0 if step < steps / 2 else 0.2) * unit(up, ball)
            move = move * (radius * (1 - 1e-12) / length(move, ball)).clamp(max=1.0)
    return best


FAMILIES = ("any", "repeated", "one-hot", "uniform", "outlier", "collinear", "far biases")


def small_layer(seed: int, *, samples: int = 4, heads: int = 5) -> tuple[Attention, str, float]:
    """A random plain layer without padding, a kind of ball, and a radius from 1e-4 to 3 times the
    mean length of a token."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n, width, d, d_v = (
        int(torch.randint(low, high, (), generator=g))
        for low, high in ((1, 8), (2, 9), (1, 5), (1, 5))
    )
    family = FAMILIES[seed % len(FAMILIES)]
    x, size = draw(samples, n, width), 10 ** float(torch.rand((), generator=g) * 2 - 1)
    w_q, w_k, w_v = draw(heads, width, d), draw(heads, width, d), draw(heads, width, d_v)
    w_q = size * w_q / width**0.5
    if family == "repeated":
        x[:, n // 2 :] = x[:, :1]
    if family == "outlier":
        x[:, 0] *= 30
    if family == "collinear":
        x = x[:, :1] * torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]
    w_q = w_q * {"one-hot": 100.0, "uniform": 0.0}.get(family, 1.0)
    far = 30.0 if family == "far biases" else 1.0
    biases = {}
    if seed % 3:
        b_q, b_k, b_v = draw(heads, d), far * draw(heads, d), far * draw(heads, d_v)
        biases = {"b_q": b_q, "b_k": b_k, "b_v": b_v}
    mask = (None, torch.full((n, n), -torch.inf).triu(1).double(), draw(heads, n, n))[seed // 7 % 3]
    att = Attention(x, w_q, w_k, w_v, **biases, mask=mask)
    radius = 10 ** float(torch.rand((), generator=g) * 4.5 - 4) * float(x.norm(dim=-1).mean())
    return att, ("token", "frobenius")[seed // 2 % 2], radius

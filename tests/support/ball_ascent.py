"""Steepest ascent of the norm of J over balls around small plain heads: dense Jacobians from the
definition, in float64, many heads at once."""

import torch
from support.layers import normal
from torch import Tensor

from lipbound.attention.layer import Attention


class Heads:
    """All heads of all samples of a plain layer without padding, as one batch: tensors (samples x
    heads, ...)."""

    def __init__(self, att: Attention):
        many = att.samples * att.heads

        def spread(w: Tensor | None) -> Tensor | None:
            return None if w is None else w.double().repeat(att.samples, *[1] * (w.dim() - 1))

        self.x = att.x.double().repeat_interleave(att.heads, 0)
        self.w = [spread(w) for w in (att.w_q, att.w_k, att.w_v)]
        self.b = [spread(b) for b in (att.b_q, att.b_k, att.b_v)]
        n = att.tokens
        mask = torch.zeros(n, n) if att.mask is None else att.mask.double()
        self.mask = mask.expand(att.samples, att.heads, n, n).reshape(many, n, n)
        self.scale = att.scale

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """P, values less outputs x_ij, q~, k~ and B at inputs (batch, N, D)."""
        q, k, v = (
            x @ w if b is None else x @ w + b[:, None] for w, b in zip(self.w, self.b, strict=True)
        )
        p = torch.softmax(self.scale * q @ k.mT + self.mask, -1)
        apart = v[:, None] - (p @ v)[:, :, None]
        qt, kt = self.scale * q @ self.w[1].mT, self.scale * k @ self.w[0].mT
        own = torch.einsum("bij,bijv,bjd->bivd", p, apart, kt)
        return p, apart, qt, kt, own

    def jacobian(self, x: Tensor) -> Tensor:
        """(batch, N d_v, N D)."""
        p, apart, qt, _, own = self.parts(x)
        blocks = p[..., None, None] * (
            self.w[2].mT[:, None, None] + apart[..., :, None] * qt[:, :, None, None, :]
        )
        eye = torch.eye(p.shape[-1], dtype=torch.float64)[:, :, None, None]
        return (blocks + eye * own[:, :, None]).transpose(2, 3).flatten(1, 2).flatten(2)


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
    heads, draw = Heads(att), normal(seed)
    best = torch.zeros(len(heads.x), dtype=torch.float64)
    for start in (0.0, 1.0):
        move = start * radius * unit(draw(*heads.x.shape), ball)
        for step in range(steps + 1):
            x = (heads.x + move).requires_grad_()
            j = heads.jacobian(x)
            u, s, vh = torch.linalg.svd(j.detach(), full_matrices=False)
            best = torch.maximum(best, s[:, 0])
            if step == steps or radius == 0:
                break
            (up,) = torch.autograd.grad(torch.einsum("bm,bmn,bn->", u[:, :, 0], j, vh[:, 0]), x)
            up = up / up.abs().amax((-1, -2), keepdim=True).clamp_min(1e-300)
            move = move + radius * (1.0 if step < steps / 2 else 0.2) * unit(up, ball)
            move = move * (radius * (1 - 1e-12) / length(move, ball)).clamp(max=1.0)
    return best.view(att.samples, att.heads)


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

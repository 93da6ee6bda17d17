"""Maps from perturbations of one token to its query, key and value, for heads with variants."""

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.variants.base import SIDES, TokenMap
from lipbound.attention.variants.rotary import turned


@memoised
def _passages(att: Attention) -> dict[str, TokenMap]:
    return att.passages(torch.float64)


class Tangents:
    r"""Linear maps :math:`D^a_i` (d_a x D) from perturbations of token i to its query, key, value.

    In float64, a = q, k, v, and the logits of a gate ("gate"); known by their products
    :math:`D^a_i D^{bT}_i`, d_a x d_b matrices that no bound needs more than. ``tokens`` are a slice
    of all tokens, or their indices.

    For plain heads :math:`D^q = W_Q^T` for all tokens; rotated ones have :math:`R_i W_Q^T`,
    normalised ones the derivative of the normalisation between
    (`lipbound.attention.variants.base`): :math:`D = L^T [W\,g]^T` with a direction g of the
    token where they are divided by the size of another vector than their own. They make the blocks
    of J in Lemma 6 (docs/theory/jacobian.md).
    """

    def __init__(self, att: Attention, sample: int, head: int):
        self._w: dict[str, Tensor] = {a: att.projection(a)[0][head].double() for a in SIDES}
        self._passages = _passages(att)
        if att.gate is not None:
            self._w["gate"] = att.gate.w[head].double()
            none = TokenMap([], att.tokens, torch.float64, att.device)
            self._passages = {**self._passages, "gate": none}
        self._entry, self._sample = sample * att.heads + head, sample
        self._same: dict[tuple[str, ...], Tensor] = {}  # for all tokens

    def product(self, a: str, b: str, tokens: slice | Tensor) -> Tensor:
        """D^a_i D^b_i^T for some tokens, (n or 1, d_a, d_b)."""
        half = self.turned(a, self.metric(a, b, tokens).mT, tokens, back=True).mT
        return self.turned(b, half, tokens, back=True)

    def turned(self, a: str, y: Tensor, tokens: slice | Tensor, *, back: bool = False) -> Tensor:
        """L y for vectors y in rows, (n or 1, r, d_a) -> (n or 1, r, d_a + extra).

        ``back``: L^T y instead, (n or 1, r, d_a + extra) -> (n or 1, r, d_a).
        """
        if (angles := self._turns(a, tokens)) is not None:
            cos, sin = angles
            return turned(y, cos[:, None], (sin if back else -sin)[:, None])
        left = self._matrices(a, tokens)
        return y if left is None else y @ (left if back else left.mT)

    def longest(self, a: str, tokens: slice | Tensor) -> Tensor:
        """Upper values of the 2-norms of |L|, (n or 1,).

        Roots of the largest row sums times the largest column sums.
        """
        angles = self._turns(a, tokens)
        if angles is not None:
            cos, sin = angles
            sums = (cos.abs() + sin.abs()).amax(-1)
            return sums if 2 * cos.shape[-1] == self._w[a].shape[1] else sums.clamp_min(1.0)
        left = self._matrices(a, tokens)
        if left is None:
            return self._w[a].new_ones(1)
        size = left.detach().abs()
        return (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()

    def _turns(self, a: str, tokens: slice | Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of some tokens, (n, r), where their map is a rotation alone.

        None where it is not.
        """
        angles = self._passages[a].turns()
        return None if angles is None else (angles[0][tokens].double(), angles[1][tokens].double())

    def size(self, a: str, tokens: slice | Tensor) -> Tensor:
        r"""Upper values of the Frobenius norms of D^a_i with absolute values inside, (n or 1,).

        Its roundings are relative to them: the Frobenius norm of :math:`[W\,g]` times a bound on
        the 2-norm of :math:`|L|`, Lemma 55 (docs/theory/numerics.md).
        """
        g = self._direction(a, tokens)
        squares = self._w[a].square().sum()
        size = squares.sqrt()[None] if g is None else (squares + g.square().sum(-1)).sqrt()
        return size * self.longest(a, tokens)

    def _matrices(self, a: str, tokens: slice | Tensor) -> Tensor | None:
        return self._passages[a].matrices(self._entry, tokens, self._w[a].shape[1])

    def _direction(self, a: str, tokens: slice | Tensor) -> Tensor | None:
        direction = self._passages[a].direction
        return None if direction is None else direction[self._sample, tokens]

    def metric(self, a: str, b: str, tokens: slice | Tensor) -> Tensor:
        """Products of projections, with their extra columns, (n or 1, d_a + extra, d_b + extra)."""
        w_a, w_b = self._w[a], self._w[b]
        g_a, g_b = self._direction(a, tokens), self._direction(b, tokens)
        if (a, b) not in self._same:
            self._same[a, b] = (w_a.mT @ w_b)[None]
        out = self._same[a, b]
        if g_a is not None:
            out = torch.cat([out.expand(len(g_a), -1, -1), (g_a @ w_b)[:, None]], 1)
        if g_b is not None:
            last = (g_b @ w_a)[..., None]
            if g_a is not None:
                last = torch.cat([last, (g_a * g_b).sum(-1)[:, None, None]], 1)
            out = torch.cat([out.expand(len(g_b), -1, -1), last], 2)
        return out

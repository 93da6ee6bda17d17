"""Norms of the parts of the blocks of J for heads with variants, whose every token has its own map.

Upper values: Lemma 79 (docs/theory/upper_values.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants.base import UNIT
from lipbound.attention.variants.gate import GateStep
from lipbound.bounds.ours.block_norms import CHUNK, at_once, distances, root, seen
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import block_norm, gamma, matrix_norm, power_of_two, upper_factor


class TokenVectors(NamedTuple):
    r"""Sizes of what tokens t do as keys, then as queries; i and k are any tokens.

    Attributes:
        length, image: :math:`|\tilde q_{it}|` and :math:`|W_V^T \tilde q_{it}|`, (N, n).
        b, b_v, b_q: :math:`\|B_t\|` and :math:`\|B_t W_V\|`, (n,), and :math:`|B_t \tilde q_{kt}|`,
            (n, N).
        inner: :math:`\sum_t E_{it} E_{kt} |\tilde q_{it} \cdot \tilde q_{kt}|`, (N, N), where it is
            wanted.
    """

    length: Tensor
    image: Tensor
    b: Tensor
    b_v: Tensor
    b_q: Tensor
    inner: Tensor | None


class QueryVectors(NamedTuple):
    r"""Norms and matrices of some tokens t as queries.

    Attributes:
        b, b_v: as in `TokenVectors`.
        through: matrices that times :math:`L_t q_k` are :math:`B_t \tilde q_{kt}`, (n, d_v, d).
        off: what rounding may take from its length, over the sizes of :math:`D^k_t` and q_k, (n,).
    """

    b: Tensor
    b_v: Tensor
    through: Tensor
    off: Tensor


class VariantHead:
    r"""One head of one sample of a float64 layer, any variant, padding left out.

    Attributes:
        gate: what a gate does, or None. gate_factor: its largest factor for every output, (N, 1),
            ones without a gate. after: norm of the matrix behind it.
        unit: a power of two near the largest probability, by which P and its weights are divided: a
            sink may leave probabilities whose squares underflow, and J is linear in both.
        p, t: P and what changes of scores are weighted with, (N, N). e: :math:`E_{ij} = T_{ij} |v_j
            - o_i|`, with a gate the norm of what it makes of v_j - o_i. distance: :math:`|v_j -
            o_i|`, (N, N).
        q, k, v, o: queries times the scale, centred keys and values, outputs, (N, d or d_v).
        norm_v, size_v: upper values of :math:`\|D^v_j\|`, and Frobenius norms with absolute values
            inside, (N,), or () where they are those of W_V for all tokens.
        own_queries: whether tokens are queries as well as keys: not so for cross-attention.
        tangents: how queries, keys and values follow their tokens, named by ``kept``.
        size: :math:`|c q_i|`, (N,).
        width: how many numbers the largest temporary has for every pair of tokens.
    """

    def __init__(self, att: Attention, h: int):
        # the derivative of a norm at padding may be infinite
        keep, rows, keys = (
            slice(None) if valid is None else valid[0]
            for valid in (att.valid, att.valid_rows, att.valid_keys)
        )
        self.kept = torch.arange(att.tokens, device=att.device)[keep]
        p, t = (w[0, h][rows][:, keys] for w in (att.p, att.weights))
        self.k, self.v = att.centred_k[0, h][keys], att.centred_v[0, h][keys]
        self.q, self.o = att.scale * att.q[0, h][rows], p @ self.v
        self.unit = power_of_two(p.detach().amax())
        self.p, self.t = p / self.unit, t / self.unit
        self.distance = distances(self.o[None], self.v[None])[0]
        self.gate, self.after = self._gate(att, h, rows), torch.ones_like(self.q[0, 0])
        self.gate_factor, self.e = torch.ones_like(self.q[:, :1]), self.t * self.distance
        if self.gate is not None:
            self.gate_factor = self.gate.factor[0].amax(-1, keepdim=True) * (1 + 64 * UNIT)
            outputs = zip(self.gate.factor[0], self.o, strict=True)
            gated = [(f * (self.v - o)).norm(dim=-1) for f, o in outputs]
            self.e = self.t * torch.stack(gated) * (1 + 64 * UNIT)
            if self.gate.after is not None:
                self.after = matrix_norm(self.gate.after[0])
        self.scale, self.w_v = att.scale, att.w_v[h]
        self.tangents, self.size = Tangents(att, 0, h), self.q.detach().norm(dim=-1)
        plain, self.values_move = att.plain("v"), att.values_move
        self.own_queries = att.other_stream is None
        n, d, d_v = max(p.shape), att.d + 1, att.d_v if plain else 4 * (att.d_v + 1)
        self.inputs, self.width = att.x.shape[2], max(d, d_v)
        self._small = gamma(self.inputs + 6 * d + d_v + 40)
        self._by_query = gamma(2 * n + self.inputs + 8 * d + d_v + 60)
        self.norm_v, self.size_v = self._values(plain)

    def _values(self, plain: bool) -> tuple[Tensor, Tensor]:
        """Return norms of the derivatives of all values, and their sizes, (N,) or ()."""
        if not self.values_move:
            return self.q.new_zeros(()), self.q.new_zeros(())
        if plain:
            return matrix_norm(self.w_v), torch.linalg.matrix_norm(self.w_v.detach())
        sizes = self.tangents.size("v", self.kept)
        squares = block_norm(self.tangents.product("v", "v", self.kept))
        return root(squares + self._small * sizes.detach() ** 2), sizes.detach()

    def _gate(self, att: Attention, h: int, rows: slice | Tensor) -> GateStep | None:
        """Return what a gate does at the tokens, (1, N, d_v) each; None where there is none."""
        gate = att.gate
        if gate is None:
            return None
        o = (att.p[0, h] @ att.wide_v[0, h])[rows] / self.unit
        return gate.of_heads(slice(h, h + 1)).at(att.x[:, rows], o[None, None])

    def moved(self, rows: slice, keys: slice) -> Tensor:
        """Differences of values and outputs, times the factors of a gate, (rows, keys, d_v)."""
        found = self.v[None, keys] - self.o[rows, None]
        return found if self.gate is None else self.gate.factor[0, rows, None] * found

    def values(self) -> Tensor:
        r"""Upper values of the norms of :math:`P_{ij} \mathrm{diag}(g_i) D^v_j`, (N, N)."""
        whole = self.p * self.gate_factor * self.norm_v
        if self.gate is None or self.norm_v.ndim:
            return whole
        f, _ = upper_factor(self.w_v)
        slack = gamma(64) * torch.linalg.matrix_norm(f.detach()) * self.gate_factor.detach()
        own = block_norm(self.gate.factor[0][:, :, None] * f.mT)[:, None] + slack
        return torch.minimum(whole, self.p * own)

    def sizes_v(self, part: slice) -> Tensor:
        """Return `size_v` of some tokens, (n or 1, 1)."""
        return self.size_v[part, None] if self.size_v.ndim else self.size_v[None, None]

    def covariances(self, rows: slice | Tensor, keys: slice = slice(None)) -> Tensor:
        r"""Sums :math:`C_i = c \sum_j T_{ij} (v_j - o_i) k_j^T` over some keys, (rows, d_v, d)."""
        a = self.t[rows, keys, None] * (self.v[None, keys] - self.o[rows, None, :])
        return a.mT @ (self.scale * self.k[keys])

    def by_query(self, rows: slice | Tensor) -> Tensor:
        """Frobenius norms of B_i with absolute values inside, (rows,).

        Rounding is relative to them.
        """
        reach = abs(self.scale) * self.e.detach()[rows] @ self.k.detach().norm(dim=-1)
        return reach * self.tangents.size("q", self.kept[rows]).detach()

    def own(self, part: slice, keys: slice, *, squarings: int) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return what some tokens do as queries: matrices, norms, and what rounding may take.

        C_i times the derivative of the projected query, (n, d_v, d), :math:`\|B_i\|`, (n,), and
        `QueryVectors.off`.
        """
        tokens, c = self.kept[part], self.covariances(part, keys)
        length = torch.linalg.vector_norm(c.detach(), dim=(-2, -1))
        length = length * self.tangents.size("q", tokens).detach()
        c, off = self.tangents.turned("q", c, tokens), self._by_query * self.by_query(part)
        if self.gate is not None:
            c = self.gate.factor[0, part, :, None] * c
        squares = _times(c, self.tangents.metric("q", "q", tokens)) @ c.mT
        if self.gate is not None:
            slope, m = self.gate.slope[0, part], self.tangents.metric("gate", "gate", tokens)
            both = _times(c, self.tangents.metric("q", "gate", tokens)) * slope[:, None]
            squares = squares + both + both.mT + slope[..., None] * m * slope[:, None]
            reach = slope.detach().norm(dim=-1) * self.tangents.size("gate", tokens).detach()
            length, off = length + reach, off + self._small * reach
        squared = block_norm(squares, squarings=squarings)
        return c, root(squared + self._small * length**2) + off, off

    def queries(self, part: slice, keys: slice, *, squarings: int) -> QueryVectors:
        """`QueryVectors` of some tokens, which see some keys.

        Norms of their matrices are upper values after so many ``squarings``.
        """
        tokens, (c, b, off) = self.kept[part], self.own(part, keys, squarings=squarings)
        through, values = (_times(c, self.tangents.metric("q", a, tokens)) for a in "kv")
        if self.gate is not None:
            slope = self.gate.slope[0, part, :, None]
            through = through + slope * self.tangents.metric("gate", "k", tokens)
            values = values + slope * self.tangents.metric("gate", "v", tokens)
        values = self.tangents.turned("v", values, tokens, back=True)
        b_v = block_norm(values, squarings=squarings) + off * self.sizes_v(part)[:, 0]
        return QueryVectors(b, b_v, through, off)

    def vectors(
        self, part: slice, rows: slice, own: QueryVectors | None, weights: Tensor | None
    ) -> TokenVectors:
        """`TokenVectors` of some tokens, at the queries ``rows`` that see them as keys.

        Args:
            part: the n tokens.
            rows: the N queries.
            own: of the tokens; None where they are no queries.
            weights: E_it, (N, n), or None where ``inner`` is not wanted.
        """
        tokens, q = self.kept[part], self.q[None, rows]
        reach = self.tangents.size("k", tokens).detach()[:, None] * self.size[rows]
        u = self.tangents.turned("k", q, tokens)
        y = _times(u, self.tangents.metric("k", "k", tokens))
        image = _times(u, self.tangents.metric("k", "v", tokens))
        image = self.tangents.turned("v", image, tokens, back=True).norm(dim=-1)
        image = image + self._small * self.sizes_v(part) * reach
        length = root((y * u).sum(-1).clamp_min(0) + self._small * reach**2)
        inner = None
        if weights is not None:
            w, most = weights.mT[..., None], weights.detach().mT * reach
            inner = ((w * y) @ (w * u).mT).abs().sum(0) + self._small * most.mT @ most
        length, image = (t.expand(len(tokens), -1).mT for t in (length, image))
        if own is None:
            none = length.new_zeros(len(tokens))
            return TokenVectors(length, image, none, none, torch.zeros_like(length.mT), inner)
        moved = torch.linalg.vector_norm(u @ own.through.mT, dim=-1) + own.off[:, None] * reach
        return TokenVectors(length, image, own.b, own.b_v, moved, inner)

    def token_vectors(self, *, inner: bool, squarings: int = 1) -> TokenVectors:
        """`TokenVectors` of all tokens, some of them at a time.

        What a mask forbids is left at zero. One squaring is enough where B_i and B_i W_V are small
        beside other terms: once more would take 1e-4 off the bounds.
        """
        t, (queries, n) = self.t, self.t.shape
        sums = t.new_zeros(queries, queries) if inner else None
        length, image, b_q = torch.zeros_like(t), torch.zeros_like(t), torch.zeros_like(t.mT)
        b, b_v, own = t.new_zeros(n), t.new_zeros(n), None
        size = 8 * max(t.shape) * max(queries if inner else 1, self.width)
        step = max(1, at_once(CHUNK, t.device) // size)
        for part, rows, keys in seen(t, step):
            if self.own_queries:
                own = self.queries(part, keys, squarings=squarings)
                b[part], b_v[part] = own.b, own.b_v
            if rows.start == rows.stop:
                continue
            found = self.vectors(part, rows, own, self.e[rows, part] if inner else None)
            length[rows, part], image[rows, part] = found.length, found.image
            b_q[part, rows] = found.b_q
            if sums is not None and found.inner is not None:
                sums[rows, rows] += found.inner
        return TokenVectors(length, image, b, b_v, b_q, sums)


def _times(x: Tensor, m: Tensor) -> Tensor:
    """Products (n, N, a) @ (n or 1, a, b), those with one matrix as one product."""
    return x @ (m[0] if len(m) == 1 else m)

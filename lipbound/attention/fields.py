"""What a layer is made of, by name."""

from collections.abc import Collection

import torch
from torch import Tensor

from lipbound.attention.cache import Cache
from lipbound.attention.projections import Projections
from lipbound.attention.residual import ResidualContext
from lipbound.attention.scoring import Scoring
from lipbound.attention.variants.cap import Cap
from lipbound.attention.variants.qk_norm import QKNorm, QKNormalised
from lipbound.attention.variants.rotary import Rotation
from lipbound.attention.variants.sinks import Sinks
from lipbound.errors import AttentionError


class Fields:
    """The parts of an attention layer, and the names that papers and users have for what is in
    them."""

    x: Tensor
    projections: Projections
    scoring: Scoring
    valid: Tensor | None
    surroundings: ResidualContext | None
    cache: Cache

    # -- parts -------------------------------------------------------------------------------------

    @property
    def w_q(self) -> Tensor:
        """Query projections, (heads, D, d)."""
        return self.projections.w_q

    @property
    def w_k(self) -> Tensor:
        """Key projections, (heads, D, d)."""
        return self.projections.w_k

    @property
    def w_v(self) -> Tensor:
        """Value projections, (heads, D, d_v)."""
        return self.projections.w_v

    @property
    def b_q(self) -> Tensor | None:
        """Query biases, (heads, d), or None."""
        return self.projections.b_q

    @property
    def b_k(self) -> Tensor | None:
        """Key biases, (heads, d), or None."""
        return self.projections.b_k

    @property
    def b_v(self) -> Tensor | None:
        """Value biases, (heads, d_v), or None."""
        return self.projections.b_v

    @property
    def w_o(self) -> Tensor | None:
        """Slices of the output projection, (heads, d_v, D_out), or None."""
        return self.projections.w_o

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.d**-0.5 if self.scoring.scale is None else self.scoring.scale

    @property
    def mask(self) -> Tensor | None:
        """Additive mask, broadcastable to (samples, heads, N, N), or None."""
        return self.scoring.mask

    @property
    def rotation(self) -> Rotation | None:
        """Rotary position embedding, or None."""
        return self.scoring.find(Rotation)

    @property
    def norm_q(self) -> QKNorm | None:
        """Normalisation of queries, or None."""
        norms = self.scoring.find(QKNormalised)
        return None if norms is None else norms.q

    @property
    def norm_k(self) -> QKNorm | None:
        """Normalisation of keys, or None."""
        norms = self.scoring.find(QKNormalised)
        return None if norms is None else norms.k

    @property
    def cap(self) -> float | None:
        """Scores are kept between -cap and cap, or None."""
        cap = self.scoring.find(Cap)
        return None if cap is None else cap.value

    @property
    def sinks(self) -> Tensor | None:
        """Sink logits, (heads,), or None."""
        sinks = self.scoring.find(Sinks)
        return None if sinks is None else sinks.logits

    @property
    def variants(self) -> frozenset[str]:
        """Names of the variants that this layer has (`lipbound.attention.variants`)."""
        return self.scoring.names

    @property
    def shift_invariant(self) -> bool:
        """Whether a vector added to all keys changes nothing."""
        return self.scoring.shift_invariant

    def only(self, what: str, allowed: Collection[str] = ()) -> None:
        """Raise AttentionError if the layer has variants that ``what`` does not cover."""
        other = [
            step.title
            for step in sorted(self.scoring.steps, key=lambda step: step.place)
            if step.name not in allowed
        ]
        if other:
            covering = "exact norms of heads, 'lipbound' and 'lipbound_block'"
            raise AttentionError(f"{what} does not cover {' and '.join(other)}; {covering} do")

    # -- shapes ------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Number of inputs."""
        return self.x.shape[0]

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.w_q.shape[0]

    @property
    def tokens(self) -> int:
        """Length N of the inputs, padding included."""
        return self.x.shape[1]

    @property
    def d(self) -> int:
        """Width of queries and keys."""
        return self.w_q.shape[2]

    @property
    def d_v(self) -> int:
        """Width of values and head outputs."""
        return self.w_v.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.x.device

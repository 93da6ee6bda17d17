"""Statistics of attention itself: its largest logit, its entropy, its mass on the first token."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.devices import in_own_modes
from lipbound.schema import STATISTICS


@in_own_modes
@torch.no_grad()
def attention_statistics(att: Attention | ModuleAttention) -> dict[str, Tensor]:
    """Return what is watched in training beside norms, by the names in `STATISTICS`.

    ``largest_logit`` is the largest score of a query and a key that may attend to each other,
    scaled and capped, before masks and position biases are added and before the softmax; it grows
    without limit where training diverges (Dehghani et al. 2023, on scaling vision transformers).
    ``entropy`` is that of the attention of a query over keys, in nats, mean over queries (Zhai et
    al. 2023, on entropy collapse). ``first_token`` is the attention on the first key, mean over
    queries (Xiao et al. 2024, on attention sinks). Padding does not count.

    Args:
        att: a layer.

    Returns:
        (samples, heads) each, float64 on the device of the layer; NaN where the layer has no closed
        form, and so no probabilities that are known.
    """
    if isinstance(att, ModuleAttention):
        return {name: torch.full((att.samples, att.heads), torch.nan) for name in STATISTICS}
    p, rows, keys = att.p.double(), att.valid_rows, att.valid_keys
    logits = att.scoring.transformed(att.scale * (att.wide_q @ att.wide_k.mT))
    hidden = torch.isneginf(att.forbid(torch.zeros_like(logits)))
    if rows is not None:
        hidden = hidden | ~rows[:, None, :, None]
    logit = logits.double().masked_fill(hidden, -torch.inf).amax((-1, -2))
    first = p[..., 0]
    if keys is not None:
        place = keys.int().argmax(-1)  # the first that is no padding
        first = p.gather(-1, place.view(-1, 1, 1, 1).expand(*p.shape[:3], 1))[..., 0]
    shares = torch.ones_like(first[:, :1]) if rows is None else rows[:, None].double()
    count = shares.sum(-1)

    def mean(x: Tensor) -> Tensor:  # over queries; rows of padding are zero
        return (x * shares).sum(-1) / count

    entropy = mean(torch.special.entr(p).sum(-1))
    return dict(zip(STATISTICS, (logit, entropy, mean(first)), strict=True))

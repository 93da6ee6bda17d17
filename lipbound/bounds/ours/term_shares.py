"""Which term makes our bounds on plain heads large."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.bound import Bound
from lipbound.bounds.ours.block_norms import MATRICES, BlockNorms, samples_of
from lipbound.devices import require


def gram_terms(bound: Bound, att: Attention) -> dict[str, Tensor]:
    """Of ``lipbound``: at the top eigenvector of the matrix of its first branch."""
    return _terms(att, gram=True)


def block_terms(bound: Bound, att: Attention) -> dict[str, Tensor]:
    """Of ``lipbound_block``: at the top singular pair of its matrix of norms."""
    return _terms(att, gram=False)


def _terms(att: Attention, *, gram: bool) -> dict[str, Tensor]:
    what = f"terms of our bounds at {att.tokens} tokens need matrices over all their pairs"
    require(
        MATRICES * att.heads * 8.0 * att.tokens**2,
        att.device,
        what,
        "measure shorter inputs or fewer heads",
    )
    found: dict[str, list[Tensor]] = {}
    for sample in samples_of(att):
        parts = BlockNorms(sample.layer, 0, slice(None), gram=gram)
        if gram:
            terms = {
                "values": parts.values(),
                "keys": parts.keys(),
                "queries": parts.queries(),
                "mixed": parts.mixed(),
            }
        else:
            moved = parts.p * parts.distance * parts.qt_norm
            terms = {
                "values": parts.p * parts.norm_v,
                "keys": moved,
                "queries": torch.diag_embed(parts.b),
            }
        total = torch.stack(list(terms.values())).sum(0)
        u, _, vh = torch.linalg.svd(total)
        forms = {
            key: (u[..., None, :, 0] @ term @ vh[..., 0, :, None])[..., 0, 0]
            for key, term in terms.items()
        }
        whole = torch.stack(list(forms.values())).sum(0)
        for key, form in forms.items():
            found.setdefault(key, []).append(
                torch.where(whole > 0, form / torch.where(whole > 0, whole, 1.0), 0.0)
            )
    return {key: torch.stack(values) for key, values in found.items()}

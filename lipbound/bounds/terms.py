"""Which term of a bound makes it large."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds import ingredients as qty
from lipbound.bounds.lipbound2026.parts import BlockNorms
from lipbound.bounds.registry import get

ROOT3 = 3**0.5


OURS = ("lipbound", "lipbound_block")


def shares(att: Attention, name: str) -> dict[str, Tensor] | None:
    r"""What each term contributes to a bound, as fractions of one, (samples, heads) each; None for statements that are a
    single product, and of ours for variants of attention.

    "values" is what would remain if attention did not depend on the input, "softmax" what comes from its change. Terms of Theorem 3 of Yudin et al.
    and of Specformer's theorem add up to the bound, those of Castin et al. to its square. For ours, softmax is told apart by what moves it, keys or
    queries: ``lipbound_block`` at the top singular pair of its matrix of norms, ``lipbound`` at the top eigenvector of the matrix of its first
    branch, with "mixed" for products of different terms.

    Args:
        att: the layer.
        name: registry name.
    """
    if att.variants and (name in OURS or not get(name).applies(att)):
        return None
    if name in OURS:
        return _ours(att, gram=name == "lipbound")
    value, norm_v, root_n = get(name)(att), qty.norm_v(att), qty.count(att).sqrt()
    if name in ("yudin", "yudin_g1", "yudin_nobias", "yudin_sqrt_n"):
        part = norm_v * qty.norm_p(att) / value
    elif name == "yudin_closed":
        part = norm_v * root_n / value
    elif name in ("castin", "castin_bias", "castin_c3"):
        part = (ROOT3 * norm_v * root_n / value) ** 2
    elif name == "castin_c3_as_coded":
        part = (norm_v * root_n / value) ** 2
    elif name == "specformer":
        part = (1 / (1 + qty.norm_q(att) * qty.norm_k(att))).expand_as(value)
    else:
        return None
    part = torch.where(value > 0, part, 1.0).clamp(0, 1).expand_as(value)
    return {"values": part, "softmax": 1 - part}


def _ours(att: Attention, *, gram: bool) -> dict[str, Tensor]:
    att, _ = att.unit_values()
    found: dict[str, list[Tensor]] = {}
    for s in range(att.samples):
        parts = BlockNorms(att, s, slice(0, att.heads), gram=gram)
        if gram:
            terms = {"values": parts.values(), "keys": parts.keys(), "queries": parts.queries(), "mixed": parts.mixed()}
        else:
            moved = parts.p * parts.distance * parts.qt.norm(dim=-1, keepdim=True)
            terms = {"values": parts.p * parts.norm_v, "keys": moved, "queries": torch.diag_embed(parts.b)}
        total = torch.stack(list(terms.values())).sum(0)
        u, _, vh = torch.linalg.svd(total)
        forms = {key: (u[..., None, :, 0] @ term @ vh[..., 0, :, None])[..., 0, 0] for key, term in terms.items()}
        whole = torch.stack(list(forms.values())).sum(0)
        for key, form in forms.items():
            found.setdefault(key, []).append(torch.where(whole > 0, form / torch.where(whole > 0, whole, 1.0), 0.0))
    return {key: torch.stack(values) for key, values in found.items()}

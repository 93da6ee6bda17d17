"""Putting a recorded call and what probing found together, and checking that it is the model's.

Rebuilt tensors are compared with those of the forward pass, and with what the model's own eager
attention makes. A sample also runs without its padding, and its head outputs are compared.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser, ResidualContext
from lipbound.attention.validation import sees_some_key
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.errors import AttentionError, CaptureError, UnfaithfulPassError
from lipbound.models.capture.probing import ProbedWeights, eps_of
from lipbound.models.capture.rerun import CAPTURE_TOLERANCE, relative_error
from lipbound.models.capture.seeing import interface, recording
from lipbound.models.capture.seeing.follower import INTERFACE, Follower, Heads
from lipbound.models.capture.seeing.recording import Call, ModuleRun, listed
from lipbound.models.capture.streams import Padding, hidden_keys
from lipbound.models.checkpoint import taken
from lipbound.models.weight_files import resident

RESIDUAL_TOLERANCE = 1e-4
"""Largest relative difference between what passes through the model and what is rebuilt."""


def assemble(call: Call, weights: ProbedWeights, *, late: bool = False) -> Attention:
    """Return the `Attention` of a call, in the dtype of its input.

    Args:
        call: of the layer, as `lipbound.models.capture.streams.of_stream` returns it.
        weights: what probing found.
        late: whether queries and keys are normalised after they are turned.

    Raises:
        CaptureError: they do not form an attention layer.
    """
    x = call.x.detach()
    own = weights.made | steps_of(call) | {"mask": _simplified(call)}
    own |= {name: part.to(x.dtype) for name, part in own.items() if hasattr(part, "to")}
    own["rotation"] = weights.turns and weights.turns.rotation  # its angles stay in float64
    own["scale"] = call.q.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
    own["valid"] = call.valid_keys if call.sides == "kv" else call.valid_rows
    try:
        return Attention(x, **own, norm_late=late)
    except AttentionError as error:
        raise CaptureError(f"layer {call.name}: {error}") from error


def steps_of(call: Call) -> dict[str, Any]:
    """Return what a recorded call does to scores beside scaling, as arguments of `Attention`.

    What else there is, is one more of them: read off the call here, or off its layer by
    `lipbound.models.capture.probing.probe`.
    """
    found: dict[str, Any] = {"cap": call.extras.get("softcap")}
    if (sinks := call.extras.get("s_aux")) is not None:
        found["sinks"] = sinks.detach().flatten()
    return found if call.sides == "qkv" else found | {"other_stream": _other_stream(call)}


def _other_stream(call: Call) -> OtherStream:
    """Return the side of cross-attention that does not move, as it was recorded."""
    groups = call.q.shape[1] // call.k.shape[1]
    q, k, v = (t.detach().transpose(0, 1) for t in (call.q, call.k, call.v))
    if call.sides == "kv":
        return OtherStream(q=q, valid=call.valid_rows)
    k, v = (t.repeat_interleave(groups, 0) for t in (k, v))
    return OtherStream(k=k, v=v, valid=call.valid_keys)


def surroundings(att: Attention, runs: Sequence[ModuleRun]) -> ResidualContext:
    """Return what stands around a layer, each part checked against the numbers of the model.

    Parts are None where they could not be found.

    Args:
        att: the layer.
        runs: of modules that may be normalisations, in the model's pass.
    """
    (samples, n, width), whole = att.x.shape, att.x.numel()

    def laid(t: Tensor) -> Tensor:
        return recording.samples_first(t.detach(), samples, n).reshape(att.x.shape)

    pairs = [(run.module, run.given, run.returned) for run in runs if run.args]
    seen = [
        (module, laid(x), laid(out))
        for module, x, out in pairs
        if isinstance(x, Tensor) and out is not None and x.shape == out.shape
        if x.numel() == whole and x.shape[-1] == width
    ]
    x = _real(att.x, att)
    feeding = (s for s in seen if relative_error(_real(s[2], att), x) <= RESIDUAL_TOLERANCE)
    fed_by = next(filter(None, (normaliser(*s) for s in feeding)), None)
    if att.w_o is None or att.w_o.shape[2] != width:
        return ResidualContext(fed_by)
    out = torch.einsum("shnv,hvo->sno", att.out, att.w_o)
    att.cache.drop("p", "out")
    size = float(_real(out, att).abs().amax())
    streams = {"post": att.x} | ({} if fed_by is None else {"pre": fed_by.x})
    for residual, stream in streams.items():
        for s in seen:
            rest = _real(s[1] - stream - out, att)
            # the same for every token, as an output bias is; one token shows nothing
            if len(rest) > 1 and float((rest - rest[:1]).abs().amax()) <= RESIDUAL_TOLERANCE * size:
                after = normaliser(*s) if residual == "post" else None
                return ResidualContext(fed_by, residual, after)
    return ResidualContext(fed_by)


def _real(t: Tensor, att: Attention) -> Tensor:
    """Return the tokens that are not padding, (n, D)."""
    return t.flatten(0, 1) if att.valid is None else t[att.valid]


def normaliser(module: Any, x: Tensor, out: Tensor) -> Normaliser | None:
    """Return LayerNorm, or RMSNorm with weights w or 1 + w, whichever rebuilds the output."""
    with resident(module):
        weight, bias = module.weight, getattr(module, "bias", None)
    weight, bias = weight.to(x.device), None if bias is None else bias.to(x.device).detach()
    eps = eps_of(module, x.dtype)
    for centred, shift in ((True, 0.0), (False, 0.0), (False, 1.0)):
        norm = Normaliser(x, (weight + shift).detach(), bias, eps=eps, centred=centred)
        if relative_error(norm.out, out) <= RESIDUAL_TOLERANCE:
            return norm
    return None


def check_defined(call: Call) -> str:
    """Return that some token that is not padding may attend to none, where that is so.

    Raises:
        CaptureError: outputs of the call are NaN, for that reason or another.
    """
    mask, rows, out, name = call.additive(), call.valid_rows, call.out, call.name
    why, real = "", out if rows is None else out[rows]
    if mask is not None and not sees_some_key(mask, call.k.shape[-2], call.valid_keys, rows):
        window = call.extras.get("sliding_window")
        width = "" if window is None else f" (its sliding window is {window} tokens wide)"
        instead = "give inputs, or a configuration, in which every token but padding may see one"
        why = f"layer {name}: its mask forbids some token every key{width}; {instead}"
    if why and bool(out.isnan().any()):
        raise CaptureError(why)
    if bool(real.isnan().any()):
        left = rows is not None and not bool(rows[:, 0].all()) and out.dtype == torch.float64
        hint = ": in float64 left padding attends to nothing, 0/0; pad right, or take float32"
        what = f"layer {name or '(the model itself)'}: the outputs of its heads are NaN"
        raise CaptureError(f"{what} in the model's own eager pass{hint if left else ''}")
    return why


def about_padding(calls: Collection[Call]) -> list[str]:
    """Return sentences where it can be doubted which tokens of some layers are padding.

    Args:
        calls: of self-attention, with their padding.
    """
    unseen, attended = [], []
    for call in calls:
        hidden, given = hidden_keys(call), call.given_mask
        if hidden is None:
            hidden = torch.zeros(call.x.shape[:2], dtype=torch.bool, device=call.x.device)
        elif call.valid_keys is None:
            unseen.append(call.name)
        if given is not None and given.shape == hidden.shape:
            attended += [call.name] if bool(((given == 0) & ~hidden).any()) else []
    hid = "no query may attend to some tokens, which are measured as tokens nevertheless"
    unmarked = f"{hid}; mark padding by 0 in an attention_mask, whether the model takes it or not"
    seen = "tokens that attention_mask marks as padding are attended to, and are measured as tokens"
    pairs = (unseen, unmarked), (attended, seen)
    return [f"layer {listed(names)}: {said}" for names, said in pairs if names]


class _Held(Follower):
    """Notes the outputs of heads of a pass, or hands out those of another again."""

    def __init__(self, again: Iterable[Tensor] = ()):
        super().__init__()
        self.seen, self._again = list[Tensor](), map(Tensor.clone, again)

    def computed(self, heads: Heads) -> Tensor | None:
        self.seen.append(heads.raw)
        return next(self._again, None)


def about_mixing(calls: Collection[Call]) -> list[str]:
    """Return sentences on layers in which tokens reach others otherwise than by attention.

    Of layers made of the same modules the first runs again, with the same outputs of heads.

    Args:
        calls: of a pass of a model, in the context of `implementation`.
    """
    first: dict[Any, ModuleRun] = {}
    for call in calls:
        listed = (run for run, _ in call.around if run.name.rpartition(".")[2].isdigit())
        run = next(listed, None)
        if run is not None and call.q.shape[-2] in getattr(run.given, "shape", ())[:2]:
            first.setdefault((run.inside, *map(type, run.module.modules())), run)
    means = "also mix tokens by other means than the attention that is seen, which are left out"
    mixing = {type(run.module).__name__: run.name for run in first.values() if _mixes(run, calls)}
    return [f"layers such as {name} ({kind}) {means}" for kind, name in mixing.items()]


def _mixes(run: ModuleRun, calls: Collection[Call]) -> bool:
    """Return whether half of the tokens move outputs of the others where those of heads stay."""
    x, own = run.given, run.returned
    if own is None or own.shape != x.shape or x.ndim != 3:
        return False
    generator = torch.Generator().manual_seed(5)
    places = torch.randperm(x[..., 0].numel(), generator=generator).view(x.shape[:2])
    moved = (places < places.numel() // 2)[..., None].to(x.device)

    def passed(tokens: Tensor, again: Iterable[Tensor] = ()) -> tuple[list[Tensor], Tensor]:
        args, kwargs = interface.copied_state((run.args, run.kwargs), {id(x): (x, tokens)})
        follower = _Held(again)
        with interface.unmoved(run.module), follower.following():
            end = recording.first_tensor(run.module(*args, **kwargs))
        return follower.seen, (own if end is None else end).masked_fill(moved, 0)

    heads = [call.raw for call in calls if any(run is one for one, _ in call.around)]
    with suppress(Exception):  # a layer that does not run by itself tells nothing
        if len(heads) < run.inside:  # some were put together
            heads = passed(x)[0]
        after = passed(x.flip(-1).where(moved, x), heads)[1]
        if relative_error(after, own.masked_fill(moved, 0)) > SAME:
            # what was returned may have been changed in its place
            return relative_error(after, passed(x, heads)[1]) > SAME
    return False


def about_positions(inputs: Mapping[str, Any]) -> list[str]:
    """Return a sentence where positions begin again within a sample."""
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return []
    where = "position_ids begin again within a sample: without a cache, as it is measured"
    said = f"{where}, models may take that for documents that do not see each other, with one not"
    return [said] if bool((positions.diff(dim=-1) < 0).any()) else []


def _simplified(call: Call) -> Tensor | None:
    """Return a mask without what padding of queries and of keys makes of it.

    None if nothing remains, and one sample of it where all share it.
    """
    mask = call.additive()
    if mask is None:
        return None
    for valid, axis in ((call.valid_rows, -2), (call.valid_keys, -1)):
        if valid is not None:
            padded = ~valid[:, None].unsqueeze(-3 - axis)
            shape = torch.broadcast_shapes(mask.shape, padded.shape)
            mask = mask.expand(shape).masked_fill(padded, 0.0)
    if bool((mask == 0).all()):
        return None
    return mask[:1] if bool((mask == mask[:1]).all()) else mask


SAME = 1e-3
"""Relative difference of head outputs up to which they count as the same: rounding, in sums of
another order."""


def head_error(mine: Tensor, reference: Tensor, floor: Tensor, valid: Tensor | None) -> Tensor:
    """Return the largest difference of two tensors, relative to each head's largest entry, ().

    Args:
        mine: (samples, heads, N, d).
        reference: (samples, heads, N, d).
        floor: (samples or 1, heads), size of the numbers a head is computed from, below a
            thousandth of which no head's entries are taken seriously: they are sums that cancel.
        valid: (samples, N) bool, False at padding, which is left out; or None.
    """
    difference, size = (mine - reference).abs(), reference.abs()
    if valid is not None:
        padded = ~valid[:, None, :, None]
        difference, size = difference.masked_fill(padded, 0), size.masked_fill(padded, 0)
    scale = torch.maximum(size.amax((-1, -2)), 1e-3 * floor.to(size.dtype))
    scale = scale.clamp_min(torch.finfo(size.dtype).tiny)
    return (difference.amax((-1, -2)) / scale).amax()


def check_rebuilt(call: Call, attention: Attention, weights: ProbedWeights) -> float:
    """Return the largest error of rebuilt queries, keys, values and head outputs.

    Every sample and head of the model's recorded forward pass is compared; an error above
    `CAPTURE_TOLERANCE` is refused, since the layer is then not what `Attention` describes.
    """
    att, groups = attention, call.q.shape[1] // call.k.shape[1]
    reach = torch.linalg.vector_norm(att.x, dim=-1).amax(-1, keepdim=True)
    order = slice(None) if weights.turns is None else weights.turns.order
    k, v = (t.repeat_interleave(groups, 1) for t in (call.k[..., order], call.v))
    made = {}
    for name, mine, own, w, norm, valid in (
        ("queries", att.q, call.q[..., order], att.w_q, att.norm_q, att.valid_rows),
        ("keys", att.k, k, att.w_k, att.norm_k, att.valid_keys),
        ("values", att.v, v, att.w_v, att.norm_v, att.valid_keys),
    ):
        size = reach * torch.linalg.matrix_norm(w) if norm is None else torch.zeros_like(reach)
        made[name] = head_error(mine, own, size, valid)
    errors = torch.stack([*made.values()]).tolist()
    for name, difference in zip(made, errors, strict=True):
        if not difference <= CAPTURE_TOLERANCE:
            what = f"{name} are not one affine map of the layer's tokens (off by {difference:.1e})"
            raise CaptureError(
                f"layer {call.name} ({type(call.module).__name__}): {what}, normalised and turned: "
                "they are made of several tokens, of other input, or differently at each position"
            )
    size = att.v.abs().amax((-1, -2))
    difference = float(head_error(att.ungated, call.out.transpose(1, 2), size, att.valid_rows))
    if not difference <= CAPTURE_TOLERANCE:
        what = "is not softmax(scale q k^T + mask) v, nor a variant of it known here"
        off = f"rebuilt head outputs differ from the model's own by {difference:.1e} relative"
        raise CaptureError(f"layer {call.name}: its attention {what}: {off}")
    return max(*errors, difference)


def check_pass(
    model: nn.Module, inputs: Mapping[str, Tensor], calls: Sequence[Call], sample: int
) -> None:
    """Check that a recorded pass is what the model computes by itself.

    One sample, or all where none uses transformers' interface, runs through its untouched eager
    attention. Calls through the interface whose outputs cannot be compared have no closed form.

    Args:
        model: that was captured.
        inputs: of all samples.
        calls: recorded, of the layers to compare.
        sample: its number.

    Raises:
        UnfaithfulPassError: it is not.
    """
    modules = {m for call in calls for m in (call.module, call.consumer) if m is not None}
    samples, own = calls[0].samples, recording.ModuleRuns(modules)
    # which axis of others' inputs counts samples is not known
    whole = samples == 1 or all(call.way != INTERFACE for call in calls)
    # eager attention adds True and False as numbers
    name = "sdpa" if any(call.boolean for call in calls) else "eager"
    with interface.implementation(model, name), own.hooked(("", m) for m in modules):
        if not whole:
            try:
                interface.forward(model, one_sample(inputs, sample, samples))
            except CaptureError:  # samples are no samples: codebooks, frames of one film
                whole = True
                own.kept.clear()
        if whole:
            interface.forward(model, inputs)
    runs = {module: [run for run in own.kept if run.module is module] for module in modules}
    part = slice(None) if whole else slice(sample, sample + 1)
    for call in calls:
        given = [run.given for run in runs[call.module]]
        if _apart(call, call.run.given, given, part) > CAPTURE_TOLERANCE:
            why = "it draws random numbers (give them), or a sample changes with others (give one)"
            what = f"is given other token vectors when one sample runs alone: {why}"
            raise call.unsupported(what, UnfaithfulPassError)
        made, floor, found = call.run.returned, None, [run.returned for run in runs[call.module]]
        if call.consumer is not None:
            made = call.projected if call.gated else call.out
            found = [run.given for run in runs[call.consumer]]
            groups = call.out.shape[2] // call.v.shape[1]
            floor = call.v.abs().amax((0, -1, -2)).repeat_interleave(groups)
        off = _apart(call, made, found, part, floor)
        if off > CAPTURE_TOLERANCE and not call.boolean:
            what = f"differs from the model's own eager attention by {off:.1e} relative"
            raise UnfaithfulPassError(f"layer {call.name}: what is captured {what}")
        if math.isnan(off) and call.way == INTERFACE and not call.reason:
            why = "hands on its heads in no form in which they can be checked"
            call.reason = str(call.unsupported(why))


def _apart(
    call: Call, recorded: object, found: list[Any], part: slice, floor: Tensor | None = None
) -> float:
    """Return the largest relative difference of samples in two passes, padding left out.

    It is NaN where shapes differ, so that they cannot be compared.

    Args:
        call: of the layer.
        recorded: of all samples.
        found: in the other pass, by calls of the module.
        part: samples of that pass.
        floor: of outputs of heads, as of `head_error`; None for what has no heads.
    """
    own = found[call.turn] if call.turn < len(found) else None
    if not isinstance(recorded, Tensor) or not isinstance(own, Tensor) or not own.numel():
        return math.nan
    (count, rest), valid = divmod(recorded.numel(), own.numel()), call.valid_rows
    if rest or count not in (1, call.samples) or not recorded.is_floating_point():
        return math.nan
    mine = recorded.reshape(count, *own.shape)[part.start or 0 if count > 1 else 0]
    if valid is not None and own.ndim == 3 and own.shape[:2] == valid[part].shape:
        mine, own = mine[valid[part]], own[valid[part].to(own.device)]
    if not own.numel():
        return 0.0
    shape = (1, -1, 1, 1) if floor is None else (1, -1, *call.out.shape[2:])
    mine, own = (t.to(recorded).nan_to_num().reshape(shape).transpose(1, 2) for t in (mine, own))
    floor = recorded.new_zeros(1) if floor is None else floor
    return float(head_error(mine, own, floor, None))


def one_sample(inputs: Mapping[str, Any], sample: int, samples: int = 0) -> dict[str, Any]:
    """Return the model inputs of one of so many samples; by default as many as a tensor has."""
    lengths = (len(t) for t in inputs.values() if isinstance(t, Tensor) and t.ndim)
    count, part = samples or next(lengths, 0), slice(sample, sample + 1)

    def of(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        # positions have a row each for time, height and width
        if name == "position_ids" and value.ndim == 3:
            return value[:, part] if value.shape[1] == count else value
        return value[part] if len(value) == count else value

    return {name: of(name, value) for name, value in inputs.items()}


def most_padded(inputs: Mapping[str, Any]) -> int | None:
    """Return the sample with most padding; None where there is none."""
    padding = [(mask == 0).sum(-1).cpu() for mask in _masks(inputs).values()]
    streams = [counts for counts in padding if len(counts) == len(padding[0])]
    most = torch.stack(streams).amax(0) if streams else torch.zeros(1)  # (samples,)
    return int(most.argmax()) if bool(most.any()) else None


def dependence(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return a sentence where head outputs of one sample are others without its padding.

    Args:
        model: of the capture.
        inputs: of this sample alone, with the padding that it has in its batch.
    """
    inputs, padding, off = taken(model, inputs), Padding((), inputs), 0.0

    def of_tokens(call: Call) -> Tensor:
        if not call.formed or len(call.out) > 1:
            return call.out[:0]
        valid = padding.of_keys(call, 1, call.out.shape[1])
        return call.out if valid is None else call.out[valid]

    with interface.implementation(model, interface.RECORDING_ATTENTION):
        passes = (recording.record(model, given)[0] for given in (inputs, _unpadded(inputs)))
        for a, b in (map(of_tokens, pair) for pair in zip(*passes, strict=False)):
            if a.numel() and a.numel() == b.numel():  # calls that both make of the same tokens
                off = max(off, relative_error(b.flatten(), a.flatten()))
    what = f"numbers depend on what shares the batch: head outputs are up to {off:.1%} off"
    why = "padding moves positions, or the longest sample decides for rotary tables, normalisations"
    said = f"{what} ({why} over padding); pad on the right, and give samples of one length"
    return [said] if off > SAME else []


def _masks(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masks of tokens, (samples, tokens), among inputs; none of those beside a cache.

    Such a mask is of more tokens than the other inputs.
    """
    held = any(isinstance(value, Cache) for value in inputs.values())
    named = {name: inputs.get(name) for name in ("attention_mask", "decoder_attention_mask")}
    return {n: t for n, t in named.items() if isinstance(t, Tensor) and t.ndim == 2 and not held}


def _unpadded(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return one sample without its padding.

    A mask is about the inputs of its stream, those whose names begin as its own does, with as many
    tokens.
    """
    trimmed = dict(inputs)
    for name, mask in _masks(inputs).items():
        keep = mask[0] != 0
        for other, t in inputs.items() if bool(keep.any()) else ():
            same_stream = other.startswith("decoder_") == name.startswith("decoder_")
            if same_stream and isinstance(t, Tensor) and t.ndim > 1 and t.shape[1] == len(keep):
                trimmed[other] = t[:, keep.to(t.device)]
    return trimmed

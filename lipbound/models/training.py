"""Attention of a model in training, with gradients: what penalties are computed from.

An attention function of ours takes the place of the model's, and hooks tell which token stream is
computed, so that calls are known with their masks and padding. Gradient checkpointing is off while
attention is watched: a recomputation in the backward pass would not find that function.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, __version__
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lipbound.attention.layer import Attention
from lipbound.attention.scoring import BLOCKED
from lipbound.devices import in_own_modes, measuring_device
from lipbound.errors import CaptureError, indices, shown, tell
from lipbound.models.capture.rerun import relative_error
from lipbound.models.capture.seeing import interface
from lipbound.models.capture.seeing.follower import INTERFACE, Heads
from lipbound.models.capture.seeing.recording import Call, ModuleRun, ModuleRuns
from lipbound.models.checkpoint import MASK, bare_module
from lipbound.models.other_libraries import temporarily

TRAINING_ATTENTION = "lipbound-training"
"""Name in the transformers registry of the attention function that can keep its probabilities."""
CHECKPOINTING = "gradient_checkpointing"
"""Attribute of modules of transformers that are computed again in the backward pass."""
TRAINING_TOLERANCE = 1e-3
"""Largest relative difference between the model's q, k, v and projected inputs, in float32 and
float64."""
HALF_ROUNDINGS = 4
"""The same in half precision, in roundings: of input, of weights, of their product, and of what is
added to it."""
SEPARATE = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
"""Names of three linear maps in one module."""
ONE_MAP = ("c_attn", "qkv")
"""Names of one linear map onto queries, keys and values, in this order."""
COUNTS = ("num_attention_heads", "num_heads", "n_heads")
"""Names under which a module keeps its number of heads."""
QUERIES = 64
"""Queries whose scores are computed at a time: these stay in a processor's cache."""


class Probabilities(list[Tensor]):
    """Attention probabilities, one tensor per layer, (samples, heads, queries, keys).

    Attributes:
        valid: per layer (samples, queries) bool, False at padding, or None where there is none.
    """

    def __init__(self, found: Iterable[Tensor] = (), valid: Iterable[Tensor | None] | None = None):
        super().__init__(found)
        self.valid: list[Tensor | None] = [None] * len(self) if valid is None else list(valid)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Probabilities(found, self.valid[index]) if isinstance(index, slice) else found


class ProbabilityCollector(ModuleRuns):
    """The probabilities of a model's layers.

    Args:
        modules: of the model.
        chosen: numbers of the layers wanted, or None for all.

    Attributes:
        found: probabilities so far.
        firsts: the first call of each layer that is wanted, and its place in ``found``.
        layers: numbers of layers, by module and pass.
        ran: whether a model ran.
    """

    def __init__(self, modules: Iterable[nn.Module], chosen: frozenset[int] | None):
        super().__init__(())
        self.modules, self.chosen = frozenset(map(id, modules)), chosen
        self.found, self.ran = Probabilities(), False
        self.firsts: dict[int, tuple[Call, int]] = {}
        self.layers: dict[tuple[int, int], int] = {}
        self._passes: dict[int, int] = {}  # how often modules were entered since their first call

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.ran = True
        super().enter(name, module, args, kwargs)

    def layer(self, module: nn.Module) -> int:
        """Return the number of the layer that calls; called twice in one pass, it is one layer."""
        key = id(module)
        if key not in self._passes:
            self._passes[key] = 0
            self.hooks.enter_context(module.register_forward_pre_hook(self._again))
        return self.layers.setdefault((key, self._passes[key]), len(self.layers))

    def _again(self, module: nn.Module, args: Any) -> None:
        self._passes[id(module)] += 1

    def add(self, layer: int, call: Call, p: Tensor) -> None:
        """Keep the probabilities of a call, with those of earlier calls in the same pass."""
        call.run = next((r for r in reversed(self.running) if r.module is call.module), call.run)
        call.valid_rows = valid = _valid(call, self.mask_given())
        first, place = self.firsts.setdefault(layer, (call, len(self.found)))
        first.run.calls += 1
        if first is call:
            self.found.append(p)
            self.found.valid.append(valid)
            return
        alike = call.extras[MASK] is first.extras[MASK]
        if not (alike and call.q is first.q and call.k is first.k):
            both = _side_by_side(self.found[place], self.found.valid[place], p, valid)
            self.found[place], self.found.valid[place] = both


_watches: list[ProbabilityCollector] = []


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kw: Any
) -> tuple[Tensor, Any]:
    """Return torch's fused attention, or the same by way of probabilities where they are wanted.

    Raises:
        CaptureError: scores are capped or have sinks, or the module is a copy of DataParallel's.
    """
    if extras := [name for name in ("softcap", "s_aux") if kw.get(name) is not None]:
        raise CaptureError(f"{type(module).__name__}: penalties do not support {', '.join(extras)}")
    if getattr(module, "_is_replica", False):
        instead = "use one device, or DistributedDataParallel (torchrun)"
        raise CaptureError(f"penalties cannot follow the copies that DataParallel runs; {instead}")
    numbers = [(w, w.layer(module)) for w in list(_watches) if id(module) in w.modules]
    layers = [(w, layer) for w, layer in numbers if w.chosen is None or layer in w.chosen]
    if not layers:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kw)
    out, p, scale, mask = _explicit(module, (query, key, value), attention_mask, kw)
    for watch, layer in layers:
        run = ModuleRun(module, "", (), {})
        seen = Heads(INTERFACE, (query,), (key,), value, mask, scale, {**kw, MASK: attention_mask})
        watch.add(layer, Call(**vars(seen), run=run, q=query, k=key, out=out), p)
    return out, p.to(query.dtype)


AttentionInterface.register(TRAINING_ATTENTION, _attention)
AttentionMaskInterface.register(TRAINING_ATTENTION, eager_mask)


def _explicit(
    module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], given: Tensor | None, kw: dict[str, Any]
) -> tuple[Tensor, Tensor, float, Tensor | None]:
    """Return output and probabilities, the factor of scores, and what is added to them.

    Probabilities are before dropout and in float32 at least.
    """
    query, key, value = qkv
    scale = kw.get("scaling") or query.shape[-1] ** -0.5
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    scores = ((query @ keys.mT) * scale).to(torch.promote_types(query.dtype, torch.float32))
    mask = _added(module, given, kw.get("is_causal"), scores)
    if (bias := kw.get("position_bias")) is not None:
        scores = scores + bias[..., : scores.shape[-1]]
    p = torch.softmax(scores if mask is None else scores + mask, -1)
    if given is not None:
        # where nothing is seen, fused attention gives zeros; the lowest number is a number
        unseen = ~given if given.dtype == torch.bool else given == -torch.inf
        p = p.masked_fill(unseen[..., : p.shape[-1]].all(-1, keepdim=True), 0.0)
    dropped = nn.functional.dropout(p.to(query.dtype), kw.get("dropout", 0.0), module.training)
    return (dropped @ values).transpose(1, 2).contiguous(), p, scale, mask


def _added(module: nn.Module, given: Any, causal: bool | None, scores: Tensor) -> Tensor | None:
    """Return what is added to scores, as fused attention takes a mask or the absence of one.

    Raises:
        CaptureError: a mask of whole numbers.
    """
    lowest, (rows, keys) = torch.finfo(scores.dtype).min, scores.shape[-2:]
    if given is None:
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal or rows == 1:
            return None
        given = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).tril()[None, None]
    given = given[..., :keys]
    if given.dtype == torch.bool:
        return interface.additive_mask(scores, scores, given, False)
    if not given.is_floating_point():
        kind = str(given.dtype).removeprefix("torch.")
        instead = "give True where attention is allowed, or floating-point numbers, added to scores"
        raise CaptureError(f"{type(module).__name__} has a mask of {kind} numbers; {instead}")
    return given.to(scores.dtype).masked_fill(given <= torch.finfo(given.dtype).min, lowest)


def _valid(call: Call, given: Any) -> Tensor | None:
    """Return which queries are not padding, (samples, queries) bool; None where none is.

    The mask that the innermost model was given says it, whose token stream they are.
    """
    if isinstance(given, Mapping):
        given = next((t for t in given.values() if isinstance(t, Tensor)), None)
    if not isinstance(given, Tensor):
        return None
    (samples, _, rows, _), keys = call.q.shape, call.k.shape[-2]
    if given.ndim == 2 and tuple(given.shape) in ((samples, rows), (samples, keys)):
        valid = given[:, -rows:] != 0
    # a mask of all pairs, or one that the model has adapted to other tokens: what no query may
    # attend to is padding
    else:
        mask = given if given.ndim > 2 else call.mask if rows == keys else None
        if mask is None or mask.shape[-1] != rows:
            return None
        seen = mask if mask.dtype == torch.bool else mask > BLOCKED
        valid = seen.flatten(1, -2).any(1).expand(samples, -1)
    return None if bool(valid.all()) else valid


def _side_by_side(
    p: Tensor, valid: Tensor | None, q: Tensor, other: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return probabilities of two calls of one layer as samples, the shorter ones padded."""
    if p.shape[1:] == q.shape[1:] and valid is None and other is None:
        return torch.cat([p, q]), None
    rows, keys = (max(a, b) for a, b in zip(p.shape[-2:], q.shape[-2:], strict=True))

    def padded(t: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = t.new_ones(t.shape[::2], dtype=torch.bool) if mask is None else mask
        short = rows - t.shape[-2]
        return pad(t, (0, keys - t.shape[-1], 0, short)), pad(mask, (0, short))

    tensors, masks = zip(padded(p, valid), padded(q, other), strict=True)
    return torch.cat(tensors), torch.cat(masks)


@contextmanager
def watched_attention(
    model: nn.Module, layers: object, inputs_of: Sequence[nn.Module] = ()
) -> Iterator[ProbabilityCollector]:
    """Yield a `ProbabilityCollector` that follows the attention of a model.

    Args:
        model: in training.
        layers: numbers of attention layers, or None for all.
        inputs_of: modules whose inputs are kept with their calls.

    Raises:
        CaptureError: layers that do not exist; a model ran and no attention was seen, or is to run
            an attention function of the user's own.
    """
    inner = bare_module(model, False, PreTrainedModel)
    chosen = None if layers is None else frozenset(indices("layers", layers))
    if chosen is not None and min(chosen, default=0) < 0:
        raise CaptureError(f"layers is {shown(layers)}; count from 0, in the order they run in")
    modules = list((model if isinstance(model, nn.Module) else inner).modules())
    configs = interface.attention_configs(modules)
    names = [getattr(config, interface.ATTRIBUTE) for config in configs]
    if own := [name for name in names if interface.own_function(name) is not None]:
        what = f"{type(inner).__name__} computes attention by {own[0]!r}, a function of your own"
        instead = "set_attn_implementation('eager') is"
        raise CaptureError(f"{what}, which is not seen in training; {instead}")
    again = [module for module in modules if getattr(module, CHECKPOINTING, False)]
    if again and inner.training:
        tell("gradient checkpointing is off while attention is watched, which takes memory")
    through = temporarily(interface.ATTRIBUTE, TRAINING_ATTENTION, *configs)
    once = temporarily(CHECKPOINTING, False, *again)
    watch = ProbabilityCollector(modules, chosen)
    wanted = {*inputs_of, *(m for m in modules if isinstance(m, PreTrainedModel))}
    hooked = watch.hooked(pair for pair in inner.named_modules() if pair[1] in wanted)
    with hooked, through, once, uncompiled(modules):
        _watches.append(watch)
        try:
            yield watch
        finally:
            _watches.remove(watch)
    if watch.ran and not watch.layers:
        newer = "" if __version__ >= "5" else ", or install transformers>=5, where more does"
        what = f"none of its attention goes through AttentionInterface (transformers {__version__})"
        instead = "take the attentions of attn_implementation='eager', output_attentions=True"
        raise CaptureError(f"{type(inner).__name__} ran, and {what}; {instead}{newer}")
    missing = sorted(i for i in watch.chosen or () if i >= len(watch.layers))
    if missing and watch.layers:
        raise CaptureError(f"layers {missing} do not exist: 0 to {len(watch.layers) - 1} ran")


def uncompiled(modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run as they are written."""
    compiled = any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in modules)
    if compiled and not hasattr(torch.compiler, "set_stance"):
        raise CaptureError("compiled models need torch 2.6 or newer; give the model uncompiled")
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def attention_probabilities(
    model: nn.Module, layers: Sequence[int] | int | str | None = None
) -> Iterator[Probabilities]:
    """Yield a list to which every forward pass of a model adds its attention probabilities.

    Each is that of a layer, (samples, heads, N, N), with gradients, before dropout, in float32 at
    least, also where the model or autocast uses less. Masks count as fused attention takes them:
    True where attention is allowed, or numbers to be added. A layer that calls attention several
    times in a pass has one entry: its probabilities, where all calls share them, else those of all
    calls as samples. Afterwards the model's attention is what it was before.

    Gradient checkpointing is off inside, which a notice tells.

    CaptureError is raised for what is no transformers model; capped scores or sinks; functions of
    the user's own, registered with ``AttentionInterface``; masks of whole numbers; layers that do
    not exist; DataParallel on several devices.

    Args:
        model: a transformers model whose attention goes through ``AttentionInterface``, also inside
            DistributedDataParallel, ``torch.compile`` (it runs uncompiled in the context) or PEFT.
        layers: numbers of attention layers, in the order of the forward pass, counted over all
            forward passes in the context; all by default.

    Yields:
        `lipbound.models.training.Probabilities`: a list whose ``valid`` says which tokens are
        not padding; `JaSMin` looks at it.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(vocab_size=9, num_hidden_layers=2, **sizes))
    >>> with attention_probabilities(model) as found:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> [tuple(p.shape) for p in found]
    [(1, 2, 3, 3), (1, 2, 3, 3)]
    """
    with watched_attention(model, layers) as watch:
        yield watch.found


@contextmanager
def attention_layers(
    model: nn.Module, layers: Sequence[int] | int | str | None = None
) -> Iterator[list[Attention]]:
    """Yield a list of `Attention` layers, differentiable in the model's weights and inputs.

    Bounds are computed from them. The list is filled when the context ends, without samples that
    are all padding; of a model in half precision the layers are in float32. Weights are found by
    their names (`projections`).

    CaptureError is raised as by `attention_probabilities`, and for biases of relative positions; a
    model whose projections are not found, whose attention modules are not given one tensor of token
    vectors, or whose queries, keys or values are not these projections of it (rotations,
    cross-attention).

    Args:
        model: as of `attention_probabilities`.
        layers: as of `attention_probabilities`.
    """
    found = projections(bare_module(model, False, PreTrainedModel))
    known = {id(p.module): p for p in found}
    result: list[Attention] = []
    with watched_attention(model, layers, [p.module for p in known.values()]) as watch:
        yield result
    calls = (call for call, _ in watch.firsts.values())
    result += filter(None, (_layer(call, known.get(id(call.module))) for call in calls))


class ModuleProjections(NamedTuple):
    """Views of the parameters of one attention module, which gradients reach.

    Attributes:
        name: of the module in the model.
        module: itself.
        w: of queries, keys, values, each (heads, D, d); fewer heads where they share keys.
        b: biases of the same, each (heads, d) or None.
    """

    name: str
    module: nn.Module
    w: tuple[Tensor, ...]
    b: tuple[Tensor | None, ...]


def projections(model: nn.Module) -> list[ModuleProjections]:
    """Return the projections of every attention module of a model, in the order of its modules.

    Raises:
        CaptureError: no module, or none is found in it: the model names its projections in another
            way than `SEPARATE` and `ONE_MAP`.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model is {shown(model)}; give a loaded transformers model")
    found = []
    for name, module in model.named_modules():
        heads = next((n for key in COUNTS if isinstance(n := getattr(module, key, None), int)), 0)
        if (maps := _maps(module) if heads else None) is not None:
            w, b = zip(*(_per_head(*m, heads) for m in maps), strict=True)
            found.append(ModuleProjections(name, module, w, b))
    if not found:
        known = ", ".join("/".join(names) for names in SEPARATE)
        what = f"has no attention modules that say their number of heads ({', '.join(COUNTS)})"
        beside = f"beside projections called {known} or {', '.join(ONE_MAP)}"
        instead = "with rotary positions or shared keys take JaSMin"
        raise CaptureError(f"{type(model).__name__} {what}, {beside}; {instead}")
    return found


def _maps(module: nn.Module) -> list[tuple[Tensor, Tensor | None]] | None:
    """Return three maps as (weight (D, heads d), bias or None), or None."""
    for names in SEPARATE:
        linear = [m for name in names if isinstance(m := getattr(module, name, None), nn.Linear)]
        if len(linear) == len(names):
            return [(one.weight.mT, one.bias) for one in linear]
    made = (getattr(module, name, None) for name in ONE_MAP)
    one: Any = next((m for m in made if isinstance(getattr(m, "weight", None), Tensor)), None)
    # transformers' Conv1D stores (in, out)
    weight = one.weight.mT if isinstance(one, nn.Linear) else getattr(one, "weight", None)
    if weight is None or weight.shape[1] % 3:
        return None
    bias = getattr(one, "bias", None)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return list(zip(weight.chunk(3, 1), biases, strict=True))


def _per_head(weight: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor | None]:
    w = weight.unflatten(1, (heads, -1)).transpose(0, 1)
    return w, None if bias is None else bias.unflatten(0, (heads, -1))


@in_own_modes
def _layer(call: Call, found: ModuleProjections | None) -> Attention | None:
    """Return the layer of a call, without samples that are all padding; None where none remains.

    Raises:
        CaptureError: see `attention_layers`.
    """
    if found is None:
        raise call.unsupported("has projections of other names, for which there is no gradient")
    no_gradient = "of which bounds have no gradient"
    if call.extras.get("position_bias") is not None:
        raise call.unsupported(f"uses position_bias in its attention, {no_gradient}")
    if call.run.calls > 1:
        raise call.unsupported(f"calls attention several times in one forward pass, {no_gradient}")
    x, valid, mask = call.x, call.valid_rows, call.mask
    first = 0
    if valid is not None and not bool((keep := valid.any(-1)).all()):
        if not bool(keep.any()):
            return None
        x, valid, first = x[keep], valid[keep], int(keep.nonzero()[0])
        mask = mask[keep] if mask is not None and len(mask) > 1 else mask
    home, dtype = measuring_device(x.device), torch.promote_types(x.dtype, torch.float32)

    def each_head(t: Tensor) -> Tensor:
        return t.to(home, dtype).repeat_interleave(call.q.shape[1] // len(t), 0)

    biases = zip("qkv", found.b, strict=True)
    given: dict[str, Any] = {f"b_{side}": each_head(b) for side, b in biases if b is not None}
    given |= {} if mask is None else {"mask": mask.to(home, dtype)}
    given |= {} if valid is None else {"valid": valid.to(home)}
    att = Attention(x.to(home, dtype), *map(each_head, found.w), scale=call.scale, **given)
    _check(att, call, first)
    return att


@torch.no_grad()
def _check(att: Attention, call: Call, sample: int) -> None:
    """Check that the model's queries, keys and values are the layer's at its first sample.

    Args:
        att: the layer.
        call: its call.
        sample: number in the call of the layer's first sample.

    Raises:
        CaptureError: they are not.
    """
    first = att.select(slice(0, 1))
    real = slice(None) if first.valid is None else first.valid[0]
    limit = max(TRAINING_TOLERANCE, torch.finfo(call.q.dtype).eps * HALF_ROUNDINGS)
    for side, name in {"q": "queries", "k": "keys", "v": "values"}.items():
        mine = getattr(first, side)[0][:, real]
        own = getattr(call, side)[sample].to(mine)[:, real]
        own = own.repeat_interleave(len(mine) // len(own), 0)  # keys and values that heads share
        off = relative_error(mine, own) if mine.shape == own.shape else torch.inf
        if not off <= limit:
            what = f"does more to its {name} than project its input (off by {off:.1e})"
            said = f"{type(call.module).__name__} {what}, or is cross-attention"
            raise CaptureError(f"{said}, so its bound has no gradient")


class BatchLogits:
    """Largest logits of heads, from queries and keys of the passes of a model in training mode.

    Hooks have the attention function, while one of the layers runs, hand on what it is given; it
    computes what it computes without them. No scores are kept, and all are in the model's dtype.
    For torch below 2.5 padding at the left would count: transformers has it attend to all there.

    Args:
        layers: modules of transformers that call the attention function "sdpa".

    Attributes:
        found: by identities of modules, (heads,).
        is_watching: whether passes are looked at.
        hooks: to be closed, which removes them.

    Raises:
        CaptureError: they call another one, or torch is older.
    """

    def __init__(self, layers: Iterable[Any]):
        self.found, self.is_watching = dict[int, Tensor](), False
        self.hooks, self._running = ExitStack(), ExitStack()
        for layer in layers:
            name = getattr(getattr(layer, "config", None), "_attn_implementation", None)
            if name != "sdpa" or torch.__version__ < "2.5":
                what = f"{type(layer).__name__} has {name}, with torch {torch.__version__}"
                raise CaptureError(f"batch_logit needs attention 'sdpa' and torch 2.5, and {what}")
            self.hooks.enter_context(layer.register_forward_pre_hook(self._enter))
            self.hooks.enter_context(layer.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.is_watching and module.training:
            known = ALL_ATTENTION_FUNCTIONS._local_mapping | {"sdpa": self._attend}
            self._running.enter_context(
                temporarily("_local_mapping", known, ALL_ATTENTION_FUNCTIONS)
            )

    def _leave(self, *_: Any) -> None:
        self._running.close()

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any
    ) -> Any:
        """Look at a call of the attention function, and compute it."""
        causal = kw.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        with torch.no_grad():
            found = largest_logits(q, k, mask, kw.get("scaling"), causal)
        self.found[id(module)] = torch.maximum(found, self.found.get(id(module), found))
        return sdpa_attention_forward(module, q, k, v, mask, **kw)


def largest_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool
) -> Tensor:
    """Return the largest scores of pairs that may attend to each other, (heads,), float32.

    Args:
        q: queries, (samples, heads, N, d).
        k: keys, (samples, heads or fewer, M, d).
        mask: True where attention is allowed, or numbers to be added; (samples or 1, heads or 1, N,
            M), or None. Queries whose own key no query may attend to are padding, and do not count.
        scale: factor of the scores; None for d^-0.5.
        is_causal: as of scaled_dot_product_attention; without effect where there is a mask.
    """
    rows, keys = q.shape[-2], k.shape[-2]
    causal = mask is None and is_causal and rows > 1
    later = q.new_full((QUERIES, QUERIES), -torch.inf).triu(1)
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask > BLOCKED
        seen = seen & seen.any(-2, keepdim=True).mT if rows == keys else seen
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    q = (q * (q.shape[-1] ** -0.5 if scale is None else scale)).contiguous()
    k, found = k.repeat_interleave(q.shape[1] // k.shape[1], 1), []
    for i in range(0, rows, QUERIES):
        end = i + QUERIES if causal else keys
        scores = q[..., i : i + QUERIES, :] @ k[..., :end, :].mT
        if causal:
            scores[..., i:] += later[: scores.shape[-2], : scores.shape[-1] - i]
        elif mask is not None:
            scores += mask[..., i : i + QUERIES, :]
        found.append(scores.amax((0, -2, -1)))
    return torch.stack(found).amax(0).float()

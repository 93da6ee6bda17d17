"""Running a model while its calls of attention functions come to us.

They are calls of transformers' attention interface, of torch's scaled_dot_product_attention, and of
what else is named in `OTHERS`. What modules keep from pass to pass (caches, counters, moving
averages) stays as it is.
"""

import copy
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint
from transformers import AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lipbound.errors import CaptureError
from lipbound.models.checkpoint import MASK, dtype_of
from lipbound.models.other_libraries import explained, temporarily

RECORDING_ATTENTION = "lipbound"
"""Name of our attention function in the transformers registry."""


class _AlsoSDPA(str):
    """Our name for models that ask whether theirs is "sdpa", and do what they do for eager."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in ("sdpa", str(self))

    def __ne__(self, other: object) -> bool:
        return not self == other


AS_SDPA = _AlsoSDPA(RECORDING_ATTENTION)
"""The same name, for a model that computes something else under a name that it does not know."""
EAGER = "eager_attention_forward"
"""Ending of the names of transformers' eager attention functions."""
ATTRIBUTE = "_attn_implementation_internal"
"""Where a configuration of transformers keeps the name of the attention function."""
EXPERTS = "_experts_implementation"
"""Where it keeps the name of the function that computes experts."""
OWN_FORWARD = "_original_forward"
"""Where Accelerate keeps the forward pass of a module that it made one under autocast for."""
ORIGINAL = "original_inv_freq"
"""Ending of the names of rotary tables in modules that stay as they were made."""

SDPA = F.scaled_dot_product_attention
"""torch's own function."""
MULTIHEAD = F.multi_head_attention_forward

AttentionFunction = Callable[..., tuple[Tensor, Any]]
"""A function (module, query, key, value, mask, ...) -> (outputs, probabilities)."""
Adapter = Callable[..., tuple[dict[str, Any], Callable[[Tensor], Tensor]]]
"""Brings a call's arguments into those of scaled_dot_product_attention, by name; and what brings
its outputs, (samples, heads, N, d_v), into the layout of the function's own."""
OTHERS: list[tuple[Any, str, Adapter]] = []
"""Other functions that compute attention: the module that calls each by a name, that name, and the
adapter."""

DEEP = 6
"""Depth to which nested lists, dictionaries and objects are copied."""
TORCHS = {name for name in vars(nn.Module()) if "hooks" not in name} - {"_buffers"}
"""Attributes that every module has, which are the model and no state of a pass.

Hooks are: transformers adds its own in the first pass that keeps hidden states, and notes it in an
attribute."""
SHARED = (type, nn.Module, nn.Parameter, PretrainedConfig, str, int, float)
"""Types of values that copies of a module's state share with it."""
OWN = "own_function"
"""The argument in which our functions are given a function of the user's own, to be followed."""

_handler: AttentionFunction | None = None


def own_function(name: object) -> AttentionFunction | None:
    """Return the attention function of a name that is the user's own, none of transformers'."""
    function: Any = ALL_ATTENTION_FUNCTIONS.get(name)
    while OWN in getattr(function, "keywords", {}):  # by way of one of ours
        function = function.keywords[OWN]
    kind = str(getattr(getattr(function, "func", function), "__module__", ""))
    usual = any(one in str(name) for one in ("sdpa", "flash", "flex_attention", "paged"))
    theirs = kind.startswith("lipbound.") or (usual and kind.startswith("transformers."))
    return None if function is None or theirs else function


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kw: Any
) -> tuple[Tensor, Any]:
    # parameters have the interface's names, since some models pass them by keyword
    given, own = (module, query, key, value, attention_mask), kw.pop(OWN, None)
    return (own or eager(module))(*given, **kw) if _handler is None else _handler(*given, own, **kw)


ALL_ATTENTION_FUNCTIONS.register(RECORDING_ATTENTION, _attention)
# without this, causal and padding masks would silently be lost
AttentionMaskInterface.register(RECORDING_ATTENTION, eager_mask)


def eager(module: nn.Module) -> AttentionFunction:
    """Return the eager attention that a module's own code names; a file may have several.

    Raises:
        CaptureError: it names none.
    """
    kind: Any = type(module)
    space, name = _eager_name(kind) or (vars(sys.modules[kind.__module__]), EAGER)
    function: AttentionFunction | None = space.get(name)  # as it is now
    if function is None:
        why = "names no eager attention function, so its attention cannot be checked"
        raise CaptureError(f"{kind.__name__} {why}")
    return function


@cache
def _eager_name(kind: Any) -> tuple[dict[str, Any], str] | None:
    """Return globals and name of the eager attention function that a class mentions."""
    for cls in kind.__mro__:
        functions = map(inspect.unwrap, filter(inspect.isfunction, vars(cls).values()))
        for f in sorted(functions, key=lambda f: f.__name__ != "forward"):
            for name in f.__code__.co_names:
                if name.endswith(EAGER):
                    return f.__globals__, name
    return None


@contextmanager
def handling(function: AttentionFunction, fused: Callable[..., Tensor]) -> Iterator[None]:
    """Yield while attention is computed by functions of ours.

    torch's own layers take no fast path that calls nothing in Python, and its MultiheadAttention
    returns no weights, for which it would multiply by hand.

    Args:
        function: takes the calls of the attention interface.
        fused: takes those of scaled_dot_product_attention, and of `OTHERS`.
    """

    def multihead(*args: Any, **kwargs: Any) -> Any:
        return MULTIHEAD(*args, **{**kwargs, "need_weights": False})

    swapped: list[tuple[Any, str, Any]] = [(sys.modules[__name__], "_handler", function)]
    swapped += [(F, SDPA.__name__, fused), (F, MULTIHEAD.__name__, multihead)]
    # functions of the user's own come to us under their names, on which masks depend
    through, known = cast(Any, _attention), dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    own = {name: own_function(name) for name in ALL_ATTENTION_FUNCTIONS}
    known |= {name: partial(through, **{OWN: one}) for name, one in own.items() if one}
    swapped += [(ALL_ATTENTION_FUNCTIONS, "_local_mapping", known)]
    swapped += [(owner, name, partial(_adapted, fused, adapt)) for owner, name, adapt in OTHERS]
    # code runs once, also where a backward pass would run it again
    once = SimpleNamespace(apply=lambda function, preserve, *args: function(*args))
    swapped += [(checkpoint, "CheckpointFunction", once)]
    again = [name for name in vars(checkpoint) if name.startswith("_checkpoint_without_reentr")]
    swapped += [(checkpoint, name, lambda *_, **__: (yield)) for name in again]
    if flex := sys.modules.get("torch.nn.attention.flex_attention"):
        adapted = partial(_adapted, fused, partial(_flexible, flex))
        new = ("flex_attention_hop", adapted), ("_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        both = (*new, ("_validate_device", lambda *_: None))  # of gradients on the CPU
        swapped += [(flex, name, value) for name, value in both if hasattr(flex, name)]
    with ExitStack() as afterwards:
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            afterwards.enter_context(torch.compiler.set_stance("force_eager"))
        fast = torch.backends.mha.get_fastpath_enabled()
        afterwards.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        for owner, name, new in swapped:
            afterwards.enter_context(temporarily(name, new, owner))
        yield


def _adapted(function: Callable[..., Tensor], adapt: Any, *args: Any, **kwargs: Any) -> Any:
    given, back = adapt(*args, **kwargs)
    return back(function(**given))


def _flexible(
    flex: Any, q: Tensor, k: Tensor, v: Tensor, modify: Any, block_mask: Any, scale: float, *_: Any
) -> tuple[dict[str, Any], Callable[[Tensor], Any]]:
    """Adapt flex_attention, without its statistics.

    Raises:
        CaptureError: it does more to scores than add to them.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    places = [torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2])]
    probe = torch.randn([len(i) for i in places], generator=torch.Generator().manual_seed(0)).to(q)
    with TransformGetItemToIndex():
        added = flex._vmap_for_bhqkv(modify, prefix=(0,))
        bias, made = (added(z, *places) for z in (torch.zeros_like(probe), probe))
        seen = flex._vmap_for_bhqkv(block_mask[-1], prefix=())(*places) & (bias > -torch.inf)
    if not torch.allclose((made - bias)[seen], probe[seen], rtol=1e-3, atol=1e-3):
        what = "a score_mod of flex_attention does more to scores than add to them"
        raise CaptureError(f"{what}; write it as products and a softmax")
    mask = bias.masked_fill(~seen, -torch.inf) if bool(bias[seen].any()) else seen
    given = {"query": q, "key": k, "value": v, "attn_mask": mask, "scale": scale}
    empty = q.new_empty(0)
    return given | {"enable_gqa": q.shape[1] != k.shape[1]}, lambda out: (out, empty, empty)


def additive_mask(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Return what masks of scaled_dot_product_attention add to scores, or None for nothing."""
    if is_causal:
        shape = (q.shape[-2], k.shape[-2])
        mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return q.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)


def plain_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Compute scaled_dot_product_attention by products and a softmax, twice differentiable."""
    with sdpa_kernel(SDPBackend.MATH):
        return SDPA(*args, **kwargs)


def attention_configs(modules: Iterable[nn.Module]) -> list[Any]:
    """Return configurations that name attention functions of models which can change theirs.

    Args:
        modules: some of which are such models.
    """
    found: dict[int, Any] = {}
    models = (m for m in modules if isinstance(m, PreTrainedModel))
    left: list[Any] = [m.config for m in models if m._can_set_attn_implementation()]
    for config in left:
        if hasattr(config, ATTRIBUTE) and id(config) not in found:
            found[id(config)] = config
            left += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [*found.values()]


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Yield while a model runs another attention function, as if it had seen no text before.

    It is in evaluation mode and has no gradients, and computes in the dtype of its weights where
    Accelerate prepared it for mixed precision; afterwards all is as it was. Of a module that is
    not transformers' this is meant of the models inside it.
    """
    with ExitStack() as afterwards, torch.no_grad():
        afterwards.enter_context(temporarily("training", False, *model.modules()))
        for module in model.modules():
            own = vars(module).get(OWN_FORWARD)
            if own is not None and "forward" in vars(module):
                afterwards.enter_context(temporarily("forward", own, module))
        configs = attention_configs(model.modules())
        theirs = (c for c in configs if own_function(getattr(c, ATTRIBUTE)) is None)
        afterwards.enter_context(temporarily(ATTRIBUTE, name, *theirs))
        if dtype_of(model) == torch.float64:  # torch's grouped product of experts knows none
            mixing = (c for c in configs if hasattr(c, EXPERTS))
            afterwards.enter_context(temporarily(EXPERTS, "eager", *mixing))
        _renew_rotary_tables(model, afterwards)
        yield


def _renew_rotary_tables(model: nn.Module, afterwards: ExitStack) -> None:
    """Start rotary tables anew that grow with the longest text seen (dynamic NTK)."""
    for module in model.modules():
        names = [*vars(module), *(name for name, _ in module.named_buffers(recurse=False))]
        for prefix in [n.removesuffix(ORIGINAL) for n in names if n.endswith(ORIGINAL)]:
            table, longest = prefix + "inv_freq", prefix + "max_seq_len_cached"
            before, now = getattr(module, prefix + ORIGINAL), getattr(module, table, None)
            if isinstance(before, Tensor) and isinstance(now, Tensor) and before.shape == now.shape:
                afterwards.enter_context(temporarily(table, before.to(now).clone(), module))
            if hasattr(module, longest) and hasattr(module, "original_max_seq_len"):
                new = module.original_max_seq_len
                afterwards.enter_context(temporarily(longest, new, module))


def computing(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which what a model's code raises becomes a CaptureError that names it."""
    return explained(CaptureError, f"{type(model).__name__} cannot compute with these inputs: ")


def takes_mask(model: nn.Module) -> bool:
    """Return whether a model is given the mask of its tokens; others make it of the tokens."""
    takes = inspect.signature(model.forward).parameters.values()
    return any(p.name == MASK or p.kind is p.VAR_KEYWORD for p in takes)


def forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Run a model once, without a cache where it would keep one.

    Random numbers that it draws are the same every time, and the user's own stay as they are, as
    does what the model keeps from pass to pass.

    Returns:
        Whether it drew some.
    """
    takes = inspect.signature(model.forward).parameters
    inputs = {name: t for name, t in inputs.items() if name != MASK or takes_mask(model)}
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    # another package's model may leave out more than logits
    known = str(getattr(model.forward, "__module__", "")).startswith("transformers.")
    if known and "logits_to_keep" in takes and not any("labels" in name for name in inputs):
        extra["logits_to_keep"] = 1  # nobody reads them, and a vocabulary is wide
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    with computing(model), torch.random.fork_rng([*devices]), unmoved(model):
        before = torch.manual_seed(0).get_state()
        model(**{**copied_state(inputs), **extra})
        return not torch.equal(before, torch.get_rng_state())


@contextmanager
def unmoved(module: nn.Module) -> Iterator[None]:
    """Yield while a module runs with copies of what it keeps, which are thrown away then."""
    # stand-ins of ours keep what they are given, to be read afterwards
    parts = [m for m in module.modules() if not type(m).__module__.startswith("lipbound.")]
    owns = [dict(vars(part)) for part in parts]
    # Accelerate keeps all weights under _hf_
    held = [{k: v for k, v in own.items() if k not in TORCHS and k[:4] != "_hf_"} for own in owns]
    for part, copied in zip(parts, copied_state(held), strict=True):
        vars(part).update(copied)
    try:
        yield
    finally:
        for part, own in zip(parts, owns, strict=True):
            vars(part).clear()
            vars(part).update(own)


def copied_state(value: Any, memo: dict[int, Any] | None = None, depth: int = DEEP) -> Any:
    """Return a value in which tensors, and what holds them, are copies, and all else is shared.

    Args:
        value: a cache, or attributes of modules.
        memo: originals and copies so far, by identities of the originals.
        depth: how deep to go.
    """
    memo = {} if memo is None else memo
    if id(value) in memo or not depth or isinstance(value, SHARED) or callable(value):
        return memo.get(id(value), (value, value))[1]
    new: Any = value
    with suppress(Exception):  # of what cannot be copied
        if isinstance(value, Tensor):
            new = value if value.is_meta else value.detach().clone()
        elif type(value) is tuple:
            return tuple(copied_state(one, memo, depth - 1) for one in value)
        elif isinstance(value, list | deque | dict | set) or hasattr(value, "__dict__"):
            new = copy.copy(value)
        memo[id(value)] = value, new
        held = new if isinstance(value, list | deque | dict) else getattr(new, "__dict__", {})
        if new is not value and not isinstance(value, Tensor):
            for key, one in [*(held.items() if isinstance(held, dict) else enumerate(held))]:
                held[key] = one if isinstance(one, SHARED) else copied_state(one, memo, depth - 1)
    return new

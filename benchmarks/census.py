"""Every model type of the installed transformers, tiny: whether its attention is measured, how, and
whether the numbers are right. Writes census.json, which the documentation shows.

    python benchmarks/census.py [TYPE ...]

A configuration of each type is shrunk by the names of its settings, weights are drawn at random,
and inputs are made by the names of what the forward pass takes. Each type has a process and a time
limit of its own. Verdicts: "closed form" (all layers), "both", "automatic" (differentiation), "no
attention", "refused" (with the reason), "not built" (by this script, or no model takes the
configuration by itself). Norms of layers in closed form are compared with those of automatic
differentiation through the model's own module, in float64.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import lipbound as lb
from lipbound.attention.module_attention import ModuleAttention
from lipbound.models.capture.capture import Capturer

LIMIT = 90.0
"""Seconds for one type."""
LARGE = 30_000_000
"""Parameters of a model that was not shrunk."""
WIDTH, HEADS, TOKENS, VOCABULARY = 32, 4, 8, 300
SIZES: list[tuple[str, int]] = [
    (r"key_value_heads|kv_heads|n_head_kv", 2),
    (r"(mamba|linear|ssm).*head_dim|linear.*dim$|d_head|dim_head|attention_head_size", 8),
    (r"(^|_)head_dim$|kv_channels|^d_kv$", 8),
    (r"heads?$", HEADS),
    (r"num_experts_per_tok|moe_topk|moe_k$|experts_per_token|n_shared_experts|num_key_heads", 2),
    (r"experts$|expert_num", 4),
    (r"n_group$|topk_group|first_k_dense|decoder_sparse_step|max_window_layers", 1),
    (r"lora_rank", 12),
    (r"qk_(rope|nope)_head_dim|v_head_dim", 8),
    (r"window|index_topk|local_attention", 4),
    (r"layers?$|depth$|num_.*blocks$|num_stages$", 2),
    (r"vocab", VOCABULARY),
    (r"position|n_ctx|max_.*length$|seq_?len|context_length", 64),
    (r"image_size|img_size|input_size|crop_size", 32),
    (r"patch_size", 8),
    (r"mel_bins|num_bins|feature_size", 16),
    (r"intermediate|ffn|mlp_dim|d_ff$|n_inner|feedforward|inner_size", 48),
    (r"hidden|embed|embd|d_model|^dff$|^dim$|_dim$|width|projection|inner_dim", WIDTH),
    (r"channels$|out_features|_size$", WIDTH),
]
"""Sizes by the ends of settings' names; larger numbers are brought down to them."""
KEPT = re.compile(
    "num_channels|in_channels|in_chans|audio_channels|_factor|_ratio|_scale|expand|kernel|stride|"
    "id$|type_vocab_size|temporal_patch_size|merge_size|_every|conv_size|group_size"
)
FILLED = {"head_dim": 16, "num_key_value_heads": 2, "num_experts_per_tok": 2, "q_lora_rank": 12}
"""What stands for settings that are None by default, where a model does not compute without."""
TRIES: list[dict[str, Any]] = [
    *({}, {"head_dim": 16}, {"filled": FILLED}, {"key_value_heads": 4}),
    *({"embed_dim": 48, "hidden_size": 48}, {"heads": 2}, {"heads": 1}),
]
"""Other sizes, tried in this order until a model computes."""
WINDOWS = {"num_heads": [2, 2], "depths": [1, 1], "patch_size": 2, "window_size": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["swin", "swinv2", "donut-swin", "maskformer-swin"], WINDOWS),
    "sam_vision_model": {"image_size": 64, "global_attn_indexes": [1], "output_channels": 32},
}
"""Settings of single types."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what other code prints and warns of."""
    sink = io.StringIO()
    printed = contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink)
    with printed[0], printed[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def small(name: str, value: Any, tried: dict[str, Any]) -> Any:
    """Return a setting of a small configuration."""
    if value is None:
        return tried.get("filled", {}).get(name)
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        if KEPT.search(name) or re.search("index|indices|ids|section", name):
            return value
        if re.search("depths|layers|num_blocks", name):
            return type(value)(1 for _ in value)
        if re.search("sizes|dims|channels|widths|embed", name) and min(value) > 16:
            return type(value)(max(16, one * 16 // min(value)) for one in value)
        return value
    if type(value) is not int or KEPT.search(name):
        if name.endswith("_id") and type(value) is int and value >= VOCABULARY:
            return VOCABULARY - 1 - sum(map(ord, name)) % 90
        return value
    for pattern, size in SIZES:
        if re.search(pattern, name):
            own = next((n for key, n in tried.items() if key in name and key != "filled"), size)
            return min(value, own)
    return value


def setting(config: Any, name: str, default: Any = None) -> Any:
    """Return a setting of a configuration; the default where it differs from layer to layer."""
    try:
        return getattr(config, name, default)
    except Exception:  # not of AttributeError's kind
        return default


def settings(kind: type, tried: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a small configuration of a class, with those of its parts."""
    default = kind()
    inner = getattr(kind, "sub_configs", {})
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = setting(default, field.name, field.default)
        if value is dataclasses.MISSING:
            continue
        if field.name in inner and isinstance(value, tf.PretrainedConfig):
            found[field.name] = settings(type(value), tried)
            found[field.name]["model_type"] = value.model_type
        elif not field.name.startswith("_") and field.name not in ("rope_parameters", "dtype"):
            changed = small(field.name, value, tried)
            if changed is not value:
                found[field.name] = changed
    found |= SPECIAL.get(getattr(kind, "model_type", ""), {})
    layers = found.get("num_hidden_layers")
    kinds = getattr(default, "layer_types", None)
    if kinds and layers and any(f.name == "layer_types" for f in dataclasses.fields(kind)):
        each = list(dict.fromkeys(kinds))
        found["layer_types"] = each if len(each) >= layers else each * layers
        found["num_hidden_layers"] = len(found["layer_types"])
    return found


def fit_sections(config: Any) -> None:
    """Bring the sections of rotary positions with several axes to the width of small heads."""
    parts = [config, *(setting(config, n) for n in setting(config, "sub_configs", {}))]
    for part in parts:
        rope = setting(part, "rope_parameters")
        known = setting(part, "ignore_keys_at_rope_validation") or ()
        if isinstance(rope, dict) and "mrope_section" in known:
            rope.setdefault("mrope_section", [1, 1, 1])
        sections = rope.get("mrope_section") if isinstance(rope, dict) else None
        if sections:
            head = setting(part, "head_dim") or part.hidden_size // part.num_attention_heads
            half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
            others = [half // len(sections)] * (len(sections) - 1)
            rope["mrope_section"] = [half - sum(others), *others]


def classes(kind: str) -> list[type[Any]]:
    """Return the classes of models that take the configuration of a type by itself."""
    names = MODEL_MAPPING_NAMES.get(kind, ())
    found = [getattr(tf, name, None) for name in ([names] if isinstance(names, str) else names)]
    if any(found):
        return [one for one in found if one is not None]
    config = CONFIG_MAPPING[kind]
    package = config.__module__.rpartition(".")[0]
    for file in sorted(Path(inspect.getfile(config)).parent.glob("modeling_*.py")):
        module = importlib.import_module(f"{package}.{file.stem}")
        for one in vars(module).values():
            own = isinstance(one, type) and issubclass(one, tf.PreTrainedModel)
            if own and one.config_class is config and "forward" in vars(one):
                found.append(one)
    return [one for one in found if one is not None][:2]


def build(kind: str, cls: type[Any], tried: dict[str, Any]) -> tf.PreTrainedModel:
    """Return a small model of a type with random weights, uneven attention among them."""
    config = CONFIG_MAPPING[kind](**settings(CONFIG_MAPPING[kind], tried))
    fit_sections(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > LARGE:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model: tf.PreTrainedModel = cls(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.ndim > 1:
                p.copy_(torch.randn(p.shape) * 1.2 / p[0].numel() ** 0.5)
    return model


def config_values(config: Any, names: str, default: int) -> int:
    """Return the first setting of one of some names in a configuration or its parts."""
    parts = [config, *(setting(config, n) for n in setting(config, "sub_configs", {}))]
    for part in parts:
        for name in names.split():
            value = setting(part, name)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if type(value) is int:
                return value
    return default


def inputs(model: tf.PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield candidates of inputs, the fullest first."""
    names, config = inspect.signature(model.forward).parameters, model.config
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 90, (1, TOKENS), generator=g)
    text = {n: ids for n in ("input_ids", "decoder_input_ids") if n in names}
    if "bbox" in names:
        text["bbox"] = torch.tensor([1, 2, 30, 40]).expand(1, TOKENS, 4)
    size = config_values(config, "image_size img_size", 32)
    channels = config_values(config, "num_channels in_channels in_chans", 3)
    bins = config_values(config, "num_mel_bins feature_size input_feat_per_channel n_mels", 16)
    pixels = torch.randn(1, channels, size, size, generator=g)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "input_features": [
            *((1, bins, 128), (1, 64, bins), (1, bins, 64), (1, 128, bins)),
            *((1, 1, 64, bins), (1, 1, 1001, 64)),
        ],
        "input_values": [(1, 3200), (1, 1, 3200), (1, 1024, bins)],
        "hidden_states": [(1, TOKENS, config_values(config, "hidden_size d_model", WIDTH))],
        "past_values": [(1, 64), (1, config_values(config, "context_length", 32), 1)],
    }
    for grid in ("image_grid_thw", "grid_thw"):
        patch = config_values(config, "patch_size", 8)
        frames = config_values(config, "temporal_patch_size", 1)
        for name in ("pixel_values", "hidden_states") if grid in names else ():
            for wide in (channels * frames * patch**2, config_values(config, "hidden_size", 32)):
                patches = torch.randn(16, wide, generator=g)
                yield {name: patches, grid: torch.tensor([[1, 4, 4]])}
    if "pixel_values" in names:
        wide = torch.randn(1, channels, 128, 128, generator=g)
        frames = pixels[:, None].repeat(1, config_values(config, "num_frames", 2), 1, 1, 1)
        for picture in (pixels, wide, frames):
            yield {**text, "pixel_values": picture}
            yield {"pixel_values": picture}
    for name, each in shapes.items():
        for shape in each if name in names else ():
            yield {**text, name: torch.randn(*shape, generator=g)}
            yield {name: torch.randn(*shape, generator=g)}
    if text:
        yield text
        yield {"input_ids": ids}


def made(kind: str) -> tuple[tf.PreTrainedModel, dict[str, Tensor]]:
    """Return a small model that computes, with inputs.

    Raises:
        ValueError: this script finds none; the first reason.
    """
    reasons = ["no model takes this configuration by itself"]
    for cls in classes(kind):
        for tried in TRIES:
            try:
                model = build(kind, cls, tried)
                model.set_attn_implementation("eager")
            except Exception as error:  # whatever a model's code raises
                reasons.append(f"{type(error).__name__}: {str(error)[:120]}")
                continue
            for batch in inputs(model):
                try:
                    with torch.no_grad():
                        model(**batch)
                    return model, batch
                except Exception as error:
                    reasons.append(f"{type(error).__name__}: {str(error)[:120]}")
    raise ValueError(reasons[min(1, len(reasons) - 1)])


def error_of(model: tf.PreTrainedModel, batch: dict[str, Tensor]) -> float | None:
    """Return the largest relative difference of closed forms and automatic differentiation."""
    model = model.double()
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    worst, seen = None, set()
    for layer in Capturer(model).run(batch):
        kind = re.sub(r"\d+", "", layer.name)
        if isinstance(layer.attention, ModuleAttention) or kind in seen:
            continue
        seen.add(kind)
        (other,) = Capturer(model, [layer.index], closed=False).run(batch)
        if other.name == layer.name:  # else it is a function of something else
            mine, its = (lb.spectral_norm(t.attention, tol=1e-9).lower for t in (layer, other))
            worst = max(worst or 0.0, float((mine / its - 1).abs().max()))
    return worst


def verdict(kind: str) -> dict[str, Any]:
    """Return what is said of a type."""
    try:
        model, batch = made(kind)
    except Exception as error:
        return {"verdict": "not built", "reason": str(error)}
    capturer = Capturer(model)
    try:
        found = capturer.run(batch)
    except lb.errors.LipboundError as error:
        none = "seems to have no attention" in str(error)
        return {"verdict": "no attention" if none else "refused", "reason": str(error)}
    automatic = sum(isinstance(layer.attention, ModuleAttention) for layer in found)
    every = {0: "closed form", len(found): "automatic"}
    row: dict[str, Any] = {"verdict": every.get(automatic, "both"), "layers": len(found)}
    row["automatic"] = automatic
    with contextlib.suppress(lb.errors.LipboundError):  # models that know no float64
        row["error"] = error_of(model, batch)
    return row


def child(kind: str, pipe: Any) -> None:
    """Measure a type in a process of its own."""
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    with quiet():
        try:
            row = verdict(kind)
        except Exception as error:  # a fault of ours, which the page shows
            row = {"verdict": "fault", "reason": f"{type(error).__name__}: {error}"}
    pipe.send(row)


def main() -> None:
    """Measure all types, or those that are named; write."""
    path, rows = Path(__file__).with_suffix(".json"), {}
    context = multiprocessing.get_context("fork")
    for kind in sys.argv[1:] or sorted(CONFIG_MAPPING_NAMES):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(kind, theirs))
        process.start()
        there = ours.poll(LIMIT)
        rows[kind] = ours.recv() if there else {"verdict": "not built", "reason": "too slow"}
        process.kill()
        process.join()
        print(kind, json.dumps(rows[kind])[:200], flush=True)
    if len(sys.argv) == 1:
        found = {"transformers": tf.__version__, "lipbound": lb.__version__, "types": rows}
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

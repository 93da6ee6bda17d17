"""The files that hold the weights of a checkpoint, and modules whose weights stay in them.

A GGUF file, llama.cpp's format, holds weights, configuration and tokenizer together; transformers
reads it with the package gguf, and turns its mostly quantised weights into the floating-point
numbers that they stand for, which are what is measured.

Where weights stay on disk, transformers builds the model out of placeholders of the right shapes
that weigh next to nothing. Whatever it renames on the way, the placeholder in a parameter's place
still tells which tensor of which file belongs there. The parameter is then a tensor on the meta
device with the right shape and dtype; hooks put what the file says in its place before the module
runs, and the meta tensor back afterwards. accelerate's offloading does as much for plain forward
passes, but casts the whole table of embeddings up for every look-up of tokens (1 GB of float32 for
128k tokens of width 2048), and its modules cannot be copied without their hooks.
"""

import copy
import hashlib
import json
import os
import pickle
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from lipbound.errors import CaptureError, CheckpointError
from lipbound.models.other_libraries import VERBOSE, explained, first_line, temporarily

WEIGHT_FORMATS = ("model.safetensors", "pytorch_model.bin")
ORDER = tuple(name + end for name in WEIGHT_FORMATS for end in ("", ".index.json"))
"""Where weights may be, in the order in which transformers looks; an index names its shards."""
NO_WEIGHTS = f"has no weights ({' or '.join(ORDER)})"
DISTRIBUTED = "shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors"
"""Files of a distributed checkpoint, which transformers would read in place of the others."""
HEADS_ONLY = ("pooler", "classifier", "lm_head", "score", "cls.", "qa_outputs", "mask_token")
"""Parts of a model that attention does not depend on: weights missing there do not matter."""
GGUF = ".gguf"
"""Ending of GGUF files."""
PACKED = ("qweight", "weight_packed", "W_q", "qzeros")
"""Buffers of layers that keep their weights in a form of their own."""
OTHER_FORM = "its weights are stored in another form, to be joined or split; use weights='whole'"


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file, as it was when the model was loaded; here of a safetensors file.

    Attributes:
        file, key: where it is.
        shape: of the tensor.
        floating: whether it holds floating-point numbers.
        stamp: size and time of the file.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    floating: bool
    stamp: tuple[int, int]

    def read(self) -> Tensor:
        """Read the tensor; pages of the file that nobody looks at are never read.

        Returns:
            The numbers in the dtype of the file.

        Raises:
            CheckpointError: the file is gone, has changed or cannot be read.
        """
        try:
            if _stamp(self.file) != self.stamp:
                raise CheckpointError(f"{self.file} has changed since it was loaded; load it again")
            return self._numbers()
        except (OSError, SafetensorError) as error:
            what = f"{self.key} cannot be read from {self.file} any more ({error})"
            raise CheckpointError(f"{what}; load it again") from error

    def _numbers(self) -> Tensor:
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.key)


@dataclass(frozen=True)
class GgufRef(TensorRef):
    """A tensor in a GGUF file, in the model's shape.

    Attributes:
        turned: transformers' processor of tensors of the file's architecture.
    """

    turned: Any

    def _numbers(self) -> Tensor:
        import gguf

        (stored,) = (one for one in gguf_of(self.file).tensors if one.name == self.key)
        like = stored.data  # a view of the mapped file, whose pages would stay in memory
        raw = np.fromfile(self.file, like.dtype, like.size, offset=stored.data_offset)
        numbers = gguf.dequantize(raw.reshape(like.shape), stored.tensor_type)
        told: dict[str, Any] = {"tensor_key_mapping": {}, "parsed_parameters": {"tensors": {}}}
        made = self.turned.process(weights=numbers, name=self.key, **told).weights
        return torch.from_numpy(np.ascontiguousarray(made)).view(self.shape)


def extremes(tensor: Tensor) -> Tensor:
    """Return the least and the largest number of a tensor in float32, (2,), on its device.

    They are NaN where one number is: a tenth of the time of a look at each. Of whole numbers, and
    of none, they are zero.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.zeros(2, device=tensor.device)
    tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    return torch.stack(tensor.aminmax()).float()


def matters(key: str) -> bool:
    """Return whether a tensor of that name is in a part that attention may depend on."""
    return not any(part in key for part in HEADS_ONLY)


def unreadable(error: BaseException) -> str:
    """Return why weights cannot be loaded, without advice on the arguments of other libraries."""
    said, kind = first_line(error), type(error).__name__
    damaged = isinstance(error, struct.error | pickle.UnpicklingError | EOFError)
    if damaged or "Weights only load failed" in str(error):
        what = "its file is damaged or holds other things than weights, none of which were run"
        return f"{what}; save the model again with save_pretrained"
    if re.search("ignore_mismatched_sizes|cannot reshape array|Storage size .* overflowed", said):
        return "its weights have other shapes than its configuration says"
    if isinstance(error, LookupError | AttributeError | TypeError | ZeroDivisionError):
        return f"transformers fails on it ({kind}: {said}); is its configuration whole, and sound?"
    return said


def sha256(paths: Iterable[Path]) -> str:
    """Return "sha256:" and the hash over the contents of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return "sha256:" + digest.hexdigest()


def state_sha256(model: nn.Module) -> str:
    """Return "sha256:" and the hash over names and float32 values of a model in memory."""
    entries = sorted(model.state_dict().items())
    values = ((key.encode(), t.detach().cpu().contiguous().float().numpy()) for key, t in entries)
    return hashed(*(part for pair in values for part in pair))


def hashed(*parts: Any) -> str:
    """Return "sha256:" and the hash over bytes, one part after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return "sha256:" + digest.hexdigest()


def files(folder: Path) -> tuple[list[Path], list[str]]:
    """List the files that the weights of a checkpoint are read from.

    Args:
        folder: of the checkpoint.

    Returns:
        The files, and sentences on others beside them that are not read.

    Raises:
        CheckpointError: there are none, an index is empty or names files that are not there, a file
            is cut off or was never fetched.
    """
    named, shards = candidates(folder), [file.name for file in folder.glob(DISTRIBUTED)]
    if shards or not named:
        problem = f"holds a distributed checkpoint ({shards[0]})" if shards else NO_WEIGHTS
        raise CheckpointError(f"{folder} {problem}; save the model again with save_pretrained")
    first, *others = named
    found = [first]
    if first.endswith(".json"):
        held = _read_json(folder / first).get("weight_map")
        found = sorted({str(name) for name in held.values()}) if isinstance(held, dict) else []
        if not found:
            what = f"{folder / first} is no index of weights, or an empty one"
            raise CheckpointError(f"{what}; fetch it again")
    for name in found:
        check_file(folder / name)
    note = f"the weights are read from {first}; {' and '.join(others)} beside it is not read"
    return [folder / name for name in found], [note] if others else []


def candidates(folder: Path) -> list[str]:
    """Return the names of files of weights, in order; the first is what the configuration says."""
    named = _read_json(folder / "config.json").get("transformers_weights")
    found = [name for name in ORDER if (folder / name).is_file()]
    return found if named is None else list(dict.fromkeys((str(named), *found)))


def _read_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; empty where there is none."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def check_file(file: Path) -> None:
    """Refuse a file of weights that is missing, or whose header is not that of a whole file.

    Raises:
        CheckpointError: it is one of these.
    """
    if not os.path.isfile(file):  # a name that no system takes is that of no file
        raise CheckpointError(f"{file} is named by the checkpoint and not there; fetch it again")
    before = f"{file} is cut off, damaged or no safetensors file ("
    after = "); fetch it again (of Git LFS: `git lfs pull`)"
    with explained(CheckpointError, before, after):
        if file.suffix == ".safetensors":
            safe_open(file, framework="pt")


def stored_tensors(paths: Iterable[Path]) -> dict[str, TensorRef]:
    """Return every tensor of a checkpoint's safetensors files by its name there; no others."""
    found = {}
    for file in (path.absolute() for path in paths if path.suffix == ".safetensors"):
        stamp = _stamp(file)
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(key)
                floating = part.get_dtype().startswith(("F", "BF"))
                found[key] = TensorRef(file, key, tuple(part.get_shape()), floating, stamp)
    return found


def _stamp(file: Path) -> tuple[int, int]:
    return (status := os.stat(file)).st_size, status.st_mtime_ns


def choose_gguf(folder: Path, wanted: str | None, name: str, otherwise: bool) -> str | None:
    """Choose a GGUF file of a folder.

    Args:
        folder: where they are.
        wanted: one of them; None for the only one.
        name: what the user called the place, for messages.
        otherwise: whether weights are elsewhere, or none of these may be taken, if none was named.

    Returns:
        The name of the file; None for none.

    Raises:
        CheckpointError: there is no such file, or there are several and none was named.
    """
    there = sorted(file.name for file in folder.glob(f"*{GGUF}"))
    if wanted is None and (otherwise or not there):
        return None
    chosen = there[0] if wanted is None and len(there) == 1 else wanted
    if chosen is None or chosen not in there:
        what = "holds several GGUF files" if wanted is None else f"has no GGUF file {wanted}"
        listed = ", ".join(map(repr, there[:6])) or "it holds none"
        raise CheckpointError(f"{name} {what}; name one with gguf_file=: {listed}")
    return chosen


def check_gguf(name: str, file: Path) -> str:
    """Check that a GGUF file can be read, and describe how it stores its weights.

    Args:
        name: what the user called it.
        file: itself.

    Returns:
        Its file type as llama.cpp calls it, and how many tensors are of which type, such as
        "GGUF Q4_1 (210 tensors Q4_1, 61 F32, 1 Q8_0)".

    Raises:
        CheckpointError: a package is missing, or the file is one of several pieces. For broken
            files the package raises others.
    """
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        needs = f"needs the package {' and '.join(missing)}; pip install 'lipbound[gguf]'"
        raise CheckpointError(f"{name} is a GGUF file, and reading it {needs}")
    import gguf

    reader = gguf_of(file)
    if "general.architecture" not in reader.fields or not reader.tensors:
        raise CheckpointError(f"{name} is a GGUF file without a model: no architecture or tensors")
    split, kind = (reader.fields.get(key) for key in ("split.count", "general.file_type"))
    if split is not None and split.contents() > 1:
        instead = "join them with llama.cpp's `llama-gguf-split --merge`"
        raise CheckpointError(f"{name} is one of {split.contents()} pieces of a model; {instead}")
    counts = Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()
    said = counts[0][0] if kind is None else gguf.LlamaFileType(kind.contents()).name
    listed = ", ".join(f"{count} {one}" for one, count in counts).replace(" ", " tensors ", 1)
    return f"GGUF {said.removeprefix('MOSTLY_').removeprefix('ALL_')} ({listed})"


def gguf_tensors(file: Path, config: PretrainedConfig) -> dict[str, TensorRef]:
    """Locate every tensor of a model in a GGUF file, by the names that the model has for them.

    As transformers finds and turns them; of one that is several in the file nothing is found.
    """
    from transformers import modeling_gguf_pytorch_utils as reader

    file, said = file.absolute(), reader.load_gguf_checkpoint(str(file))["config"]
    kind = gguf_of(file).fields["general.architecture"].contents()
    turned = reader.TENSOR_PROCESSORS.get(kind, reader.TensorProcessor)(config=said)
    with torch.device("meta"):
        model = AutoModel.from_config(config, trust_remote_code=False, attn_implementation="eager")
    names, shapes = reader.get_gguf_hf_weights_map(model, turned), model.state_dict()
    places = {names.get(one.name): one.name for one in gguf_of(file).tensors}
    return {
        name: GgufRef(file, places[name], tuple(tensor.shape), True, _stamp(file), turned)
        for name, tensor in shapes.items()
        if name in places
    }


@contextmanager
def gguf_read_once(file: Path | None, words: bool = False) -> Iterator[None]:
    """Have transformers read a GGUF file once, not for each of configuration, weights, tokenizer.

    Names of tensors are likewise listed once, and no bar is drawn: a third of the time.

    Args:
        file: itself; None changes nothing.
        words: as in `gguf_of`.

    Yields:
        Nothing; while the context lasts, functions of transformers and gguf are replaced.
    """
    with ExitStack() as stack:
        if file is not None:
            import gguf
            from transformers import modeling_gguf_pytorch_utils as reader

            names = lru_cache(gguf.get_tensor_name_map)

            def read(path: str, mode: str = "r") -> Any:
                return gguf_of(path, words)

            stack.enter_context(temporarily("GGUFReader", read, gguf))
            stack.enter_context(temporarily("get_tensor_name_map", names, gguf))
            if not os.environ.get(VERBOSE):
                stack.enter_context(temporarily("tqdm", lambda items, **options: items, reader))
        yield


def gguf_of(file: str | Path, words: bool = False) -> Any:
    """Return ``gguf.GGUFReader`` of a file; the last ones are kept while it does not change.

    Args:
        file: itself.
        words: with the tokenizer's lists, rather than lists as long without content.
    """
    return _read_gguf(Path(file).resolve(), _stamp(Path(file)), words)


_in_order = lru_cache(lambda dtype, order: np.dtype(dtype).newbyteorder(order))


@lru_cache(maxsize=2)
def _read_gguf(file: Path, stamp: tuple[int, int], words: bool) -> Any:
    from gguf.gguf_reader import GGUFReader, GGUFValueType

    class HeldReader(GGUFReader):  # type: ignore[misc]
        """A reader that holds what a file announces against its size before it goes there.

        What it reads, with words two arrays for each token and each merge of the tokenizer, are
        plain views of the mapped file with a dtype that they share: half of the memory and a fifth
        of the time of the package's own. Without words it steps over the tokenizer's lists.
        """

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            kind = _in_order(dtype, override_order or self.byte_order)
            end = int(offset) + int(count) * kind.itemsize
            if end > len(self.data):
                raise ValueError(f"it has {len(self.data)} bytes and announces {end} or more")
            return np.asarray(self.data)[int(offset) : end].view(kind)

        def _get_str(self, offset: int) -> Any:
            self.last = super()._get_str(offset)
            return self.last

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            form, name = GGUFValueType(raw_type), bytes(self.last[1])  # the field's, just read
            if words or form != GGUFValueType.ARRAY or not name.startswith(b"tokenizer."):
                return super()._get_field_parts(orig_offs, raw_type)
            kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
            count, end = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    end += 8 + int(self._get(end, np.uint64)[0])
                every = self._get(end, np.uint8, 0)
            else:
                every = self._get(end, self.gguf_scalar_to_np[kind], count)
                end += every.nbytes
            return end - orig_offs, [every[:1]], [0] * count, [form, kind]

    before = f"{file} is cut off, damaged or no GGUF file of a known version ("
    with explained(CheckpointError, before, "); fetch it again"):
        reader = HeldReader(file)
        if inside := [one.name for one in reader.tensors if one.data_offset < reader.data_offset]:
            raise ValueError(f"the place of {inside[0]} is before those of all weights")
        return reader


@dataclass
class WeightOffloader:
    """Reads the parameters of one module at their first use and drops them after their last.

    Attributes:
        away: the parameters as they are when not in memory, on the meta device.
        stored: where each of them is on disk.
        device: where they are brought.
        users: how many forward passes and `resident` contexts hold the parameters.
        table: whether what is in memory is the file's own table of embeddings, in its dtype.
    """

    away: dict[str, nn.Parameter]
    stored: dict[str, TensorRef]
    device: torch.device
    users: int = 0
    table: bool = False

    def hold(self, module: nn.Module, table: bool = False) -> None:
        """Bring the parameters into memory in the model's dtype; ``table``: in the file's."""
        self.users += 1
        if self.users == 1 or (self.table and not table):
            for name, stored in self.stored.items():
                value = stored.read()
                if not table:
                    value = _cast(value.to(self.device), self.away[name].dtype)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
            self.table = table

    def release(self, module: nn.Module) -> None:
        """Drop the parameters from memory if nobody else holds them."""
        self.users = max(self.users - 1, 0)
        if not self.users:
            for name, parameter in self.away.items():
                setattr(module, name, parameter)
            self.table = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Bring the parameters in before a forward pass; registered as a hook."""
        # a pass that only takes rows of a table: these are read and cast alone
        plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
        table = self.device.type == "cpu" and plain and module.max_norm is None
        for _, part, keeper in _read_by(module):
            keeper.hold(part, table)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return looked-up rows in the model's dtype, and drop the parameters after a pass."""
        looked_up = self.table and isinstance(output, Tensor)
        rows = _cast(output, self.away["weight"].dtype) if looked_up else None
        for _, part, keeper in _read_by(module):
            keeper.release(part)
        return rows


def _keeper(module: nn.Module) -> WeightOffloader | None:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, WeightOffloader)), None)


def _kept(module: nn.Module) -> list[tuple[str, nn.Module, WeightOffloader]]:
    """Return the names of the parts whose parameters stay on disk, the parts, and their keepers."""
    parts = ((name, part, _keeper(part)) for name, part in module.named_modules())
    return [(name, part, keeper) for name, part, keeper in parts if keeper is not None]


def is_offloaded(module: nn.Module) -> bool:
    """Return whether any of a module's parameters stay on disk."""
    return bool(_kept(module))


def check_weights(model: nn.Module, name: str) -> None:
    """Refuse weights and buffers, in memory or on disk, that are NaN or infinite.

    A buffer in memory may hold -inf, as masks do.

    Args:
        model: as it was loaded.
        name: what the user called it.

    Raises:
        CheckpointError: one of them is not finite; the message names it. Or a file is gone.
    """
    buffers, tensors = {key for key, _ in model.named_buffers()}, model.state_dict().items()
    memory = {key: t for key, t in tensors if isinstance(t, Tensor) and not t.is_meta}
    found = {"": torch.zeros(2)} | {key: extremes(t) for key, t in memory.items()}
    for prefix, _, keeper in _kept(model):
        for key, stored in keeper.stored.items():
            found[f"{prefix}.{key}".lstrip(".")] = extremes(stored.read())
    *_, last = found.values()
    ends = torch.stack([both.to(last.device) for both in found.values()]).tolist()
    for key, (low, high) in zip(found, ends, strict=True):
        if not (high < torch.inf and (low > -torch.inf or (key in buffers and low == -torch.inf))):
            raise CheckpointError(f"the weights of {name} have NaN or infinite numbers, in {key}")


def check_floating(model: nn.Module, name: str) -> None:
    """Refuse a model whose weights are not all floating-point numbers in memory or on disk.

    Numbers of one byte are taken for none: what they stand for depends on scales that are kept
    beside them. Layers that keep packed weights have no derivatives, or wrong ones, however right
    their outputs are.

    Args:
        model: as it was loaded.
        name: what the user called it.

    Raises:
        CheckpointError: quantised layers, whole numbers, or weights that were never loaded.
    """
    for key, value in (*model.state_dict(keep_vars=True).items(), *model.named_parameters()):
        packed, weight = _packed(key, value), isinstance(value, nn.Parameter)
        if packed or (weight and (not value.is_floating_point() or value.dtype.itemsize == 1)):
            kind = "quantized" if packed else str(value.dtype).removeprefix("torch.")
            what = f"are not all floating-point: {key} is {kind}, and has no true derivatives"
            instead = "give the model before quantization, or what model.dequantize() makes of it"
            raise CheckpointError(f"the weights of {name} {what}; {instead}")
        if weight and value.is_meta and not is_offloaded(model):
            what = f"are not in memory ({key} is on the device meta)"
            raise CheckpointError(f"the weights of {name} {what}; load them")


def _packed(key: str, value: object) -> bool:
    """Return whether an entry of a state dict holds packed weights of a quantised layer.

    That is one of torch's int8 layers, GPTQ, AWQ, compressed-tensors, HQQ, quanto or torchao.
    """
    if not isinstance(value, torch.Tensor):
        return "packed" in key and value is not None
    named = key.rpartition(".")[2] in PACKED
    any_one: Any = value  # tensors made of others, but for those of several devices
    other = is_traceable_wrapper_subclass(any_one) and type(any_one).__name__ != "DTensor"
    return value.is_quantized or other or (named and not value.is_floating_point())


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Keep all parameters of a module, offloaded or not, in memory in the model's dtype.

    CheckpointError is raised where a file is gone, has changed or cannot be read.

    Args:
        module: any.

    Yields:
        Nothing.
    """
    with ExitStack() as afterwards:
        for _, part, keeper in _kept(module):
            afterwards.callback(keeper.release, part)
            keeper.hold(part)
        yield


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy with its weights in memory and no tie to a disk, where these are.

    Raises:
        CaptureError: it cannot be copied.
    """
    kind = type(module).__name__
    with resident(module), explained(CaptureError, f"{kind} cannot be copied, to be run apart: "):
        copied = copy.deepcopy(module)
    for _, part, keeper in _kept(copied):
        own = keeper.before, keeper.after
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in own]:
                del hooks[key]
                part._forward_hooks_always_called.pop(key, None)
    return copied


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.float32).to(dtype)  # by way of float32, as a model loaded whole is


def _read_by(module: nn.Module) -> list[tuple[str, nn.Module, WeightOffloader]]:
    """Return the parts whose parameters a module reads: its own, or some that it never calls."""
    also = isinstance(module, nn.MultiheadAttention)
    return [kept for kept in _kept(module) if also or kept[1] is module]


def load_offloaded(
    tensors: dict[str, TensorRef], config: PretrainedConfig, dtype: torch.dtype, device: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a model whose weights stay in their files.

    Buffers, and parts that the checkpoint lacks, are in memory. The numbers are those of a model
    loaded whole in float32 and cast to ``dtype``. Not for several threads at once.

    Args:
        tensors: where the model's are, by name.
        config: of the model.
        dtype: torch.float32 or torch.float64, in which the model computes.
        device: on which it computes.

    Returns:
        The model, in evaluation mode with eager attention, and transformers' report of missing and
        mismatched keys.

    Raises:
        CheckpointError: a file has changed.
        ValueError: quantized weights, or weights that are stored in another form than the model
            computes with. For broken files transformers raises others.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantized; give the checkpoint that was quantized")
    name, device, placeholders = config.name_or_path, torch.device(device), _Placeholders(tensors)
    model, report = _built(config, placeholders)
    model.name_or_path = model.config.name_or_path = name  # as transformers sets them
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()  # not in the report
    computed = {str(key) for key in report["missing_keys"]} | {
        key for key in model.state_dict() if any(re.search(pattern, key) for pattern in ignored)
    }
    expected = model.state_dict().keys() - computed
    away: dict[tuple[Path, str], nn.Parameter] = {}  # tied weights are one parameter, and stay one
    for prefix, module in model.named_modules():
        found: dict[str, TensorRef] = {}
        parameters = dict(module.named_parameters(recurse=False))
        for name, tensor in (*parameters.items(), *module.named_buffers(recurse=False)):
            path = f"{prefix}.{name}".lstrip(".")
            stored = placeholders.source(tensor, path in expected, path)
            if stored is not None and name in parameters:
                found[name] = stored
                empty = torch.empty(stored.shape, dtype=dtype, device="meta")
                away.setdefault((stored.file, stored.key), nn.Parameter(empty, requires_grad=False))
                continue
            value = tensor.detach() if stored is None else stored.read().to(tensor.dtype)
            kind = dtype if value.is_floating_point() else value.dtype
            value = value.to(device, kind, copy=stored is not None)
            own = name in parameters
            setattr(module, name, nn.Parameter(value, requires_grad=False) if own else value)
        if found:
            mine = {name: away[stored.file, stored.key] for name, stored in found.items()}
            keeper = WeightOffloader(mine, found, device)
            keeper.release(module)
            module.register_forward_pre_hook(keeper.before)
            module.register_forward_hook(keeper.after, always_call=True)
    return model, report


def _built(
    config: PretrainedConfig, placeholders: "_Placeholders"
) -> tuple[PreTrainedModel, dict[str, Any]]:
    # eager, whatever is asked for: the package of that need not be here, nor its code be fetched
    eager: dict[str, Any] = {"attn_implementation": "eager"}
    with torch.device("meta"):
        architecture = type(AutoModel.from_config(config, trust_remote_code=False, **eager))
    try:
        with placeholders:
            how = eager | {"dtype": torch.float32, "output_loading_info": True}
            how |= {"config": config, "state_dict": placeholders.tensors}
            return architecture.from_pretrained(None, **how)
    except Exception as error:
        if placeholders.joined:
            raise ValueError(OTHER_FORM) from error
        raise


class _Placeholders(TorchFunctionMode):
    """Tensors of the stored shapes and next to no memory, known again by address and strides.

    As a context it refuses to join them (experts are stored one by one and computed with as one
    tensor), which would fill the memory with zeros.
    """

    def __init__(self, stored: dict[str, TensorRef]):
        super().__init__()
        self.stored, self.joined = stored, False
        self.tensors = {key: self._placeholder(ref) for key, ref in stored.items()}
        self.keys = {tensor.data_ptr(): key for key, tensor in self.tensors.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.stack) and any(
            tensor.data_ptr() in self.keys for tensor in (args[0] if args else kwargs["tensors"])
        ):
            self.joined = True
            raise ValueError(OTHER_FORM)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _placeholder(stored: TensorRef) -> Tensor:
        dtype = torch.float32 if stored.floating else stored.read().dtype
        thin = stored.shape[:1] + (1,) * (len(stored.shape) - 1)
        return torch.zeros(thin, dtype=dtype).expand(stored.shape)

    def source(self, tensor: Tensor, expected: bool, name: str) -> TensorRef | None:
        """Find the file's tensor behind one of the model.

        Args:
            tensor: a parameter or a buffer.
            expected: whether the file should have it.
            name: of the tensor in the model.

        Returns:
            Its place; None for what was computed.

        Raises:
            ValueError: it was expected, and something else was made of it.
        """
        key = self.keys.get(tensor.data_ptr()) if tensor.numel() else None
        if key is not None:
            mine = self.tensors[key]
            if tensor.shape == mine.shape and tensor.stride() == mine.stride():
                return self.stored[key]
        if expected and tensor.numel():
            raise ValueError(f"{OTHER_FORM}, {name} for one")
        return None

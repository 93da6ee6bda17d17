"""The files that hold the weights of a checkpoint, and single tensors of safetensors files.

A GGUF file, llama.cpp's format, holds weights, configuration and tokenizer together; transformers
reads it with the package gguf, and turns its mostly quantised weights into the floating-point
numbers that they stand for, which are what is measured.
"""

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
from torch import Tensor
from transformers import AutoModel, PretrainedConfig

from lipbound.errors import CheckpointError
from lipbound.models.other_libraries import VERBOSE, changed, explained, first_line

WEIGHT_FORMATS = ("model.safetensors", "pytorch_model.bin")
ORDER = tuple(name + end for name in WEIGHT_FORMATS for end in ("", ".index.json"))
"""Where weights may be, in the order in which transformers looks; an index names its shards."""
NO_WEIGHTS = f"has no weights ({' or '.join(ORDER)})"
WEIGHTS_KEY = "transformers_weights"
"""Key of a configuration for the file of weights, where it has another name than those."""
DISTRIBUTED = "shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors"
"""Files of a distributed checkpoint, which transformers would read in place of the others."""
HEADS_ONLY = ("pooler", "classifier", "lm_head", "score", "cls.", "qa_outputs", "mask_token")
"""Parts of a model that attention does not depend on: weights missing there do not matter."""
GGUF = ".gguf"
"""Ending of GGUF files."""


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
        numbers = gguf.dequantize(stored.data, stored.tensor_type)
        told: dict[str, Any] = {"tensor_key_mapping": {}, "parsed_parameters": {"tensors": {}}}
        made = self.turned.process(weights=numbers, name=self.key, **told).weights
        return torch.from_numpy(np.array(made)).view(self.shape)


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
        return (
            "its file of weights is damaged or holds other things than weights, none of which were "
            "run; save the model again with save_pretrained"
        )
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
    named = _read_json(folder / "config.json").get(WEIGHTS_KEY)
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


def stored_tensors(folder: Path) -> dict[str, TensorRef]:
    """Locate every tensor of a checkpoint.

    Args:
        folder: of the checkpoint.

    Returns:
        The tensors by their names in the files.

    Raises:
        CheckpointError: as `files` does, and for other formats than safetensors.
    """
    named, _ = files(folder)
    if other := next((file.name for file in named if file.suffix != ".safetensors"), None):
        what = "weights='layers' reads safetensors and GGUF files only; use weights='whole'"
        raise CheckpointError(f"{folder} has its weights in {other}, and {what}")
    found = {}
    for file in (one.absolute() for one in named):
        stamp = _stamp(file)
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(key)
                floating = part.get_dtype().startswith(("F", "BF"))
                found[key] = TensorRef(file, key, tuple(part.get_shape()), floating, stamp)
    return found


def _stamp(file: Path) -> tuple[int, int]:
    return (status := os.stat(file)).st_size, status.st_mtime_ns


def choose_gguf(there: Iterable[str], wanted: str | None, name: str) -> str:
    """Choose a GGUF file.

    Args:
        there: the names of those that there are.
        wanted: one of them; None for the only one.
        name: what the user called the place where they are, for messages.

    Returns:
        The name of the file.

    Raises:
        CheckpointError: there is no such file, or there are several and none was named.
    """
    there = sorted(there)
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


def gguf_size(file: Path) -> int:
    """Return how many numbers a GGUF file holds."""
    return sum(int(one.n_elements) for one in gguf_of(file).tensors)


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
def gguf_read_once(file: Path | None) -> Iterator[None]:
    """Have transformers read a GGUF file once, not for each of configuration, weights, tokenizer.

    Names of tensors are likewise listed once, and no bar is drawn: a third of the time.

    Args:
        file: itself; None changes nothing.

    Yields:
        Nothing; while the context lasts, functions of transformers and gguf are replaced.
    """
    with ExitStack() as stack:
        if file is not None:
            import gguf
            from transformers import modeling_gguf_pytorch_utils as reader

            names, read = lru_cache(gguf.get_tensor_name_map), lambda path, mode="r": gguf_of(path)
            stack.enter_context(changed("GGUFReader", read, gguf))
            stack.enter_context(changed("get_tensor_name_map", names, gguf))
            if not os.environ.get(VERBOSE):
                stack.enter_context(changed("tqdm", lambda items, **options: items, reader))
        yield


def gguf_of(file: str | Path) -> Any:
    """Return ``gguf.GGUFReader`` of a file; the last one is kept while its file does not change."""
    return _read_gguf(Path(file).resolve(), _stamp(Path(file)))


_in_order = lru_cache(lambda dtype, order: np.dtype(dtype).newbyteorder(order))


@lru_cache(maxsize=1)
def _read_gguf(file: Path, stamp: tuple[int, int]) -> Any:
    from gguf.gguf_reader import GGUFReader

    class HeldReader(GGUFReader):  # type: ignore[misc]
        """A reader that holds what a file announces against its size before it goes there.

        What it reads, two arrays for each token and each merge of the tokenizer, are plain views of
        the mapped file with a dtype that they share: half of the memory and a fifth of the time of
        the package's own.
        """

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            kind = _in_order(dtype, override_order or self.byte_order)
            end = int(offset) + int(count) * kind.itemsize
            if end > len(self.data):
                raise ValueError(f"it has {len(self.data)} bytes and announces {end} or more")
            return np.asarray(self.data)[int(offset) : end].view(kind)

    before = f"{file} is cut off, damaged or no GGUF file of a known version ("
    with explained(CheckpointError, before, "); fetch it again"):
        reader = HeldReader(file)
        if inside := [one.name for one in reader.tensors if one.data_offset < reader.data_offset]:
            raise ValueError(f"the place of {inside[0]} is before those of all weights")
        return reader

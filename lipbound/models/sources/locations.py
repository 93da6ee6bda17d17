"""Find the folder of a checkpoint: on this machine, or fetched from the Hugging Face hub."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub.errors as hub_errors
from huggingface_hub import HfApi, constants, snapshot_download

from lipbound.errors import CheckpointError, nearest, neighbours
from lipbound.models.checkpoint import Checkpoint, LoadOptions
from lipbound.models.gguf_file import SUFFIX, check_name, choose, is_gguf
from lipbound.models.quiet import bars, first_line, quiet
from lipbound.models.readers.files import is_path
from lipbound.models.sources.catalogue import BUILTINS, PREFIX
from lipbound.models.sources.folder import check_directory, load_folder


def load_directory(model: object, options: LoadOptions) -> Checkpoint | None:
    """Load a checkpoint from a directory of this machine, or from a GGUF file.

    Args:
        model: a directory with config.json and weights, as save_pretrained writes it, or with a
            GGUF file; or such a file itself.
        options: as `load_folder` takes them.

    Returns:
        The checkpoint; None where nothing is there and the name may be a hub id.

    Raises:
        CheckpointError: it is no such directory, lacks files, or cannot be loaded.
    """
    if not isinstance(model, str | Path):
        return None
    name, path = str(model), Path(model).expanduser()
    if not (path.exists() or is_path(name) or name.count("/") > 1 or is_gguf(name)):
        return None
    file = _gguf(path, options.gguf_file, name)
    if file is not None:
        options.refuse_given(f"the GGUF file {file}", "revision")
        return load_folder(name, file.parent, None, options, file.name)
    if path.is_dir():
        options.refuse_given(f"the directory {name}", "revision")
        check_directory(path, str(path))
        return load_folder(name, path, None, options)
    if path.exists():
        raise CheckpointError(
            f"{name} is a file; give the directory that holds config.json and the weights, or a "
            "GGUF file"
        )
    if is_gguf(name):
        instead = suggestion(name, "of a hub model, give its id and the file as gguf_file=")
        raise CheckpointError(f"there is no file {name}; {instead}")
    instead = "give a checkpoint directory, a hub id such as owner/name, or builtin:minilm"
    raise CheckpointError(f"there is no directory {name}; {suggestion(name, instead)}")


def _gguf(path: Path, wanted: str | None, name: str) -> Path | None:
    # a directory that has a config.json is what save_pretrained wrote, unless a file is wanted
    if path.is_file() and is_gguf(path.name):
        if wanted not in (None, path.name):
            raise CheckpointError(
                f"gguf_file is {wanted!r}, but {name} is a GGUF file itself; give one of the two"
            )
        return path
    saved = (path / "config.json").exists() or not any(path.glob(f"*{SUFFIX}"))
    if not path.is_dir() or (wanted is None and saved):
        return None
    return path / choose(path, wanted, name)


def load_hub(model: object, options: LoadOptions) -> Checkpoint | None:
    """Load a checkpoint from the hub, or from its cache when the hub is out of reach.

    Args:
        model: a hub id, "owner/name" or "name", with "@revision" behind it or without.
        options: as `load_folder` takes them.

    Returns:
        The checkpoint; None for what is no name. CheckpointError is raised where it cannot be had.
    """
    if not isinstance(model, str | Path):
        return None
    name, wanted = str(model), options.gguf_file
    if wanted is not None:
        check_name(wanted)
    folder, commit = snapshot(*_parts(name, options.revision), wanted)
    if wanted is not None:
        choose(folder, wanted, f"{name} on the hub")
    return load_folder(name, folder, commit, options, wanted)


def _parts(name: str, revision: str | None) -> tuple[str, str | None]:
    repo, _, suffix = name.partition("@")
    if suffix and revision and suffix != revision:
        raise CheckpointError(
            f"two revisions were given, {suffix!r} in the name and {revision!r}; give one"
        )
    return repo, suffix or revision


def adapter_folder(name: str) -> Path:
    """Fetch the folder of an adapter from the hub.

    Args:
        name: a hub id.

    Returns:
        The folder in the cache.

    Raises:
        CheckpointError: it is no hub id, or it cannot be had.
    """
    if is_path(name):
        raise CheckpointError(
            f"there is no directory {name}; adapter= takes the directory that PEFT wrote, or its "
            "hub id"
        )
    return snapshot(*_parts(name, None), only=("adapter_config.json", "adapter_model.*"))[0]


def snapshot(
    repo: str, revision: str | None, gguf_file: str | None = None, only: Sequence[str] = ()
) -> tuple[Path, str]:
    """Fetch a hub model, or find it in the cache when the hub is out of reach.

    Args:
        repo: its hub id.
        revision: branch, tag or commit.
        gguf_file: the one file that is wanted, if it is one.
        only: the names of an adapter's files, in place of a model's.

    Returns:
        The folder in the cache, and the commit.

    Raises:
        CheckpointError: there is no such model, it is not accessible, or lacks files.
    """
    at = f" at revision {revision!r}" if revision else ""
    try:
        with quiet(), bars():
            names = _wanted(repo, revision, gguf_file, only)
            options: dict[str, Any] = {"allow_patterns": names, "local_files_only": names is None}
            folder = Path(snapshot_download(repo, revision=revision, **options))
    except (hub_errors.HFValidationError, OSError) as error:
        raise CheckpointError(_why_not(error, repo, revision, at, bool(only))) from error
    if gguf_file is None and not only:
        check_directory(folder, f"{repo}{at} on the hub")
    return folder, folder.name


def _why_not(error: Exception, repo: str, revision: str | None, at: str, adapter: bool) -> str:
    """Return why a hub model cannot be had, and what to do."""
    if isinstance(error, hub_errors.GatedRepoError):
        return (
            f"{repo} is a gated model: accept its conditions on its hub page, then log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return (
            f"{repo} has no revision {revision!r} on the hub; give a branch, a tag or a full "
            "commit hash"
        )
    if isinstance(error, hub_errors.HFValidationError):
        why = f"{repo!r} is neither a directory here nor a valid hub id"
        instead = "hub ids are owner/name"
    elif isinstance(error, hub_errors.RepositoryNotFoundError):
        why = f"{repo} was not found on the hub, nor is it a directory here"
        instead = "check the spelling, or log in if it is private"
    elif not isinstance(error, hub_errors.LocalEntryNotFoundError):
        return f"{repo}{at} could not be fetched from the hub: {first_line(error)}"
    elif constants.HF_HUB_OFFLINE:
        why = f"{repo}{at} is not in the local cache, and HF_HUB_OFFLINE forbids looking on the hub"
        instead = "unset it, or give a directory"
    else:
        why = f"the hub cannot be reached and {repo}{at} is not in the local cache"
        others = "or give a directory" if adapter else "give a directory, or try builtin:minilm"
        instead = f"connect, {others}"
    return f"{why}; {suggestion(repo, instead)}"


def _wanted(
    repo: str, revision: str | None, gguf_file: str | None, only: Sequence[str]
) -> list[str] | None:
    """List the files of a hub model that are needed.

    Args:
        repo: its hub id.
        revision: branch, tag or commit.
        gguf_file: the one file that is wanted, if it is one.
        only: the names of an adapter's files, in place of a model's.

    Returns:
        Configuration, tokenizer or processor, and one format of weights; or the GGUF file, which
        has all. None: the hub is out of reach.

    Raises:
        CheckpointError: the GGUF file is not there, or there are only such files, and none was
            named.
        HfHubHTTPError: the hub has no such model.
        HFValidationError: the name is no hub id.
    """
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=15)
    except hub_errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code < 500:
            raise
        return None
    except hub_errors.HFValidationError:
        raise
    except Exception:  # no connection, in whatever type the HTTP client of the day reports it
        return None
    if only:
        return list(only)
    names = [sibling.rfilename for sibling in info.siblings or [] if "/" not in sibling.rfilename]
    packed = [name for name in names if name.endswith(SUFFIX)]
    if gguf_file is not None:
        if gguf_file not in packed:
            instead = nearest(gguf_file, packed) if packed else "it has no GGUF files"
            raise CheckpointError(f"{repo} on the hub has no file {gguf_file}; {instead}")
        return [gguf_file]
    weights = [
        n for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")
    ] or [n for n in names if n.startswith("pytorch_model") and n.endswith(".bin")]
    if packed and not weights:
        raise CheckpointError(
            f"{repo} on the hub has its weights in GGUF files only; name one with gguf_file=, "
            f"{' or '.join(map(repr, packed[:6]))}"
        )
    others = (".json", ".txt", ".model", ".jinja", ".tiktoken")
    return weights + [name for name in names if name.endswith(others)]


def suggestion(name: str, otherwise: str) -> str:
    """Suggest checkpoints that a mistyped name can mean.

    Args:
        name: what was given.
        otherwise: what to do where nothing is like it.

    Returns:
        The part of a message that names builtins, models in the hub's cache and directories nearby,
        or ``otherwise``.
    """
    wanted = name.partition("@")[0].rstrip("/")
    cached = Path(constants.HF_HUB_CACHE).glob("models--*")
    fetched = [one.name.removeprefix("models--").replace("--", "/", 1) for one in cached]
    listed = dict.fromkeys((*(PREFIX + one for one in BUILTINS), *fetched))
    by_end = {
        one.rpartition("/")[2].removeprefix(PREFIX): one
        for one in (*reversed(listed), *_beside(wanted))
    }
    close = neighbours(wanted, listed, cutoff=0.75)
    close += [by_end[one] for one in neighbours(wanted.rpartition("/")[2], by_end, cutoff=0.75)]
    found = [one for one in dict.fromkeys(close) if one != name][:3]
    return f"did you mean {' or '.join(map(repr, found))}?" if found else otherwise


def _beside(name: str) -> Iterator[str]:
    """Yield the checkpoint directories in the folder where one of that name would be."""
    parent = Path(name).parent
    with suppress(OSError, ValueError):
        for folder in parent.expanduser().iterdir():
            if (folder / "config.json").exists():
                yield str(parent / folder.name)

"""Fetching a checkpoint from the Hugging Face hub, or from its cache when the hub is
out of reach."""

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub.errors as hub_errors
from huggingface_hub import HfApi, constants, snapshot_download

from lipbound.errors import CheckpointError, nearest
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.quiet import bars, first_line, quiet
from lipbound.models.readers.files import is_path
from lipbound.models.sources import gguf
from lipbound.models.sources.folder import FolderSource, check_directory
from lipbound.models.sources.source import LoadOptions
from lipbound.models.sources.suggestions import suggestion


class HubSource(FolderSource):
    """A hub id, "owner/name" or "name", with "@revision" behind it or without: whatever no other
    kind answers to."""

    def names(self, name: str) -> bool:
        """Whether it may be a hub id; `locate` finds out."""
        return True

    def load(self, model: str | Path, options: LoadOptions) -> Checkpoint:
        """The model from its folder in the cache, or from the GGUF file that is wanted there."""
        name, wanted = str(model), options.gguf_file
        if wanted is None:
            return super().load(model, options)
        if not wanted.endswith(gguf.SUFFIX) or "*" in wanted:
            raise CheckpointError(
                f"gguf_file is {wanted!r}; give the name of a file that ends with {gguf.SUFFIX}"
            )
        folder, commit = snapshot(*_parts(name, options.revision), wanted)
        return gguf.load_gguf(
            name, gguf.choose(folder, wanted, f"{name} on the hub"), commit, options
        )

    def locate(self, name: str, revision: str | None) -> tuple[Path, str]:
        """Folder in the cache, and commit; raises CheckpointError where it cannot be had."""
        return snapshot(*_parts(name, revision))


def _parts(name: str, revision: str | None) -> tuple[str, str | None]:
    """Repository and revision of a name; raises CheckpointError where two revisions are given."""
    repo, _, suffix = name.partition("@")
    if suffix and revision and suffix != revision:
        raise CheckpointError(
            f"two revisions were given, {suffix!r} in the name and {revision!r}; give one"
        )
    return repo, suffix or revision


def adapter_folder(name: str) -> Path:
    """The folder of an adapter from the hub; raises CheckpointError where it cannot be had."""
    if is_path(name):
        raise CheckpointError(
            f"there is no directory {name}; adapter= takes the directory that PEFT wrote, or its "
            "hub id"
        )
    folder, _ = snapshot(*_parts(name, None), only=("adapter_config.json", "adapter_model.*"))
    return folder


def snapshot(
    repo: str, revision: str | None, gguf_file: str | None = None, only: Sequence[str] = ()
) -> tuple[Path, str]:
    """Folder and commit of a hub model, fetched, or, when the hub is out of reach, from the cache;
    of a GGUF file, that file alone.

    ``only``: the names of an adapter's files, in place of a model's.
    """
    at = f" at revision {revision!r}" if revision else ""
    try:
        with quiet(), bars():
            patterns = _wanted(repo, revision, gguf_file, only)
            folder = Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=patterns,
                    local_files_only=patterns is None,
                )
            )
    except hub_errors.HFValidationError as error:
        raise CheckpointError(
            f"{repo!r} is neither a directory here nor a valid hub id; "
            f"{suggestion(repo, 'hub ids are owner/name')}"
        ) from error
    except hub_errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is a gated model: accept its conditions on its hub page, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo} has no revision {revision!r} on the hub; give a branch, a tag or a full "
            "commit hash"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} was not found on the hub, nor is it a directory here; "
            f"{suggestion(repo, 'check the spelling, or log in if it is private')}"
        ) from error
    except hub_errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                f"{repo}{at} is not in the local cache, and HF_HUB_OFFLINE forbids looking on "
                "the hub; "
                f"{suggestion(repo, 'unset it, or give a directory')}"
            ) from error
        raise CheckpointError(
            f"the hub cannot be reached and {repo}{at} is not in the local cache; "
            + suggestion(
                repo,
                "connect, or give a directory"
                if only
                else "connect, give a directory, or try builtin:minilm",
            )
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{repo}{at} could not be fetched from the hub: {first_line(error)}"
        ) from error
    if gguf_file is None and not only:
        check_directory(folder, f"{repo}{at} on the hub")
    return folder, folder.name


def _wanted(
    repo: str, revision: str | None, gguf_file: str | None, only: Sequence[str]
) -> list[str] | None:
    """The files of a hub model that are needed: configuration, tokenizer or processor, and one
    format of weights; or a GGUF file, which has all.

    None: the hub is out of reach.

    Raises:
        CheckpointError: the GGUF file is not there, or there are only such files, and none was
            named.
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
    weights = [n for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")]
    packed = [n for n in names if n.endswith(gguf.SUFFIX)]
    if gguf_file is not None:
        if gguf_file not in packed:
            raise CheckpointError(
                f"{repo} on the hub has no file {gguf_file}; "
                f"{nearest(gguf_file, packed) if packed else 'it has no GGUF files'}"
            )
        return [gguf_file]
    weights = weights or [n for n in names if n.startswith("pytorch_model") and n.endswith(".bin")]
    if packed and not weights:
        raise CheckpointError(
            f"{repo} on the hub has its weights in GGUF files only; name one with gguf_file=, "
            f"{' or '.join(map(repr, packed[:6]))}"
        )
    return weights + [
        n for n in names if n.endswith((".json", ".txt", ".model", ".jinja", ".tiktoken"))
    ]

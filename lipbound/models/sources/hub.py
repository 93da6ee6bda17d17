"""Fetching a checkpoint from the Hugging Face hub, or from its cache when the hub is out of reach."""

from pathlib import Path

import huggingface_hub.errors as hub_errors
from huggingface_hub import HfApi, constants, snapshot_download

from lipbound.errors import CheckpointError
from lipbound.models.quiet import bars, first_line, quiet
from lipbound.models.sources.folder import FolderSource, check_directory
from lipbound.models.sources.known import suggestion


class HubSource(FolderSource):
    """A hub id, "owner/name" or "name", with "@revision" behind it or without: whatever no other kind answers to."""

    def names(self, name: str) -> bool:
        """Whether it may be a hub id; `locate` finds out."""
        return True

    def locate(self, name: str, revision: str | None) -> tuple[Path, str]:
        """Folder in the cache, and commit; raises CheckpointError where it cannot be had."""
        repo, _, suffix = name.partition("@")
        if suffix and revision and suffix != revision:
            raise CheckpointError(f"two revisions were given, {suffix!r} in the name and {revision!r}; give one")
        return snapshot(repo, suffix or revision)


def snapshot(repo: str, revision: str | None) -> tuple[Path, str]:
    """Folder and commit of a hub model, fetched, or, when the hub is out of reach, from the cache."""
    at = f" at revision {revision!r}" if revision else ""
    try:
        with quiet(), bars():
            patterns = _wanted(repo, revision)
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=patterns is None))
    except hub_errors.HFValidationError as error:
        raise CheckpointError(f"{repo!r} is neither a directory here nor a valid hub id; {suggestion(repo, 'hub ids are owner/name')}") from error
    except hub_errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is a gated model: accept its conditions on its hub page, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r} on the hub; give a branch, a tag or a full commit hash") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} was not found on the hub, nor is it a directory here; {suggestion(repo, 'check the spelling, or log in if it is private')}"
        ) from error
    except hub_errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                f"{repo}{at} is not in the local cache, and HF_HUB_OFFLINE forbids looking on the hub; "
                f"{suggestion(repo, 'unset it, or give a directory')}"
            ) from error
        raise CheckpointError(
            f"the hub cannot be reached and {repo}{at} is not in the local cache; "
            f"{suggestion(repo, 'connect, give a directory, or try builtin:minilm')}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{repo}{at} could not be fetched from the hub: {first_line(error)}") from error
    check_directory(folder, f"{repo}{at} on the hub")
    return folder, folder.name


def _wanted(repo: str, revision: str | None) -> list[str] | None:
    """The files of a hub model that are needed: configuration, tokenizer or processor, and one format of weights. None: the hub is out of reach."""
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
    names = [sibling.rfilename for sibling in info.siblings or [] if "/" not in sibling.rfilename]
    weights = [n for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")]
    weights = weights or [n for n in names if n.startswith("pytorch_model") and n.endswith(".bin")]
    return weights + [n for n in names if n.endswith((".json", ".txt", ".model", ".jinja", ".tiktoken"))]

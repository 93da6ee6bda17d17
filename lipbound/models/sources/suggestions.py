"""Names of checkpoints that a mistyped name can mean: builtins, directories nearby, models in the
hub's cache."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from lipbound.errors import neighbours
from lipbound.models.sources.builtins import BUILTINS, PREFIX


def suggestion(name: str, otherwise: str) -> str:
    """The part of a message that names the checkpoints nearest to a name, or else what to do."""
    wanted = name.partition("@")[0].rstrip("/")
    listed = dict.fromkeys((*(PREFIX + one for one in BUILTINS), *_cached()))
    by_end = {
        one.rpartition("/")[2].removeprefix(PREFIX): one
        for one in (*reversed(listed), *_beside(wanted))
    }
    close = neighbours(wanted, listed, cutoff=0.75)
    close += [by_end[one] for one in neighbours(wanted.rpartition("/")[2], by_end, cutoff=0.75)]
    found = [one for one in dict.fromkeys(close) if one != name][:3]
    return f"did you mean {' or '.join(map(repr, found))}?" if found else otherwise


def _cached() -> Iterator[str]:
    """Hub ids of models that were fetched before."""
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*"):
        yield folder.name.removeprefix("models--").replace("--", "/", 1)


def _beside(name: str) -> Iterator[str]:
    """Checkpoint directories in the folder where one of that name would be."""
    parent = Path(name).expanduser().parent
    try:
        folders = [folder for folder in parent.iterdir() if (folder / "config.json").exists()]
    except (OSError, ValueError):
        return
    for folder in folders:
        yield str(Path(name).parent / folder.name) if str(Path(name).parent) != "." else folder.name

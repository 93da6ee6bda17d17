"""What transformers and its neighbours say while they work: silenced, or cut to one line."""

from transformers.utils import logging as transformers_logging


class quiet:
    """Context in which transformers prints neither progress bars nor warnings."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        self._bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._level)
        if self._bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__

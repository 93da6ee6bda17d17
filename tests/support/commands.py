"""The command line in this process, and errors of one sentence."""

import io
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest

from lipbound import cli
from lipbound.errors import LipboundError


def command(*words: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of ``lipbound`` with some words, or with one
    line of them."""
    if len(words) == 1:
        words = (*shlex.split(str(words[0])),)
    out, err, status = io.StringIO(), io.StringIO(), 0
    argv = mock.patch.object(sys, "argv", ["lipbound", *map(str, words)])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def call(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    """Do what `command` does, in tests that have these fixtures."""
    return command(shlex.join(map(str, arguments)))


def said(*words: object) -> str:
    """Standard output of a command that ends well."""
    status, out, err = command(*words)
    assert status == 0, err
    return out


def refused(
    call: Callable[[], object], *words: str, error: type[Exception] = LipboundError
) -> None:
    """Check that a call ends with an error of one sentence, in which these words occur."""
    with pytest.raises(error) as raised:
        call()
    sentence = str(raised.value)
    assert "\n" not in sentence
    for one in words:
        assert one in sentence

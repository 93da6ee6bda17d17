"""The command line in this process; `refused` of `support.checks` for what it is given."""

import io
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from support.checks import refused as refused

from lipbound import cli


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


def said(*words: object) -> str:
    """Standard output of a command that ends well."""
    status, out, err = command(*words)
    assert status == 0, err
    return out

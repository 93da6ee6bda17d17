"""The command line in this process."""

import sys

import pytest

from lipbound import cli


def call(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["lipbound", *map(str, arguments)])
    status = 0
    try:
        cli.main()
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err

"""Signs of life: a line at a time where there is no terminal, and nothing where none is wanted."""

import itertools
import re
from pathlib import Path

import pytest

import lipbound as lb
from lipbound import signs
from lipbound.signs import Signs


@pytest.fixture
def heard(monkeypatch, capsys):
    """What standard error has, once it has something of a kind."""
    monkeypatch.setattr(signs, "PAUSE", 0.002)

    def wait(pattern):
        said = ""
        for _ in itertools.repeat(None):
            said += capsys.readouterr().err
            if re.search(pattern, said):
                return said
        raise AssertionError

    return wait


def test_lines_say_what_is_done_and_how_much_is_left(heard):
    with Signs("loading") as outer:
        heard(r"^loading, 0:00:0\d\n")
        with Signs("a layer"):
            assert "loading" not in heard("a layer, ").partition("a layer")[2]
        outer.say("gpt2: layers", 4)
        heard(r"gpt2: layers 0 of 4, 0:00:0\d\n")
        outer.advance(1)
        outer.advance(2)
        heard(r"gpt2: layers 3 of 4, 0:00:0\d, about 0:00:0\d left\n")


def test_nothing_is_said_where_nothing_is_wanted(heard, capsys):
    with Signs("quiet", show=False), Signs("loud") as loud:
        heard("loud")
        loud.quit()
    assert not Signs._open
    assert "quiet" not in capsys.readouterr().err


def test_a_run_says_what_it_does(heard):
    lb.compare("builtin:gpt2", samples=4, max_length=8, bounds="none")
    heard(r"loading model and data|builtin:gpt2: looking at its layers|builtin:gpt2: layers")


def test_errors_in_notebooks_end_in_one_line():
    """Below the user's own lines."""

    def mine():
        lb.compare("builtin:gpt3")

    with pytest.raises(lb.errors.CheckpointError) as raised:
        mine()
    *own, last = raised.value._render_traceback_()
    said = "CheckpointError: unknown builtin checkpoint 'gpt3'; did you mean 'gpt2'?"
    assert last == f"\x1b[1;31m{said}\x1b[0m"
    assert "in mine" in own[-1]
    assert str(Path(lb.__file__).parent) not in "\n".join(own)
    assert len(own) < 5

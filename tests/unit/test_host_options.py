"""The command line of a host agent: impossible options are refused before anything is started."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_nb.host.options import parse

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tcp", "127.0.0.1:22222", "--key", "k"], "--tcp 127.0.0.1:22222: write a scheme, an address and a port"),
        (["--tcp", "tcp://127.0.0.1:port", "--key", "k"], "such as tcp://0.0.0.0:22222"),
        (["--dial", "login", "--key", "k"], "such as tcp://login:22222"),
        (["--dial", "tcp://login:0", "--key", "k"], "--dial tcp://login:0: write"),
        (["--tcp", "tcp://127.0.0.1:22222"], "--tcp needs --key FILE"),
        (["--dial", "tcp://login:22222"], "--dial needs --key FILE"),
        (["--host", "a/b"], "'a/b' is no id"),
        (["--host", "../x"], "'../x' is no id"),
        (["--lease-s", "nan"], "--lease-s: 'nan' is not a number of seconds above 0"),
        (["--unused-s", "-1"], "--unused-s: '-1' is not a number of seconds above 0"),
        (["--run-folder", "home"], "--run-folder home goes with the agent, and has other files"),
    ],
)
def test_an_option_that_is_missing_or_impossible_is_named(
    words: list[str],
    reason: str,
    pipe: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("home", "papers").mkdir(parents=True)
    with pytest.raises(SystemExit):
        parse([*words, "--owner-fd", str(pipe)])
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:22222", "tcp://node7:1"])
def test_addresses_to_listen_at(address: str, pipe: int) -> None:
    assert parse(["--tcp", address, "--key", "k", "--owner-fd", str(pipe)]).tcp == address


def test_an_input_whose_end_cannot_be_seen_needs_keep(capsys: pytest.CaptureFixture[str]) -> None:
    with open(os.devnull) as nothing:
        with pytest.raises(SystemExit):
            parse(["--owner-fd", str(nothing.fileno())])
        assert "--keep has it run on" in capsys.readouterr().err
        assert parse(["--owner-fd", str(nothing.fileno()), "--keep"]).owner_fd is None

"""Lines as scripts show them: their ranks, equal ones once, windows, and muted meshes."""

import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.logs import Line, Written, merged
from monarch_nb.logs.forwarding import Forwarding, Windows
from monarch_nb.logs.lines import Sources, mesh_of, rank_of
from monarch_nb.logs.mesh_logs import LogOption, LogOptions
from monarch_nb.settings import settings
from tests.polling import until
from tests.unit.log_tools import Cluster

pytestmark = pytest.mark.timeout(30)


def written(rank: int, text: str, mesh: str = "p") -> Written:
    return Written(f"h/{mesh}.{rank}.0", "stdout", "c:1", 0, 1.0, text)


def test_an_address_tells_its_mesh_and_rank() -> None:
    assert (mesh_of("h12/p3a.17.2"), rank_of("h12/p3a.17.2")) == ("p3a", 17)


def test_equal_lines_merge_within_a_mesh_but_not_across_meshes() -> None:
    lines = [Line(f"h/{proc}.0", text) for proc, text in (("p.0", "x"), ("q.0", "x"), ("p.1", "x"), ("p.0", "y"))]
    sources = Sources({})
    assert merged(lines, sources.of, named=True) == ["[p rank=0-1] x\n", "[q rank=0] x\n", "[p rank=0] y\n"]
    assert merged([*lines, *lines], sources.of, named=False, prefixed=False) == [
        "x (4 times)\n",
        "x (2 times)\n",
        "y (2 times)\n",
    ]


def test_only_lines_of_a_window_wait_for_its_end() -> None:
    options = LogOptions()
    options.set("p", LogOption(stream=True, window=3.0))
    options.set("off", LogOption(stream=False))
    windows = Windows(options)
    windows.put([written(0, "held\n"), written(0, "at once\n", "q"), written(0, "never\n", "off")])
    assert windows.wait(100.0) is None
    single, gathered = windows.take(100.0)
    assert ([line.text for line in single], gathered) == (["at once"], [])
    windows.put([written(1, "held\n")])
    assert windows.take(102.0) == ([], [])
    assert windows.wait(102.0) == 1.0
    assert [line.text for line in windows.take(103.0)[1]] == ["held", "held"]
    windows.put([written(0, "last\n")])
    assert [line.text for line in windows.take(103.0, all_of_it=True)[1]] == ["last"]


def test_settings_of_a_mesh_keep_whether_lines_are_merged() -> None:
    options = LogOptions()
    assert options.merges("h/p.0.0")
    options.set_merging("p", None)
    assert options.of("h/p.0.0") is None
    options.set_merging("p", False)
    options.set("p", LogOption(level=30))
    assert (options.merges("h/p.0.0"), options.level("p"), options.level("q")) == (False, 30, 0)


class Script(Cluster):
    """A script that has spawned a mesh of processes and shows their lines on its standard output."""

    def __init__(self) -> None:
        super().__init__()
        self.logs.present(Forwarding(self.logs))


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.logs.close()


def test_lines_are_written_as_they_come_and_with_their_rank(script: Script, capsys: Any) -> None:
    script.write(0, "before\n")
    script.logs.set_option("p", LogOption(stream=True))
    script.write(0, "hello\n")
    script.logs.set_option("p", LogOption(stream=False))
    script.write(0, "hidden\n")
    script.logs.set_option("p", LogOption(stream=True))
    script.write(1, "after\n")
    script.logs.settle()
    assert capsys.readouterr().out == "[workers gpus=0] before\n[workers gpus=0] hello\n[workers gpus=1] after\n"


def test_a_window_is_shown_when_it_ends_or_all_is_shown(script: Script, capsys: Any) -> None:
    script.logs.set_option("p", LogOption(stream=True, window=60.0))
    for rank in (0, 1, 1):
        script.write(rank, "same\n")
    script.logs.settle()
    assert capsys.readouterr().out == "[workers gpus=0-1] same (3 times)\n"
    script.logs.set_option("p", LogOption(stream=True, window=0.01))
    script.write(0, "soon\n")
    output = ""
    while "soon" not in output:  # by the thread of output
        output += capsys.readouterr().out
        time.sleep(0.005)  # between looks
    assert output == "[workers gpus=0] soon\n"


def test_the_end_of_a_program_waits_for_output_before_its_replies(script: Script, capsys: Any) -> None:
    position = script.write(0, "first\n")
    script.logs.positions["h/p.0.0"] = position + len("second\n")
    threading.Timer(0.05, script.write, [0, "second\n"]).start()
    script.logs.settle()
    assert capsys.readouterr().out == "[workers gpus=0] first\n[workers gpus=0] second\n"
    script.logs.close()
    script.write(0, "to nobody\n")
    assert capsys.readouterr().out == ""


def test_characters_unknown_to_standard_output_are_escaped(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    for line in ("before\n", "h\u00e9llo \u2713\n", "after\n"):
        script.write(0, line)
        script.logs.settle()
    lines = output.buffer.getvalue().decode().splitlines()
    assert lines == [f"[workers gpus=0] {text}" for text in ("before", "h\\xe9llo \\u2713", "after")]


@pytest.mark.parametrize("closed", [True, False])
def test_output_goes_on_after_a_time_without_standard_output(
    script: Script, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    output = io.StringIO()
    output.close()
    monkeypatch.setattr("sys.stdout", output if closed else None)
    script.write(0, "to nobody\n")
    presenter = script.logs._presenter
    assert isinstance(presenter, Forwarding)
    until(lambda: not presenter._windows._new)
    reader = io.StringIO()
    monkeypatch.setattr("sys.stdout", reader)
    script.write(0, "after\n")
    until(lambda: "after" in reader.getvalue())
    assert reader.getvalue() == "[workers gpus=0] after\n"


@pytest.mark.parametrize(("named", "line"), [(True, "[workers gpus=0] x\n"), (False, "x\n")])
def test_ranks_are_named_where_the_settings_say_so(script: Script, capsys: Any, named: bool, line: str) -> None:
    before = settings.runtime()
    settings.configure({"prefix_with_rank": named})
    try:
        script.write(0, "x\n")
        script.logs.settle()
    finally:
        settings.replace(before)
    assert capsys.readouterr().out == line

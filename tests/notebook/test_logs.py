"""Output belongs to a cell: also late, in floods, on stderr, and what no cell has caused."""

import re
import time
from pathlib import Path

import pytest

from tests.notebook.notebook import Cell, Notebook
from tests.notebook.test_output import ranks

pytestmark = pytest.mark.timeout(120)

TALKER = """
import ctypes, logging, subprocess, sys, threading, time, warnings
from monarch.actor import Actor, endpoint

class LogTalker(Actor):
    def __init__(self):
        print("being made")
    @endpoint
    def late(self, path, text):
        while not __import__("os").path.exists(path):
            time.sleep(0.01)
        print(text)
    @endpoint
    def ready(self):
        pass
    @endpoint
    def raw(self):
        ctypes.CDLL(None).puts(b"from C")
        subprocess.run(["sh", "-c", "echo from a child; echo from its stderr >&2"])
    @endpoint
    def long_raw(self):
        subprocess.run(["sh", "-c", "echo live from a child"])
        time.sleep(1.5)
    @endpoint
    def complain(self):
        print("an error", file=sys.stderr)
        logging.getLogger("lib").error("logged")
        warnings.warn("warned")
    @endpoint
    def background(self):
        threading.Timer(0.02, print, ["from behind"]).start()
"""


@pytest.fixture
def talk(nb: Notebook) -> Notebook:
    """The shared kernel, with actors `t` that write in several ways."""
    if "LogTalker" not in nb.run("sorted(globals())").ok().text:
        nb.run(TALKER).ok()
    cell = nb.run("if 't' not in globals() or t._state.stopped or t._state.procs is not w._state:\n"
                  "    t = w.spawn('t', LogTalker); t.initialized.get()").ok()  # fmt: skip
    assert "being made" in cell.stdout or not cell.stdout
    nb.run("t.ready.call().get()").ok()
    return nb


def test_late_output_of_a_broadcast_goes_to_its_cell(talk: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = talk.start(f"t.late.broadcast({str(gate)!r}, 'late words')")
    assert talk.finish(first).ok().stdout == ""
    second = talk.start(f"open({str(gate)!r}, 'w').close(); t.ready.call().get(); print('second')")
    shown = {first: "", second: ""}
    while ranks(shown[first], "late words") != [0, 1, 2, 3] or "second" not in shown[second]:
        message = talk.client.get_iopub_msg(timeout=15)
        if message["msg_type"] == "stream" and message["parent_header"].get("msg_id") in shown:  # not of earlier cells
            shown[message["parent_header"]["msg_id"]] += message["content"]["text"]
    assert shown[second] == "second\n"
    talk.run("None").ok()


def test_output_of_c_code_and_children_reaches_its_cell_and_stream(talk: Notebook) -> None:
    cell = talk.run("t.raw.call().get();").ok()
    assert ranks(cell.stdout, "from C") == ranks(cell.stdout, "from a child") == [0, 1, 2, 3]
    assert ranks(cell.stderr, "from its stderr") == [0, 1, 2, 3]
    assert talk.run("print('next')").ok().stdout == "next\n"


def test_raw_output_of_a_call_that_goes_on_is_shown_meanwhile(talk: Notebook) -> None:
    request = talk.start("t.slice(gpus=2).long_raw.call_one().get()")
    talk.until(request, Cell(), "live from a child")
    talk.finish(request).ok()


def test_warnings_and_records_of_logging_come_on_stderr(talk: Notebook) -> None:
    cell = talk.run("t.complain.call().get();").ok()
    assert cell.stdout == ""
    assert ranks(cell.stderr, "an error") == [0, 1, 2, 3]
    assert "logged" in cell.stderr
    assert "UserWarning: warned" in cell.stderr


def test_output_of_no_call_is_in_the_logs_only(talk: Notebook) -> None:
    cell = talk.run("t.slice(gpus=1).background.call_one().get()").ok()
    shown = cell.stdout
    deadline = time.monotonic() + 15
    while "from behind" not in (logs := talk.run("print('looking')\n%logs w gpus=1 --grep behind").ok()).text:
        assert time.monotonic() < deadline
        shown += logs.stdout
    assert "from behind" not in shown + logs.stdout
    assert re.search(r"\[gpus=1\] from behind", logs.text)
    assert "from behind" in logs.html


def test_a_storm_of_lines_ends_in_one_folded_block(nb: Notebook) -> None:
    cell = nb.run("%%on w\nfor number in range(6000):\n    print('rank', rank, 'line', number)", timeout=60).ok()
    assert len(cell.shown) == 1
    fold = [display for display in (*cell.displays, *cell.updates) if "more lines" in display["text/plain"]][-1]
    shown = cell.stdout.count("rank ")  # how many, is tested in unit/test_cell_output.py
    match = re.search(r"… ([\d,]+) more lines not shown here: %logs w shows the last of them, .*\n", fold["text/plain"])
    assert match is not None
    assert int(match[1].replace(",", "")) + shown == 24_000
    last_words = fold["text/html"] + cell.stdout  # of a rank that is late, when there is room to show lines again
    for rank in range(4):
        assert f"gpus={rank}] rank {rank} line 5999\n" in last_words


def test_equal_lines_are_not_merged_where_that_is_not_wanted(nb: Notebook) -> None:
    nb.run("%mesh apart gpus=2 --no-dedup").ok()
    try:
        cell = nb.run("%%on apart\nprint('same')").ok()
        assert sorted(cell.stdout.splitlines()) == ["[apart gpus=0] same", "[apart gpus=1] same"]
        merges = "from monarch_nb.logs import logs_here; logs_here().options.merges(apart._state.address(0))"
        assert nb.run(f"%mesh apart gpus=2\n{merges}").ok().text == "True"
    finally:
        nb.run("%stop apart").ok()


def test_tqdm_is_one_live_bar_per_rank_and_a_final_line(nb: Notebook) -> None:
    cell = nb.run(
        "%%on w\nimport time\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(50), desc='epoch'):\n    time.sleep(0.05)"
    )
    cell.ok()
    lines = cell.stderr.splitlines()
    assert ranks(cell.stderr, "epoch: 100%", ".* 50/50 .*") == [0, 1, 2, 3]
    assert len(lines) <= 4, "ranks of the same speed share a line"
    assert all("50/50" in line for line in lines)
    shown = [data["text/plain"] for data in (*cell.displays, *cell.updates) if "epoch" in data.get("text/plain", "")]
    assert shown, "they are drawn while the cell waits"
    for text in shown:
        bars = re.findall(r"gpus=(\d)\] epoch", text)
        assert bars == sorted(set(bars)), "one each, in order"
    streams = [message for message in cell.messages if message["msg_type"] == "stream"]
    assert len(streams) <= 4
    assert len(cell.displays) + len(cell.updates) <= 20, "not one for each of 200 steps"


def test_a_traceback_printed_by_a_rank_has_the_cells_lines(nb: Notebook) -> None:
    cell = nb.run(
        "%%on w gpus=0\nimport traceback\ntry:\n    1 / 0  # the line\nexcept Exception:\n    traceback.print_exc()"
    ).ok()
    assert "1 / 0  # the line" in cell.stderr


def test_a_crash_is_reported_with_the_line_of_its_cell(nb: Notebook) -> None:
    cell = nb.run("%%on w gpus=2\nimport ctypes\nprint('on the brink')\nctypes.string_at(0)")
    text = cell.traceback
    assert "| on the brink" in text
    assert "it crashed here" in text
    assert "Fatal Python error: Segmentation fault" in text
    assert re.search(r'File ".+", line 4 in <module>', text)
    assert "monarch_nb" not in text.partition("it crashed here")[2]


def test_records_of_logging_say_which_actor_and_are_shown_once(talk: Notebook) -> None:
    cell = talk.run("t.complain.call().get();").ok()
    assert ranks(cell.stderr, "[t] logged") == [0, 1, 2, 3]


def test_logs_can_be_followed_until_they_are_interrupted(nb: Notebook) -> None:
    nb.run("%%on w gpus=3\nprint('needle one')").ok()
    request = nb.start("%logs w gpus=3 --follow --grep 'needle (one|two)'")
    nb.until(request, Cell(), "needle one")
    nb.interrupt()
    assert nb.finish(request).ok().error is None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("%logs nobody", "no mesh 'nobody'"),
        ("%logs w --grep (", "not a regular expression"),
        ("%logs w --since soon", "is not a time"),
        ("%logs w gpus=9", "gpus"),
    ],
)
def test_log_arguments_that_make_no_sense_are_refused(nb: Notebook, line: str, error: str) -> None:
    cell = nb.run(line)
    assert error in cell.traceback + cell.stderr

"""Failures in a real kernel: reported once, in the right cell, with all facts; and how work continues."""

import os
import re
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.notebook.conftest import ACTORS
from tests.notebook.notebook import Cell, Notebook

pytestmark = pytest.mark.timeout(120)


def pid_of(nb: Notebook, rank: int) -> int:
    return int(nb.run(f"a.slice(gpus={rank}).pid.call_one().get()").ok().text)


def test_killing_a_rank_during_its_call_ends_the_cell_informatively(nb: Notebook) -> None:
    victim = pid_of(nb, 2)
    request = nb.start("a.work.call(30, 'working').get()")
    nb.until(request, Cell(), "working")
    os.kill(victim, signal.SIGKILL)
    cell = nb.finish(request, timeout=20)
    assert cell.error is not None
    assert cell.error["ename"] == "SupervisionError"
    text = cell.traceback
    assert "a.work() cannot be answered: a, gpus=2 died: killed by signal 9 (SIGKILL)" in text
    assert f"pid {victim}" in text
    assert "| working" in text
    assert "heal_mesh(a)" in text
    assert "----> 1 a" in text  # the cell's own line, and below it the traceback without the engine's frames
    assert "monarch_nb" not in text
    assert f"pid {victim}" in cell.error["evalue"]  # what headless runners quote
    assert cell.shown == []  # reported by the call, and only there
    nb.run("%interrupt a").ok()


def test_a_broken_mesh_fails_at_once_and_its_healthy_slice_works(nb: Notebook) -> None:
    nb.run("a.slice(gpus=1).die.call_one().get()")
    assert "a, gpus=1 died" in nb.run("a.work.call().get()").traceback
    assert nb.run("a.slice(gpus=0).work.call_one().get()").ok().text == "0"
    shown = nb.run("w").ok()
    assert 'class="mnb-failed"' in shown.html
    assert "1 failed" in shown.html
    assert "1 failed" in nb.run("%meshes").text


def test_heal_brings_back_the_same_objects(nb: Notebook) -> None:
    nb.run("before = a; a.slice(gpus=1).die.call_one().get()")
    cell = nb.run("%heal w").ok()
    assert cell.stdout == "healed 1 proc of w\n"
    assert nb.run("before is a, a.work.call().get().values()").ok().text == "(True, [0, 1, 2, 3])"
    assert nb.run("%heal w").ok().stdout == "w has not failed: there is nothing to heal\n"


def test_heal_of_a_stopped_mesh_says_that_it_was_stopped(nb: Notebook) -> None:
    nb.run("%mesh gone gpus=1").ok()
    nb.run("%stop gone").ok()
    assert "gone is not broken, it was stopped" in nb.run("%heal gone").stderr
    assert "gone is stopped" in nb.run("%%on gone\n1").traceback


def test_a_death_while_idle_is_shown_once_in_the_last_cell(nb: Notebook) -> None:
    victim = pid_of(nb, 3)
    request = nb.start("'idle'")
    nb.finish(request)
    os.kill(victim, signal.SIGKILL)
    shown = nb.next_message(request, "display_data")["data"]
    assert "gpus=3 died: killed by signal 9 (SIGKILL)" in shown["text/plain"]
    assert f"pid {victim}" in shown["text/html"]
    again = nb.run("1 + 1").ok()
    assert again.displays == []
    assert "gpus=3 died" in nb.run("a.work.call().get()").traceback  # and raised at the next use


def await_file(gate: Path) -> str:
    """The code of a cell that runs until a file exists."""
    return f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"


def test_a_death_during_an_unrelated_cell_is_shown_without_ending_it(nb: Notebook, tmp_path: Path) -> None:
    victim, gate = pid_of(nb, 0), tmp_path / "gate"
    request = nb.start(f"print('running', flush=True)\n{await_file(gate)}print('done')")
    cell = Cell()
    nb.until(request, cell, "running")
    os.kill(victim, signal.SIGKILL)
    nb.until(request, cell, "gpus=0 died")
    gate.touch()
    rest = nb.finish(request).ok()
    assert len(cell.displays + rest.displays) == 1
    assert "gpus=0 died" in cell.displays[0]["text/plain"]
    assert "done" in rest.stdout


def test_a_broadcast_that_raises_is_shown_with_its_traceback(nb: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    request = nb.start(f"a.slice(gpus=0).divide.broadcast(0)\n{await_file(gate)}")
    cell = nb.until(request, Cell(), "ZeroDivisionError")
    gate.touch()
    assert nb.finish(request).ok().displays == []
    assert len(cell.displays) == 1
    assert "ZeroDivisionError" in cell.displays[0]["text/plain"]
    assert "return 1 / x" in cell.displays[0]["text/html"]


def test_an_endpoints_exception_shows_the_line_of_its_cell(nb: Notebook) -> None:
    cell = nb.run("a.divide.call(0).get()")
    assert "a.divide failed on 4 of 4 ranks: gpus=0-3; the same error (host " in cell.traceback
    assert "): ZeroDivisionError: division by zero" in cell.traceback
    assert "return 1 / x" in cell.traceback
    assert re.search(r"Cell In\[\d+\], line 1\d|ipykernel_\d+/\d+\.py\", line 1\d", cell.traceback)
    assert "monarch_nb" not in cell.traceback
    assert nb.run("a.divide.call(2).get().get(0)").ok().text == "0.5"


VIEW = "application/vnd.jupyter.widget-view+json"


def test_errors_of_some_ranks_name_them_and_the_bar_opens_frames(nb: Notebook) -> None:
    pytest.importorskip("anywidget")
    source = "if rank in (1, 3):\n    raise ValueError(f'bad batch {rank}')"
    cell = nb.finish(nb.start(f"%%on a\n{source}", asks=True))
    assert "The cell failed on 2 of 4 ranks of a: gpus=1,3; 2 different errors (host " in cell.traceback
    assert "gpus=1: ValueError: bad batch 1\n  gpus=3: ValueError: bad batch 3" in cell.traceback
    assert "On gpus=1 (most recent call last):" in cell.traceback
    [bar] = cell.displays
    assert bar["text/plain"].startswith("The cell failed on 2 of 4 ranks of a: gpus=1,3")
    assert VIEW in bar
    processes = nb.run("%%on w\nif rank == 2:\n    1 / 0").traceback
    assert "The cell failed on 1 of 4 ranks of w: gpus=2 (host " in processes
    failed = nb.run("import sys; sorted(sys.last_value.failures.items())").text
    assert failed == "[(2, ZeroDivisionError('division by zero'))]"


def test_a_failure_in_on_ends_the_cell(nb: Notebook) -> None:
    cell = nb.run("%%on w\nimport os, time\nif rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(30)", timeout=20)
    assert "w, gpus=1 died: killed by signal 9" in cell.traceback
    nb.run("%interrupt w").ok()


def test_ranks_that_resist_interrupts_come_with_the_command_that_heals_them(nb: Notebook) -> None:
    source = """
import os, signal, time
print('begun', flush=True)
if rank in (1, 2):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)  # this thread may be stopped a moment later
"""
    nb.run("import monarch; monarch.configure(heal_max_restarts=50)").ok()  # other tests have healed these ranks too
    patience = nb.run("from monarch_kernel import interrupted_calls; interrupted_calls.GIVE_UP_SECONDS").ok().text
    assert float(patience) == 5
    nb.run("interrupted_calls.GIVE_UP_SECONDS = 2.0").ok()
    before = [pid_of(nb, rank) for rank in range(4)]
    request = nb.start(f"%%on w{source}")
    cell = Cell()
    nb.until(request, cell, "begun")
    deadline = time.monotonic() + 15
    while any(psutil.Process(before[rank]).status() != psutil.STATUS_STOPPED for rank in (1, 2)):
        assert time.monotonic() < deadline, "a rank that is not stopped yet can be interrupted"
        time.sleep(0.01)
    nb.interrupt()
    nb.finish(request)
    nb.interrupt()
    notice = nb.shows(request, "has not stopped")
    nb.run(f"interrupted_calls.GIVE_UP_SECONDS = {patience}").ok()
    assert "w gpus=1-2 has not stopped within 2 s" in notice
    assert "%heal w gpus=1-2 --kill kills their processes and starts them again" in notice
    assert "killed 2 procs of w and healed 2" in nb.run("%heal w gpus=1-2 --kill").ok().stdout
    after = [pid_of(nb, rank) for rank in range(4)]
    assert [old != new for old, new in zip(before, after, strict=True)] == [False, True, True, False]


def test_heal_says_what_it_cannot_pick(nb: Notebook) -> None:
    assert "nodes" in nb.run("%heal w nodes=1 --kill").stderr
    assert "%heal knows no option --gently; its options are --kill" in nb.run("%heal w --gently").stderr


def test_a_failure_interrupts_the_running_cell_where_that_was_asked_for(nb: Notebook) -> None:
    source = """
    from monarch.config import configured
    with configured(interrupt_on_failure=True):
        print('running', flush=True)
        for _ in range(600):
            time.sleep(0.1)
    print('never')
    """
    victim = pid_of(nb, 3)
    request = nb.start(textwrap.dedent(source))
    cell = Cell()
    nb.until(request, cell, "running")
    os.kill(victim, signal.SIGKILL)
    done = nb.finish(request)
    assert done.error is not None
    assert done.error["ename"] == "KeyboardInterrupt"
    assert "never" not in done.stdout
    [shown] = cell.displays + done.displays
    assert "gpus=3 died" in shown["text/plain"]


def test_a_failure_between_cells_interrupts_nothing(nb: Notebook) -> None:
    nb.run("import monarch; monarch.configure(interrupt_on_failure=True)").ok()
    victim = pid_of(nb, 2)
    request = nb.start("'idle'")
    nb.finish(request)
    os.kill(victim, signal.SIGKILL)
    assert "gpus=2 died" in nb.next_message(request, "display_data")["data"]["text/plain"]
    assert nb.run("monarch.configure(interrupt_on_failure=False); 1 + 1").ok()


EIGHT = """
class Leaver(Actor):
    @endpoint
    def leave(self):
        print("going down")
        os._exit(7)

    @endpoint
    def spoil(self):
        raise ValueError("spoilt")

    @endpoint
    def ok(self):
        return True

if "leavers" not in globals():
    eight = this_host().spawn_procs(per_host={"gpus": 8}, name="eight")
    leavers = eight.spawn("leavers", Leaver)
heal_mesh(eight)
leavers.ok.call().get()
"""


@pytest.fixture(scope="module")
def leavers(kernel: Notebook) -> Iterator[Notebook]:
    kernel.run(ACTORS).ok()
    yield kernel
    kernel.run("eight.stop().get(); del eight, leavers").ok()  # lines of w have its name while there is another mesh


@pytest.fixture
def eight(leavers: Notebook) -> Iterator[Notebook]:
    leavers.run(EIGHT).ok()
    yield leavers
    leavers.run("heal_mesh(eight)").ok()


def rows_of(nb: Notebook, name: str) -> list[str]:
    """The output of %failures for a mesh, the latest first."""
    return [row for row in nb.run("%failures").text.splitlines() if name in row]


def test_eight_ranks_that_end_in_a_call_are_one_story(eight: Notebook) -> None:
    before = len(rows_of(eight, "leavers"))
    cell = eight.run("leavers.leave.call().get()")
    assert cell.shown == []
    assert "leavers.leave() cannot be answered: leavers: 8 of 8 ranks ended with exit status 7" in cell.traceback
    assert cell.traceback.count("| going down") == 1
    assert "slice" not in cell.traceback
    assert re.search(r"pids (\d+, ){7}\d+", cell.traceback)
    assert cell.error is not None
    assert "8 of 8 ranks ended" in cell.error["evalue"]  # what headless runners quote
    eight.run("heal_mesh(eight); leavers.ok.call().get()").ok()  # by now everything has been reported
    rows = rows_of(eight, "leavers")
    assert len(rows) == before + 1
    assert re.fullmatch(r"\S+  healed     leavers: 8 of 8 ranks ended with exit status 7", rows[0])


def test_eight_ranks_that_a_broadcast_fails_are_one_card(eight: Notebook) -> None:
    request = eight.start("leavers.spoil.broadcast()")
    eight.finish(request)
    [shown] = settled(eight, request)
    assert shown["text/plain"].startswith("leavers: 8 of 8 ranks failed: leavers.spoil: ValueError: spoilt\n")
    assert shown["text/plain"].count("ValueError: spoilt") == 2  # in the first line, and in one traceback


def settled(nb: Notebook, request: str) -> list[dict[str, Any]]:
    """The displays of a cell once all eight ranks are reported, in the order of their arrival."""
    shown: dict[str, dict[str, Any]] = {}
    while not any("8 of 8 ranks" in display["text/plain"] for display in shown.values()):
        message = nb._next(request, time.monotonic() + 15)
        if "display_data" in message["msg_type"]:
            shown[message["content"]["transient"]["display_id"]] = message["content"]["data"]
    return list(shown.values())


def test_a_call_failing_of_an_unclaimed_death_reports_it_briefly(eight: Notebook) -> None:
    request = eight.start("leavers.leave.broadcast()")
    eight.finish(request)
    [shown] = settled(eight, request)
    assert "| going down" in shown["text/plain"]
    second = eight.run("leavers.ok.call().get()")
    assert "leavers: 8 of 8 ranks ended with exit status 7" in second.traceback
    assert "the details were shown when it happened" in second.traceback
    assert "heal_mesh(leavers) brings them back" in second.traceback
    assert "going down" not in second.traceback


def test_with_live_displays_the_error_and_its_bar_are_one_output(eight: Notebook) -> None:
    pytest.importorskip("anywidget")
    cell = eight.finish(eight.start("leavers.slice(gpus=slice(2, 6)).leave.call().get()", asks=True))
    [bar] = cell.displays
    assert VIEW in bar
    assert bar["text/plain"] == "leavers, gpus=2-5: 4 of 8 ranks ended with exit status 7"
    assert "leavers.slice(...) without gpus=2-5 still works" in cell.traceback


NOTICED = """
from monarch_nb.host.protocol import PreemptionNotice
from monarch_nb.host.verbs import HOST_NOTICE
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.runtime import current_runtime
from monarch_nb.wire import Header, Kind, agent_of, encode_body
def notice(**said):  # as its agent sends it
    runtime = current_runtime()
    body = encode_body(PreemptionNotice(by="Slurm job 7 has reached its time limit", **said))
    header = Header(Kind.CONTROL, runtime.address, agent_of(runtime.host), method=HOST_NOTICE.name)
    runtime.verbs.take(header, body)
"""


def test_preempted_hosts_are_one_card_until_they_stay(nb: Notebook) -> None:
    nb.run(NOTICED).ok()
    request = nb.start("notice(seconds=30.0, at=1.0)")
    nb.finish(request)
    card = nb.next_message(request, "display_data")["data"]
    host = nb.run("current_runtime().host.rpartition('.')[0]").ok().text.strip("'")
    assert card["text/plain"].startswith(
        f"Host {host} is about to be taken away (Slurm job 7 has reached its time limit"
    )
    assert "<b>Host" in card["text/html"]
    assert "heal_mesh(w, replace=True) takes another host" in card["text/plain"]
    shown = nb.run("w").ok()
    assert re.search(r"is about to be taken away \(Slurm job 7 has reached its time limit\), in \d+ s", shown.text)
    assert "is about to be taken away" in shown.html
    request = nb.start("notice(at=1.0, over=True)")
    nb.finish(request)
    assert "it is as before" in nb.next_message(request, "display_data")["data"]["text/plain"]
    assert "taken away" not in nb.run("w").ok().html

"""Output of a script's processes appears in that of the script."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import os, sys
from monarch.actor import Actor, current_rank, endpoint, this_host

class Talker(Actor):
    @endpoint
    def say(self, text: str, end: str = "\\n") -> int:
        print(text, current_rank().rank, end=end)
        return os.getpid()
    @endpoint
    def nested(self) -> None:
        procs = this_host().spawn_procs(name="inner")
        procs.spawn("inner", Talker).say.call("inner").get(30)
        procs.stop().get(30)
    def __cleanup__(self, error):
        print("bye", self.last if hasattr(self, "last") else "")

def talkers(count, name="talk"):
    return this_host().spawn_procs(per_host={"gpus": count}, name=name).spawn("talkers", Talker)
"""


def run(tmp_path: Path, body: str, *, status: int = 0) -> list[str]:
    """The sorted lines a program writes on its standard output."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + body)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == status, done.stderr
    return sorted(line.rstrip() for line in done.stdout.splitlines())


def test_a_script_prints_output_of_ranks_without_waiting_for_an_answer(tmp_path: Path) -> None:
    body = "t = talkers(1)\nt.say.broadcast('one')\nt.say.call('two').get(30)"
    assert run(tmp_path, body) == ["[talk gpus=0] bye", "[talk gpus=0] one 0", "[talk gpus=0] two 0"]


def test_a_last_line_without_end_is_written_at_exit(tmp_path: Path) -> None:
    body = "t = talkers(1)\nt.say.call('two', end='').get(30)"
    lines = run(tmp_path, body)  # two lines where more than a second lies between, as on a busy machine
    assert "".join(line.removeprefix("[talk gpus=0] ") for line in reversed(lines)) == "two 0bye"


@pytest.mark.slow
def test_processes_that_processes_start_are_heard_too(tmp_path: Path) -> None:
    assert run(tmp_path, "talkers(1).nested.call().get(50)") == [
        "[talk gpus=0] bye",
        "[talk gpus=0] bye",
        "[talk gpus=0] inner 0",
    ]


@pytest.mark.slow
def test_values_that_ranks_display_come_out_as_text(tmp_path: Path) -> None:
    body = """
class Table:
    def __repr__(self):
        return "a table"
    def _repr_html_(self):
        return "<table></table>"

class Drawer(Actor):
    @endpoint
    def draw(self):
        display(Table(), 3)
        display({"text/html": "<b></b>"}, raw=True)

this_host().spawn_procs().spawn("drawer", Drawer).draw.call().get(30)
"""
    assert run(tmp_path, body) == ["[anon] 3", "[anon] <text/html>", "[anon] a table"]

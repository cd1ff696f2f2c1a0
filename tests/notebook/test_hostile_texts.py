"""Texts of ranks in a real kernel: objects that have none to give, and commands to a terminal in them."""

import json
import re

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

SGR = re.compile(r"\x1b\[[0-9;:]*m")
EVIL = r"""
from monarch.actor import Actor, current_rank, endpoint
COMMAND = "\x1b[31mred\x1b[0m\x1b]52;c;cm0=\x07\x1b[2J\x9b2Jend"

class Mute(Exception):
    def __str__(self):
        raise SystemExit(3)
    __repr__ = __str__

class Loud:
    def __repr__(self):
        return COMMAND

class Evil(Actor):
    @endpoint
    def mute(self):
        raise Mute

    @endpoint
    def command(self):
        print(COMMAND, flush=True)
        raise ValueError(COMMAND)

    @endpoint
    def loud(self):
        return Loud()

    @endpoint
    def leave(self):
        import os
        os.write(2, COMMAND.encode() + b"\n")
        os._exit(7)
"""


def commands(cell: object) -> str:
    """The escapes in all output of a cell, but for colours."""
    shown = (
        json.dumps(vars(cell), default=str, ensure_ascii=False).replace("\\u001b", "\x1b").replace("\\u0007", "\x07")
    )
    return "".join(char for char in SGR.sub("", shown) if char in "\x1b\x07\x9b")


def test_an_error_without_a_text_is_shown_and_the_kernel_survives(nb: Notebook) -> None:
    nb.run(EVIL).ok()
    nb.run("evil = w.spawn('evil', Evil)").ok()
    cell = nb.run("evil.mute.call().get()")
    assert cell.error is not None
    assert cell.error["ename"] == "ActorError"
    assert "Mute" in cell.traceback
    assert "its str raised SystemExit: 3" in cell.traceback
    assert nb.run("f = evil.mute.call(); f.exception(20); f").ok().text.startswith("<Future failed")
    assert "Mute" in nb.run("%%on w\nclass Mute(Exception):\n    def __str__(self): 1/0\nraise Mute").traceback
    nb.run("evil.stop().get()").ok()


def test_no_text_of_a_rank_commands_the_terminal(nb: Notebook) -> None:
    nb.run(EVIL).ok()
    nb.run("evil = w.spawn('evil' + COMMAND, Evil)").ok()
    cells = [
        nb.run("evil.command.call().get()"),
        nb.run("evil"),
        nb.run("evil.loud.call().get()"),
        nb.run("%logs w"),
        nb.run("%meshes"),
        nb.run("evil.slice(gpus=1).leave.call_one().get()"),
        nb.run("%failures"),
        nb.run("evil.command.call().get()"),
    ]
    for number, cell in enumerate(cells):
        assert commands(cell) == "", (number, cell)
    assert "\x1b[31mred\x1b[0m" in cells[0].stdout


def test_a_name_of_any_characters_stays_one_readable_word(nb: Notebook) -> None:
    nb.run("odd = w.spawn('\\x1b[31mred\\n\\ud800', Evil); odd.initialized.get()\n").ok()
    assert r"\x1b[31mred\n\ud800" in nb.run("%meshes").ok().text
    nb.run("odd.stop().get()").ok()

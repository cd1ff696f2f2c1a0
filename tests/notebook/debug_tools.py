"""A kernel whose front end takes questions: the debugger's prompt is answered as a person would, line by line."""

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.notebook.notebook import Cell, Notebook

STOPPING = """
import os, threading, time
from monarch.actor import Actor, breakpoint_if, current_rank, endpoint, this_host
import monarch.debug

class Trainer(Actor):
    def __init__(self, fail=False):
        self.steps = 0
        if fail:
            breakpoint()

    @endpoint
    def step(self, x):
        rank = current_rank().rank
        loss = 0.5 + rank / 100
        if rank == 3:
            loss = float("nan")
        breakpoint()
        self.steps += 1
        total = loss * x
        return rank

    @endpoint
    def only(self, which, x=1):
        rank = current_rank().rank
        breakpoint_if(rank in which, "asked for")
        return rank

    @endpoint
    def forward(self, batch):
        scaled = [value * 2 for value in batch]
        return self.loss(scaled)

    def loss(self, values):
        total = sum(values)
        return 1 / (total - 12)

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def late(self, folder):
        rank = current_rank().rank
        if rank:
            self.until(f"{folder}/asked")
        breakpoint()
        return rank

    def until(self, file):
        while not os.path.exists(file):
            time.sleep(0.01)
"""


# Stopped ranks may continue by themselves between two queries; then there is nothing to resume.
LET_GO = """
import time
until = time.monotonic() + 20
while monarch.debug.sessions() and time.monotonic() < until:
    try:
        monarch.debug.resume()
    except monarch.debug.DebugError:
        pass
    time.sleep(0.02)
len(monarch.debug.sessions())
"""


@contextlib.contextmanager
def stopping(ranks: int) -> "Iterator[Debugged]":
    """A kernel with actors, `t`, that stop in the debugger."""
    notebook = Debugged()
    try:
        notebook.run(STOPPING).ok()
        notebook.run(f"%mesh w gpus={ranks}\nt = w.spawn('trainers', Trainer)\nt.pid.call().get()").ok()
        yield notebook
    finally:
        notebook.close()


class Talk:
    """The questions of one cell, and its output."""

    def __init__(self) -> None:
        self.cell = Cell()
        self.prompts: list[str] = []
        self.before: list[str] = []  # the output before each question

    @property
    def text(self) -> str:
        """The output: displays as last updated, before printed text."""
        shown: dict[str, str] = {}
        for message in self.cell.messages:
            if message["msg_type"] in ("display_data", "update_display_data"):
                content = message["content"]
                name = content.get("transient", {}).get("display_id", "") or message["header"]["msg_id"]
                shown[name] = content["data"].get("text/plain", "")
        return "".join(f"{text}\n" for text in shown.values() if text) + self.cell.stdout


class Debugged(Notebook):
    """One kernel with the extension loaded, which may ask."""

    def talk(self, source: str, *answers: str | None, timeout: float = 40) -> Talk:
        """Runs a cell and answers its questions; None interrupts the kernel instead of an answer."""
        return self.go_on(self.start(source, asks=True), Talk(), *answers, timeout=timeout)

    def go_on(self, request: str, talk: Talk, *answers: str | None, timeout: float = 40) -> Talk:
        remaining = list(answers)
        deadline = time.monotonic() + timeout
        while True:
            question = self.question()
            if question is not None:
                self._drain(request, talk.cell)
                talk.prompts.append(question)
                talk.before.append(talk.text)
                assert remaining, f"asked more than was expected: {question!r}\n{talk.cell.stdout}"
                answer = remaining.pop(0)
                if answer is None:
                    self.interrupt()
                else:
                    self.client.input(answer)
            message = self._maybe(request)
            if message is not None and self._take(talk.cell, message):
                break
            assert time.monotonic() < deadline, f"the kernel is silent; shown so far:\n{talk.cell.stdout}"
        self._reply(request, deadline)
        assert not remaining, f"not asked for {remaining}\n{talk.cell.stdout}\n{talk.cell.traceback}"
        return talk

    def answer(self, text: str) -> None:
        """Types a line into the open question."""
        self.client.input(text)

    def read_until(self, request: str, talk: Talk, shown: Callable[[], bool], timeout: float = 20) -> None:
        """Takes the output of a cell while its question is open, until that is enough."""
        deadline = time.monotonic() + timeout
        while not shown():
            message = self._maybe(request)
            if message is not None:
                self._take(talk.cell, message)
            assert time.monotonic() < deadline, f"shown so far:\n{talk.text}"

    def next_prompt(self, timeout: float = 20) -> str:
        """Waits for the next question."""
        deadline = time.monotonic() + timeout
        while (question := self.question()) is None:
            assert time.monotonic() < deadline, "nothing was asked"
        return question

    def question(self) -> str | None:
        """The question that was not read yet, if any."""
        try:
            message: dict[str, Any] = self.client.get_stdin_msg(timeout=0.02)
        except queue.Empty:
            return None
        return str(message["content"]["prompt"])

    def _maybe(self, request: str) -> dict[str, Any] | None:
        try:
            message = self.client.get_iopub_msg(timeout=0.02)
        except queue.Empty:
            return None
        return dict(message) if message["parent_header"].get("msg_id") == request else None

    def _drain(self, request: str, cell: Cell) -> None:
        """Takes the output before a question, which arrives on another channel, maybe earlier.

        The kernel's thread for control answers while a cell asks, and tells so after what was shown before.
        """
        probe = self.client.session.msg("kernel_info_request", {})
        self.client.control_channel.send(probe)
        deadline = time.monotonic() + 20
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            parent = message["parent_header"].get("msg_id")
            if parent == request:
                self._take(cell, message)
            elif parent == probe["header"]["msg_id"] and message["content"].get("execution_state") == "idle":
                return

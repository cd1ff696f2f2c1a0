"""A front end's debugger, as far as a kernel can tell: requests on the control channel, events on iopub."""

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.notebook.notebook import Cell, Notebook

Message = dict[str, Any]

TRAINER = """\
from monarch.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    def __init__(self, scale=1):
        self.scale = scale

    @endpoint
    def step(self, x):
        rank = current_rank().rank
        loss = x + rank
        doubled = self.learn(loss)
        return doubled

    def learn(self, loss):
        result = loss * 2
        return result * self.scale

    @endpoint
    def fails(self, x):
        try:
            return 1 / x
        except ZeroDivisionError:
            return -1
"""


def named(name: str, code: str = TRAINER) -> str:
    """The cell of another class: all tests share one notebook, and actors of others stay unchanged."""
    return code.replace("class Trainer", f"class {name}")


@contextlib.contextmanager
def training() -> Iterator[Notebook]:
    """A kernel with a mesh, `w`, and actors on it, `t`."""
    opened = Notebook()
    try:
        opened.run(TRAINER).ok()
        opened.run("%mesh w gpus=3").ok()
        opened.run("t = w.spawn('trainers', Trainer)\nt.initialized.get()").ok()
        yield opened
    finally:
        opened.close()


class Debugger:
    """That of one notebook. Cells are started without waiting for their ends: what they show is taken meanwhile."""

    def __init__(self, notebook: Notebook, client: str = "jupyterlab") -> None:
        self.notebook = notebook
        self.client = client
        self.events: list[Message] = []
        self._cells: dict[str, tuple[Cell, bool]] = {}
        self._seq = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def ask(self, command: str, timeout: float = 15, **arguments: Any) -> Message:
        """The whole answer."""
        self._seq += 1
        session, channel = self.notebook.client.session, self.notebook.client.control_channel
        content = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        message = session.msg("debug_request", content)
        channel.send(message)
        deadline = time.monotonic() + timeout
        while True:
            reply = self.notebook.client.get_control_msg(timeout=max(0.1, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def do(self, command: str, **arguments: Any) -> Message:
        """The body of an answer that is none of failure."""
        answer = self.ask(command, **arguments)
        assert answer.get("success", True), answer
        return dict(answer.get("body") or {})

    def on(self) -> "Debugger":
        """Switches the debugger on, as the bug button does."""
        self.do("debugInfo")
        options = {"adapterID": "python3", "pathFormat": "path", "linesStartAt1": True, "columnsStartAt1": True}
        self.capabilities = self.do("initialize", clientID=self.client, **options)
        self.do("attach")
        return self

    def off(self) -> None:
        self.do("disconnect", restart=False, terminateDebuggee=False)

    def mark(self, code: str, *texts: str, **options: Any) -> list[Message]:
        """Sets breakpoints at the lines of a cell with these texts; returns the reply."""
        lines = code.split("\n")
        numbers = [next(i for i, line in enumerate(lines, 1) if line.strip() == text) for text in texts]
        path = self.do("dumpCell", code=code)["sourcePath"]
        breakpoints = [{"line": number, **options} for number in numbers]
        return list(self.do("setBreakpoints", source={"path": path}, breakpoints=breakpoints)["breakpoints"])

    # -- what is looked at ---------------------------------------------------------------------------------------------

    def frames(self, thread: int = 1) -> list[Message]:
        return list(self.do("stackTrace", threadId=thread)["stackFrames"])

    def scope(self, frame: int | None = None) -> int:
        """The number of the local variables of a frame, the innermost if none is named."""
        number = self.frames()[0]["id"] if frame is None else frame
        return int(self.do("scopes", frameId=number)["scopes"][0]["variablesReference"])

    def variables(self, frame: int | None = None) -> dict[str, Message]:
        """The local variables of a frame."""
        rows = self.do("variables", variablesReference=self.scope(frame))["variables"]
        return {row["name"]: row for row in rows}

    def threads(self) -> list[str]:
        return [row["name"] for row in self.do("threads")["threads"]]

    # -- iopub ---------------------------------------------------------------------------------------------------------

    def start(self, source: str, *, asks: bool = False) -> str:
        """`asks`: the front end takes questions, as JupyterLab does."""
        request = self.notebook.start(source, asks=asks)
        self._cells[request] = (Cell(), False)
        return request

    def event(self, name: str, timeout: float = 20) -> Message:
        """Takes the next event of that name; its body."""
        deadline = time.monotonic() + timeout
        while True:
            for index, event in enumerate(self.events):
                if event["event"] == name:
                    return dict(self.events.pop(index)["body"])
            self._read(deadline, f"no event {name!r}")

    def until(self, holds: Callable[[], bool], timeout: float = 20) -> None:
        """Waits until that holds: ranks that stop at one place do so one after the other."""
        deadline = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < deadline, "it does not come to hold"
            time.sleep(0.02)

    def questions(self) -> list[str]:
        """The questions of cells so far."""
        questions = []
        while self.notebook.client.stdin_channel.msg_ready():
            questions.append(self.notebook.client.get_stdin_msg(timeout=1)["content"]["prompt"])
        return questions

    def finish(self, request: str, timeout: float = 30) -> Cell:
        """The cell, once it has ended."""
        deadline = time.monotonic() + timeout
        while not self._cells[request][1]:
            self._read(deadline, "the cell has not ended")
        return self._cells[request][0]

    def shown(self, request: str, text: str, timeout: float = 30) -> None:
        """Waits until a running cell has shown a text."""
        deadline = time.monotonic() + timeout
        cell = self._cells[request][0]
        while text not in str(cell.displays) + str(cell.updates):
            self._read(deadline, f"the cell does not show {text!r}, but {cell.displays} {cell.updates[-1:]}")

    def read(self, seconds: float) -> None:
        """Takes the messages of that time."""
        until = time.monotonic() + seconds
        with contextlib.suppress(AssertionError):
            while time.monotonic() < until:
                self._read(until, "")

    def _read(self, deadline: float, reason: str) -> None:
        try:
            message = self.notebook.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"{reason}; events: {self.events}") from None
        if message["msg_type"] == "debug_event":
            self.events.append(message["content"])
            return
        entry = self._cells.get(message["parent_header"].get("msg_id"))
        if entry is not None and Notebook._take(entry[0], message):
            self._cells[message["parent_header"]["msg_id"]] = (entry[0], True)

"""A bare controller for tests of the host agent: sends CONTROL messages and waits for the answers."""

import contextlib
import itertools
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from monarch_nb.host import AgentHandle, begin_agent, protocol, verbs
from monarch_nb.logs.verbs import PROC_LOG, TAIL, TOOK, Follow, LogChunks, Took
from monarch_nb.routing import plan_cast
from monarch_nb.transport import Node, Parcel
from monarch_nb.wire import REPLY, Done, Header, Kind, Layout, Run, Verb, decode_refusal, encode_body, unfold_each
from tests.polling import until
from tests.processes import alive

ROOT = str(Path(__file__).resolve().parents[2])
SOON = 40.0  # seconds: what takes longer has failed, even on a busy machine
RUNNERS = "tests.cluster.host_runners"
EVENTS = {
    verb.name: verb
    for verb in (verbs.PROC_STARTED, verbs.PROC_EXITED, PROC_LOG, verbs.PROC_UNRESPONSIVE, verbs.PROC_RESPONSIVE)
}
Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


class Refusal(Exception):
    pass


class Client:
    """A process with its own address (`<host>/c` by default) that talks to one agent."""

    def __init__(self, host: str, run_folder: Path, name: str = "c", own_host: str | None = None) -> None:
        self.host = host
        self.root = ROOT
        self.agent = f"{host}/agent"
        self.address = f"{own_host or host}/{name}"
        self._ports = itertools.count(10)
        self._replies: dict[int, queue.Queue[tuple[Header, Any]]] = {}
        self.events: list[tuple[float, str, Any]] = []
        self._arrived: queue.Queue[tuple[float, str, Any]] = queue.Queue()
        self._uids = itertools.count()
        self.answers_pings = False
        self.pings = 0
        self.node = Node(
            self.address,
            run_folders={host: run_folder},
            agent=self.agent,
            handler=self._handle,
            on_link_failed=lambda *_: None,
        )
        self.node.start()

    def _handle(self, header: Header, parcel: Parcel) -> None:
        if header.kind in (Kind.REPLY, Kind.FOLDED, Kind.RETURNED):
            self._replies[header.port].put((header, parcel))
            return
        body = bytes(parcel.frames[0])
        if header.method == REPLY:
            self._replies[header.port].put((header, body))
        elif header.method == verbs.PROC_PING.name:
            self.pings += 1
            if self.answers_pings:
                self.send(REPLY, Done(), header.port)
        elif header.method in EVENTS:
            event = EVENTS[header.method].decode(body)
            for item in event.chunks if isinstance(event, LogChunks) else (event,):
                self._arrived.put((time.time(), header.method, item))
            if isinstance(event, LogChunks):
                self.send(TOOK.name, Took({chunk.address: chunk.offset + len(chunk.data) for chunk in event.chunks}))
        self.node.consumed(parcel)

    def send(self, verb: str, body: msgspec.Struct, port: int = 0) -> None:
        header = Header(kind=Kind.CONTROL, dst=self.agent, src=self.address, method=verb, port=port)
        self.node.send(header, Parcel([encode_body(body)]), lane=1)

    def ask(self, verb: Verb[Q, R], body: Q, timeout: float = SOON) -> R:
        port = next(self._ports)
        self._replies[port] = queue.Queue()
        self.send(verb.name, body, port)
        header, data = self._replies[port].get(timeout=timeout)
        if header.status:
            raise Refusal(decode_refusal(data))
        return verb.decode_reply(data)

    def spawn(self, count: int = 1, runner: str = "idle", *, per_host: int | None = None, **options: Any) -> list[str]:
        """Start procs; returns their addresses."""
        layout = options.pop("layout", None) or Layout(f"p{next(self._uids)}", (self.host,), per_host or count)
        wish = protocol.SpawnProcs(
            mesh=layout.uid, ranks=tuple(range(count)), sys_path=(ROOT,), runner=f"{RUNNERS}:{runner}", **options
        )
        return list(self.ask(verbs.SPAWN, wish).addresses)

    def cast(self, layout: Layout, runs: Sequence[Run], method: str, body: bytes = b"", *, answers: bool = True,
             fanout: int = 8) -> int:  # fmt: skip
        """Send one message to many; returns the port of the answers."""
        port = next(self._ports)
        self._replies[port] = queue.Queue()
        for agent, plan in plan_cast(layout, runs, fanout=fanout):
            header = Header(Kind.CAST, agent, self.address, method=method, port=port if answers else 0, plan=plan)
            self.node.send(header, Parcel([body]))
        return port

    def answers(self, port: int, count: int, timeout: float = SOON) -> tuple[dict[int, list[bytes]], list[Header]]:
        """The next `count` answers to a cast by index, and the headers of their messages."""
        replies: dict[int, list[bytes]] = {}
        messages = []
        while len(replies) < count:
            header, parcel = self._replies[port].get(timeout=timeout)
            messages.append(header)
            frames = [bytes(frame) for frame in parcel.frames]
            if header.kind == Kind.FOLDED:
                replies.update({reply.index: body for reply, body in unfold_each(header, frames)})
            else:
                replies[header.index] = frames
        return replies, messages

    def started(self, *addresses: str, timeout: float = SOON) -> list[protocol.StartedProc]:
        return [self.event(verbs.PROC_STARTED, lambda e, a=address: e.address == a, timeout) for address in addresses]

    def exited(self, *addresses: str, timeout: float = SOON) -> list[protocol.Exited]:
        return [self.event(verbs.PROC_EXITED, lambda e, a=address: e.address == a, timeout) for address in addresses]

    def event(self, verb: Verb[Any, None], fits: Callable[[Any], bool] = lambda _e: True, timeout: float = SOON) -> Any:
        """Removes and returns the first event that fits, queued or still to come."""
        deadline = time.monotonic() + timeout
        while True:
            for index, (_, name, body) in enumerate(self.events):
                if name == verb.name and fits(body):
                    del self.events[index]
                    return body
            seconds = deadline - time.monotonic()
            try:
                self.events.append(self._arrived.get(timeout=max(seconds, 0.001)))
            except queue.Empty:
                raise AssertionError(f"no {verb.name} within {timeout} s; there were {self.events}") from None

    def log(self, address: str, until: str, timeout: float = SOON) -> str:
        """Follow a proc's output until some text is in it."""
        self.ask(TAIL, Follow((address,)))
        data = b""
        while until.encode() not in data:
            chunk = self.event(PROC_LOG, lambda e: e.address == address, timeout)
            assert chunk.offset == len(data)
            data += chunk.data
        self.ask(TAIL, Follow((address,), on=False))
        return data.decode()

    def status(self) -> protocol.HostState:
        return self.ask(verbs.STATUS, Done())

    def close(self) -> None:
        self.node.close(0.2)


def left_of(run_folder: Path) -> list[str]:
    """What remains of a host: processes that write to its folder or name it, and the folder itself."""
    remains = [str(path) for path in [run_folder] if path.exists()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and alive(int(entry.name)):
            try:
                out = os.readlink(entry / "fd" / "1")
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if out.startswith(f"{run_folder}/") or f"\0{run_folder}\0" in line:
                remains.append(f"{entry.name} {line} -> {out}")
    return remains


@contextlib.contextmanager
def hosted(**options: Any) -> Iterator[tuple[AgentHandle, Client]]:
    """A host agent and a client of it; nothing may be left of them afterwards."""
    handle = begin_agent(**options).wait()
    client = Client(handle.host, handle.run_folder)
    try:
        yield handle, client
    finally:
        client.close()
        handle.close()
        until(lambda: not left_of(handle.run_folder))


__all__ = ["ROOT", "AgentHandle", "Client", "Refusal", "begin_agent", "hosted", "left_of"]

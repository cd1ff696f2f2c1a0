"""A page as a kernel has it, over the websocket of a notebook server: a session, cells, and a view of the cluster."""

import asyncio
import json
import secrets
from collections.abc import Callable
from typing import Any

from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from monarch_nb.store import apply


class Page:
    """A page as a kernel has it: a session, whose websocket may come and go, and a view of the cluster on it."""

    def __init__(self, address: str, token: str, kernel: str) -> None:
        """`address` is that of the server, as `ws://…`."""
        self.kernel = kernel
        self._address = f"{address}/api/kernels/{kernel}/channels?session_id={{}}"
        self._headers = {"Authorization": f"token {token}"}
        self._session = secrets.token_hex(8)
        self._socket: WebSocketClientConnection | None = None
        self.comm = secrets.token_hex(8)
        self.state: dict[str, Any] = {}
        self.seq = -1
        self.deltas = 0
        self.gaps = 0
        self.received = 0  # messages of the view
        self.alive: list[dict[str, Any]] = []  # the counts of sent messages that the kernel reported

    async def connect(self) -> None:
        self.close()
        request = HTTPRequest(self._address.format(self._session), headers=self._headers)
        self._socket = await websocket_connect(request)

    async def send(self, kind: str, content: dict[str, Any]) -> str:
        assert self._socket is not None
        number = secrets.token_hex(8)
        header = {"msg_id": number, "msg_type": kind, "session": self._session, "username": "", "version": "5.4"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        await self._socket.write_message(json.dumps(message))
        return number

    async def run(self, code: str) -> str:
        """Runs a cell; the text that it printed."""
        number, printed = await self.send("execute_request", {"code": code, "silent": False}), ""
        missing = {"execute_reply", "idle"}  # they come on channels of their own
        while True:
            message = await self.next()
            if message["parent_header"].get("msg_id") != number:
                continue
            if message["msg_type"] == "stream":
                printed += message["content"]["text"]
            assert message["msg_type"] != "error", message["content"]
            missing.discard(str(message["content"].get("execution_state", message["msg_type"])))
            if not missing:
                return printed

    async def watch(self) -> None:
        await self.send(
            "comm_open", {"comm_id": self.comm, "target_name": "monarch_nb.cluster", "data": {"protocol": 1}}
        )
        await self.watch_again()

    async def watch_again(self) -> None:
        await self.post(type="watch", topic="cluster")

    async def post(self, **data: Any) -> None:
        """Sends a message of the view to the kernel."""
        await self.send("comm_msg", {"comm_id": self.comm, "data": data})

    async def missing(self) -> int:
        """How many messages of the kernel's this page has not received."""
        before = len(self.alive)
        await self.post(type="alive")
        while len(self.alive) == before:
            await asyncio.wait_for(self.next(), 30)
        return int(self.alive[-1]["sent"]) - self.received

    async def next(self) -> dict[str, Any]:
        """The next message; ConnectionError where the websocket is gone."""
        assert self._socket is not None
        text = await self._socket.read_message()
        if text is None:
            raise ConnectionError
        message: dict[str, Any] = json.loads(text)
        content = message["content"]
        if content.get("comm_id") == self.comm and message["msg_type"] == "comm_msg":
            gaps = self.gaps
            self._take(content["data"])
            if self.gaps > gaps:
                await self.watch_again()
        return message

    def _take(self, data: dict[str, Any]) -> None:
        if data["type"] == "alive":
            self.alive.append(data)
            return
        self.received += 1
        if data["type"] == "snapshot":
            self.state, self.seq = data["state"], data["seq"]
        elif data["type"] == "delta":
            if data["prev"] != self.seq:  # a change is missing, or came twice
                self.gaps += 1
                return
            self.seq = data["seq"]
            self.deltas += 1
            apply(self.state, data["patch"])

    async def until(self, condition: Callable[[dict[int, str]], bool]) -> None:
        while not condition(self.ranks()):
            await asyncio.wait_for(self.next(), 30)

    async def read(self) -> None:
        while True:
            await self.next()

    async def silent(self, seconds: float) -> None:
        """Raises TimeoutError once nothing has come for so long."""
        while True:
            await asyncio.wait_for(self.next(), seconds)

    def close(self) -> None:
        if self._socket is not None and (protocol := self._socket.protocol) is not None:
            self._socket.close()
            protocol.stream.close()  # the loop may end before the server has said that it closes, too

    def ranks(self) -> dict[int, str]:
        """The states of the ranks of mesh w."""
        for uid, mesh in self.state.get("meshes", {}).items():
            if mesh["name"] == "w":
                ranks = self.state["ranks"].get(uid, {})
                return {rank: ranks.get(str(rank), {}).get("state", mesh["state"]) for rank in range(2)}
        return {}

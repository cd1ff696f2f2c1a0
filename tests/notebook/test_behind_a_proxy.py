"""A page behind a proxy that buffers, and that drops its websocket: its view goes on where it was, nothing is lost."""

import asyncio
import json
import os
import secrets
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from monarch_nb.store import apply
from tests.browser.lab import Served, serve
from tests.proxy import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # a server and a kernel of its own


class Page:
    """What a page is to a kernel: a session, whose websocket may come and go, and a view of the cluster on it."""

    def __init__(self, address: str, token: str, kernel: str) -> None:
        self._address = f"{address}/api/kernels/{kernel}/channels?session_id={{}}&token={token}"
        self._session = secrets.token_hex(8)
        self._socket: WebSocketClientConnection | None = None
        self.comm = secrets.token_hex(8)
        self.state: dict[str, Any] = {}
        self.seq = -1
        self.deltas = 0

    async def connect(self) -> None:
        self.close()
        self._socket = await websocket_connect(self._address.format(self._session))

    async def send(self, kind: str, content: dict[str, Any]) -> str:
        assert self._socket is not None
        number = secrets.token_hex(8)
        header = {"msg_id": number, "msg_type": kind, "session": self._session, "username": "", "version": "5.4"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        await self._socket.write_message(json.dumps(message))
        return number

    async def run(self, code: str) -> str:
        """Runs a cell; what it printed."""
        number, printed = await self.send("execute_request", {"code": code, "silent": False}), ""
        while True:
            message = await self.next()
            if message["parent_header"].get("msg_id") != number:
                continue
            if message["msg_type"] == "stream":
                printed += message["content"]["text"]
            assert message["msg_type"] != "error", message["content"]
            if message["msg_type"] == "execute_reply":
                return printed

    async def watch(self) -> None:
        await self.send(
            "comm_open", {"comm_id": self.comm, "target_name": "monarch_nb.cluster", "data": {"protocol": 1}}
        )
        await self.send("comm_msg", {"comm_id": self.comm, "data": {"type": "watch", "topic": "cluster"}})

    async def next(self) -> dict[str, Any]:
        """The next message; ConnectionError where the websocket is gone."""
        assert self._socket is not None
        text = await self._socket.read_message()
        if text is None:
            raise ConnectionError
        message: dict[str, Any] = json.loads(text)
        content = message["content"]
        if content.get("comm_id") == self.comm and message["msg_type"] == "comm_msg":
            self._take(content["data"])
        return message

    def _take(self, data: dict[str, Any]) -> None:
        if data["type"] == "snapshot":
            self.state, self.seq = data["state"], data["seq"]
        elif data["type"] == "delta":
            assert data["prev"] == self.seq, "a change is missing, or came twice"
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
        if self._socket is not None:
            self._socket.close()

    def ranks(self) -> dict[int, str]:
        """The states of the ranks of mesh w."""
        for uid, mesh in self.state.get("meshes", {}).items():
            if mesh["name"] == "w":
                told = self.state["ranks"].get(uid, {})
                return {rank: told.get(str(rank), {}).get("state", mesh["state"]) for rank in range(2)}
        return {}


def kernel_of(served: Served) -> str:
    asked = urllib.request.Request(
        f"{served.url}api/kernels", b"{}", {"Authorization": f"token {served.token}"}, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(json.loads(answer.read())["id"])


async def story(served: Served, proxy: Proxy) -> None:
    page = Page(f"ws://127.0.0.1:{proxy.port}", served.token, kernel_of(served))
    await page.connect()
    await page.run("%load_ext monarch\n%mesh w gpus=2\nimport os")
    pids = json.loads(await page.run("print(list(w.run(os.getpid).get().values()))"))
    await page.watch()
    await page.until(lambda ranks: set(ranks.values()) == {"idle"})

    proxy.hold()  # for as long as nothing else comes
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(TimeoutError):
        await page.silent(2)
    assert page.ranks()[0] == "idle"
    proxy.release()
    await page.until(lambda ranks: ranks.get(0) == "failed")

    proxy.cut()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(page.read(), 30)
    os.kill(pids[1], signal.SIGKILL)
    await asyncio.sleep(2)  # the time in which the page hears nothing
    proxy.mend()
    await page.connect()  # the same page: the server has kept what the kernel said meanwhile
    await page.until(lambda ranks: ranks.get(1) == "failed")
    assert page.deltas >= 2

    await page.run("%heal w")
    await page.until(lambda ranks: set(ranks.values()) == {"idle"})

    again = Page(f"ws://127.0.0.1:{proxy.port}", served.token, page._address.split("/api/kernels/")[1].split("/")[0])
    await again.connect()  # a page that was loaded anew
    await again.watch()
    await again.until(lambda ranks: ranks == page.ranks())
    await again.run("%stop --all")
    for each in (page, again):
        each.close()


def test_a_view_behind_a_proxy_that_holds_back_and_drops_has_all_that_happened_in_order(tmp_path: Path) -> None:
    with serve(tmp_path, {"MONARCH_NB_PRELOAD": ""}) as served:
        proxy = Proxy(served.url.rstrip("/"))
        try:
            asyncio.run(story(served, proxy))
        finally:
            proxy.close()

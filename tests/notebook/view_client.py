"""A view without pixels: opens a comm beside the notebook's own client, as the JupyterLab panel does."""

import json
import queue
import secrets
import time
from collections.abc import Callable
from typing import Any

from jupyter_client.blocking import BlockingKernelClient

from monarch_nb.store import apply
from tests.notebook.notebook import Notebook


class ViewClient:
    """Speaks docs/protocol.md with a kernel; on a subshell where the kernel has them."""

    def __init__(self, notebook: Notebook, *, subshell: bool = True) -> None:
        self.client = BlockingKernelClient(connection_file=notebook.manager.connection_file)
        self.client.load_connection_file()  # with a session of its own: it is another front end
        self.client.start_channels()
        self.client.wait_for_ready(timeout=30)
        self.comm = secrets.token_hex(8)
        self.subshell = self._subshell() if subshell else None
        self.messages: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.seq = -1
        self.closed = False
        self._send("comm_open", {"comm_id": self.comm, "target_name": "monarch_nb.cluster", "data": {"protocol": 1}})

    def _subshell(self) -> str | None:
        session, control = self.client.session, self.client.control_channel
        request = session.msg("kernel_info_request", {})
        control.send(request)
        features = self._control(request)["content"].get("supported_features", [])
        if "kernel subshells" not in features:
            return None
        request = session.msg("create_subshell_request", {})
        control.send(request)
        return str(self._control(request)["content"]["subshell_id"])

    def _control(self, request: dict[str, Any]) -> dict[str, Any]:
        while True:
            reply = self.client.control_channel.get_msg(timeout=15)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                return dict(reply)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        message = self.client.session.msg(kind, content)
        if self.subshell is not None:
            message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)

    def send(self, **data: Any) -> None:
        self._send("comm_msg", {"comm_id": self.comm, "data": data})

    def watch(self) -> None:
        self.send(type="watch", topic="cluster")

    def until(self, condition: Callable[["ViewClient"], bool], timeout: float = 20) -> "ViewClient":
        """Reads messages of the kernel until a condition holds."""
        deadline = time.monotonic() + timeout
        while not condition(self):
            seconds = deadline - time.monotonic()
            assert seconds > 0, f"not so within {timeout} s; the state is {json.dumps(self.state)[:3000]}"
            try:
                self._take(self.client.get_iopub_msg(timeout=seconds))
            except queue.Empty:
                continue
        return self

    def _take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if content.get("comm_id") != self.comm:
            return
        if message["msg_type"] == "comm_close":
            self.closed = True
            return
        data = content["data"]
        self.messages.append(data)
        if data["type"] == "snapshot":
            self.state, self.seq = data["state"], data["seq"]
        elif data["type"] == "delta":
            assert data["prev"] == self.seq
            self.seq = data["seq"]
            apply(self.state, data["patch"])

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]

    def ask(self, verb: str, timeout: float = 20, **more: Any) -> dict[str, Any]:
        """Asks for something and waits for the answer."""
        number = secrets.token_hex(4)
        self.send(type="request", id=number, verb=verb, **more)
        self.until(lambda view: any(reply["id"] == number for reply in view.of("reply")), timeout)
        return next(reply for reply in self.of("reply") if reply["id"] == number)

    # -- reading the state ------------------------------------------------------------------------------------------

    def mesh(self, name: str) -> str:
        """The uid of the newest mesh of a name that is not stopped; "" if there is none."""
        uids = [uid for uid, mesh in self.state.get("meshes", {}).items() if mesh["name"] == name]
        uids = [uid for uid in uids if "stopped" not in self.state["meshes"][uid]]
        return uids[-1] if uids else ""

    def rank(self, name: str, index: int) -> dict[str, Any]:
        """The facts about a rank; its state is always in them."""
        uid = self.mesh(name)
        if not uid:
            return {"state": "none"}
        return {"state": self.state["meshes"][uid]["state"], **self.state["ranks"][uid].get(str(index), {})}

    def close(self) -> None:
        self._send("comm_close", {"comm_id": self.comm, "data": {}})
        self.client.stop_channels()

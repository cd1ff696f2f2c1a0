"""Messages to views are counted and never too large for a proxy; a repeated request is done once."""

import json
import queue
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.views import VIEWS, channel
from monarch_kernel.views.channel import LARGEST, LONGEST, ViewChannel, pieces
from monarch_kernel.views.live import LiveViews
from monarch_kernel.views.view import View
from monarch_nb.mesh import state_of
from monarch_nb.runtime import current_runtime
from monarch_nb.store import apply, store_of
from monarch_nb.store.events import RankStateChanged
from monarch_nb.testing import cluster

pytestmark = pytest.mark.timeout(60)
Message = dict[str, Any]


def size(value: object) -> int:
    return len(json.dumps(value))


LEAVES = st.none() | st.text(max_size=9) | st.lists(st.integers(0, 9), max_size=3)
TREES = st.recursive(
    st.dictionaries(st.text("abc", max_size=3), LEAVES, max_size=6),
    lambda inner: st.dictionaries(st.text("abc", max_size=3), LEAVES | inner, max_size=6),
    max_leaves=40,
)


def applied(state: Message, messages: list[Message]) -> Message:
    for message in messages:
        if message["type"] == "snapshot":
            state = json.loads(json.dumps(message["state"]))
        else:
            apply(state, json.loads(json.dumps(message["patch"])))
    return state


@given(before=TREES, patch=TREES, most=st.integers(20, 400))
def test_a_change_in_pieces_is_the_same_change(before: Message, patch: Message, most: int) -> None:
    message: Message = {"type": "delta", "prev": 6, "seq": 7, "patch": patch, "now": 1.5}
    parts = list(pieces(message, size, most))
    assert applied(json.loads(json.dumps(before)), parts) == applied(json.loads(json.dumps(before)), [message])
    assert [(part["prev"], part["seq"]) for part in parts] == [(6, 7)] + [(7, 7)] * (len(parts) - 1)
    assert max(map(size, parts)) <= most + size({**message, "patch": {}}) + most // 2 + 60


def test_a_snapshot_of_many_ranks_is_split_under_one_number() -> None:
    ranks = {"uid": {str(index): {"state": "idle", "pid": index} for index in range(1000)}}
    state = {"hosts": {}, "meshes": {"uid": {"name": "w"}}, "ranks": ranks}
    parts = list(pieces({"type": "snapshot", "seq": 3, "state": state, "now": 1.0}, size, 4000))
    assert len(parts) > 5
    assert parts[0]["type"] == "snapshot"
    assert applied({}, parts) == state
    assert max(map(size, parts)) < 8000


def test_lines_and_points_come_in_pieces_after_a_marked_first() -> None:
    lines = [(0, 1.0, "", "x" * 100) for _ in range(50)] + [(1, 2.0, "", "y" * (LONGEST + 5))]
    parts = list(pieces({"type": "logs", "id": "l", "reset": True, "lines": lines, "skipped": 2}, size, 1000))
    assert [line[:3] for part in parts for line in part["lines"]] == [line[:3] for line in lines]
    assert ["reset" in part for part in parts] == [True] + [False] * (len(parts) - 1)
    assert ["skipped" in part for part in parts] == [True] + [False] * (len(parts) - 1)
    assert parts[-1]["lines"][-1][3].endswith(f"({LONGEST + 5:,} characters)")
    points = {"loss": [[0, step, 1.0, 0.5] for step in range(90)], "lr": [[0, 0, 1.0, 0.1]]}
    parts = list(pieces({"type": "metrics", "id": "m", "reset": True, "points": points}, size, 300))
    assert [point for part in parts for point in part["points"].get("loss", ())] == points["loss"]
    assert [part.get("reset", False) for part in parts] == [True] + [False] * (len(parts) - 1)


class Kernel:
    """As much as a channel needs."""

    iopub_socket = None

    def __init__(self) -> None:
        self.session = self
        self.sent: list[Message] = []

    def send(self, _socket: object, _kind: str, content: Any, **_: object) -> None:
        message = json.loads(content) if isinstance(content, bytes) else content
        self.sent.append(message["data"])


class Comm:
    comm_id = "c"


def test_a_view_is_told_the_number_of_earlier_messages_and_pieces() -> None:
    kernel = Kernel()
    view_channel = ViewChannel(kernel, Comm())
    view_channel.send({"type": "views", "views": []})
    view_channel.send({"type": "alive"})
    state = {"failures": {str(number): {"report": "r" * 100_000} for number in range(3 * LARGEST // 100_000)}}
    view_channel.send({"type": "snapshot", "seq": 1, "state": state, "now": 1.0})
    view_channel.send({"type": "alive"})
    counts = [message["sent"] for message in kernel.sent if message["type"] == "alive"]
    assert counts == [1, len(kernel.sent) - 2]
    assert counts[1] >= 4
    assert max(size(message) for message in kernel.sent) < 1.5 * LARGEST


@pytest.mark.parametrize("custom", [False, True])
def test_a_long_message_is_encoded_once_for_size_and_sending(custom: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    encode = msgspec.json.encode

    def counted(value: Any) -> bytes:
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr(channel.msgspec, "json", SimpleNamespace(encode=counted))
    ways: list[type] = []
    contents: list[Message] = []

    class Session(Kernel):
        def send(self, _socket: object, _kind: str, content: Any, **_: object) -> None:
            ways.append(type(content))
            content = json.loads(content) if isinstance(content, bytes) else content
            contents.append(content["data"]["content"] if custom else content["data"])

    view_channel = ViewChannel(Session(), Comm(), custom=custom)
    messages: list[Message] = [
        {"type": "snapshot", "seq": 1, "state": {"ranks": {"a": "é"}}, "now": 1.0},
        {"type": "delta", "prev": 1, "seq": 2, "patch": {}, "now": 1.0},
        {"type": "logs", "id": "l", "lines": [(0, 1.0, "", "x")]},
        {"type": "metrics", "id": "m", "points": {"loss": [[0, 1, 1.0, float("nan")]]}},
        {"type": "reply", "id": "r", "ok": True, "result": {"text": "done"}},
    ]
    for message in messages:
        view_channel.send(message)
    assert encoded == messages
    assert ways == [bytes] * len(messages)
    assert [message["type"] for message in contents] == [message["type"] for message in messages]
    assert contents[3]["points"] == {"loss": [[0, 1, 1.0, None]]}, "no number is none, as JSON has it"
    view_channel.send({"type": "reply", "id": "r", "ok": True, "result": {"text": "\ud800"}})
    assert ways[-1] is dict, "half a character is left to Jupyter"


class Requests:
    """Counts its requests."""

    name = str

    def __init__(self) -> None:
        self.done = 0

    def answer(self, runtime: object, message: Message) -> Message:
        self.done += 1
        return {"text": f"done {self.done}"}


def test_a_repeated_request_runs_once_and_gets_the_same_answer() -> None:
    replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
    requests: Any = Requests()
    view = View(lambda message: replies.put(message) if message["type"] == "reply" else None, requests, LiveViews())
    runtime: Any = SimpleNamespace(address="h/c")
    view.attach(runtime)
    request: Message = {"type": "request", "id": "r1", "verb": "heal"}
    view.receive(request)
    first = replies.get(timeout=10)
    view.receive(request)
    assert first == replies.get(timeout=10)
    assert first == {"type": "reply", "id": "r1", "ok": True, "result": {"text": "done 1"}}
    view.receive({**request, "id": "r2"})
    assert replies.get(timeout=10)["result"] == {"text": "done 2"}


def test_a_topic_that_cannot_be_watched_costs_no_sign_of_life() -> None:
    sent: list[Message] = []
    requests, runtime = Requests(), SimpleNamespace(address="h/c", meshes={})
    view = View(sent.append, cast(Any, requests), VIEWS)
    view.attach(cast(Any, runtime))
    view.receive({"type": "watch", "topic": "logs", "id": "l", "mesh": "gone"})
    view.receive({"type": "alive"})
    assert sent[-1] == {"type": "alive"}


def test_a_silent_page_gets_nothing_until_it_speaks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster() as machines:
        runtime = current_runtime()
        sent: list[Message] = []
        silent: list[int] = []
        requests: Any = Requests()
        view = View(sent.append, requests, VIEWS, lambda: silent.append(1))
        view.attach(runtime)
        view.receive({"type": "watch", "topic": "cluster"})
        procs = machines.hosts().spawn_procs(per_host={"gpus": 2}, name="seen")
        procs.initialized.get(10)
        assert not silent
        view.pause()  # too early
        monkeypatch.setattr("monarch_kernel.views.view.SILENT_S", -1.0)
        view.receive({"type": "alive"})
        assert silent
        view.pause()
        heard = len(sent)
        store_of(runtime).put(RankStateChanged(state_of(procs).uid, 1, "failed", 0, 1.0, "killed"))
        assert len(store_of(runtime).document()["ranks"]) == 1
        assert len(sent) == heard
        monkeypatch.setattr("monarch_kernel.views.view.SILENT_S", 180.0)
        view.receive({"type": "alive"})
        assert [message["type"] for message in sent[heard:]] == ["snapshot", "alive"]
        [ranks] = sent[heard]["state"]["ranks"].values()
        assert ranks["1"]["state"] == "failed"
        view.close()

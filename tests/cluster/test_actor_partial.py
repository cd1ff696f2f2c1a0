"""A rank that ended or never existed is a clear error of a call, and no endless wait."""

import msgspec
import pytest

from monarch_nb.actor import ProcMesh, SupervisionError
from monarch_nb.config import configured
from monarch_nb.routing import plan_cast
from monarch_nb.runtime import PendingCall, Runtime, current_runtime
from monarch_nb.wire import Header, Kind, Layout, Run, agent_of, encode, host_name
from monarch_nb.wire.header import SKIP
from tests.cluster.actor_tools import SECONDS
from tests.cluster.host_client import hosted

pytestmark = pytest.mark.timeout(120)


def call_ghost(runtime: Runtime, uid: str, dst: str) -> PendingCall:
    """A call to a process, as from a wrong reference."""
    call = PendingCall(runtime, "ghosts.step", uid, lambda: [0], 1, lambda replies: replies)
    header = Header(Kind.CALL, dst, runtime.address, mesh=uid, method="step", port=call.number, call=call.call)
    runtime.send(header, runtime.node.snapshot(encode(((), {}))))
    return call


def test_calls_to_a_process_that_never_was_are_clear_errors(quad: ProcMesh) -> None:
    runtime = current_runtime()
    with configured(message_delivery_timeout=1.0):
        call = call_ghost(runtime, "ghost", f"{runtime.host}/pghost.7.0")
        with pytest.raises(SupervisionError, match="never started here") as caught:
            call.future.get(SECONDS)
        assert f"not known on host {host_name(runtime.host)}:" in str(caught.value)


def test_casts_to_a_process_that_never_was_are_clear_errors() -> None:
    with hosted(prewarm=False, env={"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1s"}) as (_, client):
        layout = Layout("pghost", (client.host,), 1)
        replies, messages = client.answers(client.cast(layout, [Run(0, 1)], "hello"), 1)
        [header] = messages
        assert (header.kind, header.rank) == (Kind.RETURNED, 0)
        assert "no such process" in msgspec.msgpack.decode(replies[0][0])[0]


def test_losing_the_stand_in_of_a_lost_message_fails_nobody(quad: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = current_runtime()
    methods: list[str] = []
    monkeypatch.setattr(runtime.supervisor, "undeliverable", lambda header, reason: methods.append(header.method))
    lost = Header(Kind.CALL, "hx/pfar.0.0", runtime.address, "far", seq=3, method="step")
    runtime.undelivered(lost, "its host is lost")
    assert methods == ["step"]
    runtime.undelivered(msgspec.structs.replace(lost, method=SKIP), "its host is lost")
    assert methods == ["step"]


def test_answers_by_way_of_a_lost_host_are_not_waited_for(quad: ProcMesh) -> None:
    runtime = current_runtime()
    call = PendingCall(runtime, "far.step", "far", lambda: range(3), 3, lambda replies: replies)
    [(_, plan)] = plan_cast(Layout("pfar", ("hx", "hy", "hz"), 1), [Run(0, 3)], fanout=1)
    call.sent = [Header(Kind.CAST, agent_of("hx"), runtime.address, "far", method="step", plan=plan)]
    runtime.host_lost("hz", "its agent has ended")  # no answer passes through it
    assert not call.future.done()
    runtime.host_lost("hx", "its agent has ended")
    with pytest.raises(SupervisionError, match="through host hx, which is lost: its agent has ended"):
        call.future.get(0)

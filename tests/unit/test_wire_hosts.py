"""Names of hosts, and their ids in texts of other processes."""

import pytest

from monarch_nb.supervision import Cause, HealError, MeshFailure, SupervisionError
from monarch_nb.wire import ActorError, address, begin_host_names, decode_exception, encode_exception, host_name
from monarch_nb.wire import exception_text as described
from monarch_nb.wire import with_host_names as named

FIRST, SECOND = "node7.1f2e3d", "node7.0a1b2c3d4e"


class Lookup(Exception): ...  # of a program's own: it may have an id as data


@pytest.fixture(autouse=True)
def no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_names", None)
    monkeypatch.setattr(address, "_counts", {})


def become_controller() -> None:
    begin_host_names()
    assert [host_name(host) for host in (FIRST, SECOND)] == ["node7", "node7·2"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (f"{FIRST}, {SECOND}: lost.", "node7, node7·2: lost."),
        (f"nobody has heard of {SECOND}.", "nobody has heard of node7·2."),
        (f"{SECOND}/agent cannot be reached", "node7·2/agent cannot be reached"),
        (f"/tmp/monarch-0-{SECOND}/agent, /run/{SECOND}", f"/tmp/monarch-0-{SECOND}/agent, /run/{SECOND}"),
        (f"{SECOND}.log of another.123456 in 0.123456 s", f"{SECOND}.log of another.123456 in 0.123456 s"),
    ],
)
def test_a_controller_alone_replaces_host_ids_in_texts(written: str, shown: str) -> None:
    assert (host_name(SECOND), named(written)) == (SECOND, written)
    become_controller()
    assert named(written) == shown


def test_errors_of_other_processes_name_hosts_as_the_controller_does() -> None:
    lost = MeshFailure(mesh_name="members", cause=Cause(kind="host", host=SECOND, text=f"{FIRST} says so"))
    broken = SupervisionError(lost.report(), endpoint="members.nap()", failure=lost)
    raised = [broken, HealError(lost.report(), (lost,)), RuntimeError(lost.report()), ActorError(broken, "nested")]
    encoded, data = [encode_exception(error) for error in raised], encode_exception(Lookup(SECOND))
    become_controller()
    for frames in encoded:
        for text in (str(decode_exception(frames)), described(frames).text, "".join(described(frames).formatted)):
            assert "the host node7·2 was lost: node7 says so" in text
            assert SECOND not in text
    assert (decode_exception(data).args, described(data).text) == ((SECOND,), "node7·2")

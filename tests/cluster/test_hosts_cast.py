"""Casts: sent along the tree of agents, bodies written once per host, answers folded on the way back."""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_nb.actor import Actor, ActorError, MeshFailure, ProcMesh, SupervisionError, endpoint, run_on, this_host
from monarch_nb.connect import attach_hosts, local_hosts
from monarch_nb.lifecycle import heal_mesh
from monarch_nb.mesh import sending
from monarch_nb.runtime import current_runtime
from monarch_nb.transport import Keys
from monarch_nb.wire import Kind, host_name
from tests.cluster.hosts_tools import SOON, Caller, Member, faults, nothing_left, user_hosts
from tests.polling import until
from tests.proxy import Proxy

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
__all__ = ["faults", "nothing_left"]
MANY = sending.DIRECT + 2


@pytest.fixture(scope="module")
def six(nothing_left: None) -> ProcMesh:
    """Three hosts, all on this machine, with two procs each."""
    procs = local_hosts(3).spawn_procs(per_host={"slots": 2}, name="six")
    procs.initialized.get(60)
    return procs


@pytest.fixture(scope="module")
def many(six: ProcMesh) -> ProcMesh:
    """More procs on one host than get single messages."""
    procs = this_host().spawn_procs(per_host={"slots": MANY}, name="many")
    procs.initialized.get(60)
    return procs


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> Counter[Kind]:
    """Counts messages to the controller by kind."""
    kinds: Counter[Kind] = Counter()
    node = current_runtime().node
    handler = node._handler

    def count(header: Any, parcel: Any) -> None:
        kinds[Kind(header.kind)] += 1
        handler(header, parcel)

    monkeypatch.setattr(node, "_handler", count)
    return kinds


@pytest.fixture
def by_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts to more than two ranks use the tree."""
    monkeypatch.setattr(sending, "DIRECT", 2)


@pytest.mark.parametrize(("fixture", "hosts"), [pytest.param("six", 3, marks=pytest.mark.slow), ("many", 1)])
def test_answers_of_a_host_come_folded(
    request: Any, fixture: str, hosts: int, arrived: Counter[Kind], by_tree: None
) -> None:
    procs = request.getfixturevalue(fixture)
    members = procs.spawn("members", Member)
    members.where.call().get(SOON)
    for _ in range(3):  # on a busy machine a late rank may answer on its own
        arrived.clear()
        answers = members.where.call().get(SOON)
        assert [rank for rank, _ in answers.values()] == list(range(len(procs)))
        assert len({pid for _, pid in answers.values()}) == len(procs)
        if arrived[Kind.FOLDED] == hosts and arrived[Kind.REPLY] == 0:
            break
    else:
        pytest.fail(f"not folded: {arrived}")
    members.stop().get(SOON)


def test_a_slice_of_many_and_a_slice_across_hosts(six: ProcMesh, many: ProcMesh, by_tree: None) -> None:
    members = many.spawn("members", Member)
    answers = members.slice(slots=slice(1, MANY, 1)).nap.call(0, -1).get(SOON)
    assert list(answers.values()) == list(range(1, MANY))
    members = six.spawn("members", Member)
    assert list(members.slice(slots=1).nap.call(0, -1).get(SOON).values()) == [1, 3, 5]
    assert list(members.slice(hosts=slice(0, 3, 2), slots=0).nap.call(0, -1).get(SOON).values()) == [0, 4]


def test_actors_can_cast_across_hosts(six: ProcMesh, many: ProcMesh) -> None:
    members, callers = many.spawn("members", Member), six.spawn("callers", Caller)
    expected = members.where.call().get(SOON).values()
    assert callers.slice(hosts=2, slots=1).call.call_one(members).get(SOON) == list(expected)


@pytest.mark.parametrize("fixture", ["six", pytest.param("many", marks=pytest.mark.slow)])
def test_a_large_body_is_written_once_on_a_host(request: Any, fixture: str, by_tree: None) -> None:
    members = request.getfixturevalue(fixture).spawn("members", Member)
    data = np.arange(500_000)
    files = members.keep.call(data).get(SOON).values()
    assert all(len(inodes) == 1 for inodes in files)
    assert len({inode for inodes in files for inode in inodes}) == 1  # all map the file that the caller wrote
    members.stop().get(SOON)


@pytest.mark.slow
def test_large_bodies_cross_to_each_host_once_and_answers_return_folded(tmp_path: Path, arrived: Counter[Kind]) -> None:
    key = tmp_path / "job.key"
    Keys.load_or_create(key)
    data = np.random.default_rng(1).bytes(8_000_000)
    with user_hosts(tmp_path, 2, key=key, shutdown=False) as agents:
        proxies = [Proxy(agent.endpoint) for agent in agents]
        try:
            hosts = attach_hosts([proxy.endpoint for proxy in proxies], key=key)
            members = hosts.spawn_procs(per_host={"slots": 2}, name="far").spawn("members", Member)
            members.where.call().get(SOON)
            before = [proxy.sent for proxy in proxies]
            assert members.length.call(data).get(SOON).values() == [8_000_000] * 4
            for proxy, start in zip(proxies, before, strict=True):
                assert 8_000_000 < proxy.sent - start < 8_800_000
            arrived.clear()
            members.where.call().get(SOON)
            assert sum(arrived[kind] for kind in (Kind.FOLDED, Kind.REPLY)) < 4
            hosts.shutdown().get(SOON)
        finally:
            for proxy in proxies:
                proxy.close()


def test_a_stream_is_not_held_up_by_a_slow_rank(many: ProcMesh, tmp_path: Path) -> None:
    members = many.spawn("members", Member)
    members.where.call().get(SOON)
    *fast, slow = members.held.stream(tmp_path / "go", 11)
    assert sorted(future.get(SOON) for future in fast) == [rank for rank in range(MANY) if rank != 11]
    (tmp_path / "go").touch()
    assert slow.get(SOON) == 11
    members.stop().get(SOON)


@pytest.mark.slow
def test_casts_and_direct_calls_keep_their_order(six: ProcMesh, by_tree: None) -> None:
    members = six.spawn("members", Member)
    members.where.call().get(SOON)
    generator = random.Random(5)
    slices = [members, members.slice(slots=0), members.slice(hosts=1), members.slice(hosts=slice(1, 3))]
    slices += [members.slice(hosts=host, slots=slot) for host in range(3) for slot in range(2)]
    ranks = [[part._region.ranks()[index] for index in range(len(part._region))] for part in slices]
    expected: dict[int, list[int]] = {rank: [] for rank in range(6)}
    calls = []
    for number in range(3_000):
        choice = generator.randrange(len(slices))
        if number % 50 == 0:
            calls.append(slices[choice].note.call(number))
        else:
            slices[choice].note.broadcast(number)
        for rank in ranks[choice]:
            expected[rank].append(number)
    for rank in range(6):
        member = members.slice(hosts=rank // 2, slots=rank % 2)
        assert member.in_order.call_one("root", expected[rank]).get(SOON)
    for call in calls:
        call.get(SOON)
    members.stop().get(SOON)


@pytest.mark.parametrize(("fixture", "rank"), [("six", 3), ("many", 7)])
def test_a_rank_that_dies_during_a_cast_fails_it_at_once(
    request: Any, fixture: str, rank: int, faults: list[MeshFailure], by_tree: None
) -> None:
    members = request.getfixturevalue(fixture).spawn("members", Member)
    members.where.call().get(SOON)
    with pytest.raises(SupervisionError, match=r"exit.*3") as caught:
        members.die.call(rank).get(SOON)
    assert "undeliverable" not in str(caught.value)
    heal_mesh(members)
    assert len(members.where.call().get(SOON)) == len(members)
    members.stop().get(SOON)


def test_errors_of_several_hosts_are_one_error_naming_ranks_and_hosts(six: ProcMesh, many: ProcMesh) -> None:
    with pytest.raises(ActorError) as caught:
        run_on(six, "if rank in (1, 4, 5):\n    raise ValueError('spoilt')").get(SOON)
    first, _, last = six._state.layout.hosts
    summary = "The cell failed on 3 of 6 ranks of six: hosts=0 slots=1; hosts=2 slots=0-1; the same error"
    assert str(caught.value).splitlines()[0] == f"{summary} (hosts {host_name(first)}, {host_name(last)})"
    assert list(caught.value.failures) == [1, 4, 5]
    with pytest.raises(ActorError, match=rf"on 2 of {MANY} ranks of many: slots=3,{MANY - 1}; 2 different errors"):
        run_on(many, f"if rank in (3, {MANY - 1}):\n    raise ValueError(f'spoilt {{rank}}')").get(SOON)


class Unmade(Actor):
    def __init__(self) -> None:
        raise ValueError("no")

    @endpoint
    def never(self) -> None: ...


def test_failing_actors_of_every_host_are_reported_though_nobody_calls(
    six: ProcMesh, faults: list[MeshFailure]
) -> None:
    six.spawn("unmade", Unmade)
    until(lambda: {rank for item in faults if item.mesh_name == "unmade" for rank in item.crashed_ranks} == {*range(6)})


@pytest.mark.slow
# Last: it ends the meshes that the tests above share.
def test_this_machine_spawns_again_after_its_attached_hosts_shut_down(faults: list[MeshFailure]) -> None:
    hosts = local_hosts(2)
    before = this_host().spawn_procs(name="before")
    before.initialized.get(SOON)
    hosts.shutdown().get(SOON)
    after = this_host().spawn_procs(name="after")
    assert after.initialized.get(SOON)
    assert after.run(os.getpid).get(SOON).item() != os.getpid()
    after.stop().get(SOON)
    assert [failure for failure in faults if failure.mesh_name in ("before", "after")] == []

"""A make-believe cluster around one Machine: it carries out actions late and in odd orders, and keeps its own books.

`reports` are events that the machine has not been notified of yet. The books (`incarnations`, `dead`, `arrived`,
`ended`) follow from notifications and requests alone, so they can be compared with the machine's view.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from monarch_nb.supervision import (
    Action,
    Cause,
    FailActor,
    FailCalls,
    Healed,
    HealRefused,
    MeshFailure,
    MeshSpec,
    Recreate,
    Respawn,
    RootFault,
    ShowFailure,
    StopOwnedMesh,
    Supervise,
    SupervisionMachine,
)
from monarch_nb.wire.header import Layout

SIZE = 4
LAYOUT = Layout(uid="P", hosts=("h0", "h1"), per_host=2)
ROOT = "root"
ACTORS_ON = {"P": ["A", "W"], "Q": ["B", "C"]}
PROCS_OF = {actor: procs for procs, actors in ACTORS_ON.items() for actor in actors}
LIMIT, WINDOW = 3, 60.0

RankIncarnation = tuple[str, int, int]


def spec(uid: str, *, on: str | None = None, layout: Layout | None = None) -> MeshSpec:
    return MeshSpec(
        uid=uid,
        name=uid.lower(),
        kind="procs" if on is None else "actors",
        ranks=range(SIZE),
        extent=(("gpus",), (SIZE,)),
        on=on,
        layout=layout,
    )


@dataclass
class World:
    """Procs P with actors A and W; W's rank 0 is an actor of this process that owns procs Q with actors B and C."""

    random: Random
    policy: str = "script"
    machine: SupervisionMachine = field(init=False)
    now: float = 0.0
    reports: list[Callable[[], list[Action]]] = field(default_factory=list)
    incarnations: dict[str, list[int]] = field(default_factory=dict)
    dead: set[RankIncarnation] = field(default_factory=set)
    arrived: set[RankIncarnation] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    failed_once: set[RankIncarnation] = field(default_factory=set)
    owner_of_failure: dict[int, str] = field(default_factory=dict)
    hit: dict[int, set[str]] = field(default_factory=dict)  # failure -> the meshes it hit
    cut_short: set[str] = field(default_factory=set)  # meshes stopped while they were being healed
    notified: dict[int, str] = field(default_factory=dict)
    faults: list[int] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)
    losses: dict[str, int] = field(default_factory=dict)  # the last one of each host that the machine was notified of
    since: dict[int, int] = field(default_factory=dict)  # by rank of P: that loss at its last start
    loss: int = 0
    lost_owners: set[str] = field(default_factory=set)
    handling: dict[str, int] = field(default_factory=dict)
    requests: dict[int, str] = field(default_factory=dict)  # number -> "" until answered
    restarts: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    owner: str = "W0.0"

    def __post_init__(self) -> None:
        self.machine = SupervisionMachine(root=ROOT, root_policy=self.policy, max_restarts=LIMIT, window=WINDOW)  # type: ignore[arg-type]
        for uid, on in (("P", None), ("A", "P"), ("W", "P")):
            # A mesh that is resumed, some of whose ranks were healed before; W's rank 0 was not.
            starts = [0, *(self.random.choice((0, 0, 0, 2)) for _ in range(1, SIZE))]
            assert self.machine.own(ROOT, spec(uid, on=on, layout=LAYOUT), dict(enumerate(starts))) == []
            self.incarnations[uid] = starts
            self.arrived.update((uid, rank, incarnation) for rank, incarnation in enumerate(starts))
        self.machine.join(self.owner, "worker", "W", (0, 0))
        self.settle_child()

    def settle_child(self) -> None:
        """The owner spawns its meshes, under fresh names for each of its incarnations."""
        for uid, on in (("Q", None), ("B", "Q"), ("C", "Q")):
            self.ended.discard(uid)
            self.incarnations[uid] = [0] * SIZE
            for books in (self.dead, self.arrived, self.failed_once):
                books -= {incarnation for incarnation in books if incarnation[0] == uid}
            self.restarts = {key: times for key, times in self.restarts.items() if key[0] != uid}
            self.carry_out(self.machine.own(self.owner, spec(uid, on=on)))

    # The books

    def owner_name(self, uid: str) -> str:
        return ROOT if uid in ("P", "A", "W") else self.owner

    def fine(self, uid: str, rank: int) -> bool:
        incarnation = (uid, rank, self.incarnations[uid][rank])
        started = incarnation[2] == 0 or incarnation in self.arrived
        return uid not in self.ended and started and incarnation not in self.dead

    def bury(self, uid: str, rank: int, incarnation: int) -> None:
        if uid in self.ended or self.incarnations[uid][rank] != incarnation:
            return
        self.dead.add((uid, rank, incarnation))
        for actor in ACTORS_ON.get(uid, ()):
            self.dead.add((actor, rank, self.incarnations[actor][rank]))

    def end(self, uid: str) -> None:
        self.ended.update([uid, *ACTORS_ON.get(uid, ())])
        if "W" in self.ended:
            self.lose_owner()

    # The events

    def kill(self, uid: str, rank: int) -> None:
        incarnation = self.incarnations[uid][rank]
        for _ in range(self.random.choice((1, 1, 2))):  # sometimes reported twice
            self.reports.append(lambda: self.report_death(uid, rank, incarnation))

    def report_death(self, uid: str, rank: int, incarnation: int, cause: Cause | None = None) -> list[Action]:
        self.bury(uid, rank, incarnation)
        pending = self.random.choice(((), (), (uid,), ("A",), ("B", "C")))
        if uid in ACTORS_ON:
            return self.machine.proc_exited(uid, rank, incarnation, cause or Cause(kind="signal", signal=9), pending)
        actions = self.machine.actor_failed(uid, rank, incarnation, cause or Cause(kind="exception"), pending)
        return actions

    def lose_host(self) -> None:
        """The report may come twice, much later: ranks started after the first are not lost by the second."""
        host = self.random.randrange(2)
        name = f"h{host}"
        self.loss += 1
        loss = self.loss

        def report() -> list[Action]:
            self.losses[name] = max(loss, self.losses.get(name, 0))
            for rank in (2 * host, 2 * host + 1):
                if self.since.get(rank, 0) < loss and self.machine.status("P")[rank].state in ("alive", "healing"):
                    self.bury("P", rank, self.machine.status("P")[rank].incarnation)
                    self.bury("P", rank, self.incarnations["P"][rank])
            return self.machine.host_lost([name], Cause(kind="host"), loss=loss)

        self.reports += [report] * self.random.choice((1, 1, 2))

    def heal(self, uid: str, ranks: frozenset[int] | None) -> None:
        number = len(self.requests)
        self.requests[number] = ""
        self.carry_out(self.machine.heal_requested(uid, self.now, number, ranks))

    def stop(self, uid: str) -> None:
        if uid in self.ended:
            return
        self.end(uid)
        self.carry_out(self.machine.stopping(uid))
        self.reports.append(lambda: self.machine.stopped(uid))

    def report_one(self) -> None:
        report = self.reports.pop(self.random.randrange(len(self.reports)))
        self.carry_out(report())

    # The driver

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self.carry_out_one(action)

    def carry_out_one(self, action: Action) -> None:
        match action:
            case FailCalls(uid, incarnations, failure) if incarnations is not None:
                assert uid not in self.ended, f"a stopped mesh failed: {action}"
                for rank, incarnation in incarnations:
                    assert incarnation >= self.incarnations[uid][rank], f"an old incarnation is mentioned: {action}"
                    assert (uid, rank, incarnation) not in self.failed_once, f"failed twice: {action}"
                    self.failed_once.add((uid, rank, incarnation))
                self.owner_of_failure[failure.failure_id] = self.owner_name(uid)
                self.hit.setdefault(failure.failure_id, set()).add(uid)
                if uid == "W" and (0, int(self.owner.partition(".")[2])) in incarnations:
                    self.lose_owner()
            case FailCalls(uid):
                assert uid in self.ended
            case Supervise(owner, failure):
                assert owner not in self.handling, "one failure at a time"
                assert owner not in self.lost_owners
                self.tell(failure, owner)
                self.handling[owner] = failure.failure_id
                self.reports.append(lambda: self.supervised(owner, failure))
            case RootFault(failure, route):
                self.tell(failure, ROOT)
                self.faults.append(failure.failure_id)
                assert (route == "fatal") == (self.policy == "script")
                if route == "call":
                    self.awaited.add(failure.failure_id)
                    self.reports.append(lambda: self.waited(failure))
            case ShowFailure(failure):
                assert failure.failure_id in self.awaited
                self.awaited.discard(failure.failure_id)
            case FailActor(actor, cause):
                assert cause.chain is not None
                assert actor == self.owner
                self.lose_owner()
                incarnation = int(actor.partition(".")[2])
                self.reports.append(lambda: self.report_death("W", 0, incarnation, cause))
            case StopOwnedMesh(uid):
                assert uid not in self.ended or self.owner in self.lost_owners
                self.end(uid)
                self.reports.append(lambda: self.machine.stopped(uid))
            case Respawn(uid, incarnations) | Recreate(uid, incarnations):
                self.start(uid, incarnations)
            case Healed(requests, incarnations, again):
                for number in requests:
                    self.answer(number, "healed")
                for uid, healed in incarnations:
                    assert all(self.fine(uid, rank) for rank, _ in healed if uid not in self.ended)
                for failure in again:
                    self.tell(failure, self.owner_of_failure[failure.failure_id])
            case HealRefused(number, uid, text):
                assert text
                if "while it was being healed" in text:
                    procs = PROCS_OF.get(uid, uid)
                    self.cut_short.update([procs, *ACTORS_ON[procs]] if procs in self.ended else [uid])
                self.answer(number, "refused")

    def answer(self, number: int, outcome: str) -> None:
        assert self.requests[number] == "", "answered twice"
        self.requests[number] = outcome

    def tell(self, failure: MeshFailure, owner: str) -> None:
        assert failure.failure_id not in self.notified, f"notified twice: {failure}"
        assert self.owner_of_failure[failure.failure_id] == owner, "only its owner is notified"
        assert failure.crashed_ranks
        assert failure.report()
        assert str(failure)
        self.notified[failure.failure_id] = owner

    def start(self, uid: str, incarnations: tuple[tuple[int, int], ...]) -> None:
        assert uid not in self.ended
        for rank, incarnation in incarnations:
            assert incarnation > self.incarnations[uid][rank]
            if uid in PROCS_OF:
                assert self.fine(PROCS_OF[uid], rank), "an actor is created on a dead process"
            self.incarnations[uid][rank] = incarnation
            if uid == "P":
                self.since[rank] = self.losses.get(f"h{rank // 2}", 0)
            times = self.restarts.setdefault((uid, rank), [])
            times.append(self.now)
            assert len([time for time in times if time > self.now - WINDOW]) <= LIMIT + 1
        failures = [incarnation for incarnation in incarnations if self.random.random() < 0.15]
        arrivals = [incarnation for incarnation in incarnations if incarnation not in failures]
        for rank, incarnation in failures:
            self.reports.append(lambda r=rank, i=incarnation: self.fail_start(uid, r, i))  # type: ignore[misc]
        for incarnation in arrivals:  # one by one, so that other reports can come between
            self.reports.append(lambda incarnation=incarnation: self.arrive(uid, *incarnation))  # type: ignore[misc]

    def fail_start(self, uid: str, rank: int, incarnation: int) -> list[Action]:
        self.bury(uid, rank, incarnation)
        return self.machine.heal_failed(uid, [(rank, incarnation)], Cause(kind="spawn", text="no room"))

    def arrive(self, uid: str, rank: int, incarnation: int) -> list[Action]:
        if uid in self.ended:
            return [action for action in self.arrival(uid, rank, incarnation) if not isinstance(action, StopOwnedMesh)]
        self.arrived.add((uid, rank, incarnation))
        return self.arrival(uid, rank, incarnation)

    def arrival(self, uid: str, rank: int, incarnation: int) -> list[Action]:
        event = self.machine.respawned if uid in ACTORS_ON else self.machine.recreated
        return event(uid, [(rank, incarnation)])

    def waited(self, failure: MeshFailure) -> list[Action]:
        if self.random.random() < 0.5:
            return self.machine.report_unclaimed(failure.failure_id)
        self.machine.mark_reported(failure.failure_id)
        assert self.machine.report_unclaimed(failure.failure_id) == []
        self.awaited.discard(failure.failure_id)
        return []

    def supervised(self, owner: str, failure: MeshFailure) -> list[Action]:
        self.handling.pop(owner, None)
        outcome = self.random.randrange(4)
        raised = Cause(kind="exception", text="in the handler") if outcome == 1 else None
        return self.machine.owner_result(failure.failure_id, outcome > 1, raised)

    def lose_owner(self) -> None:
        self.lost_owners.add(self.owner)
        self.handling.pop(self.owner, None)

    def revive_owner(self) -> None:
        """If W's rank 0 was re-created, its `__init__` spawns its meshes again."""
        name = f"W0.{self.incarnations['W'][0]}"
        if self.owner in self.lost_owners and name not in self.lost_owners and self.fine("W", 0):
            for uid in ("C", "B", "Q"):
                self.machine.disown(uid)
            self.reports = [report for report in self.reports if not _about_child(report)]
            self.owner = name
            self.machine.join(name, "worker", "W", (0, self.incarnations["W"][0]))
            self.settle_child()

    # The invariants

    def verify(self) -> None:
        for uid in self.incarnations:
            states = self.machine.status(uid)
            for rank in range(SIZE):
                assert (states[rank].state == "alive") == self.fine(uid, rank), (uid, rank, states[rank])
            good = frozenset(rank for rank in range(SIZE) if self.fine(uid, rank))
            if uid not in self.ended:
                assert self.machine.check(uid, good) is None, "a slice of healthy ranks raised"
                for rank in set(range(SIZE)) - good:
                    failure = self.machine.check(uid, range(rank, rank + 1))
                    assert failure is not None
                    assert failure.crashed_ranks == [rank]
            else:
                assert self.machine.check(uid) is not None

    def verify_end(self) -> None:
        assert all(self.requests.values()), "a heal was never answered"
        assert not self.handling
        assert not self.awaited
        for failure_id, owner in self.owner_of_failure.items():
            if failure_id == 0 or failure_id in self.notified or owner in self.lost_owners:
                continue
            if not self.cut_short & self.hit[failure_id]:
                raise AssertionError(f"{owner} was never notified of {failure_id}")
        assert len(self.faults) == len(set(self.faults))
        assert set(self.faults) == {i for i, owner in self.notified.items() if owner == ROOT and i in self.faults}


def _about_child(report: Callable[[], list[Action]]) -> bool:
    cells = [cell.cell_contents for cell in report.__closure__ or ()]
    return any(value in ("Q", "B", "C") for value in [*cells, *(report.__defaults__ or ())] if isinstance(value, str))

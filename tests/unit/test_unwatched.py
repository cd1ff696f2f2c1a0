"""An agent diagnoses a mesh that has no controller: rounds, what is found, and the file of findings."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_nb.connect import findings_report
from monarch_nb.diagnosis import unwatched
from monarch_nb.diagnosis.verbs import EndpointRun, Evidence, StackLine
from monarch_nb.host import mesh_files, run_findings
from monarch_nb.host.mesh_files import HostRoute, MeshFile
from monarch_nb.host.procs.children import Child
from monarch_nb.host.protocol import Exited, ProcSample, ProcSamples, ProcSpec, RunFinding, Unwatched
from monarch_nb.host.run_findings import RunFindings, added, of_all_hosts

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def finding(kind: str = "stuck", rank: int = 1, time: float = 5.0, text: str = "it hangs") -> RunFinding:
    return RunFinding(kind=kind, ranks=(rank,), text=text, first=time, last=time)


def run(rank: int, call: str, seconds: float, processor: float = 0.0) -> Evidence:
    lines = (StackLine("/home/me/train.py", 7, "step"),)
    return Evidence((EndpointRun("a1", rank, "trainers", "step", call, seconds, rank, lines, "S", processor, 0),))


class Host:
    """An agent's loop and its processes, with time that passes when a test says so."""

    def __init__(
        self,
        ranks: int,
        answers: dict[int, Callable[[float], Evidence]] | None = None,
        elsewhere: Sequence[int] = (),
        samples: dict[int, str] | None = None,
    ) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        specs = [
            ProcSpec(address=f"h1/p1.{rank}.0", agent="h1/agent", host="h1", run_folder="", mesh="p1", rank=rank,
                     incarnation=0, owner="")
            for rank in range(ranks)
        ]  # fmt: skip
        self.children = [Child(spec, set(), state="running", pid=os.getpid()) for spec in specs]
        self.answers = answers or {}
        self.samples = samples
        remote = tuple(f"h2/p1.{rank}.0" for rank in elsewhere)
        size = ranks + len(remote)
        record = Unwatched(diagnoser="", extent={"gpus": size}, actors=("trainers",), elsewhere=remote)
        sender: Any = self
        self.exited, self.end = unwatched.begin("p1", "fleet", record, lambda: self.children, sender, self.later)

    address = "h1/agent"

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, call))

    def request(self, dst: str, verb: object, body: Any, callback: Callable[[Any], None]) -> None:
        if dst == "h2/agent":
            if self.samples is not None:
                samples = {f"h2/p1.{rank}.0": ProcSample(letter, 0.0) for rank, letter in self.samples.items()}
                callback(ProcSamples({address: samples[address] for address in body.addresses if address in samples}))
            return
        rank = int(dst.split(".")[1])
        if rank in self.answers:
            callback(self.answers[rank](self.now))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now = first[0]
            first[1]()
        self.now = until

    def kill(self, rank: int) -> None:
        death = Exited(address=self.children[rank].address, host="h1", reason="it ended by signal 9 (SIGKILL)")
        self.children[rank].exit = death
        self.exited(death)


def test_rank_that_alone_goes_on_with_a_call_is_a_suspicion() -> None:
    host = Host(3, {0: lambda now: Evidence(), 1: lambda now: Evidence(), 2: lambda now: run(2, "c", now)})
    host.advance(9)
    assert host.end() == ()
    host = Host(3, {0: lambda now: Evidence(), 1: lambda now: Evidence(), 2: lambda now: run(2, "c", now)})
    host.advance(35)
    (suspect,) = host.end()
    assert (suspect.kind, suspect.ranks, suspect.sure) == ("stuck", (2,), False)
    assert suspect.text.startswith("gpus=2 alone has not answered trainers.step() for ")
    assert suspect.text.endswith("it sits in step at train.py:7")
    assert suspect.source == "/home/me/train.py:7"
    host.advance(100)
    assert host.end() == (suspect,), "nothing is looked for once a controller is there"


@pytest.mark.parametrize(
    ("samples", "kind", "words"),
    [
        ({1: "T"}, "stopped", "gpus=1 is stopped by a signal"),
        ({}, "dead", "gpus=1 is dead: it has ended on host h2"),
        (None, "unreachable", "gpus=1 cannot be reached: host h2 does not answer the mesh's first host"),
    ],
)
def test_silent_ranks_of_other_hosts_are_named_by_their_agents(
    samples: dict[int, str] | None, kind: str, words: str
) -> None:
    host = Host(1, {0: lambda now: run(0, "c", now)}, elsewhere=(1,), samples=samples)
    host.advance(35)
    assert [(result.kind, result.ranks) for result in host.end()] == [(kind, (1,))]
    assert host.end()[0].text.startswith(words)


def test_ranks_of_other_hosts_are_judged_with_those_of_the_first() -> None:
    host = Host(
        2, {0: lambda now: Evidence(), 1: lambda now: Evidence(), 2: lambda now: run(2, "c", now)}, elsewhere=(2,)
    )
    host.advance(35)
    assert [(result.kind, result.ranks) for result in host.end()] == [("stuck", (2,))]


def test_what_several_hosts_have_found_is_said_once() -> None:
    short, long = finding(text="it hangs"), finding(text="it hangs, where others wait", time=4.0)
    second = finding(rank=2, time=3.0)
    assert of_all_hosts([short, long, second]) == [second, long]


def test_ranks_that_come_further_are_not_judged() -> None:
    host = Host(2, {0: lambda now: Evidence(), 1: lambda now: run(1, f"call {now // 5}", 4.0)})
    host.advance(100)
    assert host.end() == ()


def test_rank_that_has_died_is_found_at_once_and_only_once() -> None:
    host = Host(2, {1: lambda now: run(1, "c", now)})
    host.kill(0)
    host.advance(60)
    first, *rest = host.end()
    assert (first.kind, first.ranks, first.times > 1) == ("dead", (0,), True)
    assert first.text.startswith("gpus=0 is dead: it ended by signal 9 (SIGKILL)")
    assert [repeat.kind for repeat in rest if repeat.ranks == (0,)] == []
    assert "gpus=0 is dead" in findings_report("fleet")


def test_rank_that_never_answers_is_asked_once_and_named() -> None:
    host = Host(2, {0: lambda now: Evidence()})
    host.advance(60)
    (suspect,) = host.end()
    assert (suspect.ranks, suspect.sure) == ((1,), False)
    assert "gpus=1 does not answer" in suspect.text


def test_alike_findings_are_one_and_the_last_hundred_stay() -> None:
    once = added((), [finding(time=1.0, text="for 3 s")])
    (both,) = added(once, [finding(time=9.0, text="for 11 s" + 3000 * "x")])
    assert (both.first, both.last, both.times, len(both.text)) == (1.0, 9.0, 2, run_findings.LONGEST)
    many = added(once, (finding(rank=rank, time=float(rank)) for rank in range(200)))
    assert [item.ranks[0] for item in many] == list(range(100, 200))


def test_report_has_the_mesh_the_findings_and_hosts_elsewhere() -> None:
    record = RunFindings(
        uid="p1", name="fleet", host="h1", actors=("trainers",), since=1.0, inspected="2 processes of fleet",
        findings=(finding(), finding("dead", 0, 9.0, "gpus=0 is dead")),
    )  # fmt: skip
    run_findings.write(record)
    mesh = MeshFile(uid="p1", name="fleet", secret="", ways=(HostRoute("h1", ""), HostRoute("h2", "")), version="1",
                    python="3", machine="there", ranks=2, shape="gpus=2", actors=("trainers",), left_at=1.0,
                    why="it was detached", ended="its lease ended", ended_at=time.time())  # fmt: skip
    mesh_files.write(mesh_files.path_of("p1", "fleet"), mesh)
    for name in ("fleet", "p1", "trainers"):
        lines = findings_report(name).splitlines()
        assert "its lease ended" in lines[0]
        assert [line.split(" ", 3)[3] for line in lines[1:3]] == ["it hangs", "gpus=0 is dead"]
        assert "inspected: 2 processes of fleet on host h1 since " in lines[3]
        assert lines[4] == "inspected on their own machines, if at all: h2"


def test_torn_file_is_named_and_does_not_hide_others() -> None:
    record = RunFindings(uid="p1", name="fleet", host="h1", actors=(), since=1.0)
    run_findings.write(record)
    torn = run_findings.path_of(msgspec.structs.replace(record, host="h2"))
    torn.write_bytes(b'{"uid": "p1", ')
    torn.chmod(0o600)
    lines = findings_report("fleet").splitlines()
    assert lines[:2] == ["fleet: its record is gone: it was stopped, or has ended", "  nothing found"]
    assert lines[-1].startswith(f"{torn} cannot be read: ")
    run_findings.path_of(record).unlink()
    assert "cannot be read" in findings_report("fleet")


def test_full_disk_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def full(run: RunFindings) -> None:
        tried.append(run)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_findings, "write", full)
    host = Host(2)
    host.kill(0)
    host.advance(30)
    assert len(tried) > 2, "it is tried again"
    assert host.end()[0].kind == "dead"


def test_old_files_go_and_an_unknown_run_is_an_error() -> None:
    record = RunFindings(uid="p1", name="fleet", host="h1", actors=(), since=1.0)
    run_findings.write(record)
    os.utime(run_findings.path_of(record), (1.0, 1.0))
    with pytest.raises(LookupError, match="nothing is known on this machine about a mesh 'fleet'; known are: none"):
        findings_report("fleet")
    assert not run_findings.path_of(record).exists()

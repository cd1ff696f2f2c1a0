"""Diagnosis of a mesh that has no controller, by agents of its hosts that repeatedly inspect the ranks.

An agent loads this module with the first mesh that loses its controller. The agent of the first host inspects the
ranks of all hosts, since ranks may wait for ranks of another host; the other agents inspect their own host's ranks.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from monarch_nb.diagnosis.judge import STOPPED, Procs, UnansweredCall, judge
from monarch_nb.diagnosis.verbs import INSPECT, EndpointRun, Evidence, Inspect
from monarch_nb.host import run_findings
from monarch_nb.host.linux import state_letter
from monarch_nb.host.procs.children import Child
from monarch_nb.host.protocol import AskSamples, Exited, ProcSamples, RunFinding, Unwatched
from monarch_nb.host.run_findings import RunFindings
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import SAMPLES
from monarch_nb.shape import Extent, places_of, spans
from monarch_nb.wire import agent_of, counted, host_of, parse_address

WITHOUT_PROGRESS_S = 10.0  # between two rounds, and until ranks without progress are judged
LOOKS_APART_S = 0.5  # a rank that works has moved by then
ASK_AGAIN_S = 60.0  # for processes that have not answered before
ANSWER_S = 1.5  # for the second look
_PREFIX = "the process this actor was running on failed: "
log = logging.getLogger(__name__)
Activity = frozenset[tuple[object, ...]]


class UnwatchedMesh:
    """The ranks of one mesh while it has no controller. All methods are for the agent's loop.

    Each round inspects the ranks once. If none has made progress since the previous round, a second look follows, and
    `judge` decides. Findings are written to the mesh's file of findings; errors are logged and have no other effect.
    """

    def __init__(
        self,
        uid: str,
        name: str,
        spec: Unwatched,
        procs: Callable[[], Sequence[Child]],
        sender: AgentSender,
        schedule: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._procs, self._sender, self._schedule = procs, sender, schedule
        self._remote = {parse_address(address).rank: address for address in spec.elsewhere}
        self._samples: dict[str, ProcSamples] = {}  # of silent processes on other hosts, by host
        self._region = Extent([*spec.extent], [*spec.extent.values()]).region
        host = host_of(sender.address)
        self._run = RunFindings(uid=uid, name=name, host=host, actors=spec.actors, since=time.time())
        self._ended = False
        self._unanswered: dict[str, float] = {}  # processes that have not answered yet, and since when
        self._activity: Activity = frozenset()
        self._runners: dict[str, set[int]] = {}  # ranks that have run a call, by call
        self._exits: dict[int, Exited] = {}
        self._write_error = ""  # of the last write; "" if it succeeded

    def end(self) -> tuple[RunFinding, ...]:
        """Stops inspecting; returns the findings."""
        self._ended = True
        return self._run.findings

    def exited(self, process: Exited) -> None:
        """Notes that a process of the mesh has ended."""
        if not process.expected and not self._ended:
            self._exits[parse_address(process.address).rank] = process
            self._judge({}, {}, ends_only=True)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Inspects the ranks, and schedules the next round."""
        if self._ended:
            return
        self._schedule(WITHOUT_PROGRESS_S, self.round)
        before: dict[int, Evidence] = {}
        self._inspect(before)
        self._schedule(LOOKS_APART_S, lambda: self._compare(before))

    def _inspect(self, by_rank: dict[int, Evidence]) -> None:
        """Asks all processes except those that have not answered an earlier question."""
        now = time.monotonic()
        running = [child.address for child in self._living() if child.state == "running"]
        for address in (*running, *self._remote.values()):
            if now - self._unanswered.get(address, -ASK_AGAIN_S) < ASK_AGAIN_S:
                continue
            self._unanswered[address] = now

            def take(evidence: Evidence, address: str = address) -> None:  # on the thread that reads
                by_rank[parse_address(address).rank] = evidence
                self._unanswered.pop(address, None)

            self._sender.request(address, INSPECT, Inspect(), take)

    def _compare(self, before: dict[int, Evidence]) -> None:
        if self._ended:
            return
        first = dict(before)
        for rank, run in _runs(first):
            self._runners.setdefault(run.call, set()).add(rank)
        activity = _activity(first)
        has_stopped = bool(activity or len(first) < self._size) and activity == self._activity
        self._activity = activity
        if has_stopped:
            after: dict[int, Evidence] = {}
            self._inspect(after)
            self._sample(first)
            self._schedule(ANSWER_S, lambda: self._judge(before, after))
        else:
            calls = {run.call for _, run in _runs(first)}
            self._runners = {call: ranks for call, ranks in self._runners.items() if call in calls}
            self._note(())

    def _sample(self, answered: Collection[int]) -> None:
        """Asks the agents of other hosts about their processes that have not answered."""
        self._samples = {}
        silent: dict[str, list[str]] = {}
        for rank, address in self._remote.items():
            if rank not in answered:
                silent.setdefault(host_of(address), []).append(address)
        for host, addresses in silent.items():
            take = partial(self._samples.__setitem__, host)
            self._sender.request(agent_of(host), SAMPLES, AskSamples(tuple(addresses)), take)

    def _judge(self, before: dict[int, Evidence], after: dict[int, Evidence], *, ends_only: bool = False) -> None:
        if self._ended:
            return
        before, after = dict(before), dict(after)
        states, details = self._states(before, after, () if ends_only else self._living())
        calls = [*self._calls(after)]
        uncertain = {rank for call in calls for rank in call.missing}
        findings = judge(Procs(self._run.name, states, details, before, after, calls, where=self._label))
        now = time.time()
        self._note(
            RunFinding(
                kind=finding.kind,
                ranks=finding.ranks,
                text=finding.text,
                source=finding.source,
                # The called ranks are not known here.
                sure=finding.sure and not (finding.kind == "stuck" and uncertain.issuperset(finding.ranks)),
                first=now,
                last=now,
            )
            for finding in findings
        )

    # -- the evidence -------------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return len(self._living()) + len(self._remote)

    def _living(self) -> list[Child]:
        return [child for child in self._procs() if child.alive]

    def _states(
        self, before: Mapping[int, Evidence], after: Mapping[int, Evidence], living: Iterable[Child]
    ) -> tuple[dict[int, str], dict[int, str]]:
        states = {rank: "out of memory" if process.oom else "failed" for rank, process in self._exits.items()}
        details = {rank: process.reason.removeprefix(_PREFIX) for rank, process in self._exits.items()}
        for child in living:
            rank = parse_address(child.address).rank
            letter = "" if rank in before or rank in after else state_letter(child.pid)
            states[rank] = "starting" if child.state == "starting" else STOPPED.get(letter, "busy")
            details.pop(rank, None)
        for rank, address in self._remote.items() if living else ():
            host = host_of(address)
            if rank in before or rank in after:
                states[rank] = "busy"
            elif host not in self._samples:
                states[rank], details[rank] = "unreachable", f"host {host} does not answer the mesh's first host"
            elif (sample := self._samples[host].procs.get(address)) is None:
                states[rank], details[rank] = "failed", f"it has ended on host {host}"
            else:
                states[rank] = STOPPED.get(sample.letter, "busy")
        return states, details

    def _calls(self, after: Mapping[int, Evidence]) -> Iterator[UnansweredCall]:
        """Yields unanswered calls; the size of each is the number of its known runners, or of all ranks."""
        missing: dict[tuple[str, str, str], set[int]] = {}
        for rank, run in _runs(after):
            missing.setdefault((run.call, run.actor, run.endpoint.lstrip("@!")), set()).add(rank)
        own = {parse_address(child.address).rank for child in self._living()}
        silent = (own | self._remote.keys() | self._exits.keys()) - after.keys()  # these may run any of the calls
        total = self._size + len(self._exits)
        for (call, actor, endpoint), ranks in missing.items():
            runners = self._runners.get(call, ranks)
            size = len(runners) if len(runners) > len(ranks) else total
            yield UnansweredCall(call, f"{actor}.{endpoint}", frozenset(ranks | silent), size)

    def _label(self, ranks: Iterable[int]) -> str:
        ranks = sorted(ranks)
        if all(rank < len(self._region) for rank in ranks):
            return places_of(self._region, ranks) or "it"
        return f"ranks {spans(ranks)}"

    def _note(self, findings: Iterable[RunFinding]) -> None:
        count = counted(self._size, "process")
        before = self._run
        self._run = msgspec.structs.replace(
            before, inspected=f"{count} of {before.name}", findings=run_findings.added(before.findings, findings)
        )
        if self._run == before and not self._write_error:
            return
        failure = ""
        try:
            run_findings.write(self._run)
        except OSError as error:
            failure = str(error)
            if failure != self._write_error:
                log.warning("the findings about %s were not written: %s", before.name, failure)
        self._write_error = failure


def _runs(by_rank: Mapping[int, Evidence]) -> Iterator[tuple[int, EndpointRun]]:
    return ((rank, run) for rank, evidence in by_rank.items() for run in evidence.running)


def _activity(by_rank: Mapping[int, Evidence]) -> Activity:
    """Returns the calls and collectives that ranks are in, which stay equal without progress."""
    runs = ((rank, run.call) for rank, run in _runs(by_rank))
    newest = ((rank, last.group, last.number) for rank, evidence in by_rank.items() for last in evidence.collectives)
    return frozenset((*runs, *newest)) if any(evidence.running for evidence in by_rank.values()) else frozenset()


def begin(
    uid: str,
    name: str,
    spec: Unwatched,
    procs: Callable[[], Sequence[Child]],
    sender: AgentSender,
    schedule: Callable[[float, Callable[[], None]], object],
) -> tuple[Callable[[Exited], None], Callable[[], tuple[RunFinding, ...]]]:
    """Begins to diagnose a mesh; returns functions that take the ends of its processes, and that end the diagnosis."""
    mesh = UnwatchedMesh(uid, name, spec, procs, sender, schedule)
    mesh.round()
    return mesh.exited, mesh.end

"""A controller of many procs on one machine, which does one thing after the other as `procs` asks for it on stdin."""

import os
import sys
import time

from measure import figure

import monarch.actor
from monarch.actor import Actor, endpoint, this_host
from monarch_nb.host.verbs import STATUS
from monarch_nb.mesh.mesh_events import Event, MeshEvents, ProcUnresponsive
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import current_runtime
from monarch_nb.wire import Done

CALLS = 21


class Member(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    count = int(sys.argv[1])
    monarch.actor.unhandled_fault_hook = lambda failure: None
    host = this_host()
    unresponsive: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, ProcUnresponsive):
            unresponsive.append(event.address)

    runtime = current_runtime()
    runtime.part(MeshEvents).listeners.append(note)
    host.spawn_procs(name="first").spawn("member", Member).pid.call().get()
    while request(runtime, str(runtime.agent), STATUS, Done()).get().template_seconds is None:
        time.sleep(0.05)  # neither its imports nor the start of the agent are measured
    figure("ready")
    for line in sys.stdin:
        began = time.perf_counter()
        match line.split():
            case ["spawn"]:
                procs = host.spawn_procs(per_host={"procs": count}, name="procs")
                members = procs.spawn("members", Member)
                members.pid.call().get()
                figure("spawn", seconds=time.perf_counter() - began)
            case ["call"]:
                seconds = []
                for _ in range(CALLS):
                    began = time.perf_counter()
                    assert len(members.pid.call().get()) == count
                    seconds.append(time.perf_counter() - began)
                figure("call", seconds=sorted(seconds)[CALLS // 2])
            case ["stop"]:
                procs.stop().get()
                figure("stop", seconds=time.perf_counter() - began)
            case ["unresponsive"]:
                figure("unresponsive", ranks=len(set(unresponsive)))


if __name__ == "__main__":
    main()

"""Two network namespaces joined by a cable, which is pulled and put back: nothing is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_nb.transport import Keys
from tests.cluster.cables import ip
from tests.cluster.hosts_tools import HostProcess, nothing_left

pytestmark = pytest.mark.timeout(120)
__all__ = ["nothing_left"]

CONTROLLER = """
import sys
from monarch_nb.attach import attach_hosts
from tests.cluster.hosts_tools import SOON, Caller, Member
key, *endpoints = sys.argv[1:]
hosts = attach_hosts(endpoints, key=key)
procs = hosts.spawn_procs(name="pair")
members, callers = procs.spawn("members", Member), procs.spawn("callers", Caller)
assert len(members.where.call().get(SOON)) == 2
assert len(callers.call.call(members).get(SOON)) == 2
print("ready", flush=True)
assert sys.stdin.readline() == "pulled\\n"
for number in range(500):
    members.note.broadcast(number)
there, between = members.slice(hosts=1), callers.call.call(members)
far = there.where.call_one()
near = members.slice(hosts=0).in_order.call_one("root", list(range(500))).get(SOON)
try:
    far.get(1)
except TimeoutError:
    print("cut" if near else "lost", flush=True)
assert sys.stdin.readline() == "back\\n"
far.get(40)
in_order = members.in_order.call("root", list(range(500))).get(SOON).values()
print("whole" if in_order == [True, True] and len(between.get(SOON)) == 2 else "broken", flush=True)
"""


def test_a_cable_that_is_pulled_and_put_back_costs_nothing_but_time(cable: tuple[str, str], tmp_path: Path) -> None:
    key = tmp_path / "job.key"
    Keys.load_or_create(key)
    agents: list[HostProcess] = []
    controller = None
    try:
        for number, name in enumerate(cable, 1):
            inside = ("ip", "netns", "exec", name)
            agents.append(HostProcess(tmp_path, key=key, tcp=f"tcp://10.213.77.{number}:0", before=inside))
        with open(tmp_path / "controller.log", "wb") as errors:
            controller = subprocess.Popen(
                ["ip", "netns", "exec", cable[0], sys.executable, "-c", CONTROLLER, str(key),
                 *(agent.endpoint for agent in agents)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
            )  # fmt: skip
        assert controller.stdin is not None
        assert controller.stdout is not None
        with controller.stdin as say, controller.stdout as said:

            def expect(word: str) -> None:
                assert said.readline() == f"{word}\n", (tmp_path / "controller.log").read_text()

            expect("ready")
            ip("-n", cable[1], "link", "set", cable[1], "down")
            say.write("pulled\n")
            say.flush()
            expect("cut")
            ip("-n", cable[1], "link", "set", cable[1], "up")
            say.write("back\n")
            say.flush()
            expect("whole")
        assert controller.wait(20) == 0
    finally:
        if controller is not None:
            controller.kill()
            controller.wait()
        for agent in agents:
            agent.close()

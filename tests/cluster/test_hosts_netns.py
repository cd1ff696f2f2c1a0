"""Two network namespaces joined by a cable, which is pulled and put back: nothing is lost."""

from pathlib import Path

import pytest

from tests.cluster.cables import controller_of_both, ip
from tests.cluster.hosts_tools import nothing_left

pytestmark = pytest.mark.timeout(120)
__all__ = ["nothing_left"]

CONTROLLER = """
import sys
from monarch_nb.connect import attach_hosts
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
remote, calls = members.slice(hosts=1), callers.call.call(members)
reply = remote.where.call_one()
in_order = members.slice(hosts=0).in_order.call_one("root", list(range(500))).get(SOON)
try:
    reply.get(1)
except TimeoutError:
    print("cut" if in_order else "lost", flush=True)
assert sys.stdin.readline() == "back\\n"
reply.get(40)
in_order = members.in_order.call("root", list(range(500))).get(SOON).values()
print("whole" if in_order == [True, True] and len(calls.get(SOON)) == 2 else "broken", flush=True)
"""


def test_pulling_and_restoring_a_cable_costs_only_time(cable: tuple[str, str], tmp_path: Path) -> None:
    with controller_of_both(cable, tmp_path, CONTROLLER) as (say, expect):
        expect("ready")
        ip("-n", cable[1], "link", "set", cable[1], "down")
        say("pulled")
        expect("cut")
        ip("-n", cable[1], "link", "set", cable[1], "up")
        say("back")
        expect("whole")

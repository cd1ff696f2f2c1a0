"""Processes of another Python minor version are refused, with a line that says so."""

import pytest

import monarch_nb.actor
from monarch_nb.actor import Actor, SupervisionError, endpoint, this_host
from monarch_nb.lifecycle import proc_spawn

pytestmark = pytest.mark.timeout(120)


class Quiet(Actor):
    @endpoint
    def ping(self):
        return 1


def test_a_process_of_another_minor_version_says_which_and_ends(monkeypatch):
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
    monkeypatch.setattr(proc_spawn, "python_version", lambda: "3.99")
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="other", env={"MONARCH_NB_TEST": "1"})
    quiet = procs.spawn("quiet", Quiet)
    with pytest.raises(SupervisionError, match=r"its controller Python 3\.99"):
        quiet.ping.call().get(30)
    procs.stop().get(20)


def test_the_same_version_joins():
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="same")
    assert procs.spawn("quiet", Quiet).ping.call().get(30).values() == [1]
    procs.stop().get(20)

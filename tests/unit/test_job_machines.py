"""Which machines of an SSH job a mesh may grow onto."""

import pytest

from monarch_nb.job import Agent, Running
from monarch_nb.job.ssh.adapter import refusal, unused

pytestmark = pytest.mark.timeout(20)
OPTIONS = {"machines": {"trainers": ["a", "b", "b"], "loaders": ["c"]}, "more": ["d", "b"]}


def free(*used: str, mesh: str = "trainers") -> list[str]:
    return unused(Running("1", "", {f"{mesh}_{i}": Agent(machine) for i, machine in enumerate(used)}, OPTIONS), mesh)


def test_a_machine_is_free_as_often_as_named_without_an_agent() -> None:
    assert free() == ["a", "b", "b", "d", "b"]
    assert free("a", "b") == ["b", "d", "b"]
    assert free("a", "b", "b", "b") == ["d"]
    assert free("a", "b", "b", "d", "b") == []
    assert free("c", mesh="loaders") == ["d", "b"]


def test_a_refusal_names_used_machines_attempts_and_the_remedy() -> None:
    job = Running("1", "", {"trainers_0": Agent("a")}, OPTIONS)
    text = refusal(job, 2, (), {"d": "d: no connection"})
    assert text.startswith("its machines do not suffice for 2 more (in use: a). Name another one: mesh.grow(hosts=[")
    assert text.endswith("could not be started on d:\n  d: no connection")
    assert refusal(job, 1, ("d",), {"d": "d: no connection"}) == (
        "agents could not be started on d:\n  d: no connection"
    )

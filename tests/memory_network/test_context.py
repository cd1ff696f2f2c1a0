"""An actor's knowledge of itself and of its message."""

import os
from typing import Any

import pytest

from monarch_nb.actor import (
    Actor,
    ProcMesh,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_proc,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Self(Actor):
    def __init__(self) -> None:
        self.in_init = (current_rank().rank, str(context().actor_instance))

    @endpoint
    def facts(self) -> dict[str, Any]:
        instance = context().actor_instance
        return {
            "name": instance.name,
            "class": instance.class_name,
            "rank": str(instance.rank),
            "creator": str(instance.creator),
            "actor": str(instance),
            "id": instance.actor_id,
            "proc": len(instance.proc),
            "procs": instance.proc_mesh.sizes,
            "proc_id": instance.proc_id,
            "pid": os.getpid(),
        }

    @endpoint
    def name(self) -> str:
        return current_actor_name()

    @endpoint
    def in_constructor(self) -> tuple[int, str]:
        return self.in_init

    @endpoint
    def sibling(self) -> int:
        sibling = context().actor_instance.proc.spawn("sibling", Self)
        return int(sibling.facts.call_one().get(20)["pid"])  # type: ignore[attr-defined]

    @endpoint
    def creators(self, deeper: bool) -> list[tuple[str, str | None, str, str]]:
        """The chain of creators, up to the root."""
        if deeper:
            child: Any = context().actor_instance.proc.spawn("child", Self)
            return child.creators.call_one(False).get(20)  # type: ignore[no-any-return]
        creators, instance = [], context().actor_instance.creator
        while instance is not None:
            creators.append((instance.name, instance.class_name, str(instance.rank), str(instance)))
            instance = instance.creator
        return creators

    @endpoint
    def take(self, x: Any) -> Any:
        return x


class AsyncSelf(Actor):
    @endpoint
    async def name(self) -> str:
        return current_actor_name()


def test_an_instance_knows_its_name_place_and_creator(quad: ProcMesh) -> None:
    selves: Any = quad.spawn("selves", Self)
    facts = selves.facts.call().get(20).item(gpus=2)
    assert facts["name"] == "selves"
    assert facts["class"].endswith("Self")
    assert facts["rank"] == "{'gpus': 2/4}"
    assert facts["creator"] == "<root>"
    assert facts["actor"].startswith("<root>.<")
    assert facts["actor"].endswith("Self selves{'gpus': 2/4}>")
    assert facts["id"] == facts["actor"]
    assert facts["proc"] == 1
    assert facts["procs"] == {"gpus": 4}
    assert facts["proc_id"].endswith(".2.0")
    assert len({entry["proc_id"] for entry in selves.facts.call().get(20).values()}) == 4


def test_creators_are_known_up_to_the_root(quad: ProcMesh) -> None:
    selves: Any = quad.slice(gpus=slice(0, 2)).spawn("selves", Self)
    kind = f"{Self.__module__}.{Self.__qualname__}"
    creator = f"<root>.<{kind} selves{{'gpus': 1/2}}>"
    root = ("root", None, "{}", "<root>")
    assert selves.slice(gpus=1).creators.call_one(True).get(20) == [("selves", kind, "{'gpus': 1/2}", creator), root]
    assert selves.slice(gpus=1).creators.call_one(False).get(20) == [root]


def test_the_name_of_the_current_actor_is_for_people(quad: ProcMesh) -> None:
    selves: Any = quad.slice(gpus=slice(0, 2)).spawn("selves", Self)
    assert selves.name.call().get(20).item(gpus=1).endswith("Self selves{'gpus': 1/2}>")
    mesh: Any = quad.slice(gpus=0).spawn("other", AsyncSelf)
    assert mesh.name.call_one().get(20).endswith("AsyncSelf other>")


def test_a_constructor_has_a_context_too(quad: ProcMesh) -> None:
    selves: Any = quad.spawn("selves", Self)
    rank, name = selves.in_constructor.call().get(20).item(gpus=3)
    assert rank == 3
    assert name.endswith("Self selves{'gpus': 3/4}>")


def test_an_actor_can_spawn_on_its_own_process(quad: ProcMesh) -> None:
    selves: Any = quad.spawn("selves", Self)
    pids = [facts["pid"] for facts in selves.facts.call().get(20).values()]
    assert selves.sibling.call().get(20).values() == pids


def test_the_client_is_the_root() -> None:
    assert str(context().actor_instance) == "<root>"
    assert current_actor_name() == str(context().actor_instance.actor_id) == "<root>"
    assert (context().message_rank.rank, current_rank().rank, current_size()) == (0, 0, {})
    assert context().actor_instance.name == "root"
    assert context().actor_instance.creator is None
    with pytest.raises(RuntimeError, match="root"):
        context().actor_instance.stop()


def test_this_proc_of_the_client_is_the_client_process() -> None:
    mesh: Any = this_proc().spawn("here", Self)
    facts = mesh.facts.call_one().get(20)
    assert facts["pid"] == os.getpid()
    assert facts["actor"] == "<root>.<" + facts["class"] + " here>"
    assert this_proc() == this_proc()
    assert context().actor_instance.proc == this_proc()
    mesh.stop().get(20)
    with pytest.raises(RuntimeError, match="stopped"):
        mesh.facts.call_one().get(20)


def test_an_instance_does_not_travel(quad: ProcMesh) -> None:
    selves: Any = quad.spawn("selves", Self)
    with pytest.raises(TypeError, match="instance"):
        selves.take.call([context().actor_instance])

"""A mesh is had from its hosts: the first of them that knows of it decides, and the others follow."""

import contextlib
from collections.abc import Container

import msgspec

from monarch_nb.connect.following import Failures, follow
from monarch_nb.connect.hosts import AttachError
from monarch_nb.connect.leaving import Leaving
from monarch_nb.connect.routes import Routes
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.mesh_files import KEEPERS, MeshFile
from monarch_nb.mesh.requests import UnansweredError, request
from monarch_nb.runtime import Future, Runtime
from monarch_nb.wire import agent_of, host_name, text_of

_ANSWER_S = 10.0


def reach(engine: Runtime, mesh: MeshFile) -> Failures:
    """Its hosts know of this process, and it of them: why not, of those that cannot be reached, by host.

    Raises AttachError where none of those can be that keep what it takes to come back.
    """
    failures = follow(engine, mesh)
    keepers = [way.host for way in mesh.ways[:KEEPERS]]
    if all(host in failures for host in keepers):
        raise AttachError({host: RuntimeError(_unreachable(mesh, host, failures[host])) for host in keepers}, 1)
    with contextlib.suppress(TimeoutError, RuntimeError):  # who is silent now is when it is asked for the mesh, too
        engine.part(Routes).settle([way.host for way in mesh.ways if way.host not in failures], _ANSWER_S)
    return failures


def _unreachable(mesh: MeshFile, host: str, why: str) -> str:
    return f"{mesh.name} cannot be attached, its host {host_name(host)} cannot be reached: {why}"


def claim(engine: Runtime, mesh: MeshFile, failures: Failures, *, steal: bool) -> list[p.Attached]:
    """Gets the mesh from the first of its hosts that knows of it, which decides, then from the others.

    What the deciding one says comes first. An agent that was started anew knows nothing, and has no procs of it. A host
    that is silent goes to the `failures`.
    """
    holder = engine.part(Leaving).holder
    wanted = p.Attach(uid=mesh.uid, secret=mesh.secret, holder=holder, steal=steal, ended=mesh.former)
    keepers = [way.host for way in mesh.ways[:KEEPERS]]
    answers: dict[str, p.Attached] = {}
    first = p.Attached(known=False)
    for host in keepers:
        if host not in failures and not first.known:
            first = answers[host] = _attached(engine, mesh, host, wanted, failures)
    if not first.known:
        silent = [_unreachable(mesh, host, failures[host]) for host in keepers if host in failures]
        raise AttachError.of(
            silent[0] if silent else f"{mesh.name} is not there any more: it was stopped, or its lease has ended"
        )
    wanted = msgspec.structs.replace(wanted, grant=first.grant, turn=first.turn)
    others = [way.host for way in mesh.ways if way.host not in failures and way.host not in answers]
    asked = {host: request(engine, agent_of(host), verbs.ATTACH, wanted) for host in others}
    try:
        answers |= {host: _answer(mesh, host, answer, failures) for host, answer in asked.items()}
    except AttachError as error:
        give_back(engine, mesh, failures, str(error))
        raise
    return [first, *(answer for answer in answers.values() if answer is not first)]


def _attached(engine: Runtime, mesh: MeshFile, host: str, wanted: p.Attach, failures: Failures) -> p.Attached:
    return _answer(mesh, host, request(engine, agent_of(host), verbs.ATTACH, wanted), failures)


def _answer(mesh: MeshFile, host: str, asked: Future[p.Attached], failures: Failures) -> p.Attached:
    """What a host says; of a silent one it is noted why. Raises AttachError where it refuses."""
    try:
        return msgspec.structs.replace(asked.get(_ANSWER_S), host=host)
    except (TimeoutError, UnansweredError) as error:
        failures[host] = text_of(error)
        return p.Attached(known=False)
    except RuntimeError as error:
        raise AttachError.of(f"{mesh.name} cannot be attached: {error}") from error


def give_back(engine: Runtime, mesh: MeshFile, failures: Container[str], why: str) -> None:
    """It cannot be used here: whoever wants it may have it."""
    left = p.Detach(mesh.uid, f"{engine.part(Leaving).holder.what} could not use it: {why}")
    asked = [request(engine, agent_of(way.host), verbs.DETACH, left) for way in mesh.ways if way.host not in failures]
    for answer in asked:
        with contextlib.suppress(TimeoutError, RuntimeError):
            answer.get(_ANSWER_S)

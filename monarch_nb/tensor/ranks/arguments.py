"""Tensors of the ranks' own values as arguments of endpoints: each actor gets the value of its process."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from monarch_nb.mesh import Handle, LentFrames, ProcMesh, region_of, state_of
from monarch_nb.runtime import (
    ActorState,
    EncodedObject,
    Future,
    PendingCall,
    ProcState,
    current_runtime,
    reported_elsewhere,
)
from monarch_nb.tensor.commands import OBJECT, CallRemote
from monarch_nb.tensor.errors import TensorError
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.ranks.remote import Remote, RemoteArguments, with_writes
from monarch_nb.tensor.ranks.tensor import COLLECTED, RankTensor
from monarch_nb.tensor.verbs import LostInputError
from monarch_nb.tensor.views import rewriting
from monarch_nb.tensor.workers.handover import ArgumentsByRank, CallActor, GivenArguments, Tag, Withdraw
from monarch_nb.wire import ActorError, OutFrame, encode

_numbers = count(1)
_sending = threading.RLock()  # messages and commands go in the same order: else actors and workers wait for each other


class TensorFrames(LentFrames):
    """The body of a call with tensors among its arguments."""

    def __init__(self, actors: Handle[ActorState], title: str, inputs: RemoteArguments, encoded: EncodedObject) -> None:
        self._inputs, self._title, self._actors = inputs, title, state_of(actors).uid
        self._tag = _new_tag()
        self._done: Future[Any] | None = None
        super().__init__(encode((GivenArguments(self._tag, encoded, returns=False), {}), current_runtime()))

    @contextmanager
    def sending(self, call: str, pending: PendingCall[object] | None = None) -> Iterator[None]:
        """See `LentFrames`."""
        if pending is not None:
            pending.restated = self._restate
        tensors = self._inputs.tensors
        with in_order(self._inputs.mesh, self._tag), rewriting(tensor.reference for tensor in tensors):
            yield
            function = CallActor(self._tag, self._actors, call, self._title, returns=False)
            command = with_writes(CallRemote(function, self._inputs.args, {}, replies=True), tensors)
            self._done = self._inputs.mesh.stream.requested([(OBJECT, command)], self._title)
            reported_elsewhere(self._done)

    def _restate(self, error: ActorError) -> BaseException:
        """Replaces the error of an actor that lacks an argument by that of the operation that failed to make it."""
        if isinstance(error.exception, LostInputError) and self._done is not None:
            try:
                self._done.get()
            except TensorError as lost:
                return lost.copy()
        return error


def tensors_of(
    actors: Handle[ActorState],
    title: str,
    propagate: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    post: Callable[[Sequence[OutFrame]], str],
) -> Any:
    """See `Endpoint.rref`; `post` sends the body of the call, and returns its id."""
    if propagate is None:
        raise NotImplementedError(
            f"{title}.rref: the endpoint does not say what it returns. @endpoint(propagate=function), or "
            "as_endpoint(mesh.method, propagate=function): the function is called with tensors that have no values"
        )
    tensors, encoded = collect(args, kwargs)
    mesh = None if tensors else Mesh.for_ranks(ProcMesh(state_of(actors).procs, region_of(actors)))
    inputs, tag = RemoteArguments(tensors, {}, title, mesh), _new_tag()
    check_processes(actors, inputs.mesh, title)
    body = encode((GivenArguments(tag, encoded, returns=True), {}), current_runtime())
    with in_order(inputs.mesh, tag):
        call = post(body)
        function = CallActor(tag, state_of(actors).uid, call, title, returns=True)
        results = Remote(function, propagate).issued(inputs, args, kwargs)
    return results()


def _new_tag() -> Tag:
    return current_runtime().address, next(_numbers)


@contextmanager
def in_order(mesh: Mesh, tag: Tag) -> Iterator[None]:
    """Surrounds the sending of a call and the issue of its command. Actors that get only the call do not run it."""
    stream = mesh.stream
    stream.resume_if_healed()
    stream.wait_for_window()
    with _sending:
        try:
            yield
        except BaseException:
            if stream.lost is None:
                stream.issue_object(CallRemote(Withdraw(tag, "the call was broken off when it was sent"), (), {}))
            raise


def lent_frames(
    actors: Handle[ActorState], title: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> TensorFrames:
    """Returns the body of a call with tensors among its arguments, of any depth.

    Raises ValueError for tensors that are not on the processes of these actors, RankTensorError for those of two meshes
    and for those of another stream than the active one.
    """
    tensors, encoded = collect(args, kwargs)
    inputs = RemoteArguments(tensors, {}, title)
    check_processes(actors, inputs.mesh, title)
    return TensorFrames(actors, title, inputs, encoded)


def frames_by_rank(
    procs: Handle[ProcState], title: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[OutFrame]:
    """Returns the body of the arguments of actors that are spawned, with tensors among them: each actor gets a copy.

    Copies, since a heal makes the actors again. Blocks. Raises as `lent_frames`, TensorError for a failed tensor.
    """
    tensors, encoded = collect(args, kwargs)
    mesh = RemoteArguments(tensors, {}, title).mesh
    check_processes(procs, mesh, title)
    shards = [tensor.local_shards().values() for tensor in tensors]
    values = dict(zip(region_of(mesh.procs).ranks(), zip(*shards, strict=True), strict=True))
    return [*encode(ArgumentsByRank(encoded, values), current_runtime())]


def collect(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple[RankTensor, ...], EncodedObject]:
    """Returns the tensors among arguments, and the encoded arguments, with placeholders for them."""
    before, COLLECTED.tensors = COLLECTED.tensors, []
    try:
        encoded = EncodedObject(encode((args, kwargs), current_runtime()))
        return tuple(COLLECTED.tensors), encoded
    finally:
        COLLECTED.tensors = before


def check_processes(actors: Handle[ActorState] | Handle[ProcState], mesh: Mesh, title: str) -> None:
    """Raises ValueError unless each actor has a value of the mesh's tensors, and each value an actor."""
    state, ranks = state_of(actors), set(region_of(actors).ranks())
    procs = state.procs if isinstance(state, ActorState) else state
    if state_of(mesh.procs).uid != procs.uid:
        raise ValueError(
            f"{title}: the tensors among the arguments are on {mesh!r}, and these actors on processes of "
            f"{procs.name!r}. t.to_mesh(procs) brings a tensor to other processes"
        )
    own = set(region_of(mesh.procs).ranks())
    if own != ranks:
        raise ValueError(
            f"{title}: the tensors among the arguments are on the {len(own)} processes of {mesh!r}, and the call is "
            f"for {len(ranks)} of them. Call all actors, or bring the part there: "
            "t.slice_mesh(gpus=0).to_mesh(procs.slice(gpus=0))"
        )

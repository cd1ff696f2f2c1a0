"""%detach, %attach and %results: meshes that outlive the kernel, with the names that its cells gave them."""

import os
import sys
from itertools import count
from pathlib import PurePath
from typing import Any, cast

import msgspec
from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class

from monarch_nb.config import configure
from monarch_nb.connect import AttachedMesh, Detacher, Results, attach_mesh, detached_meshes, listing, results
from monarch_nb.mesh import ActorMesh, ProcMesh, region_of, state_of
from monarch_nb.runtime import ActorState, ProcState, Runtime, current_runtime
from monarch_nb.settings import DurationError, parse_duration, settings
from monarch_nb.shape import NDSlice, Region
from monarch_nb.wire import json_decoder

from .arguments import is_name
from .front import Front
from .namespace import Mesh
from .session import MeshOrigin, Session, SessionMagics

LEASE = "1h"


class MeshSlice(msgspec.Struct, frozen=True):
    """A slice of a mesh, or a mesh in another shape."""

    uid: str
    labels: tuple[str, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Notes(msgspec.Struct, frozen=True):
    """The notebook's names for a mesh, for the kernel that attaches to it later."""

    variables: dict[str, str] = {}  # uids, by the variables that hold them
    parts: dict[str, MeshSlice] = {}  # by the variables that hold them
    made: dict[str, MeshOrigin] = {}  # what %mesh lines asked for, by name


class Notebook:
    """Stores the notebook's names with its meshes."""

    def __init__(self, front: Front, session: Session, runtime: Runtime) -> None:
        self._front, self._session = front, session
        self._leaving = runtime.part(Detacher)
        name = PurePath(os.environ.get("JPY_SESSION_NAME", "")).name
        self._leaving.set_description(f"the kernel of {name}" if name else "another kernel")
        self._leaving.note_sources.append(self._notes)
        front.ending.append(self._leaving.flush_holds)

    def close(self) -> None:
        """Stops storing names."""
        self._leaving.note_sources.remove(self._notes)
        self._front.ending.remove(self._leaving.flush_holds)

    def _notes(self, meshes: tuple[str, ...]) -> bytes:
        variables = {name: uid for name, uid in self._session.variables().items() if uid in meshes}
        parts = {name: _part(mesh) for name, mesh in self._session.parts().items() if state_of(mesh).uid in meshes}
        origins = {name: arguments for name, arguments in self._session.origins().items() if arguments.uid in meshes}
        slices = {name: part for name, part in parts.items() if part is not None}
        return msgspec.json.encode(Notes(variables, slices, origins))


def _part(mesh: Mesh) -> MeshSlice | None:
    """Returns the stored form of a part of a mesh; None for ranks that were picked one by one."""
    region, ranks = region_of(mesh), region_of(mesh).ndslice
    if type(ranks) is not NDSlice:
        return None
    return MeshSlice(state_of(mesh).uid, tuple(region.labels), ranks.offset, tuple(ranks.sizes), tuple(ranks.strides))


def _of(mesh: Mesh, part: MeshSlice) -> Mesh:
    region = Region(part.labels, NDSlice(part.offset, part.sizes, part.strides))
    state = state_of(mesh)
    return ProcMesh(state, region) if isinstance(state, ProcState) else ActorMesh(cast(ActorState, state), region)


def bind(session: Session, attached: AttachedMesh) -> list[str]:
    """Gives the meshes that were attached their former names, or others where variables hold something else.

    Returns a line about each of these.
    """
    try:
        notes = json_decoder(Notes).decode(attached.notes) if attached.notes else Notes()
    except msgspec.DecodeError:
        notes = Notes()
    meshes: list[Any] = [attached.procs, *attached.actors]
    by_uid: dict[str, Mesh] = {state_of(mesh).uid: mesh for mesh in meshes}
    named = set(notes.variables.values())
    bindings = {name: by_uid[uid] for name, uid in notes.variables.items() if uid in by_uid}
    bindings |= {state_of(mesh).name: mesh for uid, mesh in by_uid.items() if uid not in named}
    bindings |= {name: _of(by_uid[part.uid], part) for name, part in notes.parts.items() if part.uid in by_uid}
    renamed: dict[str, str] = {}
    for name, mesh in bindings.items():
        if is_name(name) and not session.bind(name, mesh):
            candidates = (f"{name}_{number}" for number in count(2))
            renamed[name] = next(free for free in candidates if session.bind(free, mesh))
    origins = {name: origin for name, origin in notes.made.items() if origin.uid in by_uid and name not in renamed}
    session.remember(origins)  # for %mesh lines, which would replace the mesh in use
    return [f"the variable {name} holds something else: the mesh is {free}" for name, free in renamed.items()]


@magics_class
class LeavingMagics(SessionMagics):
    """%detach, %attach and %results."""

    @line_magic
    def detach(self, line: str) -> None:
        """Leave meshes: their processes live on without this kernel, until somebody attaches them or the lease ends.

        %detach NAME ... [--lease 2h]   # these; the lease is 1h if nothing is said
        %detach --keep 1h               # all of them, for so long, whenever this kernel ends: well, or killed
        %detach --keep 0                # no more: processes end with the kernel

        %attach NAME, here or in another kernel, comes back. What is called when a mesh is left goes on there, and
        %results has what it answers; state, output, metrics and ranks stopped in the debugger stay. From Python:
        workers.detach(lease="2h"); monarch.configure(mesh_keep="1h").
        """
        names, options = _read(line, ("--lease", "--keep"))
        if "--keep" in options:
            if names or "--lease" in options:
                raise UsageError("%detach: --keep is for all meshes: %detach --keep 1h")
            configure(mesh_keep=_duration("--keep", options["--keep"]))
            failed = current_runtime().part(Detacher).refresh()  # each is warned of
            if settings.mesh_keep <= 0:
                sys.stdout.write("processes end with this kernel\n")
            else:
                but = (
                    f"; not those of {', '.join(sorted(failed))}, until their records can be written" if failed else ""
                )
                sys.stdout.write(f"processes live on for {options['--keep']} after this kernel{but}\n")
            return
        if not names:
            raise UsageError("%detach: which mesh? Write %detach NAME --lease 2h, or %detach --keep 1h")
        lease = _duration("--lease", options.get("--lease", LEASE))
        left: dict[str, tuple[str, ProcState]] = {}  # by uid: names may mean the same processes
        for name in names:
            mesh = self._session.find(name)
            procs = state_of(mesh).procs if isinstance(mesh, ActorMesh) else state_of(mesh)
            left.setdefault(procs.uid, (name, procs))
        for name, procs in left.values():
            current_runtime().part(Detacher).detach(procs, parse_duration(lease) / 1e9)
            sys.stdout.write(f"{name} is left for {lease}: %attach {procs.name} comes back to it\n")

    @line_magic
    def attach(self, line: str) -> object:
        """Come back to a mesh that was left, with the names it had; or list what can be attached.

        %attach                  # what there is, where, since when, and how much of its lease is left
        %attach NAME             # this mesh, its actors and their state; what happened meanwhile is listed
        %attach NAME --steal     # also from a kernel that holds it, which is notified

        From Python: monarch.attach("workers", steal=True).
        """
        names, options = _read(line, (), ("--steal",))
        if not names:
            sys.stdout.write(f"{listing(detached_meshes())}\n")
            return None
        mesh: Mesh | None = None
        for name in names:
            if name in {state.name for state in self._session.meshes().values()}:
                mesh = self._session.find(name)
                twins = [twin.uid for twin in detached_meshes() if twin.name == name and twin.holder is None]
                more = f"; another mesh of this name was left: %attach {twins[-1]}" if twins else ""
                sys.stdout.write(f"{name} is here{more}\n")
                continue
            attached = attach_mesh(name, steal="--steal" in options)
            notes = bind(self._session, attached)
            sys.stdout.writelines(f"{line}\n" for line in (attached.report.text(), *notes))
            meshes: tuple[Mesh, ...] = (attached.procs, *attached.actors)
            mesh = next((part for part in meshes if state_of(part).name == name), attached.procs)
        return mesh

    @line_magic
    def results(self, line: str) -> Results:
        """List what calls on a mesh answered or raised after its kernel had left it.

        %results NAME            # all of them; %results NAME gives a list, of which each has .get()
        %results NAME --forget   # the processes need not keep them any longer

        From Python: monarch.results(trainers)[0].get(), as from the future of the call.
        """
        names, options = _read(line, (), ("--forget",))
        if len(names) != 1:
            raise UsageError("%results: of which mesh? Write %results NAME")
        answers = results(self._session.find(names[0]))
        if "--forget" in options:
            answers.forget()
        return answers


def _read(line: str, valued: tuple[str, ...], flags: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
    """Names, and options with their values. Raises UsageError."""
    names: list[str] = []
    options: dict[str, str] = {}
    words = line.replace("=", " ").split()
    while words:
        word = words.pop(0).rstrip(",")
        if word in flags:
            options[word] = ""
        elif word in valued:
            if not words:
                raise UsageError(f"{word}: for how long? Write {word} 2h")
            options[word] = words.pop(0)
        elif word.startswith("-"):
            allowed = ", ".join((*valued, *flags))
            raise UsageError(f"there is no option {word}; there is {allowed}")
        else:
            names.append(word)
    return names, options


def _duration(option: str, text: str) -> str:
    try:
        parse_duration(text)
    except DurationError as error:
        raise UsageError(f"%detach {option}: {error}") from None
    return text

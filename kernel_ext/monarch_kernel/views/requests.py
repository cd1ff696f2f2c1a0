"""Requests of views: each verb is a thin skin over a Python call."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb import diagnosis
from monarch_nb.connect import attach_mesh, detached_meshes, end_mesh, listing
from monarch_nb.debug.control import inspect_stacks
from monarch_nb.debug.render import FileName, merged_variables, short
from monarch_nb.debug.service import controller_of
from monarch_nb.diagnosis.slow import phase_shares
from monarch_nb.lifecycle import heal_mesh, interrupt, kill_mesh
from monarch_nb.logs import MeshLogs
from monarch_nb.mesh import ActorMesh, ProcMesh, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime, proc_state_of
from monarch_nb.shape import NDSlice, Region, places_of
from monarch_nb.store import describe, store_of
from monarch_nb.store.verbs import STACK, WhichStack
from monarch_nb.supervision import Driver
from monarch_nb.wire import counted, text_of

from ..jobs import end_job, job_places, running_job_rows
from ..leaving import bind
from ..session import Session, killed, resized
from .channel import Message
from .debugger import DebugRequests, requested_part
from .live import LiveViews
from .tensors import placement, values
from .timelines import order

STACKS = 16  # of one request
STACK_S = 1.5  # a process that has not answered within this time is inspected from outside
MOST_LINES = 2000
MOST_VALUES = 8  # of a variable, that differ between ranks
COMPARED_S = 3.0  # in which ranks are compared
MOST_PHASES = 256  # ranks of which the phases are drawn


class Requests:
    """Answers requests, or raises errors with texts for people. Blocks; each is called on its own thread."""

    def __init__(self, session: Session, views: LiveViews, name: FileName = short) -> None:
        self._session = session
        self._views = views
        self.name = name  # display name of a file
        self._debugger = DebugRequests(name)

    def answer(self, runtime: Runtime, message: Message) -> Message:
        """Returns the `result` of a request."""
        verb = str(message.get("verb"))
        method: Callable[[Runtime, Message], Message] | None = getattr(self, f"_do_{verb}", None)
        if method is None:
            raise LookupError(f"this kernel knows no request {verb!r}: load the page again")
        return method(runtime, message)

    # -- targets ---------------------------------------------------------------------------------------------------

    def _state(self, runtime: Runtime, message: Message) -> MeshState:
        state = runtime.meshes.get(str(message.get("mesh")))
        if state is None:
            raise LookupError(f"there is no mesh {message.get('mesh')!r} any more")
        return state

    def _bases(self, state: MeshState, message: Message) -> list[int]:
        """Returns the requested base ranks."""
        bases = list(state.region.ranks())
        indices: Sequence[int] | None = message.get("ranks")
        if indices is None:
            return bases
        if not all(isinstance(index, int) and 0 <= index < len(bases) for index in indices):
            raise LookupError(f"{state.name} has no ranks {list(indices)}")
        return [bases[index] for index in indices]

    @staticmethod
    def _meshes(state: MeshState, message: Message, bases: list[int]) -> list[Any]:
        """Returns the requested meshes: the whole one, or one for each rank."""
        kind: Any = ActorMesh if isinstance(state, ActorState) else ProcMesh
        if message.get("ranks") is None:
            return [kind(state, state.region)]
        return [kind(state, Region((), NDSlice(base, (), ()))) for base in bases]

    def _part(self, state: MeshState, message: Message) -> Any:
        """Returns the requested ranks as one mesh."""
        self._bases(state, message)
        kind: Any = ActorMesh if isinstance(state, ActorState) else ProcMesh
        return kind(state, requested_part(state, message))

    # -- verbs ------------------------------------------------------------------------------------------------------

    def _do_heal(self, runtime: Runtime, message: Message) -> Message:
        state = self._state(runtime, message)
        if state.stopped is not None:
            raise RuntimeError(f"{state.name} was stopped ({state.stopped}): spawn a new one")
        bases = self._bases(state, message)
        if message.get("kill") or message.get("replace"):
            part = self._part(state, message)
            heal_mesh(part, kill=bool(message.get("kill")), replace=True if message.get("replace") else None)
            how = "killed and healed" if message.get("kill") else "healed"
            return {"text": f"{how} {_counted(state, len(bases))} of {state.name}"}
        failed = {rank.rank for rank in describe(state).having("failed")}
        broken = [base for base in bases if base in failed]
        if message.get("ranks") is None or state.owner_process != runtime.address:
            heal_mesh(self._meshes(state, {}, bases)[0])
        elif broken:
            runtime.part(Driver).heal(state.uid, frozenset(broken)).get()
        healed = _counted(state, len(broken))
        return {
            "text": f"healed {healed} of {state.name}"
            if broken
            else f"{state.name} has not failed: there is nothing to heal"
        }

    def _do_stop(self, runtime: Runtime, message: Message) -> Message:
        state = self._state(runtime, message)
        bases = self._bases(state, message)
        if state.stopped is None:
            futures = [mesh.stop("stopped by a click") for mesh in self._meshes(state, message, bases)]
            for future in futures:
                future.get()
        return {"text": f"stopped {_counted(state, len(bases))} of {state.name}"}

    def _do_kill(self, runtime: Runtime, message: Message) -> Message:
        state = self._state(runtime, message)
        part = self._part(state, message)
        kill_mesh(part)
        return {"text": killed(part)}

    def _do_resize(self, runtime: Runtime, message: Message) -> Message:
        state, label, by = self._state(runtime, message), str(message.get("label")), message.get("by")
        if not isinstance(state, ProcState):
            raise TypeError(f"{state.name} is a mesh of actors: it follows the processes that it is on")
        if not isinstance(by, int) or by == 0:
            raise ValueError("by is how many hosts come, or, below 0, go")
        return {"text": resized(ProcMesh(state, state.region), label, by)}

    def _do_interrupt(self, runtime: Runtime, message: Message) -> Message:
        state = self._state(runtime, message)
        bases = self._bases(state, message)
        uids = [state.uid] if isinstance(state, ActorState) else [state.uid, *_actors(state)]
        for uid in uids:  # a process runs the calls of its actors
            mesh = runtime.meshes[uid]
            region_of = set(mesh.region.ranks())
            for base in bases:
                if base in region_of:
                    interrupt(self._meshes(mesh, {"ranks": True}, [base])[0])
        return {"text": f"interrupted {_counted(state, len(bases))} of {state.name}"}

    def _do_stack(self, runtime: Runtime, message: Message) -> Message:
        state = self._state(runtime, message)
        procs = proc_state_of(state)
        bases = self._bases(state, message)[:STACKS]
        indices = message.get("ranks") or range(len(bases))
        actor = state.uid if isinstance(state, ActorState) else ""
        replies = [request(runtime, procs.address(base), STACK, WhichStack(actor, base)) for base in bases]
        stacks = {}
        for index, base, future in zip(indices, bases, replies, strict=False):
            try:
                stacks[str(index)] = future.get(STACK_S).text
            except TimeoutError:
                stacks[str(index)] = "\n".join(
                    inspect_stacks(controller_of(runtime), procs, [base], lambda _: "", self.name)
                )
            except Exception as error:
                stacks[str(index)] = f"not available: {text_of(error)}"
        return {"stacks": stacks}

    def _do_logs(self, runtime: Runtime, message: Message) -> Message:
        state = self._state(runtime, message)
        procs = proc_state_of(state)
        most = min(int(message.get("lines") or 50), MOST_LINES)
        bases = self._bases(state, message)
        indices = message.get("ranks") or range(len(bases))
        receiver = runtime.part(MeshLogs).receiver
        lines = {}
        for index, base in zip(indices, bases, strict=False):
            written = receiver.written(procs.address(base))
            lines[str(index)] = [line for block in written for line in block.lines][-most:]
        return {"lines": lines}

    def _do_why(self, runtime: Runtime, message: Message) -> Message:
        return _document(diagnosis.diagnose(self._diagnosed(runtime, message)))

    def _do_slow(self, runtime: Runtime, message: Message) -> Message:
        with diagnosis.StragglerWatch(self._diagnosed(runtime, message)) as watch:
            time.sleep(COMPARED_S)
        phases = [
            {"mesh": procs.name, "where": procs.where([rank]), "shares": shares}
            for procs in watch.measured
            for rank, shares in phase_shares(procs).items()
        ]
        return {**_document(watch.diagnosis), "phases": phases[:MOST_PHASES]}

    def _do_abort(self, runtime: Runtime, message: Message) -> Message:
        return _document(diagnosis.abort(self._diagnosed(runtime, message)))

    def _diagnosed(self, runtime: Runtime, message: Message) -> ActorMesh[Any] | ProcMesh | None:
        """Returns the requested mesh; None for all meshes with running calls."""
        if not message.get("mesh"):
            return None
        mesh: ActorMesh[Any] | ProcMesh = self._meshes(self._state(runtime, message), {}, [])[0]
        return mesh

    def _do_spawn(self, runtime: Runtime, message: Message) -> Message:
        name, dims = str(message.get("name") or ""), message.get("dims")
        if not name.isidentifier():
            raise ValueError(f"{name!r} cannot be the name of a variable")
        if not isinstance(dims, dict) or not dims or not all(isinstance(n, int) and n > 0 for n in dims.values()):
            raise ValueError('dims must be sizes by name, such as {"gpus": 4}')
        mesh, notice = self._session.mesh(name, dims)
        return {"mesh": state_of(mesh).uid, "text": notice or f"{name} is running"}

    def _do_places(self, runtime: Runtime, message: Message) -> Message:
        return {
            "places": [
                {"name": name, "text": text, "why": cause, "hosts": hosts} for name, text, cause, hosts in job_places()
            ]
        }

    def _do_jobs(self, runtime: Runtime, message: Message) -> Message:
        jobs, problems = running_job_rows()
        return {"jobs": jobs, "text": problems}

    def _do_end_job(self, runtime: Runtime, message: Message) -> Message:
        return {"text": end_job(str(message.get("job")))}

    def _do_left(self, runtime: Runtime, message: Message) -> Message:
        attached = self._session.meshes()
        return {
            "meshes": [
                {"uid": mesh.uid, "name": mesh.name, "held": mesh.holder is not None, "text": listing([mesh])}
                for mesh in detached_meshes()
                if mesh.uid not in attached
            ]
        }

    def _do_attach(self, runtime: Runtime, message: Message) -> Message:
        back = attach_mesh(str(message.get("uid")), steal=bool(message.get("steal")))
        notes = bind(self._session, back)
        return {"text": "\n".join([back.report.text(), *notes])}

    def _do_end(self, runtime: Runtime, message: Message) -> Message:
        return {"text": end_mesh(str(message.get("uid")), steal=bool(message.get("steal")))}

    def _do_report(self, runtime: Runtime, message: Message) -> Message:
        failure = store_of(runtime).document()["failures"].get(str(message.get("failure")))
        if failure is None:
            raise LookupError(f"there is no failure {message.get('failure')!r} any more")
        title, report = failure["title"], failure["report"]
        return {"text": report if report.startswith(title) else f"{title}\n\n{report}"}

    def _do_view(self, runtime: Runtime, message: Message) -> Message:
        view = self._views.get(str(message.get("name")))
        if view is None:
            raise LookupError(f"there is no view {message.get('name')!r} any more")
        return {"script": view.script(), "style": view.style()}

    def _do_variables(self, runtime: Runtime, message: Message) -> Message:
        return {"variables": self._session.variables()}

    def _do_namespace(self, runtime: Runtime, message: Message) -> Message:
        state = self._state(runtime, message)
        bases = self._bases(state, message)
        answers = controller_of(runtime).variables(state, bases, STACK_S)
        rows = []
        for name, merged in merged_variables(answers).items():
            shown = [
                {
                    "type": variable.kind,
                    "text": variable.text,
                    "where": "" if len(ranks) == len(answers) else places_of(state.region, ranks),
                }
                for variable, ranks in merged[:MOST_VALUES]
            ]
            rows.append({"name": name, "values": shown, "more": max(0, len(merged) - MOST_VALUES)})
        silent = [base for base in bases if base not in answers]
        notes = [f"no answer from {places_of(state.region, silent) or state.name}"] if silent else []
        if more := max((answer.more for answer in answers.values()), default=0):
            notes.append(f"{more} more variables are left out")
        return {"rows": rows, "answered": len(answers), "text": "; ".join(notes)}

    def _do_timeline(self, runtime: Runtime, message: Message) -> Message:
        return order(message, lambda: self._part(self._state(runtime, message), message))

    def _do_placement(self, runtime: Runtime, message: Message) -> Message:
        return placement(str(message.get("tensors")), int(message.get("number") or 0))

    def _do_values(self, runtime: Runtime, message: Message) -> Message:
        return values(runtime, str(message.get("tensors")), int(message.get("number") or 0))

    def _do_post_mortem(self, runtime: Runtime, message: Message) -> Message:
        state = self._state(runtime, message)
        return self._debugger.open(runtime, state, self._bases(state, message), str(message.get("call") or ""))

    def _do_debug(self, runtime: Runtime, message: Message) -> Message:
        return self._debugger.answer(runtime, message)


def _document(report: diagnosis.Diagnosis) -> Message:
    findings = [
        {"kind": entry.kind, "mesh": entry.mesh, "text": entry.text, "perhaps": entry.is_suspicion, "sure": entry.sure}
        for entry in report.findings
    ]
    text = report.ended or ("" if findings else "Nothing was found.")
    return {"findings": findings, "inspected": report.inspected, "text": text}


def _actors(state: ProcState | MeshState) -> list[str]:
    actors: dict[str, ActorState] = getattr(state, "actors", {})
    return [uid for uid, actor in actors.items() if actor.stopped is None]


def _counted(state: MeshState, count: int) -> str:
    return counted(count, "actor" if isinstance(state, ActorState) else "proc")

"""The debugger for views: sends the stopped ranks whenever they change, and carries out commands for them."""

import threading
import time
from collections.abc import Callable, Sequence

from monarch_nb import debug
from monarch_nb.debug import verbs
from monarch_nb.debug.control import Controller, missing
from monarch_nb.debug.prompt import DebugPrompt
from monarch_nb.debug.records import Motion, Stopped
from monarch_nb.debug.render import FileName, Missing, named, picture_of, values_by_rank, variables_by_rank
from monarch_nb.debug.service import controller_of
from monarch_nb.mesh import ActorMesh, state_of
from monarch_nb.runtime import ActorState, MeshState, Runtime, proc_state_of
from monarch_nb.shape import Region, region_of_ranks
from monarch_nb.store import store_of
from monarch_nb.store.events import RankStateChanged
from monarch_nb.wire import text_of

from ..debugger.magics import StoppedTable
from .channel import Message
from .live import LiveView, Shown, bundled

SEND_S = 0.05  # between two pictures
_MOTIONS: dict[str, Motion] = {"step": "in", "next": "over", "return": "out", "until": "until"}


def place_in_mesh(runtime: Runtime) -> Callable[[Stopped], int]:
    """Gives the row-major index of a rank in its mesh, as it was spawned."""
    indices: dict[str, dict[int, int]] = {}

    def index(record: Stopped) -> int:
        if record.mesh not in indices:
            state = runtime.meshes.get(record.mesh)
            ranks = state.region.ranks() if state is not None else ()
            indices[record.mesh] = {base: index for index, base in enumerate(ranks)}
        return indices[record.mesh].get(record.rank, record.rank)

    return index


class StoppedView:
    """Sends all stopped ranks and the rest of their meshes, at once and at each change. Ends with `close`."""

    def __init__(self, runtime: Runtime, send: Callable[[Message], None], request: Message, name: FileName) -> None:
        self._runtime = runtime
        self._send = send
        self._id = request.get("id")
        self._name = name
        self._controller = controller_of(runtime)
        self._changed = threading.Event()
        self._changed.set()
        self._closed = False
        self._last: Message = {}
        self._unlisten = self._controller.stopped.listen(lambda *_: self._changed.set())
        self._unfollow = store_of(runtime).follow(lambda _: self._changed.set(), RankStateChanged)
        threading.Thread(target=self._run, name="monarch-stops", daemon=True).start()

    def close(self) -> None:
        """Stops sending."""
        self._closed = True
        self._unlisten()
        self._unfollow()
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._closed or self._runtime.closed:
                return
            self._send_picture(None)
            records = self._controller.stopped.records()
            if records:  # asks the processes of the other ranks, which takes a moment
                self._send_picture(missing(self._controller, records, self._name))
            time.sleep(SEND_S)

    def _send_picture(self, rest: tuple[dict[str, int], list[Missing]] | None) -> None:
        sizes, absent = rest if rest is not None else ({}, ())
        picture = picture_of(
            self._controller.stopped.records(),
            sizes=sizes or self._sizes(),
            missing=absent,
            name=self._name,
            index=place_in_mesh(self._runtime),
        )
        if rest is None and self._last:
            picture["missing"] = self._last["missing"] if picture["groups"] else []
        if picture != self._last and not self._closed:
            self._last = picture
            self._send({"type": "debug", "id": self._id, "now": time.time(), **picture})

    def _sizes(self) -> dict[str, int]:
        meshes = {record.mesh for record in self._controller.stopped.records()}
        return {uid: len(self._runtime.meshes[uid].region) for uid in meshes if uid in self._runtime.meshes}


class DebugRequests:
    """Answers the requests `debug` and `post_mortem`. Blocks while ranks carry out commands, for a bounded time."""

    def __init__(self, name: FileName) -> None:
        self._name = name

    def answer(self, runtime: Runtime, message: Message) -> Message:
        """Returns the `result` of a request; raises errors with texts for people."""
        verb = str(message.get("do") or "")
        method: Callable[[Controller, Message], Message] | None = getattr(self, f"_do_{verb}", None)
        if method is None and verb not in _MOTIONS:
            raise LookupError(f"this kernel's debugger knows no {verb!r}")
        controller = controller_of(runtime)
        if method is not None:
            return method(controller, message)
        return {"text": self._prompt(controller, message).move(_MOTIONS[verb]).text}

    @staticmethod
    def open(runtime: Runtime, state: MeshState, ranks: Sequence[int], call: str = "") -> Message:
        """Opens the stored frames of the last failure, or of that of a call, on the first of these ranks with any."""
        controller = controller_of(runtime)
        procs = proc_state_of(state)
        wrong = ""
        for rank in ranks:
            try:
                opened = controller.autopsy(state.uid, procs.address(rank), rank, call)
            except debug.DebugError as error:
                wrong = wrong or text_of(error)
                continue
            how = f"%%mdb {opened.name} gives commands"
            return {"sessions": [opened.session], "text": f"{named([opened])}: its frames are open; {how}"}
        raise debug.DebugError(wrong or f"{state.name} has no such rank")

    @staticmethod
    def _records(controller: Controller, message: Message) -> list[Stopped]:
        stopped = controller.stopped.records()
        sessions = message.get("sessions")
        records = stopped if sessions is None else [record for record in stopped if record.session in sessions]
        if not records:
            raise debug.DebugError("the rank is not stopped any more" if sessions is not None else "nothing is stopped")
        return records

    def _prompt(self, controller: Controller, message: Message) -> DebugPrompt:
        sessions = {record.session for record in self._records(controller, message)}

        def candidates() -> list[Stopped]:
            return [record for record in controller.stopped.records() if record.session in sessions]

        return DebugPrompt(controller, candidates, self._name, everybody=True)

    def _run(self, controller: Controller, message: Message, command: str) -> Message:
        return {"text": self._prompt(controller, message).do(command).text}

    def _do_command(self, controller: Controller, message: Message) -> Message:
        """Executes a line as typed at the prompt."""
        return self._run(controller, message, str(message.get("text") or ""))

    def _do_continue(self, controller: Controller, message: Message) -> Message:
        return self._run(controller, message, "c all")

    def _do_quit(self, controller: Controller, message: Message) -> Message:
        return self._run(controller, message, "quit")

    def _do_frame(self, controller: Controller, message: Message) -> Message:
        """Selects a frame of the stack."""
        return self._select(controller, message, verbs.Select(session="", frame=int(message.get("frame") or 0)))

    def _do_up(self, controller: Controller, message: Message) -> Message:
        return self._select(controller, message, verbs.Select(session="", by=-1))

    def _do_down(self, controller: Controller, message: Message) -> Message:
        return self._select(controller, message, verbs.Select(session="", by=1))

    def _select(self, controller: Controller, message: Message, command: verbs.Select) -> Message:
        answers = controller.ask(self._records(controller, message), command)
        return {"text": "\n".join(dict.fromkeys(f"*** {answer.error}" for answer in answers if answer.error))}

    def _do_locals(self, controller: Controller, message: Message) -> Message:
        records = self._records(controller, message)
        names = tuple(message.get("names") or ())
        pairs = list(zip(records, controller.ask(records, verbs.GetVariables(session="", names=names)), strict=True))
        errors = [f"{named([record])}: {answer.error}" for record, answer in pairs if answer.error]
        return {"locals": variables_by_rank(pairs), "errors": errors}

    def _do_eval(self, controller: Controller, message: Message) -> Message:
        records = self._records(controller, message)
        expression = str(message.get("text") or "").strip()
        if not expression:
            raise ValueError("write an expression, such as loss")
        return values_by_rank(expression, list(zip(records, controller.evaluate(records, expression), strict=True)))

    def _do_breakpoints(self, controller: Controller, message: Message) -> Message:
        return {"breakpoints": [breakpoint_row(bp) for bp in controller.breakpoints]}

    def _do_break(self, controller: Controller, message: Message) -> Message:
        state = controller.runtime.meshes.get(str(message.get("mesh")))
        if not isinstance(state, ActorState):
            raise LookupError(f"there is no mesh {message.get('mesh')!r} of actors any more")
        mesh: ActorMesh[object] = ActorMesh(state, requested_part(state, message))
        bp = controller.breakpoints.set(mesh, str(message.get("where") or ""), str(message.get("condition") or ""))
        return {"breakpoint": breakpoint_row(bp), "text": repr(bp)}

    def _do_clear(self, controller: Controller, message: Message) -> Message:
        controller.breakpoints.clear(int(message.get("number") or 0))
        return {"text": ""}


def requested_part(state: MeshState, message: Message) -> Region:
    """Returns the ranks of a mesh that a request is about."""
    indices: Sequence[int] | None = message.get("ranks")
    if indices is None:
        return state.region
    bases = list(state.region.ranks())
    return region_of_ranks(["rank"], [len(indices)], [bases[index] for index in indices])


def breakpoint_row(breakpoint: debug.Breakpoint) -> Message:
    """Returns a breakpoint as JSON."""
    return {
        "number": breakpoint.number,
        "where": breakpoint.where,
        "condition": breakpoint.condition,
        "mesh": state_of(breakpoint.mesh).uid,
        "name": state_of(breakpoint.mesh).name,
        "text": repr(breakpoint),
    }


def _shown(_: object) -> Shown:
    return Shown(key="debug")


DEBUG = LiveView(
    name="debug",
    **bundled("debug"),
    feed=lambda watch: StoppedView(watch.runtime, watch.send, watch.message, watch.file_name).close,
    shows={StoppedTable: _shown, debug.Group: _shown},
)

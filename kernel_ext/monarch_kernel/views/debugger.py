"""The debugger for views: what is stopped, sent as it changes; and commands, which go to whom the view says."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb import debug
from monarch_nb.debug.control import whereabouts
from monarch_nb.debug.control.controller import Controller
from monarch_nb.debug.prompt.commands import Desk
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.render.groups import FileName, named
from monarch_nb.debug.render.picture import picture, values, variables
from monarch_nb.mesh import ActorMesh
from monarch_nb.runtime import Runtime
from monarch_nb.runtime.features import feature
from monarch_nb.wire import text_of

from .channel import Message

TELLING_S = 0.05  # between two pictures
_MOVES = {"step": "s", "next": "n", "return": "r", "until": "until", "up": "u", "down": "d"}


def place_in_mesh(engine: Runtime) -> Callable[[Stopped], int]:
    """Gives the row-major index of a rank in its mesh, as it was spawned."""
    known: dict[str, dict[int, int]] = {}

    def index(one: Stopped) -> int:
        if one.mesh not in known:
            state: Any = engine.meshes.get(one.mesh)
            ranks = state.region.ranks() if state is not None else ()
            known[one.mesh] = {base: at for at, base in enumerate(ranks)}
        return known[one.mesh].get(one.rank, one.rank)

    return index


class Stops:
    """Sends what is stopped, all of it, at once and whenever it changes. Ends with `close`."""

    def __init__(self, engine: Runtime, send: Callable[[Message], None], wish: Message, name: FileName) -> None:
        self._engine = engine
        self._send = send
        self._id = wish.get("id")
        self._name = name
        self._controller: Controller = feature(engine, "debug").controller
        self._changed = threading.Event()
        self._changed.set()
        self._closed = False
        self._last: Message = {}
        self._controller.book.listeners.append(self._happened)
        threading.Thread(target=self._run, name="monarch-stops", daemon=True).start()

    def close(self) -> None:
        """Sends nothing any more."""
        self._closed = True
        if self._happened in self._controller.book.listeners:
            self._controller.book.listeners.remove(self._happened)
        self._changed.set()

    def _happened(self, kind: str, record: Stopped) -> None:
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._closed or self._engine.closed:
                return
            self._tell(None)
            records = self._controller.book.sessions()
            if records:  # who is missing is asked of the processes, which takes a moment
                self._tell(whereabouts.missing(self._controller, records, self._name))
            time.sleep(TELLING_S)

    def _tell(self, rest: Any) -> None:
        sizes, missing = rest if rest is not None else ({}, ())
        found = picture(
            self._controller.book.sessions(),
            sizes=sizes or self._sizes(),
            missing=missing,
            name=self._name,
            index=place_in_mesh(self._engine),
        )
        if rest is None and self._last:
            found["missing"] = self._last["missing"] if found["groups"] else []
        if found != self._last and not self._closed:
            self._last = found
            self._send({"type": "debug", "id": self._id, "now": time.time(), **found})

    def _sizes(self) -> dict[str, int]:
        meshes = {one.mesh for one in self._controller.book.sessions()}
        return {uid: len(self._engine.meshes[uid].region) for uid in meshes if uid in self._engine.meshes}


class Commands:
    """Answers the requests `debug` and `post_mortem`. Blocks while ranks do as they are told, for a bounded time."""

    def __init__(self, name: FileName) -> None:
        self._name = name

    def answer(self, engine: Runtime, message: Message) -> Message:
        """The `result` of a request; raises what a person should read."""
        verb = str(message.get("do") or "")
        method: Callable[[Controller, Message], Message] | None = getattr(self, f"_do_{verb}", None)
        if method is None and verb not in _MOVES:
            raise LookupError(f"this kernel's debugger knows no {verb!r}")
        controller: Controller = feature(engine, "debug").controller
        if method is not None:
            return method(controller, message)
        return self._run(controller, message, _MOVES[verb])

    @staticmethod
    def open(engine: Runtime, state: Any, ranks: Sequence[int], call: str = "") -> Message:
        """Opens the frames of the last failure, or of that of a call, of the first of some ranks that has kept them."""
        controller: Controller = feature(engine, "debug").controller
        procs = getattr(state, "procs", state)
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
    def _meant(controller: Controller, message: Message) -> list[Stopped]:
        every = controller.book.sessions()
        wanted = message.get("sessions")
        found = every if wanted is None else [one for one in every if one.session in wanted]
        if not found:
            raise debug.DebugError("the rank is not stopped any more" if wanted is not None else "nothing is stopped")
        return found

    def _desk(self, controller: Controller, message: Message) -> Desk:
        meant = {one.session for one in self._meant(controller, message)}
        desk = Desk(controller, lambda: [one for one in controller.book.sessions() if one.session in meant], self._name)
        desk.everybody = True
        return desk

    def _run(self, controller: Controller, message: Message, command: str) -> Message:
        return {"text": self._desk(controller, message).do(command).text}

    def _do_command(self, controller: Controller, message: Message) -> Message:
        """A line, as it is typed at the prompt."""
        return self._run(controller, message, str(message.get("text") or ""))

    def _do_continue(self, controller: Controller, message: Message) -> Message:
        return self._run(controller, message, "c all")

    def _do_quit(self, controller: Controller, message: Message) -> Message:
        return self._run(controller, message, "quit")

    def _do_frame(self, controller: Controller, message: Message) -> Message:
        """Looks at one frame of the stack."""
        found = self._meant(controller, message)
        controller.ask(found, "look", frame=int(message.get("frame") or 0))
        return {"text": ""}

    def _do_locals(self, controller: Controller, message: Message) -> Message:
        found = self._meant(controller, message)
        answers = controller.ask(found, "locals", " ".join(message.get("names") or ()))
        pairs = list(zip(found, answers, strict=True))
        errors = [f"{named([one])}: {answer.error}" for one, answer in pairs if answer.error]
        return {"locals": variables(pairs), "errors": errors}

    def _do_eval(self, controller: Controller, message: Message) -> Message:
        found = self._meant(controller, message)
        expression = str(message.get("text") or "").strip()
        if not expression:
            raise ValueError("write an expression, such as loss")
        return values(expression, list(zip(found, controller.ask(found, "eval", expression), strict=True)))

    def _do_breakpoints(self, controller: Controller, message: Message) -> Message:
        return {"breakpoints": [breakpoint_row(one) for one in list(controller.breakpoints.values())]}

    def _do_break(self, controller: Controller, message: Message) -> Message:
        state = controller.engine.meshes.get(str(message.get("mesh")))
        if state is None:
            raise LookupError(f"there is no mesh {message.get('mesh')!r} any more")
        mesh: Any = ActorMesh(state, state.region)
        made = controller.set_break(mesh, str(message.get("where") or ""), str(message.get("condition") or ""))
        return {"breakpoint": breakpoint_row(made)}

    def _do_clear(self, controller: Controller, message: Message) -> Message:
        controller.clear_break(int(message.get("number") or 0))
        return {"text": ""}


def breakpoint_row(one: debug.Breakpoint) -> Message:
    """A breakpoint as JSON."""
    return {
        "number": one.number,
        "where": one.where,
        "condition": one.condition,
        "mesh": one.mesh._state.uid,
        "name": one.mesh._state.name,
        "text": repr(one),
    }

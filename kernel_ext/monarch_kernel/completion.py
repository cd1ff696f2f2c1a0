"""Completion of meshes, dimensions and options on the lines of magics, and of names of ranks in their cells."""

import re
from collections.abc import Callable
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, TypeVar

from IPython.core.error import UsageError
from msgspec import Struct

from monarch_nb.code import local_modules
from monarch_nb.connect import detached_meshes
from monarch_nb.debug.verbs import COMPLETE, DESCRIBE, CompleteName, DescribeName
from monarch_nb.mesh import cell_actors, region_of, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Actor, Future, ProcState, current_runtime, proc_state_of
from monarch_nb.telemetry.exports import TARGETS
from monarch_nb.wire import Verb

from .actors import is_actor_class
from .arguments import LOG_OPTIONS, PROFILE_OPTIONS, TIMELINE_OPTIONS, USUAL_DIMS, WHY_OPTIONS, read_place
from .session import Session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Q = TypeVar("Q", bound=Struct)
A = TypeVar("A", bound=Struct)
WAIT_S = 0.5  # for a rank, which answers within milliseconds unless it runs C code that keeps the interpreter
_PATH = re.compile(r"[^\W\d]\w*(?:\.\w*)*$")
_WORD = re.compile(r"\w*")
MOST_INDICES = 16  # of a dimension are offered one by one


def matcher(name: str, kind: str, complete: Callable[[Any], tuple[list[str], str | None]]) -> object:
    """Returns a matcher that replaces IPython's own if it has completions. Raises ImportError before IPython 8.6.

    `complete` returns them for a context, and what they replace: None for the context's token.
    """
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier=f"monarch.{name}", priority=100)  # type: ignore[untyped-decorator]
    def match(context: Any) -> dict[str, Any]:
        words, replaced = complete(context)
        fragment = {} if replaced is None else {"matched_fragment": replaced}
        completions = [SimpleCompletion(text=word, type=kind) for word in words]
        return {"completions": completions, "ordered": True, "suppress": True, **fragment}

    return match


class LineCompletion:
    """Completion on the lines of some magics, without names of Python.

    Through IPython's matchers, or, before 8.6, its `complete_command` hook, which adds Python's names.
    """

    magics: tuple[str, ...] = ()

    def __init__(self, shell: "InteractiveShell", session: Session) -> None:
        self._shell: Any = shell  # its hooks have no types
        self._session = session

    def install(self) -> None:
        """Registers them."""
        try:
            self._shell.Completer.custom_matchers.append(matcher(type(self).__name__, "magic", self._matches))
        except ImportError:  # in an older IPython that list holds matchers of another kind
            for magic in self.magics:
                self._shell.set_hook("complete_command", self._hook, str_key=magic)

    def complete(self, line: str, token: str) -> list[str]:
        """Completions of `token`, the end of `line`."""
        start = line[: len(line) - len(token)] if line.endswith(token) else line
        magic, *before = start.split() or [""]
        if magic not in self.magics or not line[len(magic) :][:1].isspace():
            return []
        if start.endswith("="):
            words = self.values(magic, before, before[-1][:-1]) if len(before) > 1 else []
        else:
            words = self.candidates(magic, before)
        return [word for word in words if word.startswith(token)]

    def candidates(self, magic: str, before: list[str]) -> list[str]:
        """Words that can follow `before` on the line of a magic."""
        raise NotImplementedError

    def values(self, magic: str, before: list[str], label: str) -> list[str]:
        """Values for `label=` of the first named mesh: indices, and all of them, as output writes them."""
        size = self._sizes(before[0]).get(label, 0)
        return [*(str(index) for index in range(min(size, MOST_INDICES))), *([f"0-{size - 1}"] if size > 1 else [])]

    def _hook(self, _shell: "InteractiveShell", event: Any) -> list[str]:
        return self.complete(event.text_until_cursor, event.symbol)

    def _matches(self, context: Any) -> tuple[list[str], str | None]:
        line = context.line_with_cursor[: context.cursor_position]
        return self.complete(line.lstrip(), context.token), None

    def _sizes(self, name: str) -> dict[str, int]:
        try:
            return dict(self._session.find(name).extent)
        except Exception:
            return {}

    def _dims(self, before: list[str]) -> list[str]:
        """Returns the dimensions of the mesh that is named first, except those already in the line."""
        labels = {word.partition("=")[0] for word in before[1:]}
        return [f"{label}=" for label in self._sizes(before[0]) if label not in labels]


_OPTIONS: dict[str, tuple[str, ...]] = {
    "%logs": LOG_OPTIONS,
    "%heal": ("--kill", "--replace"),
    "%%prof": PROFILE_OPTIONS,
    "%why": WHY_OPTIONS,
    "%%why": WHY_OPTIONS[:-1],
    "%%watch": ("--stop",),
    "%timeline": TIMELINE_OPTIONS,
    "%%timeline": ("--save",),
}


class Completion(LineCompletion):
    """On the lines of the magics of meshes, actors and logs."""

    magics = (
        *("%kill", "%notify", "%timeline", "%%timeline", "%history"),
        *("%mesh", "%%mesh", "%%on", "%%actor", "%reload", "%heal", "%stop", "%interrupt", "%logs", "%metrics"),
        *("%monarch", "%detach", "%attach", "%results", "%why", "%%why", "%%prof", "%%watch", "%%spmd"),
    )

    def candidates(self, magic: str, before: list[str]) -> list[str]:
        """Words that can follow `before` on the line of a magic."""
        if magic == "%monarch":
            return [] if before else ["doctor"]
        names = self._session.names()
        if magic == "%attach":
            return self._detached(before)
        if magic == "%detach":
            options = [] if "--keep" in before else ["--lease"] if before else ["--keep"]
            free = [] if "--keep" in before else [name for name in names if name not in before]
            return [*free, *(option for option in options if option not in before)]
        if magic == "%results":
            return names if not before else [option for option in ("--forget",) if option not in before]
        if magic == "%notify":
            return [] if before else [*self._futures(), "off"]
        if magic in ("%stop", "%interrupt"):
            options = [] if before or magic != "%stop" else ["--all", "--unused"]
            dims = self._dims(before) if len(before) == 1 else []
            return [*dims, *(name for name in names if name not in before), *options]
        if magic == "%%actor":
            return self._actor(before)
        if magic == "%reload":
            return [name for name in (*self._session.names("actors"), *local_modules()) if name not in before]
        if magic == "%metrics":
            if len(before) < 2:
                return ["--to"] if before else self._session.names()
            return [*TARGETS] if before[1:] == ["--to"] else []
        if not before:
            return [*names, "procs="] if magic == "%%spmd" else names
        if magic in ("%mesh", "%%mesh"):
            keys = {word.partition("=")[0] for word in before[1:]}
            labels = dict.fromkeys((*self._sizes(before[0]), *USUAL_DIMS))
            dims = [f"{label}=" for label in labels if label not in keys]
            return [*dims, *(option for option in ("--fresh", "--no-dedup", "--job") if option not in keys)]
        also = _OPTIONS.get(magic, ())
        dims = [] if magic in ("%why", "%%why") else self._dims(before)
        return [*dims, *(option for option in also if option not in before)]

    def values(self, magic: str, before: list[str], label: str) -> list[str]:
        """Values for `label=`: sizes of a new mesh, arguments of actors, or indices."""
        if magic in ("%mesh", "%%mesh"):
            return ["1", "2", "4", "8"]
        if magic == "%%actor":
            return self._classes() if label == "class" else []
        return super().values(magic, before, label)

    @staticmethod
    def _detached(before: list[str]) -> list[str]:
        try:
            names = [mesh.name for mesh in detached_meshes() if mesh.name not in before]
        except OSError:
            names = []
        return [*dict.fromkeys(names), *(["--steal"] if before and "--steal" not in before else [])]

    def _futures(self) -> list[str]:
        return [
            name
            for name, value in self._shell.user_ns.items()
            if isinstance(value, Future) and not name.startswith("_")
        ]

    def _classes(self) -> list[str]:
        return [name for name, value in self._shell.user_ns.items() if is_actor_class(value) and value is not Actor]

    def _actor(self, before: list[str]) -> list[str]:
        if not before:
            return self._session.names("actors")
        if len(before) == 1:
            return ["on"]
        if len(before) == 2:
            return self._session.names("procs")
        return [option for option in ("class=", "--fresh") if option not in before]


class RankCompletion:
    """Has the shell ask ranks for names in cells that begin with `%%on`; it answers by itself where none does."""

    def __init__(self, shell: "InteractiveShell", session: Session) -> None:
        self._shell: Any = shell  # its hooks have no types
        self._session = session
        self._inspect: Any = None

    def install(self) -> None:
        """Registers a matcher, and takes over the kernel's inspection."""
        try:
            self._shell.Completer.custom_matchers.append(matcher("RankCompletion", "rank", self._matches))
        except ImportError:  # an IPython before 8.6 has no matchers that see the whole cell
            return
        kernel = getattr(self._shell, "kernel", None)
        if kernel is not None:
            self._inspect = kernel.do_inspect
            kernel.do_inspect = self._do_inspect

    def uninstall(self) -> None:
        """Restores inspection."""
        if self._inspect is not None:
            self._shell.kernel.do_inspect, self._inspect = self._inspect, None

    def completions(self, cell: str, path: str) -> list[str]:
        """Completions of a path of names on the ranks of a cell; none where the first of them does not answer."""
        answer = self._answer(cell, COMPLETE, lambda mesh, rank: CompleteName(mesh, rank, path))
        return [] if answer is None else list(answer[0].names)

    def described(self, cell: str, name: str, *, source: bool) -> str:
        """Returns the text about a name on the ranks of a cell; "" without one."""
        answer = self._answer(cell, DESCRIBE, lambda mesh, rank: DescribeName(mesh, rank, name, source))
        return f"{answer[0].text}\n\nOn {answer[1]}" if answer is not None and answer[0].text else ""

    def _answer(self, cell: str, verb: Verb[Q, A], question: Callable[[str, int], Q]) -> tuple[A, str] | None:
        """Returns the answer of the first rank of a cell, and its name; None without one, and for a local cell."""
        target = self._target(cell)
        if target is None:
            return None
        procs, mesh, rank = target
        try:
            answer = request(current_runtime(), procs.address(rank), verb, question(mesh, rank)).get(WAIT_S)
        except Exception:  # it is busy, lost, or on its way
            return None
        return answer, f"rank {rank} of {procs.name}"

    def _target(self, cell: str) -> tuple[ProcState, str, int] | None:
        """Returns the processes, the actor and the rank that have the names of a cell; None for a local cell."""
        line, _, _ = cell.lstrip().partition("\n")
        magic, _, rest = line.partition(" ")
        if magic != "%%on":
            return None
        try:
            selection = read_place(magic, rest)
            mesh = selection.of(self._session.find(selection.name))
        except (UsageError, LookupError):
            return None
        rank = next(iter(region_of(mesh).ranks()), None)
        return None if rank is None else (proc_state_of(state_of(mesh)), cell_actors(mesh).uid, rank)

    def _matches(self, context: Any) -> tuple[list[str], str | None]:
        path = _PATH.search(context.line_with_cursor[: context.cursor_position])
        if path is None or not context.cursor_line:
            return [], None
        return self.completions(context.full_text, path.group()), path.group()

    def _do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        before = _PATH.search(code[:cursor_pos])
        if before is not None:
            after = _WORD.match(code, cursor_pos)
            name = before.group() + (after.group() if after is not None else "")
            if iskeyword(name) and code[: before.start()].rpartition("\n")[2].strip() == "%":  # IPython looks up none
                data = self._shell.object_inspect_mime(f"%{name}", detail_level, omit_sections)
                return {"status": "ok", "found": True, "data": data, "metadata": {}}
            text = self.described(code, name.rstrip("."), source=detail_level > 0)
            if text:
                return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}
        return self._inspect(code, cursor_pos, detail_level, omit_sections)

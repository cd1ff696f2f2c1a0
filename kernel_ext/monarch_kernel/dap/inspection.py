"""Requests that inspect stopped ranks: threads, frames, variables, values, sources; and the numbers of frames."""

import html
import itertools
import linecache
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_nb.debug import Stopped, Tensor, Value, verbs
from monarch_nb.debug.records import Variable
from monarch_nb.debug.render import named, short
from monarch_nb.debug.verbs import CommandAnswer

from ..jupyter import cell_file, cell_files
from .cluster import LEAD, ClusterRanks, Focus

FIRST_NUMBER = 1 << 28  # the kernel's own debugger counts from 1
VARIABLES_S = 1.5  # for the values of variables: one whose repr takes longer is described by its type
EVALUATE_S = 5.0
MOST_RANKS = 64  # ranks whose values a rich view compares
LONGEST = 4 << 20  # bytes of a file that are shown
SCALARS = ("int", "float", "bool", "str")  # which JupyterLab shows by their values; all others by their types
Message = dict[str, Any]


def is_ours(number: object) -> bool:
    """Returns whether a number is one of the mesh's adapter."""
    return isinstance(number, int) and number >= FIRST_NUMBER


@dataclass(frozen=True)
class FrameHandle:
    """A frame of a stop, or what a reference of it holds."""

    session: str
    stop: int  # which stop of the session
    frame: int  # 0 is the outermost
    reference: int = 0
    edition: int = 0


class Handles:
    """Numbers of frames and references, in a range that no other debugger uses.

    They stay the same while a rank is stopped and are dropped when it resumes.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(FIRST_NUMBER)
        self._by_number: dict[int, FrameHandle] = {}
        self._by_handle: dict[FrameHandle, int] = {}

    def number(self, handle: FrameHandle) -> int:
        """Returns the number of a frame or a reference."""
        number = self._by_handle.get(handle)
        if number is None:
            number = self._by_handle[handle] = next(self._numbers)
            self._by_number[number] = handle
        return number

    def get(self, number: object) -> FrameHandle | None:
        """Returns the handle of a number, if it is still valid."""
        return self._by_number.get(number) if isinstance(number, int) else None

    def keep(self, records: Iterable[Stopped]) -> None:
        """Drops the numbers of stops that have ended."""
        stops = {(record.session, record.number) for record in records}
        for number, handle in tuple(self._by_number.items()):
            if (handle.session, handle.stop) not in stops:
                del self._by_number[number], self._by_handle[handle]


class RequestRefused(Exception):
    """A request of a front end cannot be answered; the text says why."""


class InspectionRequests:
    """Inspection requests. Each blocks for answers of ranks. `client` is the id of the front end."""

    def __init__(
        self,
        ranks: ClusterRanks,
        focus: Focus,
        source_of: Callable[[str], str | None],
        named_here: Callable[[str], str] = lambda file: file,
    ) -> None:
        self._ranks = ranks
        self._focus = focus
        self._source_of = source_of
        self._named_here = named_here
        self.handles = Handles()
        self.client = ""
        self._edition = 0
        self.requests: dict[str, Callable[[Message], Message]] = {
            "threads": self._threads,
            "stackTrace": self._stack_trace,
            "scopes": self._scopes,
            "variables": self._variables,
            "setVariable": self._set_variable,
            "evaluate": self._evaluate,
            "copyToGlobals": self._copy_to_globals,
            "richInspectVariables": self._rich_inspect_variables,
            "exceptionInfo": self._exception_info,
            "source": self._source,
        }

    def _threads(self, arguments: Message) -> Message:
        threads = self._focus.threads(self._ranks.records())
        return {"threads": [{"id": thread.number, "name": thread.name} for thread in threads]}

    def _stack_trace(self, arguments: Message) -> Message:
        targets = self._focus.targets(self._ranks.records(), int(arguments.get("threadId") or LEAD))
        if not targets:
            return {"stackFrames": [], "totalFrames": 0}
        record = targets[0]
        rows = [
            {
                "id": self.handles.number(FrameHandle(record.session, record.number, index, edition=self._edition)),
                "name": frame.function,
                "line": frame.line,
                "column": 1,
                "source": {"name": short(frame.file), "path": self._named_here(frame.file), "sourceReference": 0},
            }
            for index, frame in enumerate(record.stack)
        ][::-1]
        start = int(arguments.get("startFrame") or 0)
        count = int(arguments.get("levels") or 0) or len(rows)
        return {"stackFrames": rows[start : start + count], "totalFrames": len(rows)}

    def _resolve(self, number: object) -> tuple[Stopped, FrameHandle]:
        """Returns the rank of a number, and its frame or reference; by default the frame of the rank in focus."""
        records = self._ranks.records()
        handle = self.handles.get(number)
        if number is None:
            lead = self._focus.lead(records)
            if lead is None:
                raise RequestRefused("no rank is stopped")
            return lead, FrameHandle(lead.session, lead.number, max(0, len(lead.stack) - 1))
        for record in records:
            if handle is not None and (record.session, record.number) == (handle.session, handle.stop):
                return record, handle
        raise RequestRefused("the rank has gone on since")

    def _ask(self, record: Stopped, command: verbs.Command) -> verbs.CommandAnswer:
        answer = self._ranks.ask([record], command)[0]
        if answer.error:
            raise RequestRefused(answer.error)
        return answer

    def _scopes(self, arguments: Message) -> Message:
        record, handle = self._resolve(arguments.get("frameId"))
        answer = self._ask(record, verbs.GetScopes(session="", frame=handle.frame))
        scopes = answer.scopes if isinstance(answer, verbs.Scopes) else ()
        return {
            "scopes": [
                {
                    "name": scope.name,
                    "variablesReference": self._reference(handle, scope.reference),
                    "namedVariables": scope.named,
                    "expensive": scope.expensive,
                }
                for scope in scopes
            ]
        }

    def _reference(self, handle: FrameHandle, reference: int) -> int:
        if not reference:
            return 0
        return self.handles.number(FrameHandle(handle.session, handle.stop, handle.frame, reference))

    def _variables(self, arguments: Message) -> Message:
        record, handle = self._resolve(arguments.get("variablesReference") or 0)
        start, count = int(arguments.get("start") or 0), int(arguments.get("count") or 0)
        command = verbs.GetVariables(
            session="", frame=handle.frame, reference=handle.reference, start=start, count=count, limit=VARIABLES_S
        )
        answer = self._ask(record, command)
        by_type = self.client == "jupyterlab"
        rows = [
            _variable(variable, self._reference(handle, variable.reference), by_type=by_type)
            for variable in answer.variables
        ]
        hidden = answer.total - start - len(rows)
        if hidden > 0 and not count:
            rows.append(_rest(hidden))
        return {"variables": rows}

    def _set_variable(self, arguments: Message) -> Message:
        record, handle = self._resolve(arguments.get("variablesReference") or 0)
        name, text = str(arguments.get("name") or ""), str(arguments.get("value") or "")
        command = verbs.Assign(session="", frame=handle.frame, name=name, text=text, reference=handle.reference)
        return self._valued(self._ask(record, command), handle)

    def _valued(self, answer: verbs.CommandAnswer, handle: FrameHandle) -> Message:
        value = answer.value
        return {
            "value": value.text if value is not None else "",
            "type": value.type if value is not None else "",
            "variablesReference": self._reference(handle, answer.reference),
            "namedVariables": answer.named,
            "indexedVariables": answer.indexed,
        }

    def _evaluate(self, arguments: Message) -> Message:
        record, handle = self._resolve(arguments.get("frameId"))
        types = str(arguments.get("context") or "repl") in ("repl", "clipboard")
        text = str(arguments.get("expression") or "")
        command = verbs.Evaluate(
            session="", frame=handle.frame, text=text, statement=types, much=types, limit=EVALUATE_S
        )
        answer = self._ranks.ask([record], command)[0]
        if answer.error and not (types and self.client == "jupyterlab"):  # which shows no errors, only results
            raise RequestRefused(answer.error)
        if types:
            self._edition += 1  # JupyterLab reads the variables again only of frames that it does not know
        body = self._valued(answer, handle)
        error = f"*** {answer.error}" if answer.error else ""
        body["result"] = "\n".join(part for part in (_text_of_answer(answer), error) if part)
        del body["value"]
        return body

    def _copy_to_globals(self, arguments: Message) -> Message:
        record, handle = self._resolve(arguments.get("srcFrameId"))
        source, target = (str(arguments.get(f"{end}VariableName") or "") for end in ("src", "dst"))
        if not (source.isidentifier() and target.isidentifier()):
            raise RequestRefused("copyToGlobals needs names of variables")
        text = f"globals()[{target!r}] = {source}"
        self._ask(record, verbs.Evaluate(session="", frame=handle.frame, text=text, statement=True, limit=EVALUATE_S))
        return {"value": target}

    def _rich_inspect_variables(self, arguments: Message) -> Message:
        record, handle = self._resolve(arguments.get("frameId"))
        name = str(arguments.get("variableName") or "")
        if not name.isidentifier():
            return {"data": {}, "metadata": {}}
        group = [peer for peer in self._focus.group(self._ranks.records()) if peer.session != record.session]
        ranks = [record, *group[: MOST_RANKS - 1]]
        depth = len(record.stack)
        ranks = [rank for rank in ranks if len(rank.stack) == depth]
        command = verbs.GetVariables(session="", frame=handle.frame, names=(name,), limit=VARIABLES_S)
        pairs = []
        for rank, answer in zip(ranks, self._ranks.ask(ranks, command), strict=True):
            value = answer.variables[0].value if answer.variables else None
            pairs.append((rank, verbs.CommandAnswer(session=rank.session, value=value, error=answer.error)))
        if pairs[0][1].value is None:
            return {"data": {}, "metadata": {}}
        return _rich(name, pairs)

    def _exception_info(self, arguments: Message) -> Message:
        targets = self._focus.targets(self._ranks.records(), int(arguments.get("threadId") or LEAD))
        if not targets:
            raise RequestRefused("no rank is stopped")
        note = targets[0].note or targets[0].reason
        return {"exceptionId": note.partition(":")[0], "description": note, "breakMode": "always"}

    def _source(self, arguments: Message) -> Message:
        path = str((arguments.get("source") or {}).get("path") or "")
        text = self._source_of(path)
        if text is not None:
            return {"content": text, "mimeType": "text/x-python"}
        for record in self._ranks.records():
            if any(frame.file == path for frame in record.stack):
                answer = self._ask(record, verbs.GetSource(session="", file=path))
                return {
                    "content": answer.content if isinstance(answer, verbs.SourceText) else "",
                    "mimeType": "text/x-python",
                }
        raise RequestRefused(f"the source of {path} is not available")


class CellSources:
    """Cells, known by the file names in their code objects. Dumped cells are written to these files, for debuggers that
    read files.
    """

    def __init__(self) -> None:
        self._cells: dict[str, str] = {}

    def dump(self, code: str) -> str:
        """Stores the text of a cell; returns its file."""
        path = cell_file(code)
        self._cells[path] = code
        try:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(path).write_text(code, encoding="utf-8")
        except OSError:  # a full disk: debuggers that read files do without
            pass
        return path

    def named_here(self, path: str) -> str:
        """This kernel's file name for a cell: a mesh may come from an earlier kernel, which has run the same cell."""
        name = os.path.basename(path)
        same = (cell for cell in self._cells if cell != path and os.path.basename(cell) == name)
        return path if path in self._cells else next(same, path)

    def text(self, path: str) -> str | None:
        """Text of a file or a cell; None where it is not available."""
        cell = self._cells.get(path)
        if cell is not None:
            return cell
        try:
            if os.path.getsize(path) <= LONGEST:
                return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            pass
        lines = linecache.getlines(path)
        return "".join(lines) if lines else None

    @staticmethod
    def info() -> dict[str, object]:
        """Data from which front ends compute the file of a cell."""
        prefix, suffix, seed = cell_files()
        return {"hashMethod": "Murmur2", "hashSeed": seed, "tmpFilePrefix": prefix, "tmpFileSuffix": suffix}


def _variable(variable: Variable, reference: int, *, by_type: bool) -> Message:
    """Returns a DAP Variable. With `by_type` the front end shows only the type of values that are not scalars."""
    shown = variable.value.text
    kind = shown if by_type and variable.value.type not in SCALARS else variable.value.type
    row: Message = {"name": variable.name, "value": shown, "type": kind, "variablesReference": reference}
    if variable.named:
        row["namedVariables"] = variable.named
    if variable.indexed:
        row["indexedVariables"] = variable.indexed
    if variable.expression:
        row["evaluateName"] = variable.expression
    return row


def _rest(count: int) -> Message:
    """Returns a row in place of variables that were not requested."""
    return {"name": "…", "value": f"{count} more", "type": f"{count} more", "variablesReference": 0}


def _text_of_answer(answer: CommandAnswer) -> str:
    """Returns the readable text of an answer."""
    parts = [answer.text.rstrip("\n")] if answer.text.strip() else []
    if answer.value is not None:
        parts.append(answer.value.text)
    return "\n".join(parts)


def _rich(name: str, pairs: Sequence[tuple[Stopped, CommandAnswer]], own_html: str = "") -> Message:
    """Returns a value as HTML: that of the rank in focus, and how the other ranks differ."""
    first = pairs[0][1]
    plain = first.error or (first.value.text if first.value is not None else "None")
    parts = []
    if own_html:
        parts.append(own_html)
    elif first.value is not None and first.value.tensor is not None:
        parts.append(_tensor(first.value, first.value.tensor))
    else:
        parts.append(f"<pre>{html.escape(plain)}</pre>")
    if len(pairs) > 1:
        parts.append(_by_rank(pairs))
    title = f"<p><b>{html.escape(name)}</b> on {html.escape(named([pairs[0][0]]))}</p>"
    return {"data": {"text/plain": plain, "text/html": f"<div>{title}{''.join(parts)}</div>"}, "metadata": {}}


def _tensor(value: Value, tensor: Tensor) -> str:
    numbers = {"shape": " × ".join(map(str, tensor.shape)) or "scalar", "dtype": tensor.dtype}
    numbers |= {"device": tensor.device} if tensor.device else {}
    for label, number in (("least", tensor.least), ("greatest", tensor.most), ("mean", tensor.mean)):
        if number is not None:
            numbers[label] = f"{number:.6g}"
    numbers |= {"NaN": str(tensor.nan)} if tensor.nan else {}
    numbers |= {"infinite": str(tensor.inf)} if tensor.inf else {}
    if tensor.step > 1:
        numbers["seen"] = f"every {tensor.step}th element"
    rows = "".join(f"<tr><th>{label}</th><td>{html.escape(text)}</td></tr>" for label, text in numbers.items())
    elements = value.text.partition("  ")[0] if value.text.startswith("[") else ""
    return f"<table>{rows}</table>" + (f"<pre>{html.escape(elements)}</pre>" if elements else "")


def _by_rank(pairs: Sequence[tuple[Stopped, CommandAnswer]]) -> str:
    by_text: dict[str, list[Stopped]] = {}
    for record, answer in pairs:
        text = answer.error or (answer.value.text if answer.value is not None else "None")
        by_text.setdefault(text, []).append(record)
    rows = "".join(
        f"<tr><td>{html.escape(named(records))}</td><td>{html.escape(text[:400])}</td></tr>"
        for text, records in sorted(by_text.items(), key=lambda group: len(group[1]))
    )
    return f"<table><tr><th>ranks</th><th>value</th></tr>{rows}</table>"

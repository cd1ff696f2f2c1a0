"""Exceptions and warnings of sharded tensors, their texts, and the lines of the program that they name."""

import linecache
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch

from monarch_nb._package import more
from monarch_nb.code.modules import name_of
from monarch_nb.settings import settings
from monarch_nb.supervision import DeviceMeshError, SupervisionError
from monarch_nb.tensor.propagation import NoRuleError, OperationPlan, PlanNotice, user_line
from monarch_nb.tensor.verbs import Failure, ranks_text
from monarch_nb.wire import ENGINE, ActorError, RemoteException

if TYPE_CHECKING:
    from monarch_nb.tensor.stream import Stream

RESTORE = "monarch.checkpoint(...).restore(), model.load_state_dict(...), or tensor.copy_(values)"
CHOICES = ("warn", "allow", "refuse")  # values of the setting `tensor_gather`
NAMED_FAILURES, REMEMBERED_FAILURES = 3, 256  # the most further failures that an error names, and that are stored
FORMER = "tell"  # the name of "warn" in 0.1.0

_LIBRARIES = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # of this package
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(os.path.dirname(os.__file__), "contextlib.py"),
    "<frozen",
)


class _LibraryFiles(dict[str, bool]):
    """Whether a file belongs to a library, by name."""

    def __missing__(self, file: str) -> bool:
        is_library = self[file] = file.startswith(_LIBRARIES)
        return is_library


_is_library = _LibraryFiles()


# A frame's position: cheap to record; its line is computed on demand.
CallSite = tuple[CodeType, int]


class ProgramLine(NamedTuple):
    """A line of a program."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The text of the line; "" if it is not available."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        location = f"{name_of(self.file)}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")
        return f"{location}\n    {self.source}" if self.source else location


def call_site(depth: int = 1) -> CallSite | None:
    """Returns the position of the innermost frame above the caller outside libraries; None if there is none."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and _is_library[frame.f_code.co_filename]:
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def origin_of(site: CallSite | None) -> ProgramLine | None:
    """Returns the source line of a call site."""
    if site is None:
        return None
    code, instruction = site
    line = next((line for start, line in _lines(code) if start >= instruction), code.co_firstlineno)
    return ProgramLine(code.co_filename, line, code.co_qualname)


def _lines(code: CodeType) -> Iterator[tuple[int, int]]:
    """Yields the last instruction of each code range, and its line."""
    for _, end, line in code.co_lines():
        if line is not None:
            yield end - 1, line


class TensorError(ActorError, RuntimeError):
    """An operation failed on the workers. The mesh stays usable; the result of the operation is lost.

    `operation` is its name ("" if a failure elsewhere cut it off), `origin` the line of the program that issued it, if
    known, `failures` the workers' errors by rank.
    """

    missing = ("Nobody has fetched what this operation made", "`monarch.inspect(…)` raises its error")

    def __init__(
        self, operation: str, origin: ProgramLine | None, failures: Sequence[Failure], mesh: str = "", details: str = ""
    ) -> None:
        first = failures[0]
        remote = RemoteException(first.type_name, first.text, first.traceback, "it was sent as text")
        ranks = ranks_text([failure.rank for failure in failures])
        location = f"{ranks} of {mesh}" if mesh else ranks
        if operation:
            summary = f"{operation} failed on {location}: {first.line}"
        else:
            summary = f"this needs a tensor that was lost on {location}: {first.text}\n  restore it: {RESTORE}"
        if origin is not None:
            summary += f"\n  issued at {origin}"
        summary += f"\n{details}" * bool(details)
        super().__init__(remote, summary, formatted=first.traceback)
        self.operation, self.origin = operation, origin
        self.failures = {
            failure.rank: RemoteException(failure.type_name, failure.text, failure.traceback, "")
            for failure in failures
        }
        self._arguments = (operation, origin, tuple(failures), mesh, details)

    def copy(self) -> "TensorError":
        """Returns an equal error without the traceback of this one."""
        return TensorError(*self._arguments)

    @property
    def worker_error_string(self) -> str:
        """The same as `exception_formatted`; this name, `rank` and `controller_frames` are torchmonarch's."""
        return self.exception_formatted

    @property
    def rank(self) -> int:
        """The first rank on which it failed."""
        return next(iter(self.failures))

    @property
    def controller_frames(self) -> list[traceback.FrameSummary]:
        """The line of the program that issued the operation, if it is known."""
        return [] if self.origin is None else [traceback.FrameSummary(*self.origin)]

    def __str__(self) -> str:
        files = [line for line in self.exception_formatted.splitlines() if line.startswith('  File "')]
        of_program = any(not line.startswith(f'  File "{ENGINE}') for line in files)  # none for an operator of torch
        return super().__str__() if of_program else self.summary

    def __reduce__(self) -> tuple[object, ...]:
        return TensorError, self._arguments


class RankTensorError(TypeError, RuntimeError):
    """A tensor of the ranks' own values was used where it cannot be. `code` is the reason, in torchmonarch's terms.

    LOCAL_TENSOR: with a local tensor. WRONG_MESH: with one of another mesh. WRONG_STREAM: on another stream than its
    own. DROPPED: after `drop()`. BORROWED, MUTATING_BORROW: while it is lent. REQUIRES_GRAD: where gradients would be
    lost. DIFFERENT_VALUES: as one value, although ranks have several.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, str(self).removeprefix(f"{self.code}: "))


class ContentsLostError(DeviceMeshError):
    """Shards of a tensor are lost, since a process that held one has died or the mesh was healed."""


class StreamFailures:
    """The failed operations of a stream, from the reply with a failure until the program has seen its error."""

    def __init__(self) -> None:
        self._newest: dict[int, TensorError] = {}  # by operation
        self._unseen: dict[int, TensorError] = {}  # `apart` failures that were not fetched or reported
        self._unraised: deque[TensorError] = deque()  # failures that no call has raised
        self._due: list[int] = []  # `apart` failures that the next call of `overdue` returns

    def add(self, number: int, error: TensorError, failures: Sequence[Failure]) -> None:
        """Adds an operation that failed on some ranks."""
        self._newest[number] = error
        if all(failure.apart for failure in failures):
            self._unseen[number] = error  # others continue: each fetch of a dependent tensor raises it
        elif any(failure.type_name != "KeyboardInterrupt" for failure in failures):  # which the user caused
            self._unraised.append(error)
        for stored in (self._newest, self._unseen):
            while len(stored) > REMEMBERED_FAILURES:
                del stored[next(iter(stored))]

    def error_of(self, number: int) -> TensorError | None:
        """Returns the error of an operation, if it is known; it then counts as seen."""
        self._unseen.pop(number, None)
        return self._newest.get(number)

    def overdue(self) -> list[TensorError]:
        """Returns errors that were here at the last call, and that nobody has seen since; they then count as seen."""
        errors = [error for number in self._due if (error := self._unseen.pop(number, None)) is not None]
        self._due = list(self._unseen)
        return errors

    def raise_unseen(self) -> None:
        """Raises the first error that nobody has seen."""
        for number in tuple(self._unseen):
            raise self._unseen.pop(number)

    def raise_first(self) -> None:
        """Raises the first failure that was not raised yet, with notes about further ones."""
        if not self._unraised:
            return
        error, *further = self._unraised
        self._unraised.clear()
        for failure in further[:NAMED_FAILURES]:
            error.add_note(f"then: {failure.summary}")
        if len(further) > NAMED_FAILURES:
            error.add_note(f"and {len(further) - NAMED_FAILURES} operations more")
        raise error


def by_operation(failures: Sequence[Failure]) -> Mapping[int, list[Failure]]:
    """Groups failures by operation, in order of operations and ranks."""
    grouped: dict[int, list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: (failure.number, failure.rank)):
        grouped.setdefault(failure.number, []).append(failure)
    return grouped


def stopped_text(reason: str) -> str:
    """Returns the error text for tensors of a mesh that was stopped."""
    return f"the mesh was stopped: {reason}"


def lost_text(mesh: str, reason: str) -> str:
    """Returns the error text for tensors of a mesh that lost a process, with the remedy."""
    return (
        f"{mesh} has lost tensors: {reason}. mesh = monarch.heal_mesh(mesh) brings its processes back, and the tensors "
        "that other ranks hold as well; restore the others" + more("manual/tensors.md#failures-and-what-is-lost")
    )


def replaced_text(mesh: str, how: str) -> str:
    """Returns the error text for tensors of a mesh whose processes were replaced, with the remedy."""
    return (
        f"the tensors of {mesh} are gone: {mesh} has {how}. Make a mesh for tensors on what it has now, with "
        "Mesh.of(procs), and restore them" + more("manual/elastic.md#shrinking")
    )


def broken_mesh(mesh: str, error: SupervisionError, sites: Sequence[CallSite | None]) -> SupervisionError:
    """Returns the error for a wait on operations issued at these call sites, on a mesh that lost a process."""
    origin = next((origin for site in sites if (origin := origin_of(site)) is not None), None)
    text = f"mesh {mesh} is broken" + (f"; it was at operations of {origin}" if origin is not None else "")
    details = str(error) if error.failure is None else error.failure.report()
    return SupervisionError(f"{text}\n{details}", failure=error.failure)


class CompileError(RuntimeError):
    """A step cannot be compiled as it is. The text names the line and the remedy."""


class CompileWarning(UserWarning):
    """A step runs without being compiled: the text has the reason. Its results are correct."""


class GatherWarning(UserWarning):
    """An operation on sharded tensors gathered them on every process. Its results are correct.

    Issued once for each operation of a mesh. `configure(tensor_gather="allow")` silences it, "refuse" raises.
    """


def is_refused() -> bool:
    """Returns whether the setting `tensor_gather` refuses gathering. Raises ValueError for an unknown value."""
    if settings.tensor_gather not in (*CHOICES, FORMER):
        raise ValueError(f"tensor_gather={settings.tensor_gather!r}: one of {', '.join(map(repr, CHOICES))}")
    return settings.tensor_gather == "refuse"


def check_notices(stream: "Stream", plan: OperationPlan, site: CallSite | None) -> None:
    """Issues the warnings of a plan. Raises NoRuleError if gathering is refused."""
    if is_refused():
        notice = plan.notices[0]
        raise NoRuleError(
            notice.operation,
            notice.text.partition(": ")[2],
            'Redistribute its inputs yourself, or allow it: monarch.config.configure(tensor_gather="warn")',
            user_line(),
        )
    for notice in plan.notices:
        warn_once(stream, notice, site)


def warn_once(stream: "Stream", notice: PlanNotice, site: CallSite | None) -> None:
    """Warns at the user's line, once for each operation of a mesh."""
    if notice.operation in stream.noticed or settings.tensor_gather == "allow":
        return
    stream.noticed.add(notice.operation)
    origin = origin_of(site)
    if origin is None:
        warnings.warn(notice.text, GatherWarning, stacklevel=2)
    else:
        warnings.warn_explicit(notice.text, GatherWarning, origin.file, origin.line)

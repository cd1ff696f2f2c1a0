"""Lines and modules that issued the operations on a mesh of sharded tensors, which only the controller knows."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CodeType
from typing import NamedTuple, TypeAlias

import torch

from monarch_nb.diagnosis.nonfinite_rank import ForwardRecord, ModulePaths, NonFinite
from monarch_nb.diagnosis.tensor_allocations import ACTIVATIONS, BACKWARD
from monarch_nb.runtime.tensor_memory import OTHER

CallSite: TypeAlias = tuple[CodeType, int]
Sites: TypeAlias = Sequence[CallSite | None]
Issued: TypeAlias = Callable[[CallSite | None], CallSite | None]
Sent: TypeAlias = Callable[[int, int, Sites], None]
Joined: TypeAlias = Callable[[], None]
MOST = 1 << 20  # operations whose lines are known


class _Site(tuple[CodeType, int]):
    """A call site, with the module that ran there, or whose backward pass it belongs to."""

    module = ""
    is_backward = False
    forward: "_Site | None" = None


class Origin(NamedTuple):
    """The line that issued an operation, its module, "" outside of modules, and whether a backward pass did."""

    source: str
    module: str = ""
    backward: bool = False

    @property
    def kind(self) -> str:
        """The kind of memory that the operation allocates."""
        return BACKWARD if self.backward else ACTIVATIONS if self.module else OTHER


def _line(site: CallSite) -> str:
    code, instruction = site
    lines = (line for _, end, line in code.co_lines() if line is not None and end > instruction)
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)}"


class IssuedOperations:
    """Notes where operations are issued, from `begin` to `end`; `observe` takes the functions that note them."""

    def __init__(self, observe: Callable[[Issued | None, Sent, Joined], None]) -> None:
        self._observe = observe
        self._sent: deque[tuple[int, int, Sites]] = deque()  # streams, first numbers, sites
        self._count = 0
        self._forward: ForwardRecord[_Site] = ForwardRecord()
        self._modules: ModulePaths | None = None

    def begin(self, joined: Joined = lambda: None) -> None:
        """Begins; `joined` is called when further actors execute operations."""
        self._modules = ModulePaths(lambda: True)
        self._observe(self._note_issued, self._note_sent, joined)

    def end(self) -> None:
        """Ends; may be called several times."""
        if self._modules is not None:
            self._modules.end()
            self._modules = None
            self._observe(None, self._note_sent, lambda: None)

    def located(self, event: NonFinite | None) -> NonFinite | None:
        """Returns the event with the line and the module that issued its operation, if they are known."""
        if event is None or event.issued is None:
            return event
        origin = self.origin(event.issued)
        return event if origin is None else replace(event, **origin._asdict())

    def origin(self, issued: tuple[int, int]) -> "Origin | None":
        """Returns the origin of the operation with this number of a stream; None if it was issued before `begin`."""
        stream, number = issued
        for of_stream, first, sites in self._sent:
            if of_stream == stream and first <= number < first + len(sites):
                site = sites[number - first]
                if isinstance(site, _Site):
                    source = site.forward or site
                    return Origin(_line(source), source.module, site.is_backward)
                return None if site is None else Origin(_line(site))
        return None

    def _note_issued(self, call_site: CallSite | None) -> CallSite | None:
        if call_site is None or self._modules is None or type(call_site) is not tuple:
            return call_site  # of a compiled step: the sites of all its operations
        site = _Site(call_site)
        if torch._C._current_graph_task_id() != -1:
            site.is_backward = True
            site.forward = self._forward.of_backward()
        else:
            site.module = self._modules.current
            if torch.is_grad_enabled():
                self._forward.note(lambda: site)
        return site

    def _note_sent(self, stream: int, first: int, sites: Sites) -> None:
        self._sent.append((stream, first, sites))
        self._count += len(sites)
        while self._count > MOST:
            self._count -= len(self._sent.popleft()[2])

"""Brings the debugger into waits, blocking and awaited ones: a prompt, or StoppedAtBreakpoint."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from monarch_nb._package import more
from monarch_nb.debug.control.controller import Controller, asking
from monarch_nb.debug.prompt.conversation import NoPrompt, ScriptTerminal, Terminal, converse
from monarch_nb.debug.prompt.prompt import DebugPrompt
from monarch_nb.debug.records import Stopped, StoppedAtBreakpoint
from monarch_nb.debug.render.groups import FileName, named, short
from monarch_nb.runtime import Future, current, waiting
from monarch_nb.settings import settings

GATHER_S = 0.05  # ranks that stop within this time of each other are shown together
IN_CELLS = "Debug them in the next cell: %%mdb NAME, or monarch.debug; then .get() again"
IN_SCRIPTS = "Look at them with monarch.debug (table, eval), continue them with debug.resume(); then .get() again"
PROMPTS = 32  # that are stored, with their focus, for further waits for their calls


class WaitPrompt(waiting.WaitObserver):
    """Checks, while a thread waits for a call, whether ranks that it waits for are stopped. Opens a prompt at the
    terminal, or raises StoppedAtBreakpoint where nobody can be asked.
    """

    def __init__(
        self,
        controller: Controller,
        terminal: Terminal,
        may_ask: Callable[[], bool],
        name: FileName = short,
        *,
        how: str = IN_CELLS,
        shown_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """`may_ask()` is true if a wait of the calling thread may open a prompt; `how` is the advice where none can be,
        with NAME for the mesh; while `shown_elsewhere()`, another debugger shows the stops, and waits say nothing.
        """
        self._shown_elsewhere = shown_elsewhere
        self.controller = controller
        self.terminal = terminal
        self._may_ask = may_ask
        self._name = name
        self._how = how
        self._asking = threading.Lock()
        self._shown: set[tuple[str, int]] = set()  # stops that were shown, by session and number
        self._ignored: set[tuple[str, int]] = set()  # stops that this wait ignores
        self._prompts: dict[str, DebugPrompt] = {}

    def install(self) -> None:
        """Joins waits, which then show stopped ranks."""
        self.controller.mark_attended()
        waiting.join(self)
        waiting.enter_awaits(self)

    def uninstall(self) -> None:
        """Leaves waits."""
        waiting.leave(self)

    # -- waits --------------------------------------------------------------------------------------------------------

    def tick(self, future: Future[object], seconds: float) -> None:
        """Handles a tick of a wait, on the waiting thread. Raises StoppedAtBreakpoint."""
        if not asking.waiting and self._may_ask():
            self.check(future)

    def begin(self, future: Future[object], timeout: float | None) -> None:
        """Clears the stops that earlier waits have ignored."""
        if not asking.waiting and self._may_ask():
            self._ignored.clear()

    def begin_await(self, future: Future[object], signal: "asyncio.Future[None]") -> Callable[[], None] | None:
        """Checks the stops at each tick, on the loop."""
        if not self._may_ask():
            return None
        loop = asyncio.get_running_loop()
        handles: list[asyncio.TimerHandle] = []

        def tick() -> None:
            if signal.done():
                return
            try:
                self.check(future)
            except (StoppedAtBreakpoint, KeyboardInterrupt) as error:
                if not signal.done():
                    signal.set_exception(error)
                return
            handles[:] = [loop.call_later(waiting.TICK, tick)]

        handles.append(loop.call_later(waiting.TICK, tick))
        return lambda: handles[0].cancel()

    # -- reactions -----------------------------------------------------------------------------------------------------

    def check(self, future: Future[object]) -> None:
        """Opens a prompt, or raises StoppedAtBreakpoint, if a relevant rank is stopped. On the waiting thread."""
        stopped = self.controller.stopped
        if (
            not stopped.any
            or self._shown_elsewhere()
            or not self.relevant(future)
            or not self._asking.acquire(blocking=False)
        ):
            return
        try:
            stopped.settle(GATHER_S)
            records = self.relevant(future)
            if not records:
                return
            try:
                if self.terminal.can_ask:
                    self._ask(future, records)
                    return
            except NoPrompt:
                pass
            self._raise_or_show(future, records)
        finally:
            self._asking.release()

    def relevant(self, future: Future[object]) -> list[Stopped]:
        """Stops that concern this wait: it waits for them, or they were not shown yet."""
        records = [record for record in self.controller.stopped.records() if _stop(record) not in self._ignored]
        related = self._related(future, records)
        return [
            record
            for record in records
            if record in related or (record.blocks_actor and _stop(record) not in self._shown)
        ]

    def _related(self, future: Future[object], records: list[Stopped]) -> list[Stopped]:
        if not records:
            return []
        call = self.controller.runtime.calls.get(future.wait_id)
        missing = set(call.missing_ranks()) if call is not None else set()
        return [
            record
            for record in records
            if (future.wait_id and future.wait_id in record.chain)
            or (call is not None and record.blocks_actor and record.mesh == call.mesh and record.rank in missing)
        ]

    def _raise_or_show(self, future: Future[object], records: list[Stopped]) -> None:
        """Without a prompt: raises if the call waits for stopped ranks, or else shows them."""
        related = self._related(future, records)
        if related:
            call = self.controller.runtime.calls.get(future.wait_id)
            ranks = {record.rank for record in related if call is not None and record.mesh == call.mesh}
            covered = call is None or set(call.missing_ranks()) <= ranks
            since = time.monotonic() - self.controller.stopped.changed_at
            if covered or since >= settings.debug_patience:
                raise self.error(future, related)
        fresh = [record for record in records if record not in related and _stop(record) not in self._shown]
        if fresh:
            self._shown |= set(map(_stop, fresh))
            table = DebugPrompt(self.controller, lambda: fresh, self._name).table()
            self.terminal.write(f"{table}\n{self._how_for(fresh).partition(';')[0]}\n")

    def _how_for(self, records: list[Stopped]) -> str:
        return self._how.replace("NAME", records[0].name)

    def error(self, future: Future[Any], records: list[Stopped]) -> StoppedAtBreakpoint:
        """Returns the exception of a call where no prompt can be shown."""
        self._shown |= set(map(_stop, records))
        table = DebugPrompt(self.controller, lambda: records, self._name).table()
        progress = future.progress_text() or "the call waits"
        reason = "no prompt can be shown here" if settings.debug_prompt else "nothing is asked (debug_prompt)"
        message = f"{progress}: {named(records)} stopped in the debugger, and {reason}.\n{table}\n"
        how = self._how_for(records)
        explained = more("manual/debugging.md#without-a-prompt")
        text = f"{message}They stay stopped and the call stays under way. {how}{explained}"
        return StoppedAtBreakpoint(text, records, table)

    def _prompt(self, future: Future[object]) -> DebugPrompt:
        key = future.wait_id or "any"
        prompt = self._prompts.get(key)
        if prompt is None:
            if len(self._prompts) > PROMPTS:
                self._prompts.clear()
            prompt = self._prompts[key] = DebugPrompt(self.controller, lambda: self.relevant(future), self._name)
        prompt.leave, prompt.interactive = "", False
        return prompt

    def _ask(self, future: Future[Any], records: list[Stopped]) -> None:
        prompt = self._prompt(future)
        converse(prompt, self.terminal, over=future.done)
        remaining = prompt.candidates()
        self._shown |= set(map(_stop, remaining))
        self._ignored |= set(map(_stop, remaining))
        if prompt.leave == "detach" and not future.done():
            how = self._how_for(records)
            message = f"{named(remaining)} left stopped in the debugger; the call stays under way. {how}"
            raise StoppedAtBreakpoint(message, remaining, prompt.table(source=False))


def _stop(record: Stopped) -> tuple[str, int]:
    return record.session, record.number


def attend(controller: Controller) -> None:
    """Installs prompts for scripts, on the main thread; without a terminal all waits raise StoppedAtBreakpoint."""
    console = ScriptTerminal()

    def may_ask() -> bool:
        running, thread = current.get(), threading.current_thread()
        outside = running is None or running.actor_instance.cell is None
        theirs = thread is threading.main_thread() or (not console.can_ask and not thread.name.startswith("monarch"))
        return outside and theirs and not controller.runtime.closed

    WaitPrompt(controller, console, may_ask, how=IN_SCRIPTS).install()

"""An event loop on a thread of its own."""

import asyncio
import threading

_CLOSING_S = 2.0


class LoopThread:
    """Runs until it is told to end, which leaves no thread and no descriptor."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def end(self) -> None:
        """Ends it, after what was asked of it before. Does not block."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_finish())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()


async def _finish() -> None:
    """Lets what still closes end, for a moment; the rest is cancelled."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_CLOSING_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    # One that closes keeps its socket while its other end does not read what is left. asyncio lists them nowhere else.
    for transport in tuple(getattr(asyncio.get_running_loop(), "_transports", {}).values()):
        transport.abort()
    await asyncio.sleep(0)  # in which they are closed

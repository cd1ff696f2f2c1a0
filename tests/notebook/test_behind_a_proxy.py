"""A page behind a proxy that buffers, and that drops its websocket: its view goes on where it was, nothing is lost."""

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.browser.lab import Served, serve
from tests.frames import FrameProxy
from tests.notebook.page_client import Page
from tests.proxy import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # a server and a kernel of its own


def kernel_of(served: Served) -> str:
    request = urllib.request.Request(
        f"{served.url}api/kernels", b"{}", {"Authorization": f"token {served.token}"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.loads(answer.read())["id"])


async def drive(served: Served, proxy: Proxy) -> None:
    page = Page(f"ws://127.0.0.1:{proxy.port}", served.token, kernel_of(served))
    await page.connect()
    await page.run("%load_ext monarch\n%mesh w gpus=2\nimport os")
    pids = json.loads(await page.run("print(list(w.run(os.getpid).get().values()))"))
    await page.watch()
    await page.until(lambda ranks: set(ranks.values()) == {"idle"})

    proxy.hold()  # until the next release
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(TimeoutError):
        await page.silent(2)
    assert page.ranks()[0] == "idle"
    proxy.release()
    await page.until(lambda ranks: ranks.get(0) == "failed")

    proxy.cut()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(page.read(), 30)
    os.kill(pids[1], signal.SIGKILL)
    await asyncio.sleep(2)  # while the page receives nothing
    proxy.mend()
    await page.connect()  # the same page: the server has kept the messages of the kernel
    await page.until(lambda ranks: ranks.get(1) == "failed")
    assert page.deltas >= 2
    assert page.gaps == 0

    await page.run("%heal w")
    await page.until(lambda ranks: set(ranks.values()) == {"idle"})

    again = Page(f"ws://127.0.0.1:{proxy.port}", served.token, page.kernel)
    await again.connect()  # a page that was loaded anew
    await again.watch()
    await again.until(lambda ranks: ranks == page.ranks())
    await again.run("%stop --all")
    for client in (page, again):
        client.close()


def test_views_behind_a_lossy_proxy_get_every_event_in_order(tmp_path: Path) -> None:
    with serve(tmp_path, {"MONARCH_NB_PRELOAD": ""}) as served:
        proxy = Proxy(served.url.rstrip("/"))
        try:
            asyncio.run(drive(served, proxy))
        finally:
            proxy.close()


# Ranks in the store alone: their snapshot has some 25 MB.
RANKS = """
%load_ext monarch
import os, signal, time
from monarch_nb.runtime import current_runtime
from monarch_nb.store import store_of, events as e
%mesh w gpus=2
store, now, count = store_of(current_runtime()), time.time(), 200_000
store.put(e.MeshDescription(uid="many", name="many", kind="procs", ranks=range(count), labels=("gpus",), sizes=(count,),
                    strides=(1,), hosts=("node",), per_host=count, ready=True, at=now))
for rank in range(count):
    store.put(e.ProcessStarted("many", rank, 40_000 + rank, now))
    store.put(e.Usage("many", rank, 0.25, 2_000_000_000 + rank))
"""
LARGE = "from IPython.display import HTML, display\ndisplay(HTML('x' * 12_000_000))"


async def shown_and_read(page: Page) -> None:
    await page.run(LARGE)
    await asyncio.wait_for(page.read(), 30)  # the cell has ended before all of it is here


async def large(served: Served, proxy: FrameProxy) -> None:
    page = Page(f"ws://127.0.0.1:{proxy.port}", served.token, kernel_of(served))
    await page.connect()
    await page.run(RANKS)
    await page.watch()
    await page.until(lambda ranks: set(ranks.values()) == {"idle"})
    [many] = [uid for uid, mesh in page.state["meshes"].items() if mesh["name"] == "many"]
    while len(page.state["ranks"].get(many, ())) < 200_000:
        await asyncio.wait_for(page.next(), 30)
    assert proxy.too_large == 0, "what views are sent comes in pieces"

    with pytest.raises(ConnectionError):  # what a cell of the user's shows may be as large as it likes
        await shown_and_read(page)
    assert proxy.too_large == 1
    await page.connect()
    await page.run("os.kill(w.slice(gpus=1).run(os.getpid).get().item(), signal.SIGKILL)")
    await page.until(lambda ranks: ranks.get(1) == "failed")

    before = await page.missing()
    proxy.loses = True
    await page.send("execute_request", {"code": "%heal w", "silent": False})
    with pytest.raises(TimeoutError):
        await page.silent(5)
    proxy.loses = False
    assert await page.missing() > before, "the page sees that something is missing"
    await page.watch_again()
    await page.until(lambda ranks: set(ranks.values()) == {"idle"})
    await page.run("%stop --all")
    page.close()


def test_messages_to_views_pass_a_proxy_with_a_10_mb_limit(tmp_path: Path) -> None:
    with serve(tmp_path, {"MONARCH_NB_PRELOAD": ""}) as served:
        proxy = FrameProxy(served.url.rstrip("/"))
        try:
            asyncio.run(large(served, proxy))
        finally:
            proxy.close()

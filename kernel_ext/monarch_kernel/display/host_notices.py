"""Hosts that are about to be taken away, each announced once, in the cell that runs or ran last."""

import threading
from collections.abc import Callable
from html import escape

from monarch_nb.mesh.mesh_events import HostMessage, HostNoticed, HostNoticeWithdrawn

from ..front import Bundle, Front
from .html import framed


def show_notice(
    front: Front, before: Callable[[], None], event: HostNoticed | HostNoticeWithdrawn | HostMessage
) -> None:
    """Shows a notice, from any thread; does not block. `before` is called first, so that earlier output comes first."""
    cell = front.parent

    def show() -> None:
        before()
        front.display(notice_bundle(event), cell=cell)

    threading.Thread(target=show, name="monarch-notice", daemon=True).start()


def notice_bundle(event: HostNoticed | HostNoticeWithdrawn | HostMessage) -> Bundle:
    """A card: which host, how long it has, what is on it and what can be done."""
    head, *lines = event.text.splitlines()
    parts = [f"<b>{escape(head)}</b>", *(f'<div class="mnb-s">{escape(line.strip())}</div>' for line in lines)]
    return {"text/plain": event.text, "text/html": framed(*parts)}

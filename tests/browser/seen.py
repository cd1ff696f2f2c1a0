"""When something is to be seen in a page, by the page's own clock, which is that of the machine."""

from collections.abc import Mapping
from typing import Any

# Looks after every change of the page, and once before: what is there already is as good as seen now.
WATCH = """wanted => {
    const told = window.mnbSeen = {};
    const there = ([selector, name]) => [...document.querySelectorAll(selector)].some(
        node => !name || (node.querySelector(".mnb-outline-name") ?? node).textContent.includes(name));
    const look = () => {
        for (const [key, what] of Object.entries(wanted))
            if (!(key in told) && there(what)) told[key] = performance.timeOrigin + performance.now();
        if (Object.keys(told).length === Object.keys(wanted).length) observer.disconnect();
    };
    const observer = new MutationObserver(look);
    observer.observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
    look();
}"""


class Seen:
    """Watches from now on for elements, each given by a selector and a part of its text ("" for any)."""

    def __init__(self, shown: Any, wanted: Mapping[str, tuple[str, str]]) -> None:
        self._shown = shown
        self._wanted = wanted
        shown.evaluate(WATCH, {name: list(what) for name, what in wanted.items()})

    def after(self, began: float, timeout: float = 30) -> dict[str, float]:
        """Waits for all of them; milliseconds from a moment (seconds, as time.time has them) to each."""
        everything = f"() => Object.keys(window.mnbSeen).length === {len(self._wanted)}"
        self._shown.wait_for_function(everything, timeout=timeout * 1000)
        told = self._shown.evaluate("window.mnbSeen")
        return {name: told[name] - 1000 * began for name in self._wanted}


def rank(index: int, state: str) -> tuple[str, str]:
    """A rank of a mesh in a cell."""
    return f'.mnb-cell[data-index="{index}"][data-state="{state}"]', ""


def row(name: str, state: str) -> tuple[str, str]:
    """A row of the panel."""
    return f'.mnb-panel .mnb-outline-row[data-state="{state}"]', name


def told(what: str, times: Mapping[str, float]) -> str:
    """A line for the log of a test."""
    return f"{what}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in times.items())

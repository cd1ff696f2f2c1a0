"""When an element appears in a page, by the page's own clock, which is that of the machine."""

from collections.abc import Mapping
from typing import Any

# Checks after every change of the page, and once before: an element that exists already counts as seen now.
WATCH = """targets => {
    const times = window.mnbSeen = {};
    const shows = ([selector, name]) => [...document.querySelectorAll(selector)].some(
        node => !name || (node.querySelector(".mnb-outline-name") ?? node).textContent.includes(name));
    const check = () => {
        for (const [key, target] of Object.entries(targets))
            if (!(key in times) && shows(target)) times[key] = performance.timeOrigin + performance.now();
        if (Object.keys(times).length === Object.keys(targets).length) observer.disconnect();
    };
    const observer = new MutationObserver(check);
    observer.observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
    check();
}"""


class Sighting:
    """Watches from now on for elements, each given by a selector and a part of its text ("" for any)."""

    def __init__(self, shown: Any, targets: Mapping[str, tuple[str, str]]) -> None:
        self._shown = shown
        self._targets = targets
        shown.evaluate(WATCH, {name: list(target) for name, target in targets.items()})

    def after(self, began: float, timeout: float = 30) -> dict[str, float]:
        """Waits for all of them; milliseconds from a time (in seconds, as of time.time) to each."""
        everything = f"() => Object.keys(window.mnbSeen).length === {len(self._targets)}"
        self._shown.wait_for_function(everything, timeout=timeout * 1000)
        times = self._shown.evaluate("window.mnbSeen")
        return {name: times[name] - 1000 * began for name in self._targets}


def rank(index: int, state: str) -> tuple[str, str]:
    """A rank of a mesh in a cell."""
    return f'.mnb-cell[data-index="{index}"][data-state="{state}"]', ""


def row(name: str, state: str) -> tuple[str, str]:
    """A row of the panel."""
    return f'.mnb-panel .mnb-outline-row[data-state="{state}"]', name


def timing(title: str, times: Mapping[str, float]) -> str:
    """A line for the log of a test."""
    return f"{title}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in times.items())

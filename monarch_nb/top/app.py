"""The live table in a terminal. Only visible lines are rendered, so that ten thousand ranks cost no more."""

import time
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from monarch_nb.top.connection import Watching
from monarch_nb.top.rows import HEADS, SORTS, Row, ViewChoice, cells, rows, summary

REFRESH_S = 0.5  # between two updates; the state may change far more often
_WIDEST = (18, 14, 22, 12, 44, 7, 6, 8, 9)  # of the columns
_RIGHT = frozenset((5, 6, 7, 8))
_COLOURS = {
    "failed": "bold red", "unresponsive": "yellow", "paused": "magenta", "healing": "yellow", "starting": "cyan",
    "busy": "blue", "idle": "green", "stopped": "bright_black",
}  # fmt: skip


class Table(ScrollView):
    """Rows with a cursor, below a header."""

    can_focus = True

    cursor: reactive[int] = reactive(0)

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home", "move(-1000000000)", show=False),
        Binding("end", "move(1000000000)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._widths = tuple(map(len, HEADS))

    def put(self, shown: list[Row]) -> None:
        """Shows rows; the cursor stays at its row if that is among them."""
        key = self.rows[self.cursor].key if self.cursor < len(self.rows) else None
        self.rows = shown
        index = next((index for index, row in enumerate(shown) if row.key == key), self.cursor)
        self.cursor = max(0, min(index, len(shown) - 1))
        self.virtual_size = Size(sum(self._widths) + 2 * len(HEADS), len(shown))
        self.refresh()

    @property
    def chosen(self) -> Row | None:
        """The row at the cursor."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def watch_cursor(self) -> None:
        """Scrolls to the cursor."""
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False)
        self.refresh()

    def action_move(self, by: int) -> None:
        """Moves the cursor."""
        self.cursor = max(0, min(self.cursor + by, len(self.rows) - 1))

    def action_page(self, by: int) -> None:
        """Moves the cursor by a page."""
        self.action_move(by * max(1, self.size.height - 1))

    def lines(self, first: int, count: int) -> list[tuple[str, ...]]:
        """Rows as text."""
        now = time.time()
        return [cells(row, now) for row in self.rows[first : first + count]]

    def head(self) -> str:
        """Returns the header, with columns as wide as the visible lines need."""
        lines = self.lines(self.scroll_offset.y, max(1, self.size.height))
        self._widths = tuple(
            min(widest, max(len(head), *(len(line[column]) for line in lines))) if lines else len(head)
            for column, (head, widest) in enumerate(zip(HEADS, _WIDEST, strict=True))
        )
        return "  ".join(
            _fit(head, width, column) for column, (head, width) in enumerate(zip(HEADS, self._widths, strict=True))
        )

    def render_line(self, y: int) -> Strip:
        """Renders one visible line."""
        index = y + self.scroll_offset.y
        if index >= len(self.rows):
            return Strip.blank(self.size.width, self.rich_style)
        row = self.rows[index]
        base = self.rich_style + Style(reverse=index == self.cursor and self.has_focus, bold=index == self.cursor)
        parts = []
        for column, text in enumerate(cells(row, time.time())):
            style = base + Style.parse(_COLOURS.get(row.state, "")) if column == 3 else base
            parts.append(Segment(f"{_fit(text, self._widths[column], column)}  ", style))
        return Strip(parts).adjust_cell_length(self.size.width, base).crop(0, self.size.width)


def _fit(text: str, width: int, column: int) -> str:
    cut = text if len(text) <= width else f"{text[: width - 1]}…"
    return cut.rjust(width) if column in _RIGHT else cut.ljust(width)


def _row_text(row: Row) -> str:
    """Describes a row in words, without cuts."""
    return f"{row.host} {row.mesh} {row.place}: {cells(row, 0.0)[4] or row.state}"


class Top(App[None]):
    """`monarch-nb top`."""

    TITLE = "monarch-nb top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: 1; padding: 0 1; text-style: bold; }
    #look { height: 1; padding: 0 1; color: $text-muted; }
    #head { height: 1; text-style: underline; }
    #detail { height: auto; max-height: 4; padding: 0 1; border-top: solid $primary; }
    Input { display: none; height: 3; }
    Input.searching { display: block; }
    Table { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "find", key_display="/"),
        Binding("s", "sort", "sort"),
        Binding("h", "hosts", "by host"),
        Binding("enter", "open", "open host", priority=False),
        Binding("escape", "back", "back"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, watching: Watching) -> None:
        super().__init__()
        self.watching = watching
        self.look = ViewChoice()
        self.looks = 0  # number of updates that drew rows
        self._drawn: tuple[int, ViewChoice] | None = None
        self.table = Table()

    def compose(self) -> ComposeResult:
        """Yields the widgets from top to bottom."""
        with Vertical():
            yield Static(id="summary", markup=False)
            yield Static(id="look", markup=False)
            yield Input(placeholder="failed, node17, gpus=0:4, cpu>50%, memory>2GB …")
            yield Static(id="head", markup=False)
            yield self.table
            yield Static(id="detail", markup=False)
            yield Footer()

    def on_mount(self) -> None:
        """Starts the refresh."""
        self.table.focus()
        self.set_interval(REFRESH_S, self.look_again)
        self.look_again()

    def look_again(self) -> None:
        """Draws changes since the last call, if any, and the durations in any case."""
        with self.watching.lock:
            view = (self.watching.version, self.look)
            if view != self._drawn:
                self._drawn = view
                self.looks += 1
                document = self.watching.document
                shown, totals = rows(document, self.look), summary(document)
                self._set_text("summary", totals)
                self.table.put(shown)
        self.table.refresh()
        self._set_text("head", self.table.head())
        self._set_text("look", self._words())
        chosen = self.table.chosen
        self._set_text("detail", "" if chosen is None else _row_text(chosen))

    def _words(self) -> str:
        look, connection = self.look, self.watching.connection
        parts = [
            self.watching.over or f"{connection.what}, process {connection.pid}, read-only",
            f"sorted by {look.sort}",
        ]
        if look.host:
            parts.append(f"host {look.host}")
        if look.query:
            parts.append(f"found {len(self.table.rows):,} of: {look.query}")
        return " · ".join(parts)

    def _set_text(self, widget: str, text: str) -> None:
        self.query_one(f"#{widget}", Static).update(text)

    def _turn(self, look: ViewChoice) -> None:
        self.look = look
        self.table.cursor = 0
        self.look_again()

    def action_find(self) -> None:
        """Opens the search field."""
        search = self.query_one(Input)
        search.add_class("searching")
        search.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Searches as the query is typed."""
        self._turn(self.look._replace(query=event.value))

    def on_input_submitted(self) -> None:
        """Returns to the rows."""
        self.query_one(Input).remove_class("searching")
        self.table.focus()

    def action_sort(self) -> None:
        """Sorts by the next column."""
        self._turn(self.look._replace(sort=SORTS[(SORTS.index(self.look.sort) + 1) % len(SORTS)]))

    def action_hosts(self) -> None:
        """Switches between hosts and ranks."""
        by_host = any(row.stands_for for row in self.table.rows)
        self._turn(self.look._replace(by_host=not by_host, host=""))

    def action_open(self) -> None:
        """Shows the ranks of the host at the cursor."""
        chosen = self.table.chosen
        if chosen is not None and chosen.stands_for:
            self._turn(self.look._replace(host=chosen.host, by_host=False))

    async def action_back(self) -> None:
        """Leaves a host, or the search."""
        search = self.query_one(Input)
        search.value = ""
        search.remove_class("searching")
        self.table.focus()
        self._turn(self.look._replace(query="", host="", by_host=None))

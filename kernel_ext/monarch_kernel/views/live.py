"""Live views: a front end, bundled from `labextension`, the topic it watches, the values it shows, and its magic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from monarch_nb.debug.render import FileName
from monarch_nb.runtime import Runtime

from ..jupyter import line_magic_of
from ..session import Session
from .channel import Message

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

STATIC = Path(__file__).parents[1] / "static"
BUNDLES = (
    "debug",
    "failures",
    "history",
    "logs",
    "mesh",
    "metrics",
    "panel",
    "profiles",
    "tensors",
    "timeline",
    "transfers",
)
LARGEST = 82_000  # bytes of one view: it travels through the kernel with each widget
LARGEST_PANEL = 240_000  # of the panel, which has most of the others in it, and is shown once


class Bundle(TypedDict):
    """The front end of a view: functions that return its module and its style sheet."""

    script: Callable[[], str]
    style: Callable[[], str]


def built() -> bool:
    """Returns whether the bundles are there; only a checkout from which they were removed has none."""
    return all((STATIC / f"{view}.{kind}").is_file() for view in BUNDLES for kind in ("js", "css"))


def bundled(view: str) -> Bundle:
    """Returns the front end that is bundled for a view; it is read when it is first used."""
    return {"script": partial(script, view), "style": partial(style, view)}


@cache
def script(view: str) -> str:
    """Returns the ES module of a view; it fetches nothing when it runs."""
    return (STATIC / f"{view}.js").read_text(encoding="utf-8")


@cache
def style(view: str) -> str:
    """Its style sheet."""
    return (STATIC / f"{view}.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Watch:
    """A front end that watches a view's topic; `message` is its request, as docs/protocol.md describes it."""

    runtime: Runtime
    send: Callable[[Message], None]
    message: Message
    file_name: FileName  # display name of a file

    def publish(self, **content: object) -> None:
        """Sends JSON to the front end, under the topic and the id of its request. From any thread."""
        self.send({"type": self.message.get("topic"), "id": self.message.get("id"), **content})


@dataclass(frozen=True)
class Shown:
    """A value in a widget: the options that its front end reads, and a key under which it is shown again."""

    options: dict[str, Any] = field(default_factory=dict)
    key: object = None  # equal keys share one widget; None makes a new one each time


@dataclass(frozen=True, kw_only=True)
class LiveView:
    """A custom way to look at the cluster. `register` adds it to widgets, magics, and the side panel."""

    name: str  # of the topic that it watches, and of its magic
    script: Callable[[], str]  # an ES module whose default export is anywidget's `{render({model, el})}`
    style: Callable[[], str] = str
    title: str = ""  # of its section in the panel, which has sections of its own for the views that come with it
    feed: Callable[[Watch], Callable[[], None]] | None = None  # begins to publish to a front end; its result ends that
    shows: Mapping[type | str, Callable[[Any], Shown]] = field(default_factory=dict)  # by type, or its name
    magic: Callable[[Session, str], object] | None = None  # gives what `%name LINE` displays; its docstring is the help


class LiveViews:
    """All views of this process."""

    def __init__(self, views: tuple[LiveView, ...] = ()) -> None:
        self._views = {view.name: view for view in views}
        self._followers: list[tuple[Callable[[LiveView], None], Callable[[LiveView], None]]] = []

    def __iter__(self) -> Any:
        return iter(tuple(self._views.values()))

    def get(self, name: str) -> LiveView | None:
        """Returns the view of that name."""
        return self._views.get(name)

    def register(self, view: LiveView) -> None:
        """Adds a view, also to notebooks in which the extension is loaded.

        Raises ValueError for a name that is none, or taken.
        """
        if not view.name.isidentifier():
            raise ValueError(f"{view.name!r} cannot name a view: it must be a name as Python has them")
        if view.name in self._views:
            raise ValueError(f"there is a view {view.name!r} already: unregister({view.name!r}) takes it away")
        self._views[view.name] = view
        followers = []
        try:
            for add, remove in self._followers:
                followers.append(remove)
                add(view)
        except BaseException:
            del self._views[view.name]
            for remove in followers:
                remove(view)
            raise

    def unregister(self, name: str) -> None:
        """Removes a view. What is displayed already stays, without updates. Raises LookupError."""
        view = self._views.pop(name, None)
        if view is None:
            raise LookupError(f"there is no view {name!r}")
        for _, remove in self._followers:
            remove(view)

    def follow(self, add: Callable[[LiveView], None], remove: Callable[[LiveView], None]) -> Callable[[], None]:
        """Calls `add` with each view present and future, `remove` with each one removed, until the result is called."""
        follower = (add, remove)
        self._followers.append(follower)
        for view in self:
            add(view)
        return lambda: self._followers.remove(follower)


class ViewMagics:
    """`%failures`, `%metrics`, and those of views that are registered later. `%logs` is in `magics`."""

    def __init__(self, shell: "InteractiveShell", session: Session) -> None:
        self._shell: Any = shell  # IPython types magics as methods
        self._session = session

    def install(self, views: LiveViews) -> None:
        """Registers the magics of current and later views."""
        self._end = views.follow(self._add, self._remove)

    def uninstall(self) -> None:
        """Stops registering; registered magics stay, as all magics do."""
        self._end()

    def _add(self, view: LiveView) -> None:
        if view.magic is None:
            return
        magic = line_magic_of(self._shell, view.name)
        if magic is not None and not isinstance(magic, _Magic):
            raise ValueError(f"there is a magic %{view.name} already: choose another name for the view")
        self._shell.register_magic_function(_Magic(view, self._session), "line", view.name)

    def _remove(self, view: LiveView) -> None:
        magics = self._shell.magics_manager.magics["line"]
        if isinstance(magics.get(view.name), _Magic):
            del magics[view.name]


class _Magic:
    def __init__(self, view: LiveView, session: Session) -> None:
        assert view.magic is not None
        self._show, self._session = view.magic, session
        self.__name__, self.__doc__ = view.name, view.magic.__doc__

    def __call__(self, line: str) -> object:
        return self._show(self._session, line)

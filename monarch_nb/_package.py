"""What any layer may use of the package itself: its version and home page, names that are imported at their first use,
errors about parts that are not there yet, and how a process becomes a controller. Imports nothing of the project.

Texts that lead to a page lead to the home page: who has installed a wheel has no other copy.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__version__ = "0.1.0"
HOMEPAGE = "https://github.com/monarch-nb/monarch-nb"


def page(name: str) -> str:
    """The address of a page of docs/, or of a heading there: `manual/hosts.md#who-is-trusted`.

    A test holds all that the code leads to against the pages and headings that there are.
    """
    return f"{HOMEPAGE}/blob/main/docs/{name}"


def more(name: str) -> str:
    """A last line for the text of an error: where the page is that explains it."""
    return f"\nMore: {page(name)}"


PAGE = page("compatibility.md")


class NotYetError(ModuleNotFoundError):
    """A part of torchmonarch that this version does not have; the text says which, and where to read on.

    `name` is the package that lacks it. Were it the part itself, `from package import part` would take this error for
    a plain missing module and leave its text out.
    """


def sentence(subject: str, part: str, instead: str = "") -> str:
    """Returns the text that `subject` is missing, with its part of torchmonarch and what to do instead."""
    return (
        f"{subject} is not part of Monarch-NB yet: it belongs to {part}, see {PAGE}{'. ' + instead if instead else ''}"
    )


def refuse(subject: str, part: str, instead: str = "") -> NoReturn:
    """Raises NotImplementedError for the use of something that is there in name only."""
    raise NotImplementedError(sentence(subject, part, instead))


# How a process that is part of nothing yet becomes a controller: the top package says it.
_become: Callable[[], None] | None = None


def set_becoming(become: Callable[[], None]) -> None:
    """`become` makes this process a controller, and installs it."""
    global _become
    _become = become


def become_controller() -> None:
    """Makes this process a controller."""
    assert _become is not None
    _become()


def lazy_names(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `homes` has its modules, and which of its public names each of them holds."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def look_up(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return look_up

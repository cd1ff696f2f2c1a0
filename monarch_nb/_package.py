"""The package's own data and helpers, for every layer: version and home page, names that are imported at first use,
errors about missing parts, and the way a process becomes a controller. Imports nothing of the project.

Error texts link to the home page, since a user who has installed a wheel has no other copy of the pages.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__version__ = "0.1.0"
HOMEPAGE = "https://github.com/monarch-nb/monarch-nb"


def page(name: str) -> str:
    """Returns the address of a page of docs/, or of a heading of one: `manual/hosts.md#who-is-trusted`.

    A test compares all addresses in the code with the existing pages and headings.
    """
    return f"{HOMEPAGE}/blob/main/docs/{name}"


def more(name: str) -> str:
    """Returns the last line of an error text: the address of the page that explains the error."""
    return f"\nMore: {page(name)}"


PAGE = page("compatibility.md")


class NotYetError(ModuleNotFoundError):
    """A part of torchmonarch that this version does not have; the text says which, and where to read on.

    `name` is the package that lacks the part. With the part's own name, `from package import part` would take this
    error for a plain missing module and leave its text out.
    """


def sentence(subject: str, part: str, instead: str = "") -> str:
    """Returns the text that `subject` is missing, with its part of torchmonarch and what to do instead."""
    return (
        f"{subject} is not part of Monarch-NB yet: it belongs to {part}, see {PAGE}{'. ' + instead if instead else ''}"
    )


def refuse(subject: str, part: str, instead: str = "") -> NoReturn:
    """Raises NotImplementedError for the use of a name without an implementation."""
    raise NotImplementedError(sentence(subject, part, instead))


# Makes a process outside any cluster a controller; set by the top package.
_become: Callable[[], None] | None = None


def set_becoming(become: Callable[[], None]) -> None:
    """Sets the function that makes this process a controller and installs it."""
    global _become
    _become = become


def become_controller() -> None:
    """Makes this process a controller."""
    assert _become is not None
    _become()


def lazy_names(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package; `homes` maps its modules to the public names that each defines."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def look_up(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return look_up

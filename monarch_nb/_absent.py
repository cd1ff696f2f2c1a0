"""What is said of parts of torchmonarch that are not there yet: when they are imported, looked up, and used."""

from typing import NoReturn

from monarch_nb._about import page

PAGE = page("compatibility.md")


class NotYetError(ModuleNotFoundError):
    """A part of torchmonarch that this version does not have; the text says which, and where to read on.

    `name` is the package that lacks it. Were it the part itself, `from package import part` would take this error for
    a plain missing module and leave its text out.
    """


def sentence(what: str, part: str, instead: str = "") -> str:
    """That `what` is missing, to which part of torchmonarch it belongs, and what to do instead."""
    return f"{what} is not part of Monarch-NB yet: it belongs to {part}, see {PAGE}{'. ' + instead if instead else ''}"


def refuse(what: str, part: str, instead: str = "") -> NoReturn:
    """Raises NotImplementedError for the use of something that is there in name only."""
    raise NotImplementedError(sentence(what, part, instead))

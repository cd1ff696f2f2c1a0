"""English for counts and kinds of things, so that every text has the same: `1 rank`, `2,000 ranks`, `an int`."""

from monarch_nb.wire.texts import type_name

_ENDS_IN_ES = ("s", "x", "z", "ch", "sh")


def counted(number: int, noun: str) -> str:
    """A number and what is counted, in the plural unless there is one: `1 failed call`, `3 meshes`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and not noun.endswith(("ay", "ey", "oy")):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(_ENDS_IN_ES) else 's'}"


def with_article(noun: str) -> str:
    """`a list`, `an int`."""
    return f"{'an' if noun.lstrip('_')[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def kind_of(value: object) -> str:
    """What a value is, by the name of its type alone: `an int`, `a Trainer`, `None`."""
    return "None" if value is None else with_article(type_name(value).rpartition(".")[2])

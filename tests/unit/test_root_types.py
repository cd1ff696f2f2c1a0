"""What the composition root builds is typed: no attribute of it is Any, but for values of users."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator

import pytest

from monarch_nb.actor import Actor, endpoint
from monarch_nb.runtime import runtime
from monarch_nb.testing import cluster

pytestmark = pytest.mark.timeout(60)

# (class, attribute) and why it may be anything.
VALUES_OF_USERS = {
    ("ActorCell", "obj"): "the user's actor",
    ("EndpointProperty", "_propagator"): "what the user gave for the types of an endpoint",
    ("Future", "_value"): "what the user's endpoint returned",
}


def parts(thing: object) -> Iterator[object]:
    """What an object holds: attributes, what is in containers, what functions are bound to or close over."""
    if isinstance(thing, dict):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif inspect.ismethod(thing):
        yield thing.__self__
    elif inspect.isfunction(thing):
        for cell in thing.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is not set yet
                continue
    elif type(thing).__module__.startswith("monarch_nb"):
        yield from getattr(thing, "__dict__", {}).values()
        for cls in type(thing).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(thing, name):
                    yield getattr(thing, name)
        for name in getattr(thing, "__struct_fields__", ()):
            yield getattr(thing, name)


def classes_below(root: object) -> set[type]:
    """The classes of this package of which anything is made that `root` reaches."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or inspect.ismodule(thing) or inspect.isclass(thing):
            continue
        seen[id(thing)] = thing
        queue.extend(parts(thing))
    made = {cls for thing in seen.values() for cls in type(thing).__mro__}
    return {cls for cls in made if cls.__module__.startswith("monarch_nb.")}


def is_any(annotation: ast.expr | None) -> bool:
    """Any, or Any | None; containers of anything are not meant."""
    text = ast.unparse(annotation).strip("'\"") if annotation is not None else ""
    return "Any" in {part.strip() for part in text.split("|")}


def elements(target: ast.expr) -> list[ast.expr]:
    """What is assigned in one statement, side by side."""
    return target.elts if isinstance(target, ast.Tuple) else [target]


def untyped(source: str) -> Iterator[str]:
    """The attributes of a class that are declared as Any, or set to a parameter that is."""
    [cls] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(cls, ast.ClassDef)
    for node in cls.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if is_any(annotation):
                yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                anything = {argument.arg for argument in arguments if is_any(argument.annotation)}
                for inner in ast.walk(node):
                    match inner:
                        case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=kind):
                            if is_any(kind):
                                yield name
                        case ast.Assign(targets=[target]):
                            pairs = zip(elements(target), elements(inner.value), strict=False)
                            for into, value in pairs:
                                match into, value:
                                    case ast.Attribute(value=ast.Name(id="self"), attr=name), ast.Name(id=given):
                                        if given in anything:
                                            yield name


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def test_only_values_of_users_are_any_below_the_composition_root() -> None:
    with cluster() as made:
        echo = made.this_host().spawn_procs(per_host={"gpus": 2}).spawn("echo", Echo)
        assert made.result(echo.echo.call(1)).values() == [1, 1]
        classes = classes_below(made) | classes_below(runtime())
    names = {cls.__qualname__ for cls in classes}
    assert {"Runtime", "MeshRegistry", "Driver", "MeshStopper", "ActorCell", "ProcState", "Routes"} <= names
    found = {(cls.__name__, name) for cls in classes for name in untyped(inspect.getsource(cls))}
    assert found == VALUES_OF_USERS.keys()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n    a: Any = None\n    b: dict[str, Any]\n    c: 'int | Any'", ["a", "c"]),
        ("class A:\n    def __init__(self, a: Any, b: int):\n        self.a, self.x = a, 1\n        self.b = b", ["a"]),
        ("class A:\n    def __init__(self, a: Any, b: int):\n        self.c = a\n        self.d: Any = b", ["c", "d"]),
    ],
)
def test_untyped_attributes_are_found(source: str, names: list[str]) -> None:
    assert list(untyped(source)) == names

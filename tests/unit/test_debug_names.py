"""Names on ranks are completed and described without running code of the program."""

import types
from typing import Any

import pytest

from monarch_nb.debug.session.names import completions, description, variables

pytestmark = pytest.mark.timeout(60)


class Model:
    """A model."""

    classes = 3

    def __init__(self) -> None:
        self.layers = [1, 2]
        self.inner = types.SimpleNamespace(depth=4)

    @property
    def computed(self) -> int:
        raise AssertionError("code of the program")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"code of the program: {name}")

    def __dir__(self) -> list[str]:
        raise AssertionError("code of the program")

    def __repr__(self) -> str:
        raise AssertionError("code of the program")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("code of the program")

    def forward(self, x: float, *, scale: float = 2.0) -> float:
        """Scales it."""
        return x * scale

    @staticmethod
    def made(path: str) -> str:
        return path


NAMESPACE = {"model": Model(), "Model": Model, "module": types, "values": [1.5, 2.5], "_hidden": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mod", ["model", "module"]),
        ("Mod", ["Model", "ModuleNotFoundError"]),
        ("_hid", ["_hidden"]),
        ("lamb", ["lambda"]),
        ("model.", ["model.classes", "model.computed", "model.forward", "model.inner", "model.layers", "model.made"]),
        ("model.la", ["model.layers"]),
        ("model.inner.d", ["model.inner.depth"]),
        ("model.computed.", []),
        ("model.layers.app", ["model.layers.append"]),
        ("Model.cl", ["Model.classes"]),
        ("module.SimpleN", ["module.SimpleNamespace"]),
        ("absent.x", []),
    ],
)
def test_names_are_completed_as_they_are_stored(text: str, expected: list[str]) -> None:
    assert completions(NAMESPACE, text) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.forward", ["Signature: forward(x: float, *, scale: float = 2.0) -> float", "Docstring: Scales it."]),
        ("model.made", ["Signature: made(path: str) -> str"]),
        ("values", ["Type:      list", "Value:     [1.5, 2.5]"]),
        ("model", ["Type:      Model", "Docstring: A model."]),
        ("model.layers", ["Value:     [1, 2]"]),
        ("len", ["Signature: len(obj, /)"]),
        ("Model", ["Signature: Model() -> None"]),
    ],
)
def test_names_are_described_with_their_signature_type_and_value(name: str, expected: list[str]) -> None:
    lines = description(NAMESPACE, name).splitlines()
    assert [line for line in expected if line not in lines] == []


def test_keys_defaults_and_annotations_of_the_program_are_not_written_out() -> None:
    def built(model: object = NAMESPACE["model"], *, sizes: "list[int] | None" = None) -> None:
        raise AssertionError

    built.__annotations__["return"] = NAMESPACE["model"]
    namespace = {"built": built, "by_model": {NAMESPACE["model"]: 1}, "sizes": {"a": 1}}
    lines = "\n".join(description(namespace, name) for name in namespace).splitlines()
    assert "Signature: built(model: object = …, *, sizes: 'list[int] | None' = None) -> …" in lines
    assert "Value:     1 item" in lines
    assert "Value:     {'a': 1}" in lines


def test_source_takes_the_place_of_the_docstring() -> None:
    text = description(NAMESPACE, "model.forward", source=True)
    assert "return x * scale" in text
    assert "Docstring" not in text
    assert __file__ in text


def test_what_is_not_there_or_computed_is_not_described() -> None:
    assert [description(NAMESPACE, name) for name in ("absent", "model.absent", "model.computed")] == [""] * 3


def test_tensors_are_described_by_shape_type_and_device() -> None:
    torch = pytest.importorskip("torch")
    assert "shape (2, 3), torch.float32, on cpu" in description({"t": torch.ones(2, 3)}, "t")
    assert completions({"t": torch.ones(1)}, "t.unsq") == ["t.unsqueeze", "t.unsqueeze_"]


def test_variables_are_listed_without_what_every_cell_has() -> None:
    namespace = {
        "rank": 1,
        "point": 1,
        "mesh": 1,
        "_hidden": 1,
        "module": types,
        "text": "x" * 50_000,
        "many": [0] * 21,
    }
    namespace |= {"model": Model(), "number": 1 << 50_000, "step": lambda x, by=2: x}
    listing = {variable.name: (variable.kind, variable.text) for variable in variables(namespace)}
    assert list(listing) == ["many", "model", "number", "step", "text"]
    assert listing["many"] == ("list", "21 items")
    assert listing["model"] == ("Model", "")
    assert listing["number"] == ("int", "")
    assert listing["step"] == ("function", "(x, by=2)")
    assert listing["text"][1].endswith("… (50000 characters)")


def test_variables_of_an_actor_are_those_of_its_self() -> None:
    model = Model()
    model._cache = 1  # type: ignore[attr-defined]
    listing = [(variable.name, variable.kind) for variable in variables({"self": model, "x": 1.5})]
    assert listing == [("self", "Model"), ("self.inner", "SimpleNamespace"), ("self.layers", "list"), ("x", "float")]

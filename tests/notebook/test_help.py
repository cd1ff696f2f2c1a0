"""Help and completion in a real kernel: an endpoint shows the user's own method."""

from collections.abc import Iterator

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

DEFINED = """
class Helped(Actor):
    @endpoint
    def learn(self, batch: list[int], *, decay: float = 0.5) -> float:
        \"\"\"One step of training; gives the loss.\"\"\"
        return decay * sum(batch)

helped = w.spawn("helped", Helped)
"""


@pytest.fixture
def helped(nb: Notebook) -> Iterator[Notebook]:
    nb.run(DEFINED).ok()
    yield nb
    nb.run("%stop helped").ok()


@pytest.mark.parametrize("code", ["helped.learn", "helped.learn.call", "helped.learn.broadcast"])
def test_help_shows_the_signature_and_docstring_of_the_users_method(helped: Notebook, code: str) -> None:
    text = helped.inspect(code)
    assert "(batch: list[int], *, decay: float = 0.5)" in text
    assert "One step of training; gives the loss." in text


def test_the_signature_shows_what_each_adverb_returns(helped: Notebook) -> None:
    assert "-> Future[ValueMesh[float]]" in helped.inspect("helped.learn.call")
    assert "-> Future[float]" in helped.inspect("helped.learn.call_one")


def test_help_with_two_question_marks_shows_the_users_source(helped: Notebook) -> None:
    assert "return decay * sum(batch)" in helped.inspect("helped.learn", detail=1)


@pytest.mark.parametrize("magic", ["%mesh", "%break"])  # IPython takes the second for a keyword
def test_help_of_a_magic_is_shown_at_its_name(nb: Notebook, magic: str) -> None:
    assert f"{magic} " in nb.inspect(f"1\n{magic}")


def test_arguments_of_the_users_method_are_completed(helped: Notebook) -> None:
    assert "decay=" in helped.complete("helped.learn.call(dec")
    assert {"batch=", "decay="} <= set(helped.complete("helped.learn.call_one("))
    assert "learn" in {name.rpartition(".")[2] for name in helped.complete("helped.lea")}


def test_help_follows_a_class_that_was_reloaded(helped: Notebook) -> None:
    helped.run(DEFINED.replace("decay: float = 0.5", "rate: float = 0.1").rpartition("helped =")[0]).ok()
    helped.run("%reload helped").ok()
    assert "rate: float = 0.1" in helped.inspect("helped.learn.call")

"""Section 1.9: errors. The rest: tests/memory_network/test_errors.py, tests/unit/test_supervision_texts.py."""

import inspect
import pickle
from typing import Any

import pytest

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, ProcMesh, endpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class NotOrdinary(BaseException):
    """No Exception, and no end of a program."""


class Fails(Actor):
    @endpoint
    async def leave(self) -> None:
        raise NotOrdinary(3)


def test_an_actor_error_can_be_made_and_has_a_message() -> None:
    error = ActorError(ValueError("x"), "mine")
    assert (error.message, error.exception.args) == ("mine", ("x",))
    assert "mine" in str(error)
    assert error.exception_formatted.splitlines()[-1] == "ValueError: x"
    assert "message" in inspect.signature(ActorError).parameters
    assert pickle.loads(pickle.dumps(error)).message == "mine"


def test_a_supervision_error_is_a_runtime_error_with_an_endpoint(quad: ProcMesh, faults: Any) -> None:
    fails = quad.slice(gpus=0).spawn("fails", Fails)
    with pytest.raises(SupervisionError, match=r"Endpoint call .*fails\.leave\(\) failed, ") as caught:
        fails.leave.call_one().get(20)
    assert isinstance(caught.value, RuntimeError)
    assert "fails.leave()" in str(caught.value.endpoint)
    caught.value.endpoint = "other.method()"
    assert str(caught.value).startswith("Endpoint call other.method() failed, ")
    assert faults.next().mesh_name == "fails"

"""Placeholders of tensors that could not be made."""

from monarch_nb.tensor.failure import Failure


class LostTensor:
    """Placeholder of a tensor that an operation failed to make or to change."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class LostInputError(Exception):
    """An operation needs the result of a failed operation, which is reported instead."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure

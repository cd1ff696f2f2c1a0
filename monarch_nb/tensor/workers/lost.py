"""What stands for a tensor that could not be made."""

from monarch_nb.tensor.failure import Failure


class Lost:
    """In the place of a tensor that an operation should have made, or was changing when it failed."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class LostInputError(Exception):
    """An operation would have used what another one has failed to make: the other one is told, not this."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure

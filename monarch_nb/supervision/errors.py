"""Errors that calls on a broken mesh raise."""

from .failure import MeshFailure, decode_failure


class DeviceMeshError(RuntimeError):
    """A mesh is broken. Catch this to heal it, or to continue with a slice that works."""


class SupervisionError(DeviceMeshError):
    """A call cannot be answered because a rank that it was sent to failed; `failure` describes it."""

    def __init__(self, message: str = "", *, endpoint: str | None = None, failure: MeshFailure | None = None) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        """The call, as "mesh.method()"; settable."""
        self.failure = failure
        self.reported_elsewhere = False  # the failure is reported separately, if the call is not awaited

    def __str__(self) -> str:
        text = super().__str__() or (self.failure.report() if self.failure is not None else "")
        return f"Endpoint call {self.endpoint} failed, {text}" if self.endpoint else text

    def __reduce__(self) -> tuple[object, ...]:
        # The failure itself refuses to be pickled, but an error that an endpoint lets through must reach its caller.
        encoded = self.failure.encode() if self.failure is not None else None
        return _rebuild, (type(self), self.args[0] if self.args else "", self.endpoint, encoded)


class HealError(DeviceMeshError):
    """A mesh was not healed; `failures` has the new failures, and is empty if healing was refused."""

    def __init__(self, message: str = "", failures: tuple[MeshFailure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_heal, (type(self), self.args[0], tuple(failure.encode() for failure in self.failures))


def _rebuild(
    kind: type[SupervisionError], message: str, endpoint: str | None, encoded: bytes | None
) -> SupervisionError:
    return kind(message, endpoint=endpoint, failure=None if encoded is None else decode_failure(encoded))


def _rebuild_heal(kind: type[HealError], message: str, encoded: tuple[bytes, ...]) -> HealError:
    return kind(message, tuple(map(decode_failure, encoded)))

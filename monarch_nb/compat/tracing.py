"""Records of `logging` in traces: what `monarch._src.actor.telemetry` has beside spans and meters."""

import contextlib
import logging

from monarch_nb.runtime.context import current

logger = logging.getLogger("monarch_nb.compat")
_said = False


class TracingForwarder(logging.Handler):
    """Puts each record into the current span as an event, where OpenTelemetry records one; says so once.

    As in torchmonarch a record from within an actor gets the actor's name as `actor_id`.
    """

    def __init__(self, level: int = logging.NOTSET) -> None:
        global _said
        super().__init__(level)
        if not _said:
            _said = True
            logger.warning(
                "TracingForwarder: accepted; records become events of the current OpenTelemetry span, where the "
                "program records any, and go nowhere else from here"
            )

    def emit(self, record: logging.LogRecord) -> None:
        """Adds the event."""
        running = current.get()
        if running is not None:
            record.actor_id = str(running.actor_instance.actor_id)
        with contextlib.suppress(ImportError):
            from opentelemetry import trace

            span = trace.get_current_span()
            if span.is_recording():
                try:
                    text = record.getMessage()
                except Exception:
                    self.handleError(record)
                    return
                span.add_event(text, {"log.severity": record.levelname, "log.logger": record.name})


__all__ = ["TracingForwarder"]

"""The key of an agent, and its change while the agent runs."""

import logging
from collections.abc import Callable
from pathlib import Path

from monarch_nb.host import protocol as p
from monarch_nb.transport import Keys, Node, TrustError
from monarch_nb.wire import Asker

log = logging.getLogger(__name__)


class AgentKeys:
    """Changes this agent's key in steps, so that its job's processes reach each other at any time.

    All expect another key first, then all use it, and at last the former one is forgotten. On the loop's thread, except
    `candidates`.
    """

    def __init__(
        self, node: Node, keys: Keys | None, file: Path | None, users: Callable[[str], tuple[str, ...]]
    ) -> None:
        """`users` names the controllers, other than its argument, that would be cut off by a change."""
        self._node, self._file, self._users = node, file, users
        self._keys = keys
        self._alternate: Keys | None = None  # during a change

    @property
    def candidates(self) -> tuple[Keys | None, ...]:
        """The keys to try one after the other for a connection that this agent dials. Any thread."""
        alternate = self._alternate
        return (self._keys,) if alternate is None else (self._keys, alternate)

    def change(self, request: p.KeyChange, asker: Asker[p.KeyChanged]) -> p.KeyChanged | None:
        """Executes one step. Raises ValueError for an agent without a key."""
        if self._keys is None:
            raise ValueError("this agent was started without a key")
        new = self._read(request.key)
        match request.step:
            case "expect":
                if self._alternate is not None and self._alternate != new:
                    self._node.change_keys("cancel", self._keys, self._alternate)
                self._alternate = new
                self._node.change_keys("expect", self._keys, new)
                return p.KeyChanged(users=self._users(asker.src), error=self._file_error(new.check_file))
            case "use":
                self._use(new, asker)
                return None
            case "cancel":
                if self._alternate == new:
                    self._node.change_keys("cancel", self._keys, new)
                    self._alternate = None
            case "done":
                if self._keys == new and self._alternate is not None:
                    self._node.change_keys("done", self._alternate, new)
                    self._alternate = None
        return p.KeyChanged()

    def _read(self, key: str) -> Keys:
        try:
            return Keys.from_text(key.encode(), "the new key")
        except TrustError as error:
            raise ValueError(str(error)) from None

    def _use(self, new: Keys, asker: Asker[p.KeyChanged]) -> None:
        """Uses the new key once it has replied, with the reason why its file could not be written, if so."""
        assert self._keys is not None
        if self._keys == new:  # a repeated request
            asker.reply(p.KeyChanged())
            return
        old, self._keys, self._alternate = self._keys, new, self._keys
        self._node.change_keys("expect", old, new)
        error = self._file_error(new.save)
        if error:
            log.warning("the key was changed, but not its file: %s", error)
        asker.reply(p.KeyChanged(error=error))
        self._node.change_keys("use", old, new)

    def _file_error(self, write: Callable[[Path], None]) -> str:
        """Writes this agent's key file, if it has one; returns why that failed, or ""."""
        try:
            if self._file is not None:
                write(self._file)
        except OSError as error:
            return f"{self._file}: {error.strerror or error}"
        return ""

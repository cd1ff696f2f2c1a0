"""The document that views see, and what has changed in it since it was last asked for."""

from typing import Any

from monarch_nb.store.patch import Patch

Document = dict[str, Any]
"""The state as JSON has it: objects by section and key."""

SECTIONS = ("hosts", "meshes", "ranks", "failures", "sessions", "detached", "tensors", "transfers")


class Board:
    """Every write goes into the document and into the patch that is pending. Objects that were removed stay removed."""

    def __init__(self) -> None:
        self.document: Document = {section: {} for section in SECTIONS}
        self._pending: Patch = {}
        self._gone: dict[tuple[str, str], dict[str, set[str]]] = {}  # fields of objects removed since the last patch

    def take(self) -> Patch:
        """What has changed since the last time; {} if nothing has."""
        taken, self._pending = self._pending, {}
        self._gone.clear()
        return taken

    def put(self, section: str, key: str, value: Any) -> None:
        """Writes or, with None, removes a whole object."""
        objects = self.document[section]
        before = objects.pop(key, None)
        if value is None and before is None:
            return
        gone = self._gone.setdefault((section, key), {})
        for name, inner in (before or {}).items():
            gone.setdefault(name, set()).update(inner if isinstance(inner, dict) else ())
        pending = self._pending.setdefault(section, {})
        if value is None:
            pending[key] = None
            return
        objects[key] = value
        # The patch is merged into what a view has: what is not there any more has to be said.
        patch = {**dict.fromkeys(gone.keys() - value.keys()), **_copied(value)}
        for name, inner in patch.items():
            if isinstance(inner, dict) and name in gone:
                patch[name] = {**dict.fromkeys(gone[name] - inner.keys()), **inner}
        pending[key] = patch

    def change(self, section: str, key: str, fields: dict[str, Any]) -> None:
        """Writes fields of an object that is there; None removes one. Fields that stay as they are cost nothing."""
        known = self.document[section].get(key)
        if known is not None:
            self._write(known, fields, section, key)

    def change_in(self, section: str, key: str, part: str, fields: dict[str, Any]) -> None:
        """The same for an object within an object."""
        known = self.document[section].get(key)
        if known is not None:
            self._write(known[part], fields, section, key, part)

    def change_rank(self, uid: str, index: str, fields: dict[str, Any]) -> None:
        """The same for a rank of a mesh, whose object is made when it is needed."""
        ranks = self.document["ranks"].get(uid)
        if ranks is None:
            return
        known = ranks.get(index)
        if known is None:
            fields = {name: value for name, value in fields.items() if value is not None}
            if not fields:
                return
            known = ranks[index] = {}
        self._write(known, fields, "ranks", uid, index)

    def _write(self, known: dict[str, Any], fields: dict[str, Any], *path: str) -> None:
        patch: Patch | None = None
        for name, value in fields.items():
            if known.get(name) == value:
                continue
            if patch is None:
                patch = self._pending_at(path)
            if value is None:
                known.pop(name, None)
            else:
                known[name] = value
            patch[name] = value

    def _pending_at(self, path: tuple[str, ...]) -> Patch:
        patch: Patch = self._pending
        for key in path:
            inner = patch.get(key)
            if inner is None:
                inner = patch[key] = {}
            patch = inner
        return patch


def _copied(value: Any) -> Any:
    """What goes into a patch must not change with the document."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return value

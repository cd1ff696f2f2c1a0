"""Completion on the lines of the debugger's magics: names of meshes, dimensions, places."""

from monarch_nb import debug
from monarch_nb.mesh import ActorMesh, state_of

from ..completion import LineCompletion


class DebugCompletion(LineCompletion):
    """On the lines of the debugger's magics."""

    magics = ("%%mdb", "%break", "%mpm", "%stacks", "%freeze")

    def candidates(self, magic: str, before: list[str]) -> list[str]:
        """What can follow the words `before` on the line of a magic."""
        if magic == "%break":
            return self._break(before)
        if magic == "%stacks":
            return self._dims(before) if before else self._session.names()
        if magic == "%freeze":
            return ["--off"] if before else self._session.names("actors")
        if not before:
            stopped = [record.name for record in debug.sessions()] if magic == "%%mdb" else []
            first = ["release"] if magic == "%mpm" else []
            return list(dict.fromkeys([*stopped, *self._session.names("actors"), *first]))
        return self._dims(before)

    def _break(self, before: list[str]) -> list[str]:
        if not before:
            return ["clear", *self._functions()]
        if before[0] == "clear":
            return [str(each.number) for each in debug.breakpoints()]
        if "on" not in before:
            return ["on", "if"] if "if" not in before else ["on"]
        after = before[before.index("on") + 1 :]
        return self._dims(after) if after else self._session.names("actors")

    def values(self, magic: str, before: list[str], label: str) -> list[str]:
        """What can follow `label=`; on a line of %break the mesh is named after "on"."""
        return super().values(magic, before[before.index("on") + 1 :] if "on" in before else before, label)

    def _functions(self) -> list[str]:
        """The methods of the actors there are."""
        functions: list[str] = []
        for name in self._session.names("actors"):
            mesh = self._session.find(name)
            if isinstance(mesh, ActorMesh):
                cls = state_of(mesh).cls
                functions += [f"{cls.__name__}.{each}" for each in vars(cls) if not each.startswith("_")]
        return list(dict.fromkeys(functions))

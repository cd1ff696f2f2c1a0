"""The command that becomes a process of a mesh, for users who need a command of their own."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from monarch_nb.host.launch import command
from monarch_nb.host.protocol import Launch
from monarch_nb.shape import Extent, Point


@dataclass
class BootstrapCommand:
    """The command that starts processes of a proc mesh: a program, its arguments and its environment.

    In the end it must run the command of `default_bootstrap_cmd()`, perhaps inside a wrapper such as a profiler, with
    the open descriptors it was given. A None in `env` removes a variable. With `inherit_env` false only `env` is set,
    and the variables of Monarch itself.
    """

    program: str
    arg0: str | None = None
    args: list[str] = field(default_factory=list)
    env: Mapping[str, str | None] = field(default_factory=dict)
    inherit_env: bool = True

    def __post_init__(self) -> None:
        check_environment(self.env, "bootstrap_command")

    def with_env(self, env: Mapping[str, str | None]) -> "BootstrapCommand":
        """Returns a copy with `env` laid over its environment. Raises TypeError for values that are not strings."""
        return replace(self, args=list(self.args), env={**self.env, **env})

    def _launch(self) -> Launch:
        strings = [self.program, *self.args, *self.env, *(text for text in self.env.values() if text is not None)]
        if self.arg0 is not None:
            strings.append(self.arg0)
        for text in strings:
            if not isinstance(text, str) or "\0" in text:
                raise ValueError(
                    f"bootstrap_command: {text!r} holds a character that no command line or environment can hold"
                )
        if not self.program:
            raise ValueError("bootstrap_command: it names no program")
        return Launch(self.program, self.arg0, tuple(self.args), dict(self.env), self.inherit_env)


def check_environment(env: Mapping[str, str | None], option: str) -> None:
    """Raises TypeError for a name or a value that is not a string; None, which removes a variable, may be a value."""
    for name, value in env.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str)):
            raise TypeError(f"{option}: the environment takes text, and {name!r}: {value!r} is not; str() makes it")


def default_bootstrap_cmd() -> BootstrapCommand:
    """Returns the default command: this interpreter, without changes to the environment."""
    return BootstrapCommand(sys.executable, None, command("monarch_nb.host.procs.proc_main")[1:], {})


def launches(
    commands: BootstrapCommand | Callable[[Point], BootstrapCommand] | None, extent: Extent
) -> tuple[Launch, ...]:
    """Returns one launch for each process of a mesh, none for the default. Raises TypeError for an invalid command."""
    if commands is None:
        return ()
    if isinstance(commands, BootstrapCommand):
        return (commands._launch(),) * extent.nelements
    by_rank = [commands(extent.point(rank)) for rank in range(extent.nelements)]
    for each_command in by_rank:
        if not isinstance(each_command, BootstrapCommand):
            raise TypeError(f"bootstrap_command gave {type(each_command).__name__}, not a BootstrapCommand")
    return tuple(each_command._launch() for each_command in by_rank)

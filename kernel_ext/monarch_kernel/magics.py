"""The magics: each reads its line and calls the session."""

import linecache
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand

from monarch_nb.code import PipError, run_pip
from monarch_nb.debug.records import StoppedAtBreakpoint
from monarch_nb.logs import Logs, follow_logs, logs_here, logs_of
from monarch_nb.mesh import ActorMesh, ProcMesh, ValueMesh, run_on, state_of
from monarch_nb.runtime import Future

from .actors import Actors
from .arguments import check_name, read_actor, read_logs, read_mesh, read_names, read_place
from .display.errors import cell_syntax
from .jupyter import line_magic_of
from .namespace import Overview
from .output.pacing import BYTES, BYTES_BURST, Bucket
from .session import Session, SessionMagics
from .tensors import parts_on
from .views.displays import LogView

_OF_MESH = "--mesh"  # of %pip


@magics_class
class MonarchMagics(SessionMagics):
    """%mesh, %%mesh, %%on, %%actor, %reload, %meshes, %heal, %kill, %stop, %interrupt."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell, session)
        self._actors = Actors(shell, session)

    @line_cell_magic
    def mesh(self, line: str, cell: str | None = None) -> ProcMesh:
        """Make a mesh of processes and bind it to a variable.

        %mesh NAME dim=size ... [hosts=N] [--fresh] [--no-dedup] [--job KIND argument=value ...]

        As a cell magic, the cell is the set-up of each process: it runs there before any actor is made, at first and
        whenever a process is brought back.

            %mesh workers gpus=4            # four processes, called workers
            %mesh grid hosts=2 gpus=4       # on two host agents
            %mesh workers                   # the one that is there

            %%mesh workers gpus=4
            import torch
            torch.manual_seed(rank)

            %mesh trainers hosts=4 gpus=8 --job slurm partition=gpu    # on hosts that an engine gives
            %mesh trainers gpus=8 --job lab                            # on those of [jobs.lab] of monarch.toml
            %mesh trainers gpus=8 --job 5e6f3a21                       # on those of a job that runs
            %mesh trainers hosts=+2         # two hosts more, from its job; hosts=-1 gives the last one back

        Running the same line again gives the same mesh; another shape or set-up replaces it, and says so. --fresh
        replaces it in any case; --no-dedup shows equal lines of several ranks one by one. From Python:
        this_host().spawn_procs(per_host={"gpus": 4}, name="workers").
        """
        args = read_mesh(line)
        check_name(args.name)
        if args.change is not None:
            if cell is not None:
                label, by = args.change
                raise UsageError(
                    f"%%mesh: {label}={by:+} changes a mesh that is there, without a set-up: write "
                    f"%mesh {args.name} {label}={by:+}, or a size of at least 1 for a new mesh"
                )
            mesh, notice = self._session.resize(args.name, *args.change)
            self._say(notice)
            return mesh
        setup, filename = numbered("%%mesh", line, cell) if cell else "", self._cell()
        if setup:
            linecache.cache[filename] = (len(setup), None, setup.splitlines(keepends=True), filename)
        with cell_syntax():
            mesh, notice = self._session.mesh(args.name, args.dims, setup, setup_filename=filename, fresh=args.fresh,
                                                job=args.job, arguments=args.arguments)  # fmt: skip
        logs_here().options.set_merging(state_of(mesh).uid, None if args.dedup else False)
        self._say(notice)
        return mesh

    @cell_magic
    def on(self, line: str, cell: str) -> ValueMesh[Any] | None:
        """Run a cell on the ranks of a mesh.

        %%on NAME [dim=0] [dim=0-2,5] [dim=from:to] ...

            %%on workers
            x = torch.ones(3) * rank        # x stays there for the next %%on
            x.sum()                         # the last expression comes back, as a ValueMesh

            %%on workers gpus=0-1           # only the first two; gpus=0,2-3 and gpus=0:2 go, too
            %%on trainers gpus=0            # actors: between messages, with self
            self.optimizer

        On processes the cell runs in a namespace that lasts, with rank, point and mesh in it; on actors with self as
        well. A sharded tensor of the notebook that the cell names is there as the process's own part of it. What ranks
        print is shown as it comes, equal lines once. Ctrl-C stops waiting; pressed again within ten seconds it
        interrupts the ranks. From Python: monarch.actor.run_on(workers, "x.sum()").get().
        """
        selection = read_place("%%on", line)
        part = selection.of(self._session.find(selection.name))
        source = numbered("%%on", line, cell)
        with parts_on(part, source):
            with cell_syntax():
                future = run_on(part, source, filename=self._cell())
            return shown_values(self.shell, future)

    @no_var_expand  # braces belong to expressions
    @cell_magic
    def actor(self, line: str, cell: str) -> ActorMesh[Any]:
        """Spawn the actor class that a cell defines; or, if the actors live, give them the changed class.

        %%actor NAME on MESH [class=Name] [--fresh] [argument ...] [name=argument ...]

            %%actor trainers on workers lr=1e-3 sizes=[64, 10]
            class Trainer(Actor):
                def __init__(self, lr, sizes): ...
                @endpoint
                def step(self): ...

        The class is spawned on each process of MESH (which may be a slice: workers.slice(gpus=0)), and the mesh of
        actors is bound to NAME. Arguments are Python expressions without blanks outside of brackets and quotes.
        Edit the cell and run it again: the actors that live take the new class over between two messages and keep
        their state; __reload__(self, old) runs there, if the class has it. __init__ does not run again; --fresh stops
        them and spawns anew. What else is in the cell (functions, imports) runs here. From Python:
        workers.spawn("trainers", Trainer, lr=1e-3), then reload_mesh(trainers).
        """
        args = read_actor(line)
        with cell_syntax():
            return self._actors.define(args, numbered("%%actor", line, cell), self._cell(), self._say)

    @line_magic
    def reload(self, line: str) -> None:
        """Bring edited code to where it runs: modules whose files have changed, and the actors made from them.

        %reload                # all that was edited
        %reload trainers       # the class of these actors, and the modules it lies among
        %reload mymodel        # this module, and what imports it

        Modules are loaded again here and in all processes; names imported from them into the notebook follow. Living
        actors take their new class over between two messages and keep their state, also where the class was defined
        by a cell that was run again. From Python: await hosts.sync_workspace(folder, auto_reload=True), or
        reload_mesh(trainers).
        """
        names, _ = read_names("%reload", line) if line.strip() else ([], set())
        with cell_syntax():
            self._say(str(self._session.reload(names)))

    @line_magic
    def meshes(self, line: str) -> Overview:
        """Show all meshes: their shape, how their ranks are, and which variables refer to them.

        %meshes

        Meshes that no variable refers to any more are marked; %stop --unused stops them.
        """
        if line.strip():
            raise UsageError("%meshes takes no arguments")
        return Overview(self._session.rows())

    @line_magic
    def heal(self, line: str) -> object:
        """Bring the failed ranks of a mesh back, with everything that lived on them.

        %heal NAME                  # what has failed
        %heal NAME gpus=3 --kill    # kill the processes of these ranks first: for those that react to nothing
        %heal NAME --replace        # a spare host, or a new one of the job, in place of a lost one

        Lost processes are started again and set up, their actors re-created with the newest class and their original
        arguments. All references to the mesh work again. From Python: heal_mesh(workers).
        """
        if not line.strip():
            raise UsageError("%heal: which mesh? Write %heal NAME, or %heal NAME gpus=3 --kill")
        selection = read_place("%heal", line, ("--kill", "--replace"))
        mesh = self._session.find(selection.name)
        flags = {option.strip("-"): True for option in selection.options}
        self._say(self._session.heal(selection.name, selection.of(mesh), **flags))
        return mesh

    @line_magic
    def stop(self, line: str) -> None:
        """Stop meshes: their actors' clean-up runs, then their processes end.

        %stop NAME ...        # these
        %stop NAME gpus=0,2-3 # only these ranks
        %stop --all           # all of them
        %stop --unused        # those that no variable refers to any more (see %meshes)

        From Python: workers.stop().get().
        """
        if "=" in line:
            selection = read_place("%stop", line)
            self._say(self._session.stop_part(selection.of(self._session.find(selection.name))))
            return
        names, options = read_names("%stop", line, ("--all", "--unused"))
        if names and options:
            raise UsageError(f"%stop: either names or {', '.join(sorted(options))}, not both")
        if "--all" in options:
            lines = self._session.stop_all()
        elif options:
            lines = self._session.stop_unused()
        else:
            lines = self._session.stop([self._session.find(name) for name in names])
        self._say("\n".join(lines) or "nothing to stop")

    @line_magic
    def kill(self, line: str) -> None:
        """Kill the processes of a mesh, or of some of its ranks, with all that runs on them.

        %kill NAME
        %kill NAME gpus=3     # only these ranks

        Calls that wait for them fail; nothing is cleaned up. %heal NAME starts them again.
        From Python: monarch_nb.lifecycle.kill_mesh(workers.slice(gpus=3)).
        """
        selection = read_place("%kill", line)
        self._say(self._session.kill(selection.of(self._session.find(selection.name))))

    @line_magic
    def interrupt(self, line: str) -> None:
        """Raise KeyboardInterrupt in what runs on the ranks of a mesh now, and say what has ended and what has not.

        %interrupt NAME ...
        %interrupt NAME gpus=0,2-3  # only these ranks

        Python code, `time.sleep` and waits for other calls end. A rank that sits in other C code notices when it
        returns from it, which is said within a second; %heal NAME gpus=3 --kill does not wait for that.
        From Python: monarch_nb.lifecycle.interrupt(workers).
        """
        if "=" in line:
            selection = read_place("%interrupt", line)
            self._say(self._session.interrupt(selection.of(self._session.find(selection.name))))
            return
        names, _ = read_names("%interrupt", line)
        for mesh in [self._session.find(name) for name in names]:  # all are known before any is interrupted
            self._say(self._session.interrupt(mesh))

    def _cell(self) -> str:
        return cell_file(self.shell)

    def _say(self, text: str) -> None:
        if text:
            sys.stdout.write(f"{text}\n")


def numbered(magic: str, line: str, body: str) -> str:
    """Returns the body of a cell magic as source whose line numbers are those of the whole cell."""
    return f"#{magic} {line}\n{body}"


def cell_file(shell: object) -> str:
    """Returns the file name of the running cell, which code of it on ranks has too."""
    variables: Any = getattr(shell, "user_ns", None)
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals is not variables:
        frame = frame.f_back
    return frame.f_code.co_filename if frame.f_globals is variables else "<cell>"


def shown_values(shell: InteractiveShell, future: Future[Any]) -> ValueMesh[Any] | None:
    """Waits for what runs on every rank; gives the values to be shown, None when all are None.

    Where the wait ends before the cell does, since ranks have stopped in the debugger or by Ctrl-C, the future is the
    output of the cell in the notebook: `Out[3].get()` waits again.
    """
    try:
        values: ValueMesh[Any] = future.get()
    except (StoppedAtBreakpoint, KeyboardInterrupt) as error:
        number = shell.displayhook.prompt_count
        shell.user_ns.setdefault("_oh", {})[number] = shell.user_ns[f"_{number}"] = future
        if error.args:
            text = str(error.args[0]).replace(" .get() ", f" Out[{number}].get() ")
            error.args = (text, *error.args[1:])
        raise
    return values if any(value is not None for value in values.values()) else None


@magics_class
class PackageMagics(SessionMagics):
    """%pip, for meshes too."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell, session)
        magic = line_magic_of(shell, "pip")
        owner = getattr(magic, "__self__", None)  # this class, where the extension is loaded a second time
        self.usual: Callable[[str], object] = owner.usual if isinstance(owner, PackageMagics) else magic

    @line_magic
    def pip(self, line: str) -> None:
        """Run pip: for this kernel, or where the ranks of a mesh run.

        %pip install einops                     # as IPython has it
        %pip install einops --mesh trainers     # on the hosts of this mesh, for the interpreter of its processes

        It runs once in each environment: hosts that share one, as on a network file system, have one of them run it.
        What it writes is shown as that rank's output, then for each environment what has changed. Ranks can import what
        is new at once; modules they have loaded stay as they are, and are listed.
        From Python: monarch_nb.code.run_pip(trainers, ["install", "einops"]).
        """
        parts = _split_pip(line)
        if parts is None:
            self.usual(line)
            return
        name, words = parts
        mesh = self._session.find(name)
        if not isinstance(mesh, ProcMesh):
            raise UsageError(f"%pip: {name} is no mesh of processes: name the one that its actors are on")
        try:
            sys.stdout.write(f"{run_pip(mesh, words)}\n")
        except PipError as error:
            raise UsageError(f"%pip: {error}") from None
        except ValueError as error:
            raise UsageError(f"%pip: {error} {_OF_MESH} {name}") from None


def _split_pip(line: str) -> tuple[str, list[str]] | None:
    """Returns the mesh and the other words; None for a line without a mesh. Raises UsageError."""
    if _OF_MESH not in line:
        return None
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%pip: {error}") from None
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{_OF_MESH}=") else [word])]
    if _OF_MESH not in words:
        return None
    index = words.index(_OF_MESH)
    if len(words) == index + 1:
        raise UsageError(f"%pip: which mesh? Write %pip install einops {_OF_MESH} trainers")
    return words[index + 1], words[:index] + words[index + 2 :]


@magics_class
class LogMagics(SessionMagics):
    """%logs."""

    @line_magic
    def logs(self, line: str) -> Logs | LogView | None:
        """Show the last lines that the ranks of a mesh wrote, also those that no cell has shown.

        %logs NAME [dim=0] [dim=0-2,5] ... [--follow] [--grep RE] [--level L] [--since T] [--last N] [--stderr]

            %logs workers                        # all ranks, in the order of time; live where widgets are
            %logs workers gpus=3 --since 5m
            %logs workers --grep "loss|nan"      # a regular expression
            %logs workers --level WARNING        # only records of logging, from there on
            %logs workers --follow               # goes on till Ctrl-C, or till the mesh stops

        What was held back in a cell, what background threads and child processes wrote when no call ran, and the last
        words of the dead are here too. From Python: workers.logs("loss|nan", since="5m", level="WARNING", last=100),
        whose .files says where all that each rank wrote is kept.
        """
        args = read_logs(line)
        part: Any = args.place.of(self._session.find(args.place.name))
        try:
            if args.follow:
                follow(part, args.filters)
                return None
            if args.last is None and not args.filters:
                return LogView(part)
            return logs_of(part, last=args.last, **args.filters)
        except (TypeError, IndexError, ValueError, RuntimeError) as error:
            raise UsageError(f"%logs: {error}") from None


def follow(mesh: Any, filters: dict[str, Any]) -> None:
    """Writes lines as they come, until Ctrl-C or the end of the mesh; at the rate that a front end can take."""
    bucket = Bucket(BYTES, BYTES_BURST)
    missed = 0
    try:
        for record in follow_logs(mesh, **filters):
            text = f"{record}\n"
            if bucket.refill(time.monotonic()) < len(text):
                missed += 1
                continue
            if missed:
                text = f"… {missed:,} lines are not shown; %logs --grep shows what you look for\n{text}"
                missed = 0
            bucket.balance -= len(text)
            sys.stdout.write(text)
    except KeyboardInterrupt:
        pass

"""%%spmd and %torchrun: a cell or a script on all ranks, as under torchrun."""

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_magic, magics_class

from monarch_nb._torchrun import TorchrunCommand
from monarch_nb.lifecycle import heal_mesh
from monarch_nb.mesh import ProcMesh, ValueMesh, run_on, state_of
from monarch_nb.spmd import SPMDProgram, begin, machine_size, prepare
from monarch_nb.wire import counted

from .arguments import read_place
from .display.errors import cell_syntax
from .magics import cell_file, numbered, shown_values
from .session import SessionMagics
from .tensors import parts_on

NAME = "spmd"  # of the mesh of cells and scripts that name none


@magics_class
class ProgramMagics(SessionMagics):
    """%%spmd and %torchrun."""

    @cell_magic
    def spmd(self, line: str, cell: str) -> ValueMesh[Any] | None:
        """Run a cell on all ranks as a program of its own, as torchrun runs a script.

        %%spmd [NAME [gpus=0-1]] [procs=N]

            %%spmd                      # on as many processes as this machine has GPUs, else cores, at most 8
            import torch.distributed as dist
            dist.init_process_group("gloo")
            print(dist.get_rank(), dist.get_world_size())

            %%spmd procs=4              # on four
            %%spmd workers              # on the ranks of a mesh that is there

        Each rank has torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR...), and no process groups of an earlier
        cell: those are given up first. Names stay; a cell that goes on with them, and with the process groups, begins
        with %%on. Without a name the mesh is called spmd, and stays for the next cell. From Python:
        monarch_nb.spmd.prepare(workers), then run_on(workers, "...").
        """
        words = line.split()
        procs = [word.partition("=")[2] for word in words if word.startswith("procs=")]
        rest = " ".join(word for word in words if not word.startswith("procs="))
        if rest and procs:
            raise UsageError("%%spmd: either the name of a mesh, or procs=N for one of its own")
        part = self._named("%%spmd", rest) if rest else self._own(_number(procs[0]) if procs else 0)
        source = numbered("%%spmd", line, cell)
        with parts_on(part, source):
            with cell_syntax():
                prepare(part, tables=self._has_tables)
                future = run_on(part, source, filename=cell_file(self.shell))
            return shown_values(self.shell, future)

    @line_magic
    def torchrun(self, line: str) -> None:
        """Run a script on all ranks, as torchrun does.

        %torchrun [--nproc-per-node N] [--nnodes N] SCRIPT [argument ...] [on NAME [gpus=0-1]]
        %torchrun [...] -m MODULE [argument ...] [on NAME]

            %torchrun train.py --epochs 3
            %torchrun --nproc-per-node 4 train.py --lr {lr}
            %torchrun train.py --epochs 3 on workers

        Each rank runs it on its main thread, with torchrun's environment, in a __main__ of its own. What it defines is
        there for %%on. Modules beside the script that were edited are imported again. Without `on` it runs on the mesh
        spmd, of as many processes as this machine has GPUs, else cores, at most 8, which stay for the next run. From
        Python: monarch_nb.spmd.run("train.py", "--epochs", "3", on=workers).
        """
        try:
            words, target = _split(shlex.split(line), self._session.names())
            command = TorchrunCommand.read(["torchrun", *words], local=True)
            with cell_syntax():
                program = SPMDProgram.read(command.script)
        except (ValueError, OSError) as error:
            raise UsageError(f"%{error}" if str(error).startswith("torchrun") else f"%torchrun: {error}") from None
        if target and (command.hosts or command.procs):
            name = target.split()[0]
            raise UsageError(f"%torchrun: {name} says how many processes: leave --nnodes and --nproc-per-node out")
        part = self._named("%torchrun", target) if target else self._own(command.procs, command.hosts)
        if command.left_out:
            sys.stdout.write(f"{', '.join(command.left_out)}: left out, since the mesh decides that\n")
        shown_values(self.shell, begin(program, part, tables=self._has_tables))

    @property
    def _has_tables(self) -> bool:
        """True if cells show HTML."""
        return getattr(self.shell, "kernel", None) is not None

    def _named(self, magic: str, target: str) -> ProcMesh:
        selection = read_place(magic, target)
        part = selection.of(self._session.find(selection.name))
        if not isinstance(part, ProcMesh):
            raise UsageError(f"{magic}: {selection.name} is a mesh of actors, and programs run on processes: name "
                             f"{state_of(part).procs.name}")  # fmt: skip
        return part

    def _own(self, procs: int, hosts: int = 0) -> ProcMesh:
        """Returns the mesh of programs that name none; it is made or healed if necessary."""
        dims = {"hosts": hosts} if hosts > 1 else {}
        previous = self._session.value(NAME)
        mesh, notice = self._session.mesh(NAME, {**dims, "gpus": procs or machine_size()})
        if isinstance(previous, ProcMesh) and state_of(previous) is state_of(mesh):
            return heal_mesh(mesh)
        sys.stdout.write(f"{notice or NAME}: {counted(len(mesh), 'process')}, for this and later cells\n")
        return mesh


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"%%spmd: procs={text} is no number of processes: write procs=4")
    return int(text)


def _split(words: Sequence[str], names: Sequence[str]) -> tuple[list[str], str]:
    """Returns the words of torchrun, and the text after the last `on` that the name of a mesh follows."""
    for index in range(len(words) - 2, -1, -1):
        if words[index] == "on" and words[index + 1] in names:
            return list(words[:index]), " ".join(words[index + 1 :])
    return list(words), ""

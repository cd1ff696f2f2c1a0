"""Sharded tensors and modules of them as they are displayed in a cell."""

from typing import TYPE_CHECKING, Any

from monarch_nb.store import describe
from monarch_nb.tensor.placement import Placement, text_of
from monarch_nb.tensor.summary import placement_of
from monarch_nb.wire import counted, size_text

from ..jupyter import formatters
from ..tensors import all_streams, handle_type, name_of
from .meshes import mesh_html
from .placement import placement_html
from .tensors import module_html, module_text

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# Named, not imported: a kernel without tensors does not import torch.
HANDLE = "monarch_nb.tensor.handle.MeshTensor"
MESH = "monarch_nb.tensor.mesh.Mesh"
MODULE = "torch.nn.modules.module.Module"


class HandleForms:
    """The forms of one notebook, whose variables name the tensors."""

    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell

    def install(self) -> None:
        """Registers them."""
        by_type = formatters(self._shell)
        by_type["text/html"].for_type(HANDLE, self.html)
        by_type["text/html"].for_type(MODULE, self.module)
        by_type["text/html"].for_type(MESH, lambda mesh: mesh_html(mesh.procs, *mesh_facts(mesh)))
        by_type["text/plain"].for_type(MESH, _pretty_mesh)
        by_type["text/plain"].for_type(HANDLE, self._pretty)
        by_type["text/plain"].for_type(MODULE, self._pretty_module)
        by_type["text/plain"].for_type(Placement, lambda value, printer, cycle: printer.text(text_of(value)))

    def uninstall(self) -> None:
        """Removes the displays."""
        by_type = formatters(self._shell)
        for kind, form in (
            ("text/html", HANDLE),
            ("text/html", MODULE),
            ("text/html", MESH),
            ("text/plain", MESH),
            ("text/plain", HANDLE),
            ("text/plain", Placement),
        ):
            by_type[kind].pop(form, None)

    def html(self, tensor: Any) -> str:
        """Returns the placement of a tensor."""
        stream = tensor.reference.stream
        lost = "" if stream.lost is None else _first_line(stream.lost)
        name = self._name(tensor)
        return placement_html(
            placement_of(tensor.meta), name, lost_ranks(stream), lost, calls=() if lost else _calls(tensor, name)
        )

    def text(self, tensor: Any) -> str:
        """Returns the text form."""
        stream = tensor.reference.stream
        name = self._name(tensor)
        text = text_of(placement_of(tensor.meta), name, lost_ranks(stream))
        if stream.lost is not None:
            return f"{text}\n  {_first_line(stream.lost)}"
        return f"{text}\n  {', '.join(f'{label}: {call}' for label, call in _calls(tensor, name))}"

    def module(self, module: Any) -> str | None:
        """Its parameters and buffers that are sharded; None, which shows it as ever, where none are."""
        parameters = sharded(module)
        name = self._name(module)
        kind = type(module).__name__
        return module_html(f"{name}: {kind}" if name else kind, parameters) if parameters else None

    def _pretty_module(self, module: Any, printer: Any, cycle: bool) -> None:
        printer.text(repr(module))
        parameters = sharded(module)
        if parameters:
            printer.text(f"\n{module_text(parameters)}")

    def _pretty(self, tensor: Any, printer: Any, cycle: bool) -> None:
        printer.text(self.text(tensor))

    def _name(self, value: Any) -> str:
        return name_of(self._shell.user_ns, value)


def mesh_facts(mesh: Any) -> tuple[str, ...]:
    """Facts about the tensors of a mesh: device, number and size."""
    stream = mesh.stream
    if stream.lost is not None:
        return "for tensors", _first_line(stream.lost)
    live = stream.table.live()
    size = size_text(sum(tensor.nbytes for tensor in live))
    return f"for tensors on {mesh.device}", f"{counted(len(live), 'tensor')}, {size}" if live else "no tensors yet"


def _pretty_mesh(mesh: Any, printer: Any, cycle: bool) -> None:
    printer.text(f"{mesh!r}\n  {' · '.join(mesh_facts(mesh)[1:])}")


def sharded(module: Any) -> list[tuple[str, Any]]:
    """Returns the path and the meta of each parameter and buffer of a module that is sharded."""
    handle = handle_type()
    if handle is None:
        return []
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [(path, value.meta) for path, value in tensors if isinstance(value, handle)]


def lost_ranks(stream: Any) -> tuple[int, ...]:
    """Ranks of a mesh of tensors that have failed."""
    procs = next((procs for candidate, procs in all_streams() if candidate is stream), None)
    if procs is None:
        return ()
    return tuple(index for index, rank in enumerate(describe(procs).ranks) if rank.state == "failed")


def _calls(tensor: Any, name: str) -> tuple[tuple[str, str], ...]:
    """Expressions that show values of a tensor with this name."""
    called = name or "t"
    layout = tensor.meta.layout
    if tensor.meta.is_own:
        last = ", ".join(f"{dim}={size - 1}" for dim, size in zip(layout.names, layout.shape, strict=True))
        return ("that of one rank", f"monarch.inspect({called}, {last})"), ("by rank", f"{called}.local_shards()")
    return ("its values", f"{called}.full_tensor()"), ("by rank", f"{called}.local_shards()")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(":,")

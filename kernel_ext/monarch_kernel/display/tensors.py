"""Sharded tensors, meshes of them, and the parameters of modules, as text, pictures and tables."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from monarch_nb.store import describe
from monarch_nb.tensor.placement import Placement, shape_text, text_of
from monarch_nb.tensor.placement.picture import thumbnail
from monarch_nb.tensor.placement.text import title
from monarch_nb.tensor.summary import Summary, TensorRow, busy_text, live_bytes, moved_text, placement_of
from monarch_nb.wire import counted, size_text, text_table

from ..jupyter import formatters
from ..tensors import (
    HEADINGS,
    MOVED,
    NOTHING,
    WAITED,
    TensorListing,
    all_streams,
    cells,
    handle_type,
    head,
    live_text,
    memory_lines,
    moved_cells,
    name_of,
    waited_cells,
    waits_text,
)
from .html import LEFT, framed, heading, table, table_head
from .meshes import mesh_html
from .placement import placement_html, small

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_LISTED = 60  # parameters
_BAR = 72  # pixels of the fullest rank
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


def tensors_html(tensors: TensorListing) -> str:
    """Returns the static form of %tensors."""
    if not tensors.meshes:
        return framed(f'<div class="mnb-s">{escape(NOTHING)}</div>')
    form = _waits if tensors.waits else _mesh
    return framed(*(part for summary in tensors.meshes.values() for part in form(summary)))


def _mesh(summary: Summary) -> list[str]:
    parts = [heading(summary.name, *head(summary))]
    if summary.lost:
        parts.append(f"<div>{escape(summary.lost)}</div>")
    if summary.rows:
        parts.append(_rows(summary.rows))
    hidden = summary.count - len(summary.rows)
    if hidden:
        parts.append(f'<div class="mnb-s">… and {hidden} smaller ones</div>')
    if summary.lost:
        return parts
    lines = memory_lines(summary)[1:]
    parts += [_memory(summary), *(f'<div class="mnb-s">{escape(line)}</div>' for line in lines)]
    parts.append(f"<div>{escape(moved_text(summary.moved))}</div>")
    if summary.moved:
        parts.append(table(MOVED, moved_cells(summary), mono=(0,)))
    if summary.busy:
        parts.append(f'<div class="mnb-s">{escape(busy_text(summary.busy))}</div>')
    return [*parts, f'<div class="mnb-s">{escape(waits_text(summary))}</div>']


def _waits(summary: Summary) -> list[str]:
    if not summary.waits:
        return [heading(summary.name, "the last cell waited for no result")]
    return [
        heading(summary.name, "what the last cell waited for"),
        table(WAITED, waited_cells(summary.waits), mono=(3,)),
    ]


def _rows(rows: Sequence[TensorRow]) -> str:
    body = []
    for row in rows:
        name, shape, placement, size, _ = cells(row)
        body.append(
            f"<tr{' class=mnb-s' if row.lost else ''}><td>{small(row.picture)}</td>"
            f"<td{LEFT}><b>{escape(name)}</b></td><td{LEFT}>{escape(shape)}</td>"
            f"<td class=mnb-m{LEFT}>{escape(placement)}</td><td{LEFT}>{_unbroken(size)}</td>"
            f"<td{LEFT}>{_line(row)}</td></tr>"
        )
    return f'<table class="mnb-t">{table_head(("", *HEADINGS))}<tbody>{"".join(body)}</tbody></table>'


def _unbroken(size: str) -> str:
    """Returns a number and its unit, on one line in a narrow table."""
    return size.replace(" ", "&nbsp;")


def _line(row: TensorRow) -> str:
    return f'<span title="{escape(row.line.source)}">{escape(row.line.at)}</span>'


def _memory(summary: Summary) -> str:
    """Returns a bar for each rank, where they differ."""
    if len(set(map(size_text, summary.live))) <= 1 or len(summary.live) > 64:
        return f'<div class="mnb-s">live: {escape(live_text(summary.live[:64]))}</div>'
    top = max(summary.live) or 1
    bars = "".join(
        f"<tr><th{LEFT}>{rank}</th><td{LEFT}>{_bar(size / top)} {size_text(size)}</td></tr>"
        for rank, size in enumerate(summary.live)
    )
    title = f"live by rank: {size_text(min(summary.live))} to {size_text(top)}"
    return f"<details><summary>{title}</summary><table><tbody>{bars}</tbody></table></details>"


def _bar(share: float) -> str:
    width = max(1, round(_BAR * share))
    style = f"display:inline-block;height:9px;width:{width}px;background-color:rgba(0,114,178,.6)"
    return f'<span style="{style}"></span>'


def module_html(name: str, parameters: Sequence[tuple[str, Any]]) -> str:
    """Returns the parameters of a module with their placement: (path, meta) each; memory by rank below."""
    total = sum(placement_of(meta).nbytes for _, meta in parameters)
    sizes = live_bytes((meta for _, meta in parameters), parameters[0][1].layout.size)
    rows = [_parameter(path, placement_of(meta)) for path, meta in parameters[:_LISTED]]
    tops = table_head(("parameter", "shape", "dtype", "", "placement", "on a rank"))
    more = f'<div class="mnb-s">… and {len(parameters) - len(rows)} more</div>' if len(parameters) > len(rows) else ""
    largest = max(sizes)
    return framed(
        heading(
            name, f"{len(parameters)} sharded tensors", size_text(total), f"{size_text(largest)} on the fullest rank"
        ),
        f'<table class="mnb-t">{tops}<tbody>{"".join(rows)}</tbody></table>{more}',
        f'<div class="mnb-s">by rank: {escape(live_text(tuple(sizes[:64])))}</div>',
    )


def module_text(parameters: Sequence[tuple[str, Any]]) -> str:
    """Returns the parameters as text."""
    rows = [("parameter", "tensor", "placement", "on a rank")]
    for path, meta in parameters[:_LISTED]:
        placement = placement_of(meta)
        rows.append((path, title(placement), " ".join(map(str, placement.kinds)), size_text(placement.largest)))
    more = f"\n… and {len(parameters) - _LISTED} more" if len(parameters) > _LISTED else ""
    sizes = live_bytes((meta for _, meta in parameters), parameters[0][1].layout.size)
    return f"{text_table(rows)}{more}\nby rank: {live_text(tuple(sizes[:64]))}"


def _parameter(path: str, placement: Placement) -> str:
    cells = (shape_text(placement.shape), placement.dtype, small(thumbnail(placement)))
    kinds = escape(" ".join(map(str, placement.kinds)))
    first = "".join(f"<td{LEFT}>{cell}</td>" for cell in cells)
    last = f"<td class=mnb-m{LEFT}>{kinds}</td><td{LEFT}>{_unbroken(size_text(placement.largest))}</td>"
    return f"<tr><td class=mnb-m{LEFT}>{escape(path)}</td>{first}{last}</tr>"

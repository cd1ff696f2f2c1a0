"""Views of sharded tensors, which share memory for the program but not always on the workers.

A view that divides a sharded dimension is a copy on the workers. It is recreated when it is used after its base has
changed, and writes to it are also written to its base.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from monarch_nb.tensor.commands import Define
from monarch_nb.tensor.errors import CallSite, call_site, is_refused, warn_once
from monarch_nb.tensor.propagation import Meta, OperationPlan, PlanNotice, PropagationError, ViewWriteError, user_line
from monarch_nb.tensor.references import Copied, LogicalMemory, Reference
from monarch_nb.tensor.stream import Stream

T = TypeVar("T")
Tree = TypeVar("Tree", tuple[object, ...], dict[str, object])
_REAL = 1 << 24  # bytes of real tensors that test whether a kernel accepts overlapping memory

_RESHAPE_INSTEAD = (
    "Make a new tensor instead of changing the shape in place: t = t.transpose(0, 1), t = t.squeeze(dim), "
    "t = t.unsqueeze(dim)"
)


def record_views(plan: OperationPlan, inputs: Sequence[Reference], outputs: Sequence[Reference]) -> None:
    """Records the views that a plan has made of its inputs."""
    for (result, source), offset in zip(plan.views, plan.offsets, strict=True):
        base_reference, view = inputs[source], outputs[result]
        memory = base_reference.memory
        if memory is None:
            memory = base_reference.memory = LogicalMemory()
        view.memory, view.is_view, view.offset = memory, True, base_reference.offset + offset
        if plan.made[result].copied:
            base, steps = base_reference.copied or (base_reference, ())
            view.copied = Copied(base, (*steps, (plan, result)))
            memory.copies.add(view)
            view.stream.viewed.add(memory)


def make_again(stream: Stream, numbers: Iterable[int], site: CallSite | None) -> None:
    """Recreates the stale views among these tensors, which stay stale if this is interrupted."""
    stale = stream.held.stale
    for number in numbers:
        copied = stale.get(number)
        if copied is None:
            continue
        source, references = copied.base.number, []
        for step, (plan, result) in enumerate(copied.steps, 1):
            outputs = [stream.hold_object() for _ in plan.made]
            references += outputs  # freed after all steps
            results = [reference.number for reference in outputs]
            if step == len(copied.steps):
                results[result] = number
            again = stream.held.references((number,)) if results[result] == number else ()
            _issue(stream, plan, (source, *results), site, again)
            source = results[result]
        stale.pop(number, None)


def check_writes(plan: OperationPlan, inputs: Sequence[Reference], site: CallSite | None) -> None:
    """Warns of the cost of a write through a view. Raises ViewWriteError if the write is not visible everywhere."""
    targets = [inputs[index] for index in plan.writes]
    copies = [target for target in targets if target.copied is not None]
    if not copies and not plan.puts_back:
        return
    if len({id(target.memory or target) for target in targets}) < len(targets):
        raise ViewWriteError(
            plan.operation,
            "it writes to one tensor in several ways at once, of which some are copies on the processes",
            "Write to them one after the other",
            user_line(),
        )
    if copies and is_refused():
        raise ViewWriteError(
            plan.operation,
            "this writes through a view of a tensor that is sharded on a dimension which the view cuts, so that the "
            "tensor would have to be gathered on every rank, which tensor_gather forbids",
            "Write to the tensor itself: t = torch.slice_scatter(t, values, dim, start, end), "
            "t = t.index_copy(dim, index, values), or redistribute it first",
            user_line(),
        )
    for target in copies:
        _warn_of_write(target.stream, plan.operation, _write_back_plan(target), site)


def check_reshape(plan: OperationPlan, target: Reference, *, has_gradient: bool, is_base: bool) -> bool:
    """Returns whether other tensors share the memory of a tensor that is reshaped in place.

    Raises PropagationError if gradients of views would be lost: after a write, autograd replays the views of the base,
    in which a change of shape in place is missing.
    """
    shared = not target.stream.held.is_alone(target)
    has_reshaped = target.memory is not None and any(reference is not target for reference in target.memory.reshaped)
    if has_gradient and (has_reshaped or (is_base and shared)):
        raise PropagationError(
            plan.operation,
            "it changes the shape of a tensor in place whose memory other tensors show, too, and their gradients would "
            "go to other elements",
            _RESHAPE_INSTEAD,
            user_line(),
        )
    return shared


def record_reshape(before: Reference, after: Reference) -> None:
    """Records a reshape in place of a tensor with shared memory, whose handle now refers to `after`."""
    assert after.memory is not None
    after.memory.reshaped.discard(before)
    after.memory.reshaped.add(after)


def check_gradients(plan: OperationPlan, inputs: Sequence[Reference]) -> None:
    """Raises ViewWriteError for a differentiable write to memory of which a view was reshaped in place."""
    for index in plan.writes:
        memory = inputs[index].memory
        if memory is not None and memory.reshaped:
            raise ViewWriteError(
                plan.operation,
                "a tensor that shares this memory had its shape changed in place, and gradients would no longer find "
                "their way through it",
                _RESHAPE_INSTEAD,
                user_line(),
            )


def overlapping_inputs(
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    plan: OperationPlan,
    inputs: Sequence[tuple[T, Reference, Meta]],
) -> list[T]:
    """Returns the tensors that an operation has to read from copies, since it writes to other elements of their memory.

    Workers would not notice, or would refuse a shard whose strides differ from those of the whole. `inputs` are the
    tensors among the arguments, with their references and metas. Raises RuntimeError where local torch does. Raises
    ViewWriteError if copies change the result: local torch's then depends on the order of its kernel.
    """
    shares = Counter(id(reference.memory) for _, reference, _ in inputs if reference.memory is not None)
    for index in plan.writes:
        _, target, meta = inputs[index]
        if target.memory is None or shares[id(target.memory)] < 2:
            continue
        if any(
            reference.memory is target.memory
            and (reference.offset, input_meta.shape, input_meta.stride) != (target.offset, meta.shape, meta.stride)
            and max(reference.offset, target.offset) < min(_end(reference, input_meta), _end(target, meta))
            for _, reference, input_meta in inputs
        ):
            break
    else:
        return []
    size = max(_end(reference, meta) for _, reference, meta in inputs)
    if sum(meta.nbytes for _, _, meta in inputs) + size > _REAL:
        return []
    results = []
    with no_dispatch(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        real, written = _real_tensors(plan, inputs, size, target.memory, True)
        written.zero_()
        targets = {id(inputs[index][0]) for index in plan.writes}
        for tensor in targets:
            real[tensor].fill_(1)
        read = [
            tensor
            for tensor, reference, _ in inputs
            if reference.memory is target.memory and id(tensor) not in targets and bool(real[id(tensor)].any())
        ]
        for shared in (True, False):
            torch.default_generator.manual_seed(0)  # only this generator: torch.manual_seed would seed all meshes
            real, written = _real_tensors(plan, inputs, size, target.memory, shared)
            try:
                func(*_replace_real(args, real), **_replace_real(kwargs, real))
            except RuntimeError as error:
                if "single memory location" in str(error):
                    raise
                return []
            results.append(written)
    # The values of an index are not known here.
    if not torch.equal(*results) or (read and any(_is_index(input_meta) for _, _, input_meta in inputs)):
        raise ViewWriteError(
            plan.operation,
            "it reads elements that it also writes, so that its result depends on the order in which it does so",
            "Let it read from a copy: x.sub_(y.clone())",
            user_line(),
        )
    return read


def _is_index(meta: Meta) -> bool:
    return not (meta.dtype.is_floating_point or meta.dtype.is_complex or meta.dtype is torch.bool)


def _real_tensors(
    plan: OperationPlan, items: Sequence[tuple[object, Reference, Meta]], size: int, memory: LogicalMemory, shared: bool
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Returns CPU tensors by the id of the tensors that they replace, and the bytes of `memory`, which is written to.

    Elements of floating point differ from each other, indices are 0 and masks true. `shared`: the tensors that the
    operation only reads share memory with those that it writes.
    """
    targets = {id(items[index][0]) for index in plan.writes}
    dtypes = {reference.memory: meta.dtype for _, reference, meta in items if reference.memory is memory}
    buffers: dict[object, torch.Tensor] = {}
    real = {}
    for tensor, reference, meta in items:
        owner = reference.memory or reference
        buffer = buffers.get(owner)
        if buffer is None:
            buffer = buffers[owner] = torch.zeros(size, dtype=torch.uint8)
            dtype = dtypes[memory] if reference.memory is memory else meta.dtype
            elements = buffer[: size // dtype.itemsize * dtype.itemsize].view(dtype)
            numbers = torch.arange(len(elements))
            if not _is_index(meta) and dtype is not torch.bool:
                elements.copy_((numbers % 89 + 1) / 97)
            elif reference.memory is memory:
                elements.copy_(numbers % (2 if dtype is torch.bool else 89))
            elif dtype is torch.bool:
                elements.fill_(True)
        offset = reference.offset // meta.dtype.itemsize
        part = torch.empty(0, dtype=meta.dtype, device="cpu")
        part.set_(buffer.untyped_storage(), offset, meta.shape, meta.stride)
        real[id(tensor)] = part if shared or id(tensor) in targets else part.clone()
    return real, buffers[memory]


def _replace_real(values: Tree, real: dict[int, torch.Tensor]) -> Tree:
    cpu = torch.device("cpu")
    replaced: Tree = tree_map(
        lambda value: cpu if isinstance(value, torch.device) else real.get(id(value), value), values
    )
    return replaced


def _end(reference: Reference, meta: Meta) -> int:
    """Returns the end of a tensor in its shared memory in bytes; the start if it has no elements."""
    if 0 in meta.shape:
        return reference.offset
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=True))
    return reference.offset + (last + 1) * meta.dtype.itemsize


def write_back(plan: OperationPlan, inputs: Sequence[Reference], site: CallSite | None) -> None:
    """Writes copied views, to which an issued plan has written, back to their bases. They are stale until then."""
    for index in plan.writes:
        _write_back(inputs[index], site)


def _write_back(reference: Reference, site: CallSite | None) -> None:
    if reference.copied is not None:
        numbers = (reference.copied.base.number, reference.number)
        _issue(reference.stream, _write_back_plan(reference), numbers, site, (reference.copied.base,))
        reference.stream.held.stale.pop(reference.number, None)


@contextmanager
def rewriting(references: Iterable[Reference]) -> Iterator[None]:
    """Surrounds code that may write to these tensors, and propagates the writes, also after an error.

    The command that writes to them names them, too. Raises ViewWriteError if one is a copy of a part of another, since
    the written one of them is unknown.
    """
    distinct = tuple(dict.fromkeys(references))
    if _overlap(distinct):
        raise ViewWriteError(
            "this",
            "it may write to a tensor and to a view of it that is a copy on the processes, and which of them it "
            "writes to is not known",
            "Give it one of them only, or a copy of the view: view.clone()",
            user_line(),
        )
    site = call_site()
    try:
        yield
    finally:
        for reference in distinct:
            if reference.stream.lost is None:
                make_stale(reference)
                _write_back(reference, site)


def _overlap(references: Sequence[Reference]) -> bool:
    """Returns whether one is a copied view that shares memory with another."""
    times = Counter(id(reference.memory or reference) for reference in references)
    return any(
        reference.copied is not None and times[id(reference.memory or reference)] > 1 for reference in references
    )


def share(view: Reference, source: Reference, offset: int, copied: Copied | None) -> None:
    """Records that a tensor shares memory of `source`, at an offset from it, with elements that may be older."""
    if source.memory is None:
        source.memory = LogicalMemory()
    view.memory, view.is_view, view.offset = source.memory, True, source.offset + offset
    if copied is not None:
        view.copied = copied
        view.memory.copies.add(view)
        view.stream.viewed.add(view.memory)
        view.stream.held.stale[view.number] = copied


def make_stale(reference: Reference) -> None:
    """Marks the copied views of a tensor's memory, to which an operation writes, as stale.

    Before the write, so that no interrupt leaves a view with other values than its base; a view that is written itself
    is not stale once it was written back.
    """
    if reference.memory is not None:
        for copy in reference.memory.copies:
            if copy.copied is not None:
                reference.stream.held.stale[copy.number] = copy.copied


def _write_back_plan(reference: Reference) -> OperationPlan:
    """Returns the plan that writes a copied view back to its base."""
    stream = reference.stream
    assert reference.copied is not None
    base, steps = reference.copied
    entries = stream.table.entries
    names = tuple((plan.number, result) for plan, result in steps)
    return stream.propagator.putting_back(entries[base.number].meta, names, entries[reference.number].meta)


def _warn_of_write(stream: Stream, operation: str, back: OperationPlan, site: CallSite | None) -> None:
    moved = sum(collective.nbytes for collective in back.collectives)
    text = (
        f"{operation} writes through a view that cuts a sharded dimension: the tensor under it is gathered on every "
        f"rank, and written back ({moved} bytes from each here). torch.slice_scatter and index_copy, or another "
        "placement, may cost less"
    )
    warn_once(stream, PlanNotice(f"{operation} through a view", text), site)


def _issue(
    stream: Stream,
    plan: OperationPlan,
    numbers: Sequence[int],
    site: CallSite | None,
    written: Iterable[Reference | None],
) -> None:
    if plan.number not in stream.defined:
        stream.define(Define(plan.number, plan.operation, plan.program, 0, plan.made, plan.writes))
    stream.issue((plan.number, *numbers), site, [ref.writes for ref in written if ref is not None])
    if plan.collectives:
        stream.table.moved(site, plan)

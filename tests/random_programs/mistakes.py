"""Lines that are errors in local torch, and must be errors on a mesh."""

from collections.abc import Callable

from tests.random_programs.draw import Draw, Scope

Entry = Callable[[Draw, Scope], str | None]
WRONG: list[Entry] = []


def wrong(function: Entry) -> Entry:
    WRONG.append(function)
    return function


@wrong
def bad_dims(d: Draw, s: Scope) -> str | None:
    operand = s.real(1)
    if operand is None:
        return None
    x, tensor = operand
    n = tensor.dim()
    bad = d.choice([n, -n - 1, n + 2])
    return d.choice(
        [
            f"{x}.sum({bad})",
            f"{x}.cumsum({bad})",
            f"{x}.softmax({bad})",
            f"{x}.select({bad}, 0)",
            f"{x}.transpose(0, {bad})",
            f"{x}.amax({bad})",
            f"{x}.sort({bad})",
            f"torch.cat([{x}, {x}], {bad})",
            f"{x}.split(1, {bad})",
            f"{x}.squeeze({bad})",
            f"{x}.narrow({bad}, 0, 1)",
            f"{x}.select(0, {tensor.shape[0]})",
            f"{x}[{-tensor.shape[0] - 1}]",
            f"{x}.narrow(0, 0, {tensor.shape[0] + 1})",
            f"{x}.view(7, 11)",
            f"{x}.topk({tensor.shape[0] + 1}, 0)",
            f"{x}.permute({', '.join(['0'] * (n + 1))})",
            f"{x}.reshape(-1, 0)",
            f"{x}.expand(3, 0)",
            f"{x}.split([{tensor.shape[0] + 1}], 0)",
            f"{x} @ {x}.new_zeros(13)",
            f"{x} + {x}.new_zeros(11, 13)",
            f"{x}.sum((0, 0))",
            f"{x}.max(dim={bad})",
            f"{x}.flip({bad})",
        ]
    )


@wrong
def bad_writes(d: Draw, s: Scope) -> str | None:
    operand = s.real(1)
    if operand is None:
        return None
    x, tensor = operand
    return d.choice(
        [
            f"{x}.add_({x}.new_zeros(5, 7, 11))",
            f"{x}.copy_({x}.new_zeros(5, 7, 11))",
            f"{x}[0] = {x}.new_zeros(5, 7, 11)",
            f"{x}.t_()" if tensor.dim() > 2 else f"{x}.mul_({x}.new_zeros(3, 5, 7))",
            f"{x}.unsqueeze(0).expand(2, {', '.join('-1' for _ in tensor.shape)}).add_({x}.new_zeros(5, 5, 5, 5))",
        ]
    )


@wrong
def bad_types(d: Draw, s: Scope) -> str | None:
    x = s.pick(lambda t: t.is_floating_point() and t.dim() == 2)
    return x and d.choice(
        [
            f"{x} @ {x}.mT.to(torch.int64)",
            f"{x}[{x}]",
            f"~{x}",
            f"{x}.index_select(0, {x}[0])",
            f"{x} & {x}",
            f"{x}.mm({x}.mT.double().long())",
            f"F.embedding({x}, {x})",
        ]
    )


@wrong
def bad_indices(d: Draw, s: Scope) -> str | None:
    """Mistakes that only the ranks can see."""
    x = s.pick(lambda t: t.is_floating_point() and t.dim() > 0 and t.numel() > 0)
    return x and d.choice(
        [
            f"{x}.index_select(0, torch.tensor([99], device={x}.device))",
            f"{x}[torch.tensor([99], device={x}.device)]",
            f"{x}.gather(0, torch.full({x}.shape, 99, device={x}.device))",
        ]
    )


def mistakes(device: str) -> list[Entry]:
    """Those that ranks on a device raise errors for: a GPU fails an assertion for an index, which ends the process."""
    return [entry for entry in WRONG if device == "cpu" or entry is not bad_indices]

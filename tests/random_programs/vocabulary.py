"""The operations that random programs are made of: each draws the text of a line for tensors that there are.

A line that fits no tensor is not written (None).
"""

from collections.abc import Callable

import torch

from tests.random_programs.draw import Draw, Scope, broadcast

Entry = Callable[[Draw, Scope], str | None]
VOCABULARY: list[tuple[float, str, Entry]] = []


def entry(group: str, weight: float = 1.0) -> Callable[[Entry], Entry]:
    def add(function: Entry) -> Entry:
        VOCABULARY.append((weight, group, function))
        return function

    return add


def unary(group: str, least: int, *texts: str, weight: float = 1.0) -> None:
    """Lines on one tensor of floating numbers: X stands for it, D for a dimension, K for whether that is kept."""

    def line(d: Draw, s: Scope) -> str | None:
        operand = s.real(least)
        if operand is None:
            return None
        x, tensor = operand
        text = d.choice(texts)
        return text.replace("X", x).replace("D", str(d.dim(tensor.dim()))).replace("K", str(d.chance(0.5)))

    VOCABULARY.append((weight, group, line))


unary(
    "elements",
    0,
    "X.tanh()",
    "X.relu()",
    "F.gelu(X)",
    "F.silu(X)",
    "X.sigmoid()",
    "X.abs()",
    "-X",
    "X ** 2",
    "1 - X",
    "X * 0.5",
    "X.clamp(-0.5, 0.75)",
    "X.clamp(min=0.1)",
    "X / 4",
    "2.0 / (X.abs() + 1)",
    "X.sin()",
    "(X * 0.1).exp()",
    "(X.abs() + 0.5).log()",
    "(X.abs() + 0.25).sqrt()",
    "F.hardtanh(X)",
    "F.elu(X)",
    "F.softplus(X)",
    "X.sign() * X",
    "X.clone()",
    "X.detach()",
    "X.contiguous()",
    "X.square()",
    "(X.abs() + 1).rsqrt()",
    "X.erf()",
    "X.lerp(X * 2, 0.25)",
    "torch.zeros_like(X) + X",
    "torch.ones_like(X) * X",
    "X.new_zeros(X.shape) - X",
    "X.floor()",
    "X.round()",
    "F.leaky_relu(X, 0.2)",
    "F.hardswish(X)",
    "F.dropout(X, 0.5, training=False)",
    "X.nan_to_num()",
    "X % 3",
    "X // 2",
    "X.logit(0.1)",
    "torch.full_like(X, 0.5) * X",
    "X.remainder(2.5)",
    weight=6,
)
unary(
    "reductions",
    0,
    "X.sum()",
    "X.mean()",
    "X.norm()",
    "X.sum(D, keepdim=K)",
    "X.mean(D, keepdim=K)",
    "X.sum(D)",
    "X.logsumexp(D)",
    "X.square().sum()",
    "X.var(D, unbiased=False, keepdim=K)",
    "X.std(D, correction=0)",
    "X.prod(D, keepdim=K)",
    "X.norm(dim=D, keepdim=K)",
    "torch.linalg.vector_norm(X, 1, D)",
    "torch.linalg.vector_norm(X, float('inf'), D)",
    "torch.linalg.vector_norm(X, 3)",
    "X.amax(D, keepdim=K)",
    "X.amin(D, keepdim=K)",
    "X.abs().amax()",
    "X.amax()",
    "X.max(D, keepdim=K)",
    "X.min(D)",
    "X.argmax(D, keepdim=K)",
    "X.argmin(D)",
    "(X > 0.25).any(D)",
    "(X > -1.5).all(D, keepdim=K)",
    "(X > 0).sum(D)",
    "X.median(D)",
    "X.aminmax(dim=D)",
    "X.nansum(D)",
    "X.count_nonzero(D)",
    "torch.var_mean(X, D, correction=0)",
    "X.max()",
    "X.prod()",
    "(X > 0).sum()",
    "X.std(correction=0)",
    "X.argmax()",
    "X.kthvalue(1, D)",
    "X.quantile(0.5, D)",
    "X.nanmean(D, keepdim=K)",
    "(X > 0.5).any()",
    "X.mode(D)",
    weight=8,
)
unary(
    "scans",
    0,
    "X.cumsum(D)",
    "X.cumsum(D)",
    "(X * 0.5).cumprod(D)",
    "X.logcumsumexp(D)",
    "X.cummax(D)",
    "X.cummin(D)",
    "X.diff(dim=D)",
    "X.clone().cumsum_(D)",
    "X.to(torch.float64).cumsum(D)",
    "torch.cumsum(X, dim=D)",
    "torch.cumulative_trapezoid(X, dim=D)",
    "torch.trapezoid(X, dim=D)",
    "X.cumsum(D, dtype=torch.float64)",
    weight=5,
)
unary(
    "softmax",
    0,
    "X.softmax(D)",
    "X.log_softmax(D)",
    "F.softmax(X, D)",
    "F.softmin(X, D)",
    "F.normalize(X, dim=D)",
    weight=2,
)
unary(
    "order",
    0,
    "X.sort(D)",
    "X.sort(D, descending=True)",
    "X.argsort(D)",
    "X.sort(D, stable=True)",
    "X.flip(D)",
    "X.msort()",
    "X.roll(1, D)",
    "X.roll(-2, D)",
    "torch.searchsorted(X.detach().flatten().sort().values, X.detach())",
    weight=3,
)
unary(
    "views",
    1,
    "X.unbind(D)",
    "X.squeeze(D)",
    "X.movedim(D, 0)",
    "X.swapaxes(D, -1)",
    "X.flatten()",
    "X.mT.contiguous()",
    "X.transpose(D, 0)",
    "X.transpose(D, -1)",
    "X.flatten(0, D)",
    "X.view(-1)",
    "X.reshape(-1)",
    "X.ravel()",
    "X.squeeze()",
    "X[None]",
    "X[..., None]",
    "X.view(X.shape)",
    "X.mT",
    "X.diagonal()",
    "X.t()",
    "X.unfold(D, 2, 1)",
    "X.narrow_copy(D, 0, 1)",
    "X.view_as(X)",
    "X.flatten(-2, -1)",
    "X.adjoint()",
    "X.T if X.dim() == 2 else X.mT",
    weight=6,
)


@entry("elements", 3)
def mixed(d: Draw, s: Scope) -> str | None:
    """Whole numbers and truth values."""
    operand = s.some(lambda t: not t.is_floating_point())
    if operand is None:
        return None
    x, tensor = operand
    dim, keep = d.dim(tensor.dim()), d.chance(0.5)
    if tensor.dtype == torch.bool:
        return d.choice(
            [
                f"~{x}",
                f"{x}.any()",
                f"{x}.sum({dim})",
                f"{x}.all({dim}, keepdim={keep})",
                f"{x}.to(torch.float32)",
                f"{x}.logical_not()",
                f"{x} * 2",
                f"{x}.cumsum({dim})",
                f"{x}.to(torch.int64)",
                f"{x}.sum()",
                f"{x} & True",
            ]
        )
    return d.choice(
        [
            f"{x} + 1",
            f"{x} * 3",
            f"{x}.sum({dim}, keepdim={keep})",
            f"{x}.cumsum({dim})",
            f"{x}.to(torch.float32)",
            f"{x} // 2",
            f"{x} % 3",
            f"{x} > 0",
            f"{x}.amax({dim}, keepdim={keep})",
            f"{x}.sum()",
            f"{x}.abs()",
            f"{x} / 2",
            f"{x}.bool()",
            f"{x}.prod({dim})",
            f"{x}.bitwise_and(3)",
            f"{x}.flip({dim})",
            f"{x}.max()",
            f"{x}.cumprod({dim})",
            f"{x}.clamp(-1, 2)",
            f"{x}.to(torch.float32).mean({dim})",
            f"{x}.amin()",
            f"{x} == {x}.flip({dim})",
            f"{x}.neg()",
            f"{x}.to(torch.int32)",
        ]
    )


@entry("elements", 2)
def typed(d: Draw, s: Scope) -> str | None:
    name = s.pick()
    kind = d.choice(
        ["float64", "float32", "float32", "bfloat16", "float16", "int64", "bool", "int32", "uint8", "int16"]
    )
    return name and f"{name}.to(torch.{kind})"


@entry("elements", 6)
def pairs(d: Draw, s: Scope) -> str | None:
    operand = s.real()
    if operand is None:
        return None
    x, tensor = operand
    y = s.fitting(tensor)
    return y and d.choice(
        [
            f"{x} + {y}",
            f"{x} - {y}",
            f"{x} * {y}",
            f"{x} / ({y}.abs() + 1)",
            f"torch.maximum({x}, {y})",
            f"torch.atan2({x}, {y})",
            f"torch.minimum({x}, {y})",
            f"{x}.lerp({y}.to({x}.dtype), 0.3)",
            f"torch.where({x} > {y}, {x}, {y} * 2)",
            f"{x} > {y}",
            f"torch.add({x}, {y}, alpha=2)",
            f"{y} - {x} * 0.5",
            f"torch.hypot({x}, {y})",
            f"({x} - {y}).square()",
            f"{x} + 2 * {y}",
            f"torch.sub({x}, {y}, alpha=0.5)",
            f"torch.addcmul({x}, {y}, {y}, value=0.5)",
            f"torch.logaddexp({x}, {y})",
            f"torch.fmod({x}, {y}.abs() + 1)",
            f"torch.copysign({x}, {y})",
            f"{x}.eq({y})",
            f"torch.broadcast_tensors({x}, {y})",
        ]
    )


@entry("elements", 2)
def any_pairs(d: Draw, s: Scope) -> str | None:
    operand = s.some(lambda t: True)
    assert operand is not None
    x, tensor = operand
    y = s.fitting(tensor, real=False)
    return y and d.choice(
        [f"{x} + {y}", f"{x} * {y}", f"{x} == {y}", f"{x} >= {y}", f"torch.where({x} != 0, {y}, {x})"]
    )


@entry("elements", 2)
def numbers(d: Draw, s: Scope) -> str | None:
    x = s.pick()
    return x and d.choice([f"{x} + {d.number()}", f"{x} * {d.number()}", f"{d.number()} - {x}", f"{x} > {d.number()}"])


@entry("elements", 3)
def masks(d: Draw, s: Scope) -> str | None:
    operand = s.real()
    if operand is None:
        return None
    x, tensor = operand
    y = s.fitting(tensor) or x
    mask = (
        s.pick(lambda t: t.dtype == torch.bool and broadcast(t.shape, tensor.shape) == tuple(tensor.shape))
        or f"({x} > 0.25)"
    )
    return d.choice(
        [
            f"torch.where({mask}, {x}, {y})",
            f"torch.where({mask}, {x}, 0.0)",
            f"{x}.masked_fill({mask}, {d.number()})",
            f"{x} * {mask}",
            f"torch.where({mask}, -1.0, {x})",
            f"{x}.masked_fill(~{mask}, float('-inf')).softmax({d.dim(tensor.dim())})",
            f"torch.where({mask}, {x}, {x}.new_zeros(()))",
            f"{x}.where({mask}, {y})",
            f"{x}.masked_fill({mask}, {x}.new_ones(()))",
        ]
    )


@entry("reductions", 2)
def over_dims(d: Draw, s: Scope) -> str | None:
    operand = s.real(2)
    if operand is None:
        return None
    x, tensor = operand
    dims, keep = d.dims(tensor.dim()), d.chance(0.5)
    return d.choice(
        [
            f"{x}.sum({dims}, keepdim={keep})",
            f"{x}.mean({dims}, keepdim={keep})",
            f"{x}.amax({dims})",
            f"{x}.var({dims}, correction=0)",
            f"{x}.amin({dims}, keepdim={keep})",
            f"torch.linalg.vector_norm({x}, 2, {dims}, keepdim={keep})",
            f"{x}.logsumexp({dims})",
            f"{x}.flip({dims})",
            f"({x} > 0).any({dims})",
            f"{x}.std({dims}, correction=0, keepdim={keep})",
            f"{x}.sum({dims}, dtype=torch.float64)",
        ]
    )


@entry("views", 5)
def reshaped(d: Draw, s: Scope) -> str | None:
    operand = s.some(lambda t: t.dim() > 0)
    if operand is None:
        return None
    x, tensor = operand
    shape, ndim, count = tuple(tensor.shape), tensor.dim(), tensor.numel()
    dim = d.dim(ndim)
    size = shape[dim]
    order = d.sample(range(ndim), ndim)
    kinds = [
        f"{x}.permute({', '.join(map(str, (n - ndim if d.chance(0.3) else n for n in order)))})",
        f"{x}.unsqueeze({d.dim(ndim + 1)})",
    ]
    kinds.append(f"{x}.expand({d.randint(1, 2)}, {', '.join('-1' if d.chance(0.5) else str(n) for n in shape)})")
    kinds.append(f"{x}.repeat({', '.join(str(d.randint(1, 2)) for _ in shape)})")
    kinds.append(f"{x}.narrow({dim}, {d.randint(0, size)}, 0)" if d.chance(0.1) else f"{x}.unflatten({dim}, (1, -1))")
    if count:
        rows = d.choice([n for n in range(1, count + 1) if count % n == 0])
        kinds += [f"{x}.reshape({rows}, -1)", f"{x}.reshape(-1, {rows})"]
        if ndim > 1:
            kinds += [
                f"{x}.flatten({d.randrange(ndim - 1)})",
                f"{x}.reshape({shape[0]}, -1)",
                f"{x}.view(-1, {shape[-1]})",
            ]
    if size:
        factor = d.choice([n for n in range(1, size + 1) if size % n == 0])
        start = d.randrange(size)
        kinds += [f"{x}.unflatten({dim}, ({factor}, -1))", f"{x}.unflatten({dim}, (-1, {factor}))"]
        kinds += [
            f"{x}.narrow({dim}, {start}, {d.randint(1, size - start)})",
            f"{x}.select({dim}, {d.index(size)})",
        ] * 2
    if ndim >= 2:
        first, second = d.sample(range(ndim), 2)
        kinds += [
            f"{x}.transpose({first}, {second - ndim})",
            f"{x}.diagonal({d.randint(-1, 1)}, {first}, {second})",
            f"{x}.tril()",
            f"{x}.triu(1)",
        ]
        kinds += [f"{x}.movedim({first}, {second - ndim})", f"torch.rot90({x}, 1, ({first}, {second}))"]
    return d.choice(kinds)


@entry("indexing", 5)
def subscripts(d: Draw, s: Scope) -> str | None:
    operand = s.some(lambda t: t.dim() > 0)
    return operand and f"{operand[0]}[{d.subscript(operand[1].shape)}]"


@entry("indexing", 4)
def gathered(d: Draw, s: Scope) -> str | None:
    operand = s.some(lambda t: t.dim() > 0 and t.shape[0] > 0)
    if operand is None:
        return None
    x, tensor = operand
    dim = d.dim(tensor.dim())
    size = tensor.shape[dim]
    if not size:
        return None
    picked = f"torch.tensor({[d.randrange(size) for _ in range(d.randint(1, 4))]}, device={x}.device)"
    signed = f"torch.tensor({[d.index(tensor.shape[0]) for _ in range(d.randint(1, 4))]}, device={x}.device)"
    index = s.pick(lambda t: t.dtype == torch.int64 and t.dim() == 1 and bool(((t >= 0) & (t < size)).all()))
    same = s.pick(
        lambda t: (
            t.dtype == torch.int64
            and t.dim() == tensor.dim()
            and bool(((t >= 0) & (t < size)).all())
            and all(
                a <= b for n, (a, b) in enumerate(zip(t.shape, tensor.shape, strict=True)) if n != dim % tensor.dim()
            )
        )
    )
    kinds = [f"{x}.index_select({dim}, {picked})", f"{x}[{signed}]", f"{x}[..., {[d.index(tensor.shape[-1] or 1)]}]"]
    kinds += [f"{x}.take_along_dim({x}.argsort({dim}), {dim})", f"{x}.gather({dim}, {x}.argsort({dim}))"]
    if index:
        kinds += [f"{x}.index_select({dim}, {index})"] * 2
        if dim % tensor.dim() == 0:
            kinds += [f"{x}[{index}]"] * 2
    if same:
        kinds += [f"{x}.gather({dim}, {same})"] * 2
    if tensor.dim() > 1 and tensor.shape[1]:
        second = f"torch.tensor({[d.index(tensor.shape[1]) for _ in range(2)]}, device={x}.device)"
        first = f"torch.tensor({[d.index(tensor.shape[0]) for _ in range(2)]}, device={x}.device)"
        kinds += [f"{x}[{first}, {second}]", f"{x}[:, {second}]", f"{x}[{first}[:, None], {second}]"]
    if tensor.is_floating_point() and index and tensor.dim() == 2 and dim % 2 == 0:
        kinds.append(f"F.embedding({index}, {x})")
    return d.choice(kinds)


@entry("indexing", 2)
def scattered(d: Draw, s: Scope) -> str | None:
    """Out of place."""
    operand = s.real(1)
    if operand is None or not operand[1].numel():
        return None
    x, tensor = operand
    dim = d.dim(tensor.dim())
    size = tensor.shape[dim]
    rows = d.sample(range(size), d.randint(1, size))
    index = f"torch.tensor({rows}, device={x}.device)"
    position = d.index(size)
    return d.choice(
        [
            f"{x}.index_fill({dim}, {index}, {d.number()})",
            f"{x}.select_scatter({x}.select({dim}, 0) * 2, {dim}, {position})",
            f"{x}.index_add({dim}, {index}, {x}.index_select({dim}, {index}), alpha=2)",
            f"{x}.index_copy({dim}, {index}, {x}.index_select({dim}, {index}) * 3)",
            f"{x}.scatter({dim}, {x}.argsort({dim}), {x} * 2)",
            f"{x}.scatter_add({dim}, {x}.argsort({dim}), {x})",
            f"{x}.slice_scatter({x}.narrow({dim}, 0, 1) * 2, {dim}, {position % size}, {position % size + 1})",
            f"{x}.scatter({dim}, {x}.argmax({dim}, keepdim=True), 0.5)",
            f"{x}.take({index})",
            f"{x}.scatter_reduce({dim}, {x}.argsort({dim}), {x} * 2, 'amax')",
            f"{x}.index_put(({x}.new_zeros((), dtype=torch.int64),), {x}[0] * 2)",
        ]
    )


@entry("joins", 4)
def joined(d: Draw, s: Scope) -> str | None:
    operand = s.real()
    if operand is None:
        return None
    x, tensor = operand
    same = s.pick(lambda t: t.shape == tensor.shape and t.is_floating_point()) or x
    dim, wide = d.dim(tensor.dim()), d.dim(tensor.dim() + 1)
    kinds = [
        f"torch.stack([{x}, {same}], {wide})",
        f"torch.stack([{x}, {x} * 2, {same}], {wide})",
        f"torch.hstack([{x}, {same}])",
    ]
    if tensor.dim():
        partner = s.pick(
            lambda t: (
                t.dim() == tensor.dim()
                and t.is_floating_point()
                and all(
                    a == b
                    for axis, (a, b) in enumerate(zip(t.shape, tensor.shape, strict=True))
                    if axis != dim % tensor.dim()
                )
            )
        )
        kinds += [
            f"torch.cat([{x}, {partner or same}], {dim})",
            f"torch.cat([{partner or same}, {x}, {x} + 1], dim={dim})",
        ] * 2
        pad = ", ".join(str(d.randint(0, 2)) for _ in range(2))
        kinds += [
            f"F.pad({x}, ({pad}))",
            f"{x}.repeat_interleave(2, dim={dim})",
            f"torch.vstack([{x}, {same}])",
            f"{x}.tile(2)",
        ]
    return d.choice(kinds)


@entry("splits", 3)
def split(d: Draw, s: Scope) -> str | None:
    operand = s.some(lambda t: t.dim() > 0)
    if operand is None:
        return None
    x, tensor = operand
    dim = d.dim(tensor.dim())
    size = tensor.shape[dim]
    return d.choice(
        [
            f"{x}.split({d.randint(1, max(size, 1))}, {dim})",
            f"{x}.split({d.split(size)}, dim={dim})",
            f"{x}.chunk({d.randint(1, 3)}, {dim})",
            f"{x}.tensor_split({d.randint(1, 3)}, {dim})",
            f"{x}.tensor_split(({d.randint(0, size)},), dim={dim})",
            f"{x}.unbind({dim})",
        ]
    )


@entry("products", 5)
def products(d: Draw, s: Scope) -> str | None:
    operand = s.real(1)
    if operand is None:
        return None
    x, tensor = operand
    size, dtype = tensor.shape[-1], tensor.dtype

    def pick(fits: Callable[[torch.Tensor], bool]) -> str | None:
        return s.pick(lambda t: t.dtype == dtype and fits(t))

    kinds = [f"torch.outer({x}, {x} + 1)"] if tensor.dim() == 1 and size < 12 else [f"{x} @ {x}.mT"]
    vector = pick(lambda t: t.shape == (size,))
    if vector:
        kinds += [f"{x} @ {vector}", f"torch.matmul({x}, {vector})"]
    weight = pick(lambda t: t.dim() == 2 and t.shape[1] == size)
    if weight:
        bias = pick(lambda t: t.shape == s.tensors[weight].shape[:1])
        kinds += [
            f"F.linear({x}, {weight})",
            f"{x} @ {weight}.T",
            f"F.linear({x}, {weight}{f', {bias}' if bias else ''})",
        ]
        if tensor.dim() == 2:
            kinds += [
                f"torch.einsum('ik,jk->ij', {x}, {weight})",
                f"torch.cdist({x}, {weight} + 5)",
                f"{x}.mm({weight}.t())",
            ]
            kinds += [f"torch.addmm({x}[:, :1], {x}, {weight}.t(), beta=0.5)"]
    right = pick(lambda t: t.dim() >= 2 and t.shape[-2] == size)
    if right:
        kinds += [f"{x} @ {right}"] * 2
    same = pick(lambda t: t.shape == tensor.shape)
    if same and tensor.dim() == 3:
        kinds += [
            f"torch.bmm({x}, {same}.transpose(1, 2))",
            f"torch.einsum('bik,bjk->bij', {x}, {same})",
            f"{x}.mT.bmm({same})",
        ]
        kinds += [f"torch.baddbmm({x}[:, :, :1], {x}, {same}.mT)"]
    if same and tensor.dim() == 1:
        kinds += [f"{x}.dot({same})", f"torch.inner({x}, {same})"]
    if same and tensor.dim() >= 2:
        kinds += [
            f"torch.tensordot({x}, {same}, dims=([0], [0]))",
            f"torch.einsum('...ij,...ij->...i', {x}, {same})",
            f"F.cosine_similarity({x}, {same}, dim={d.dim(tensor.dim())})",
        ]
    return d.choice(kinds)


@entry("norms", 3)
def norms(d: Draw, s: Scope) -> str | None:
    operand = s.real(1)
    if operand is None or not operand[1].shape[-1]:
        return None
    x, tensor = operand
    last = tensor.shape[-1]
    weight = s.pick(lambda t: t.shape == (last,) and t.dtype == tensor.dtype)
    more = f", {weight}" if weight and d.chance(0.7) else ""
    kinds = [f"F.layer_norm({x}, ({last},){more})", f"F.rms_norm({x}, ({last},){more})"]
    if tensor.dim() >= 2:
        kinds += [f"F.layer_norm({x}, {tuple(tensor.shape[-2:])})"]
        same = s.pick(lambda t: t.shape == tensor.shape and t.dtype == tensor.dtype) or x
        kinds += [
            f"F.mse_loss({x}, {same} + 1)",
            f"F.smooth_l1_loss({x}, {same} * 0.5)",
            f"F.l1_loss({x}, {same} + 2)",
            f"F.huber_loss({x}, {same}, reduction='none')",
        ]
        rows = torch.Size(tensor.shape[:-1]).numel()
        classes = f"torch.arange({rows}, device={x}.device) % {last}"
        ones = s.pick(lambda t: t.shape == (last,) and t.dtype == tensor.dtype)
        options = f", weight={ones}.abs() + 1" if ones and d.chance(0.7) else ""
        options += f", ignore_index={d.randint(0, max(last - 1, 0))}" if d.chance(0.3) else ""
        options += f", reduction='{d.choice(['mean', 'sum', 'none'])}'" if d.chance(0.5) else ""
        kinds += [f"F.cross_entropy({x}.reshape({rows}, {last}), {classes}{options})"]
        kinds += [f"F.group_norm({x}, 1)"] if tensor.shape[1] else []
    if tensor.dim() == 3:
        kinds += [f"F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None], is_causal={d.chance(0.5)})"]
        kinds += [f"F.max_pool1d({x}, 2)", f"F.avg_pool1d({x}, 2)"] if last > 1 else []
        kinds += [f"F.conv1d({x}, {x}[:, :, :1])"] if 0 not in tensor.shape else []
    return d.choice(kinds)


@entry("order", 2)
def top(d: Draw, s: Scope) -> str | None:
    operand = s.real(1)
    if operand is None:
        return None
    x, tensor = operand
    dim = d.dim(tensor.dim())
    return (
        f"{x}.topk({d.randint(0 if d.chance(0.1) else 1, max(tensor.shape[dim], 1))}, {dim}, largest={d.chance(0.6)})"
    )


@entry("writes", 7)
def writes(d: Draw, s: Scope) -> str | None:
    """In place: on a tensor itself, or through a view of it."""
    operand = s.some(lambda t: t.grad_fn is not None or not t.requires_grad)
    if operand is None:
        return None
    x, tensor = operand
    target, part = x, tensor
    if tensor.dim() and d.chance(0.5):
        text = d.subscript(tensor.shape)
        try:
            part = eval(f"x[{text}]", {"x": tensor})
        except Exception:
            return None
        target = f"{x}[{text}]"
        if d.chance(0.3):
            source = s.filling(part.shape, tensor.dtype)
            return f"{target} = {source if source and d.chance(0.7) else d.choice(['2', '-1', '0'])}"
    source = s.filling(part.shape, tensor.dtype)
    kinds = [f"{target}.fill_(2)", f"{target}.zero_()"]
    if tensor.dtype != torch.bool:
        kinds += [
            f"{target}.add_(1)",
            f"{target}.mul_(2)",
            f"{target}.sub_(3)",
            f"{target}.neg_()",
            f"{target}.clamp_(-2, 2)",
            f"{target}.abs_()",
        ]
    if source:
        kinds += [f"{target}.copy_({source})"] * 2
        if tensor.dtype != torch.bool:
            kinds += [f"{target}.add_({source})", f"{target}.mul_({source})", f"{target}.sub_({source})"] * 2
        if tensor.is_floating_point():
            kinds += [
                f"{target}.add_({source}, alpha=0.5)",
                f"{target}.lerp_({source}, 0.25)",
                f"{target}.addcmul_({source}, {source})",
            ]
    if tensor.is_floating_point():
        kinds += [
            f"{target}.tanh_()",
            f"{target}.relu_()",
            f"{target}.masked_fill_({target} > 0.5, 0.25)",
            f"{target}.div_(2)",
            f"{target}.sigmoid_()",
        ]
        mask = s.pick(lambda t: t.dtype == torch.bool and broadcast(t.shape, part.shape) == tuple(part.shape))
        kinds += [f"{target}.masked_fill_({mask}, -1.5)"] * 2 if mask else []
        if part.dim():
            dim = d.dim(part.dim())
            kinds += [
                f"{target}.cumsum_({dim})",
                f"{target}.copy_({target}.flip({dim}))",
                f"{target}.sub_({target}.mean({dim}, keepdim=True))",
            ]
            if part.shape[dim]:
                rows = [d.randrange(part.shape[dim])]
                index = f"torch.tensor({rows}, device={x}.device)"
                kinds += [
                    f"{target}.index_fill_({dim}, {index}, 0.5)",
                    f"{target}.index_add_({dim}, {index}, {target}.index_select({dim}, {index}))",
                ]
                kinds += [
                    f"{target}.index_copy_({dim}, {index}, {target}.index_select({dim}, {index}) * 2)",
                    f"{target}.select({dim}, -1).mul_(0.5)",
                ]
                kinds += [f"{target}.scatter_({dim}, {target}.argsort({dim}), {target} * 2)"]
            kinds += (
                [f"{target}.squeeze_({dim})", f"{target}.unsqueeze_({dim})", f"{target}.transpose_({dim}, 0)"]
                if target == x
                else []
            )
    return d.choice(kinds)


@entry("writes", 1)
def writes_without_gradient(d: Draw, s: Scope) -> str | None:
    operand = s.real()
    return operand and f"with torch.no_grad(): {operand[0]}.mul_(0.5)"


@entry("places", 4)
def places(d: Draw, s: Scope) -> str | None:
    """PLACED stands for placements that the generator draws."""
    operand = s.some(lambda t: True)
    return operand and f"place({operand[0]}, PLACED)"

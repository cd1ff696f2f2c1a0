"""Random programs of common operations: what a mesh computes, forward and backward, against local tensors."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional

import monarch_nb
from monarch_nb.distributed import Mesh

Make = Callable[[torch.Tensor], torch.Tensor]
Operation = Callable[..., torch.Tensor]


def unary(draw: random.Random, shape: torch.Size) -> list[tuple[str, Operation]]:
    """Operations on one tensor of a shape, with arguments that fit it."""
    dim = draw.randrange(len(shape)) if shape else 0
    size = shape[dim] if shape else 1
    start = draw.randrange(size) if size else 0
    keep = draw.random() < 0.5
    found: list[tuple[str, Operation]] = [
        ("exp", lambda x: (x * 0.1).exp()),
        ("tanh", torch.tanh),
        ("relu", torch.relu),
        ("gelu", functional.gelu),
        ("silu", functional.silu),
        ("hardtanh", functional.hardtanh),
        ("abs", torch.abs),
        ("neg", torch.neg),
        ("square", lambda x: x**2),
        ("one minus", lambda x: 1 - x),
        ("clamp", lambda x: x.clamp(-0.5, 0.5)),
        ("sum", lambda x: x.sum()),
        ("mean", lambda x: x.mean()),
        ("amax", lambda x: x.amax()),
        ("norm", lambda x: x.norm()),
        ("where", lambda x: torch.where(x > 0, x, x * 0.1)),
        ("masked_fill", lambda x: x.masked_fill(x > 0.5, 0.25)),
        ("double", lambda x: x.double().float()),
        ("flatten", lambda x: x.flatten()),
        ("clone add_", lambda x: x.clone().add_(1.0)),
        ("dropout none", lambda x: functional.dropout(x, 0.5, training=False)),
    ]
    if not shape:
        return found
    found += [
        ("sum dim", lambda x: x.sum(dim, keepdim=keep)),
        ("mean dim", lambda x: x.mean(dim, keepdim=keep)),
        ("amax dim", lambda x: x.amax(dim, keepdim=keep)),
        ("max dim", lambda x: x.max(dim, keepdim=keep).values),
        ("min dim", lambda x: x.min(dim).values),
        ("prod dim", lambda x: x.prod(dim)),
        ("var", lambda x: x.var(dim, unbiased=False)),
        ("std mean", lambda x: x.std(dim, unbiased=False, keepdim=keep)),
        ("norm dim", lambda x: x.norm(dim=dim, keepdim=keep)),
        ("norm 1", lambda x: torch.linalg.vector_norm(x, 1, dim)),
        ("norm inf", lambda x: torch.linalg.vector_norm(x, float("inf"), dim)),
        ("norm 3", lambda x: torch.linalg.vector_norm(x, 3)),
        ("any", lambda x: (x > 0.3).any(dim).sum().float() * x.sum()),
        ("all", lambda x: (x > -0.3).all(dim).float().sum() * x.sum()),
        ("argmax", lambda x: x.argmax(dim).float().sum() * x.sum()),
        ("softmax", lambda x: x.softmax(dim)),
        ("log_softmax", lambda x: x.log_softmax(dim)),
        ("logsumexp", lambda x: x.logsumexp(dim)),
        ("cumsum", lambda x: x.cumsum(dim)),
        ("cumprod", lambda x: x.cumprod(dim)),
        ("sort", lambda x: x.sort(dim).values),
        ("topk", lambda x: x.topk(max(1, size // 2), dim).values),
        ("flip", lambda x: x.flip(dim)),
        ("roll", lambda x: x.roll(1, dim)),
        ("select", lambda x: x.select(dim, start)),
        ("narrow", lambda x: x.narrow(dim, start, size - start)),
        ("chunk", lambda x: x.chunk(2, dim)[0]),
        ("unsqueeze", lambda x: x.unsqueeze(dim)),
        ("expand", lambda x: x.unsqueeze(0).expand(2, *x.shape)),
        ("repeat", lambda x: x.repeat(2, *[1] * (x.dim() - 1))),
        ("index", lambda x: x.index_select(dim, torch.tensor([0, size - 1], device=x.device))),
        ("index list", lambda x: x[torch.tensor([size - 1, 0], device=x.device)] if dim == 0 else x),
        ("gather", lambda x: x.gather(dim, x.argsort(dim))),
        ("pad", lambda x: functional.pad(x, (1, 1))),
        ("tril", lambda x: x.tril() if x.dim() > 1 else x),
        ("write row", lambda x: _written(x, start, dim)),
        ("diff", lambda x: x.diff(dim=dim) if size > 1 else x),
        ("layer_norm", lambda x: functional.layer_norm(x, x.shape[-1:])),
        ("rms_norm", lambda x: functional.rms_norm(x, x.shape[-1:])),
        ("normalize", lambda x: functional.normalize(x, dim=dim)),
        ("cross_entropy", lambda x: _cross_entropy(x)),
    ]
    if len(shape) >= 2:
        found += [
            ("transpose", lambda x: x.transpose(0, -1)),
            ("matmul own", lambda x: x @ x.mT),
            ("view", lambda x: x.reshape(x.shape[0], -1)),
            ("stack", lambda x: torch.stack([x, x * 2], dim)),
            ("cat", lambda x: torch.cat([x, x + 1], dim)),
            ("logcumsumexp", lambda x: x.logcumsumexp(dim)),
        ]
    return found


BINARY: list[tuple[str, Operation]] = [
    ("add", torch.add),
    ("sub", torch.sub),
    ("mul", torch.mul),
    ("div", lambda x, y: x / (y.abs() + 1)),
    ("maximum", torch.maximum),
    ("atan2", lambda x, y: torch.atan2(x, y + 3)),
    ("lerp", lambda x, y: torch.lerp(x, y, 0.3)),
    ("addcmul", lambda x, y: torch.addcmul(x, y, y, value=0.5)),
    ("mse", functional.mse_loss),
    ("huber", functional.huber_loss),
    ("l1", functional.l1_loss),
    ("cosine", lambda x, y: functional.cosine_similarity(x, y, dim=-1) if x.dim() and y.dim() else x * y),
    ("where two", lambda x, y: torch.where(x > y, x, y * 2)),
    ("in place", lambda x, y: x.clone().mul_(y) if torch.broadcast_shapes(x.shape, y.shape) == x.shape else x * y),
]

PRODUCTS: list[tuple[str, Operation]] = [
    ("mm", lambda x, y: x @ y.mT),
    ("linear", functional.linear),
    ("addmm", lambda x, y: torch.addmm(x[:, :1], x, y.mT) if x.dim() == 2 else x @ y.mT),
    ("outer sum", lambda x, y: torch.einsum("ik,jk->ij", x, y)),
    ("bilinear", lambda x, y: (x.unsqueeze(1) * y.unsqueeze(0)).sum(-1)),
    ("cdist", lambda x, y: torch.cdist(x, y + 5)),
]


def _written(x: torch.Tensor, at: int, dim: int) -> torch.Tensor:
    x = x.clone()
    x.select(dim, at).mul_(2.0)
    return x


def _cross_entropy(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    return functional.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % x.shape[-1])


def placements_for(draw: random.Random, mesh: Mesh, shape: torch.Size) -> list[Any]:
    """One placement for each dimension of a mesh."""
    choices: list[Any] = [Replicate(), *(Shard(dim) for dim in range(len(shape)) if shape[dim] > 1)]
    return [draw.choice(choices) for _ in mesh.shape]


def difference(seed: int, mesh: Mesh, length: int) -> str:
    """What differs in the random program of this seed, "" where all is equal, or refused."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, columns = draw.choice([(4, 6), (5, 3), (8, 4), (3, 7)])
    shapes = [torch.Size(one) for one in ((rows, columns), (rows, columns), (draw.choice([2, 5]), rows, columns))]
    wholes = [torch.randn(shape) for shape in shapes]
    placed = [placements_for(draw, mesh, shape) for shape in shapes]
    local = [one.clone().requires_grad_() for one in wholes]
    ours: list[Any] = [
        monarch_nb.distribute(one, mesh, placements).requires_grad_()
        for one, placements in zip(wholes, placed, strict=True)
    ]
    leaves = list(zip(local, ours, strict=True))
    story = [f"seed {seed} on {mesh.shape}: {[tuple(one) for one in shapes]} {placed}"]
    if draw.random() < 0.2:
        parts = [Partial() if draw.random() < 0.5 else Replicate() for _ in mesh.shape]
        ours[0] = ours[0].redistribute([Replicate()] * len(parts)).redistribute(parts)
        story.append(f"0 as {parts}")
    for _ in range(length):
        at = draw.randrange(len(local))
        x = local[at]
        pairs = [n for n, one in enumerate(local) if _fit(one, x)]
        products = [n for n, one in enumerate(local) if one.dim() == x.dim() == 2 and one.shape[1] == x.shape[1]]
        kind = draw.random()
        others: list[int] = []
        if products and kind < 0.15:
            name, operation = draw.choice(PRODUCTS)
            others = [draw.choice(products)]
        elif pairs and kind < 0.4:
            name, operation = draw.choice(BINARY)
            others = [draw.choice(pairs)]
        else:
            name, operation = draw.choice(unary(draw, x.shape))
        if x.numel() > 400:
            continue
        try:
            expected = operation(x, *(local[n] for n in others))
        except (RuntimeError, IndexError):
            continue
        if not expected.isfinite().all() or expected.abs().max() > 1e4:
            continue
        story.append(f"{len(local)} = {name}({', '.join(map(str, (at, *others)))}) {tuple(expected.shape)}")
        found = operation(ours[at], *(ours[n] for n in others))
        story[-1] += f" {getattr(found, 'placements', '')}"
        if text := _off(expected, found):
            return "\n".join([*story, text])
        local.append(expected)
        ours.append(found)
    weights = [torch.randn(one.shape) for one in local]
    expected = sum((one * weight).sum() for one, weight in zip(local, weights, strict=True))  # type: ignore[assignment]
    found = sum(  # type: ignore[assignment]
        (one * monarch_nb.distribute(weight, mesh)).sum() for one, weight in zip(ours, weights, strict=True)
    )
    expected.backward()
    found.backward()
    for one, other in leaves:
        assert one.grad is not None
        if text := _off(one.grad, other.grad):
            return "\n".join([*story, f"gradient of {tuple(one.shape)}: {text}"])
    return ""


def _fit(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(one.shape, other.shape)
    except RuntimeError:
        return False
    return True


def _off(expected: torch.Tensor, found: Any) -> str:
    whole = found.full_tensor()
    if whole.shape != expected.shape:
        return f"{tuple(whole.shape)} in place of {tuple(expected.shape)}"
    one, other = expected.detach().double(), whole.double()
    if torch.allclose(one, other, 1e-3, 1e-3 * max(1.0, one.abs().max().item() if one.numel() else 1.0)):
        return ""
    return f"off by {(one - other).abs().max().item():.4g}: {found.meta}\n{one}\n{other}"

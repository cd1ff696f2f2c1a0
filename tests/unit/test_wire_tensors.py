import gc
import io
import subprocess
import sys

import pytest

from monarch_nb.wire import decode, encode

torch = None  # imported by the first of these tests: collecting them must be quick


@pytest.fixture(scope="module", autouse=True)
def the_library():
    global torch
    torch = pytest.importorskip("torch")


def trip(obj):
    first, *rest = encode(obj)
    return decode([bytes(first), *map(bytearray, rest)])


def assert_same(copy, original):
    assert type(copy) is type(original)
    assert copy.dtype == original.dtype
    assert copy.shape == original.shape
    assert copy.requires_grad == original.requires_grad
    assert copy.device.type == "cpu"
    assert torch.equal(copy.detach(), original.detach())


DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64", "int64", "int8", "uint8", "bool"]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [3, 5000])
def test_every_dtype_survives_small_and_large(name, size):
    dtype = getattr(torch, name)
    tensor = torch.arange(size).to(dtype)
    copy = trip([tensor])[0]
    assert copy.dtype == dtype
    assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))


SHAPES = {
    "scalar": lambda big: torch.tensor(3.5),
    "empty": lambda big: torch.zeros(3, 0, 2),
    "transposed": lambda big: big.reshape(300, 400).t(),
    "expanded": lambda big: torch.arange(100.0).unsqueeze(1).expand(100, 50),
    "row of a big one": lambda big: big.reshape(300, 400)[7],
    "column of a big one": lambda big: big.reshape(300, 400)[:, 7],
    "half": lambda big: big[60_000:],
    "channels last": lambda big: torch.randn(2, 16, 20, 20).to(memory_format=torch.channels_last),
    "conjugated": lambda big: torch.randn(2000, dtype=torch.complex64).conj(),
    "negated": lambda big: torch.randn(2000, dtype=torch.complex64).conj().imag,
    "permuted slice": lambda big: big.reshape(30, 40, 100)[3:5].permute(2, 0, 1),
}


@pytest.fixture
def big():
    return torch.arange(120_000, dtype=torch.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_views_of_all_sorts_survive(name, big):
    view = SHAPES[name](big)
    assert_same(trip({"t": view})["t"], view)


@pytest.mark.parametrize("name", ["transposed", "expanded", "channels last"])
def test_strides_of_dense_and_expanded_tensors_are_kept(name, big):
    view = SHAPES[name](big)
    assert trip([view])[0].stride() == view.stride()


def test_a_small_view_does_not_bring_the_big_storage_behind_it():
    big = torch.zeros(1_000_000)
    for view in (big[10:2000], big.reshape(1000, 1000)[:, 3]):
        frames = encode([view])
        assert sum(len(frame) for frame in frames) < 20_000
        assert_same(trip([view])[0], view)


def test_large_tensors_are_neither_copied_when_encoding_nor_when_decoding():
    tensor = torch.zeros(100_000)
    first, buffer = encode((tensor,))
    assert len(first) < 500
    tensor[0] = 1
    memory = bytearray(buffer)
    assert memory[:4] == bytes(torch.tensor([1.0]).view(torch.uint8).tolist())
    (copy,) = decode([first, memory])
    memory[:4] = bytes(4)
    assert copy[0] == 0


def test_received_tensors_are_writable_and_private():
    tensor = torch.ones(10_000)
    copy = trip([tensor])[0]
    copy.zero_()
    assert tensor.sum() == 10_000
    first, *rest = encode([tensor])
    from_read_only = decode([first, *map(bytes, rest)])[0]
    from_read_only.zero_()


def test_temporary_copies_live_until_the_frames_are_gone(big):
    frames = encode([big.reshape(300, 400)[:, 7], torch.randn(3000, dtype=torch.complex64).conj()])
    gc.collect()
    trash = [torch.full((400,), float(n)) for n in range(100)]
    copy = decode([frames[0], *map(bytearray, frames[1:])])
    assert torch.equal(copy[0], big.reshape(300, 400)[:, 7])
    del trash


def test_gradients_wanted_and_parameters_stay_so():
    leaf = torch.randn(2000, requires_grad=True)
    assert_same(trip([leaf])[0], leaf)
    result = trip([leaf * 2])[0]
    assert result.requires_grad
    assert result.is_leaf
    for flag in (True, False):
        parameter = torch.nn.Parameter(torch.randn(50, 50), requires_grad=flag)
        assert_same(trip([parameter])[0], parameter)
    (copy,) = trip([leaf])
    (copy * 2).sum().backward()
    assert copy.grad is not None


def test_modules_survive_with_tied_weights():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(64, 64)
            self.b = torch.nn.Linear(64, 64)
            self.b.weight = self.a.weight
            self.register_buffer("mean", torch.zeros(64))

    module = Tied()
    copy = trip(module)
    assert copy.b.weight is copy.a.weight
    x = torch.randn(2, 64)
    assert torch.equal(copy.b(x), module.b(x))
    lstm = torch.nn.LSTM(8, 8)
    assert torch.equal(trip(lstm)(x[:, :8])[0], lstm(x[:, :8])[0])


def test_views_of_one_storage_keep_sharing_it():
    flat = torch.zeros(3000)
    flat_back, head, tail = trip((flat, flat[:10], flat[10:]))
    flat_back.fill_(4)
    assert head.sum() == 40
    assert tail.sum() == 4 * 2990
    left, right = trip((flat[:1500], flat[1500:]))
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def test_optimizer_state_survives():
    parameter = torch.nn.Parameter(torch.randn(40, 40))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    copy = trip(optimizer.state_dict())
    assert torch.equal(copy["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_the_rest_is_left_to_torch():
    sparse = torch.eye(50).to_sparse()
    assert torch.equal(trip([sparse])[0].to_dense(), sparse.to_dense())
    meta = trip([torch.empty(3, device="meta")])[0]
    assert meta.is_meta
    marked = torch.ones(2000)
    marked.note = "mine"
    copy = trip([marked])[0]
    assert copy.note == "mine"
    assert torch.equal(copy, marked)
    size, dtype, device = trip((torch.Size([1, 2]), torch.bfloat16, torch.device("cpu")))
    assert size == torch.Size([1, 2])
    assert dtype is torch.bfloat16
    assert device == torch.device("cpu")


def special_tensors(big):
    subclass = type("Marked", (torch.Tensor,), {"__module__": __name__})
    globals()["Marked"] = subclass
    noted = big.clone()
    noted.note = "mine"
    return {
        "subclass": big.as_subclass(subclass),
        "parameter of a subclass": torch.nn.Parameter(big.as_subclass(subclass)),
        "with an attribute": noted,
        "quantized": torch.quantize_per_tensor(big, 0.1, 3, torch.qint8),
        "sparse": big.reshape(300, 400).to_sparse(),
        "compressed rows": big.reshape(300, 400).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([big[:50_000], big[50_000:]], layout=torch.strided),
        "jagged": torch.nested.nested_tensor([big[:50_000], big[50_000:]], layout=torch.jagged),
        "storage": big.untyped_storage(),
        "buffer": getattr(torch.nn, "Buffer", torch.nn.Parameter)(big),  # PyTorch 2.4 has no buffers
    }


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about its new features
@pytest.mark.parametrize(
    "name",
    sorted(
        (
            "subclass",
            "parameter of a subclass",
            "with an attribute",
            "quantized",
            "sparse",
            "compressed rows",
            "jagged",
            "nested",
            "storage",
            "buffer",
        )
    ),
)
def test_storages_that_torch_pickles_itself_are_not_copied(name, big):
    original = special_tensors(big)[name]
    first, *rest = encode(original)
    assert len(first) < 4096
    assert sum(memoryview(frame).nbytes for frame in rest) >= big.nbytes // 4
    copy = decode([bytes(first), *map(bytearray, rest)])
    assert type(copy) is type(original)
    assert torch.save(copy, io.BytesIO()) is None
    if name == "storage":
        assert bytes(copy) == bytes(original)
    elif name in ("jagged", "nested"):
        assert all(torch.equal(a, b) for a, b in zip(copy.unbind(), original.unbind(), strict=True))
    else:
        plain = [tensor.dequantize() if tensor.is_quantized else tensor.to_dense() for tensor in (copy, original)]
        assert torch.equal(*plain)
        assert vars(copy) == vars(original)


def test_storages_that_are_shared_stay_shared_however_they_are_taken_apart(big):
    noted, plain = big[:], big[100:]
    noted.note = "mine"
    noted, plain = trip([noted, plain])
    plain[0] = -1
    assert noted[100] == -1


def test_modes_of_the_calling_thread_do_not_get_in_the_way():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor = torch.randn(3000)
    scattered = tensor[::3]
    with torch.device("meta"):
        assert_same(trip([tensor])[0], tensor)
    with FakeTensorMode():
        copy = trip([tensor, scattered])[0]
    assert_same(copy, tensor)
    with torch.no_grad():
        leaf = torch.ones(2, requires_grad=True)
        assert_same(trip([leaf])[0], leaf)
    with torch.inference_mode():
        assert_same(trip([tensor])[0], tensor)


def test_what_torch_calls_by_name_is_found_in_torch_alone():
    """`multiprocessing` gives the program another name, under which Python would find what it has imported."""
    program = """
import multiprocessing, torch
from monarch_nb.wire import decode, encode
values = [torch.contiguous_format, torch.preserve_format, torch.strided, torch.sparse_coo, torch.per_tensor_affine]
frames = encode(values)
assert b"__mp_main__" not in b"".join(map(bytes, frames))
assert all(value is back for value, back in zip(values, decode(frames), strict=True))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)

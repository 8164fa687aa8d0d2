"""What torch promises about tensors on an accelerator, on a simulated one: values equal the CPU's, errors too."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("hardware")

FIRST, SECOND = "sim:0", "sim:1"


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8)


def assert_close(on_sim: Tensor, on_cpu: Tensor) -> None:
    assert on_sim.device.type == "sim"
    torch.testing.assert_close(on_sim.cpu(), on_cpu, atol=1e-5, rtol=1e-4)


# --- Moving


def test_each_device_index_is_a_device(x: Tensor) -> None:
    first, second = x.to(FIRST), x.to(SECOND)
    assert (str(first.device), str(second.device)) == (FIRST, SECOND)
    assert first.device != second.device


def test_round_trip_keeps_every_byte(x: Tensor) -> None:
    assert torch.equal(x.to(SECOND).cpu(), x)


def test_copy_between_devices(x: Tensor) -> None:
    moved = x.to(FIRST).to(SECOND)
    assert str(moved.device) == SECOND
    assert torch.equal(moved.cpu(), x)


def test_a_copy_shares_nothing_with_its_source(x: Tensor) -> None:
    source = x.clone()
    on_sim = source.to(FIRST)
    source.zero_()
    assert torch.equal(on_sim.cpu(), x)


def test_non_blocking_copies_arrive(x: Tensor) -> None:
    target = torch.empty(4, 8, device=SECOND)
    target.copy_(x.pin_memory(), non_blocking=True)
    moved = x.to(SECOND, non_blocking=True)
    torch.accelerator.synchronize(1)
    assert torch.equal(target.cpu(), x)
    assert torch.equal(moved.cpu(), x)


def test_broadcasting_and_converting_copies(x: Tensor) -> None:
    target = torch.zeros(3, 4, 8, device=SECOND, dtype=torch.float64)
    target.copy_(x)
    assert torch.equal(target.cpu(), x.double().expand(3, 4, 8))
    target[0, ::2].copy_(x[0])
    assert torch.equal(target[0, 2].cpu(), x[0].double())


def test_conjugated_copies() -> None:
    z = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(z.to(SECOND).conj().cpu(), z.conj())
    target = torch.zeros(4, dtype=torch.complex64, device=SECOND)
    target.conj().copy_(z.to(SECOND))
    assert torch.equal(target.cpu(), z.conj())


# --- Modules


MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(8, 16), torch.randn(4, 8)),
    "conv1d": lambda: (nn.Conv1d(4, 8, 3), torch.randn(2, 4, 9)),
    "conv2d": lambda: (nn.Conv2d(4, 8, 3, padding=1, stride=2), torch.randn(2, 4, 9, 9)),
    "conv3d": lambda: (nn.Conv3d(4, 8, 3, padding=1), torch.randn(1, 4, 4, 5, 5)),
    "conv_transpose2d": lambda: (nn.ConvTranspose2d(4, 8, 2, stride=2), torch.randn(1, 4, 5, 5)),
    "layer_norm": lambda: (nn.LayerNorm(8), torch.randn(4, 8)),
    "group_norm": lambda: (nn.GroupNorm(2, 8), torch.randn(2, 8, 5, 5)),
    "rms_norm": lambda: (nn.RMSNorm(8), torch.randn(4, 8)),
    "batch_norm": lambda: (nn.BatchNorm2d(4), torch.randn(2, 4, 5, 5)),
    "embedding": lambda: (nn.Embedding(10, 8), torch.tensor([[1, 2], [3, 9]])),
    "attention layer": lambda: (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_module_equals_cpu(kind: str) -> None:
    module, inputs = MODULES[kind]()
    module.eval()
    with torch.no_grad():
        reference = module(inputs)
        output = module.to(SECOND)(inputs.to(SECOND))
    assert_close(output, reference)


def test_activations_and_resampling_equal_cpu() -> None:
    def forward(x: Tensor) -> Tensor:
        y = F.interpolate(F.silu(F.gelu(torch.softmax(x, -1))), scale_factor=2, mode="nearest")
        return F.avg_pool2d(y, 2) + F.interpolate(x, scale_factor=1.0, mode="bilinear")

    image = torch.randn(1, 2, 8, 8)
    assert_close(forward(image.to(SECOND)), forward(image))


@pytest.mark.parametrize("kind", ["plain", "mask", "causal"])
def test_attention_equals_cpu(kind: str) -> None:
    query, key, value = (torch.randn(1, 2, 6, 8) for _ in range(3))
    mask = torch.rand(6, 6) > 0.3
    mask.fill_diagonal_(True)
    options = {"plain": {}, "mask": {"attn_mask": mask}, "causal": {"is_causal": True}}[kind]
    on_sim = {k: v.to(SECOND) if isinstance(v, Tensor) else v for k, v in options.items()}
    output = F.scaled_dot_product_attention(query.to(SECOND), key.to(SECOND), value.to(SECOND), **on_sim)
    assert_close(output, F.scaled_dot_product_attention(query, key, value, **options))


def test_module_to_keeps_the_parameters() -> None:
    module = nn.Linear(8, 8)
    weight = module.weight
    module.to(SECOND)
    assert module.weight is weight
    assert {str(p.device) for p in module.parameters()} == {SECOND}


def test_deepcopy_has_its_own_memory() -> None:
    module = nn.Linear(8, 8).to(SECOND)
    copied = copy.deepcopy(module)
    assert str(copied.weight.device) == SECOND
    assert copied.weight.data_ptr() != module.weight.data_ptr()


def test_parameter_data_is_swapped_in_place(x: Tensor, hardware) -> None:
    module = nn.Linear(8, 8)
    reference = module(x)
    module.weight.data = module.weight.data.to(SECOND)
    assert hardware.stats(1).used_bytes == 8 * 8 * 4
    module.weight.data = module.weight.data.cpu()
    assert hardware.stats(1).used_bytes == 0
    assert torch.equal(module(x), reference)


# --- Views, indexing, factories


def test_views_share_storage_and_cost_nothing(x: Tensor, hardware) -> None:
    base = x.to(SECOND)
    used = hardware.stats(1).used_bytes
    window = base[1:3, ::2]
    window.mul_(2)
    expected = x.clone()
    expected[1:3, ::2] *= 2
    assert window.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    chunks = base.view(8, 4).transpose(0, 1).unsqueeze(0).expand(3, 4, 8).chunk(2, -1)
    assert hardware.stats(1).used_bytes == used
    assert torch.equal(base.cpu(), expected)
    assert torch.equal(base.t().cpu(), expected.t())
    assert torch.equal(base.reshape(2, 16).cpu(), expected.reshape(2, 16))
    assert torch.equal(chunks[1].cpu(), expected.view(8, 4).t().expand(3, 4, 8).chunk(2, -1)[1])


def test_typed_views_into_a_slab_of_bytes() -> None:
    weight, bias = torch.randn(16, 8, dtype=torch.bfloat16), torch.randn(16, dtype=torch.bfloat16)
    slab = torch.zeros(1024, dtype=torch.uint8).pin_memory()
    slab[:256].view(torch.bfloat16).copy_(weight.flatten())
    slab[512:544].view(torch.bfloat16).copy_(bias)
    on_sim = torch.empty(1024, dtype=torch.uint8, device=SECOND)
    on_sim.copy_(slab, non_blocking=True)
    module = nn.Linear(8, 16, dtype=torch.bfloat16, device="meta")
    module._parameters["weight"] = on_sim.narrow(0, 0, 256).view(torch.bfloat16).view(16, 8)
    module._parameters["bias"] = on_sim.narrow(0, 512, 32).view(torch.bfloat16).view(16)
    assert module.weight.untyped_storage().data_ptr() == on_sim.untyped_storage().data_ptr()
    assert on_sim.data_ptr() % 512 == 0
    inputs = torch.randn(4, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        assert_close(module(inputs.to(SECOND)), F.linear(inputs, weight, bias))


def test_indexing_with_ints_masks_and_cpu_indices(x: Tensor) -> None:
    index = torch.tensor([2, 0])
    on_sim, expected = x.to(SECOND), x.clone()
    assert torch.equal(on_sim[index.to(SECOND)].cpu(), x[index])
    assert torch.equal(on_sim[index].cpu(), x[index])
    on_sim[index] = 5.0
    expected[index] = 5.0
    on_sim[on_sim < 0] = 0
    expected[expected < 0] = 0
    assert torch.equal(on_sim.cpu(), expected)


def test_joining_sorting_and_reducing(x: Tensor) -> None:
    on_sim = x.to(SECOND)
    values, indices = on_sim.topk(3)
    assert str(indices.device) == SECOND
    assert torch.equal(values.cpu(), x.topk(3)[0])
    assert torch.equal(torch.cat([on_sim, on_sim]).cpu(), torch.cat([x, x]))
    assert torch.equal(torch.stack([on_sim, on_sim]).cpu(), torch.stack([x, x]))
    assert torch.equal(torch.where(on_sim > 0, on_sim, -on_sim).cpu(), x.abs())
    assert torch.equal(on_sim.sort(1)[0].cpu(), x.sort(1)[0])
    assert torch.equal(on_sim.gather(1, indices).cpu(), x.gather(1, indices.cpu()))
    scattered = torch.zeros_like(on_sim).scatter_(1, indices, values)
    assert torch.equal(scattered.cpu(), torch.zeros_like(x).scatter_(1, indices.cpu(), values.cpu()))
    assert_close(torch.einsum("ij,kj->ik", on_sim, on_sim), x @ x.t())
    assert_close(on_sim.cumsum(0), x.cumsum(0))


FACTORIES: dict[str, Callable[[str], Tensor]] = {
    "zeros": lambda device: torch.zeros(3, device=device),
    "ones": lambda device: torch.ones(3, device=device),
    "arange": lambda device: torch.arange(5, device=device),
    "full": lambda device: torch.full((2,), 3.0, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "tensor": lambda device: torch.tensor([1.0, 2.0], device=device),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(3), device=device),
    "randn": lambda device: torch.randn(3, device=device),
    "randint": lambda device: torch.randint(0, 5, (3,), device=device),
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_factory_makes_it_on_the_device(factory: str) -> None:
    torch.manual_seed(1)
    made = FACTORIES[factory](SECOND)
    torch.manual_seed(1)
    assert str(made.device) == SECOND
    assert torch.equal(made.cpu(), FACTORIES[factory]("cpu"))


def test_device_context() -> None:
    with torch.device(SECOND):
        assert str(torch.zeros(3).device) == SECOND
        assert str(nn.Linear(2, 2).weight.device) == SECOND


def test_out_resize_and_set(x: Tensor) -> None:
    out = torch.empty(0, device=SECOND)
    torch.add(x.to(SECOND), 1, out=out)
    assert_close(out, x + 1)
    assert torch.empty(2, device=SECOND).resize_(100).fill_(1).sum().item() == 100
    assert torch.empty(0, device=SECOND).set_(out).data_ptr() == out.data_ptr()


def test_resized_storage_frees_and_refills(hardware) -> None:
    tensor = torch.arange(1000, device=SECOND, dtype=torch.float32)
    tensor.untyped_storage().resize_(0)
    assert hardware.stats(1).used_bytes == 0
    tensor.untyped_storage().resize_(4000)
    tensor.fill_(2)
    assert tensor.sum().item() == 2000


# --- Types


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(x: Tensor, dtype: torch.dtype) -> None:
    module, inputs = nn.Linear(8, 8).to(dtype), x.to(dtype)
    reference = module(inputs)
    output = module.to(SECOND)(inputs.to(SECOND))
    assert output.dtype == dtype
    torch.testing.assert_close(output.cpu(), reference)


def test_float8_storage_and_casts() -> None:
    weight = torch.randn(8, 8)
    on_cpu = weight.to(torch.float8_e4m3fn)
    moved, cast = on_cpu.to(SECOND), weight.to(SECOND).to(torch.float8_e4m3fn)
    assert moved.untyped_storage().nbytes() == 64
    assert torch.equal(moved.view(torch.uint8).cpu(), on_cpu.view(torch.uint8))
    assert torch.equal(cast.cpu().view(torch.uint8), on_cpu.view(torch.uint8))
    assert torch.equal(moved.to(torch.bfloat16).cpu(), on_cpu.to(torch.bfloat16))


def test_scaled_matrix_product_of_float8() -> None:
    a = torch.randn(16, 32).to(torch.float8_e4m3fn)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    one = torch.ones(())
    product = torch._scaled_mm(
        a.to(SECOND), b.to(SECOND), scale_a=one.to(SECOND), scale_b=one.to(SECOND), out_dtype=torch.bfloat16
    )
    assert_close(product, torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))


def test_fft_linear_algebra_and_complex_views(x: Tensor) -> None:
    on_sim = x.to(SECOND)
    assert_close(torch.fft.fft(on_sim).abs(), torch.fft.fft(x).abs())
    assert_close(torch.linalg.norm(on_sim), torch.linalg.norm(x))
    assert_close(torch.linalg.svdvals(on_sim), torch.linalg.svdvals(x))
    with torch.inference_mode():
        rotated = torch.view_as_complex(on_sim.view(4, 4, 2)) * 1j
        assert_close(torch.view_as_real(rotated), torch.view_as_real(torch.view_as_complex(x.view(4, 4, 2)) * 1j))


def test_autocast(x: Tensor) -> None:
    module = nn.Linear(8, 8).to(SECOND)
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert module(x.to(SECOND)).dtype == torch.bfloat16
        assert F.layer_norm(x.to(SECOND).bfloat16(), (8,)).dtype == torch.float32


# --- Reading back


def test_item_bool_equal_repr_nonzero(x: Tensor) -> None:
    on_sim = x.to(SECOND)
    assert on_sim.sum().item() == pytest.approx(x.sum().item(), abs=1e-4)
    assert bool((on_sim == on_sim).all())
    assert torch.equal(on_sim, on_sim.clone())
    assert "sim:1" in repr(on_sim)
    assert on_sim.nonzero().shape == (32, 2)
    with pytest.raises(TypeError, match="numpy"):
        on_sim.numpy()


# --- Tensors on different devices


MISMATCHES: dict[str, Callable[[Tensor], object]] = {
    "two devices": lambda x: x.to(FIRST) + x.to(SECOND),
    "host and device": lambda x: x + x.to(SECOND),
    "device and host": lambda x: x.to(SECOND) + x,
    "weight on the host": lambda x: F.linear(x.to(SECOND), torch.randn(8, 8)),
    "bias on the host": lambda x: F.linear(x.to(SECOND), torch.randn(8, 8, device=SECOND), torch.randn(8)),
    "input on the host": lambda x: F.linear(x, torch.randn(8, 8, device=SECOND)),
    "convolution": lambda x: F.conv2d(torch.randn(1, 2, 4, 4, device=SECOND), torch.randn(2, 2, 3, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(x.to(SECOND), x.to(FIRST), x.to(SECOND)),
    "cat": lambda x: torch.cat([x.to(SECOND), x.to(FIRST)]),
    "embedding": lambda x: F.embedding(torch.tensor([1]), torch.randn(4, 4, device=SECOND)),
    "layer_norm": lambda x: F.layer_norm(x.to(SECOND), (8,), torch.ones(8), torch.zeros(8)),
    "device index into host": lambda x: x[torch.tensor([1], device=SECOND)],
    "in place": lambda x: x.clone().add_(x.to(SECOND)),
    "out": lambda x: torch.add(x.to(SECOND), 1, out=torch.empty(0)),
    "index_select": lambda x: x.to(SECOND).index_select(0, torch.tensor([1])),
    "equal": lambda x: torch.equal(x.to(FIRST), x.to(SECOND)),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mixing_devices_is_an_error(kind: str, x: Tensor) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"same device|indices should be"):
        MISMATCHES[kind](x)


def test_a_host_scalar_may_meet_a_device_tensor(x: Tensor) -> None:
    assert_close(x.to(SECOND) * torch.tensor(2.0), x * 2)
    assert_close(2 / (x.to(SECOND) + 10), 2 / (x + 10))


# --- Random numbers


def test_generators_are_per_device_and_repeatable() -> None:
    generator = torch.Generator(device=SECOND)
    first = torch.randn(4, generator=generator.manual_seed(5), device=SECOND)
    again = torch.randn(4, generator=generator.manual_seed(5), device=SECOND)
    assert str(first.device) == str(generator.device) == SECOND
    assert torch.equal(first.cpu(), again.cpu())
    assert torch.equal(first.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(5)))


def test_a_host_generator_draws_on_the_host_only() -> None:
    generator = torch.Generator().manual_seed(3)
    assert str(torch.randn(4, generator=generator).to(SECOND).device) == SECOND
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, generator=generator, device=SECOND)


def test_manual_seed_and_fork_rng_reach_the_device() -> None:
    torch.manual_seed(7)
    with torch.random.fork_rng(devices=[1], device_type="sim"):
        first = torch.randn(4, device=SECOND)
    assert torch.equal(torch.randn(4, device=SECOND), first)


# --- Autograd and modes


@pytest.mark.parametrize("device", [FIRST, SECOND])
def test_backward_equals_cpu(device: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(36, 3))
    inputs = torch.randn(2, 2, 5, 5)
    module(inputs).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module.to(device)
    module(inputs.to(device)).square().sum().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert str(parameter.grad.device) == device
        assert_close(parameter.grad, gradient)


def test_backward_through_attention_equals_cpu() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v).square().sum().backward()
    on_sim = [t.detach().to(SECOND).requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*on_sim).square().sum().backward()
    for tensor, reference in zip(on_sim, (q, k, v), strict=True):
        assert_close(tensor.grad, reference.grad)


def test_inference_mode(x: Tensor) -> None:
    module = nn.Linear(8, 8).to(SECOND)
    with torch.inference_mode():
        assert module(x.to(SECOND)).is_inference()


def test_a_user_subclass_over_device_tensors(x: Tensor) -> None:
    from torch.utils._pytree import tree_map

    class Upcast(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: Tensor) -> Upcast:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32, device=inner.device)

        def __init__(self, inner: Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            unwrap = lambda value: value.inner.float() if isinstance(value, Upcast) else value  # noqa: E731
            return function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))

    wrapped = Upcast(x.to(torch.bfloat16).to(SECOND))
    assert str(wrapped.device) == SECOND
    assert_close(wrapped + 1, x.bfloat16().float() + 1)


def test_fake_tensors_on_the_device(hardware) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(1, 4, 1024, 64, device=SECOND)
        assert str(F.scaled_dot_product_attention(fake, fake, fake).device) == SECOND
    assert hardware.stats(1).used_bytes == 0


def test_compile_with_the_eager_backend(x: Tensor) -> None:
    compiled = torch.compile(lambda a: (a + 1) * 2, backend="eager")
    assert_close(compiled(x.to(SECOND)), (x + 1) * 2)
    torch.compiler.reset()


def test_four_threads_share_a_module(x: Tensor) -> None:
    module = nn.Linear(8, 8).to(SECOND)
    reference = module(x.to(SECOND)).cpu()
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            if not torch.equal(module(x.to(SECOND)).cpu(), reference):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- Files


def test_safetensors_through_the_host(x: Tensor, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"w": x.to(SECOND)}, tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"].to(SECOND).cpu(), x)


def test_safetensors_straight_to_a_device_named_npu() -> None:
    """safetensors knows device names by a fixed list, in which "npu" is free to be taken; one name per process."""
    program = """
import tempfile, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from highwater.headless import simdevice
simdevice.install("npu", num_devices=2)
x = torch.randn(4, 8)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "w.safetensors")
    save_file({"w": x, "q": x.to(torch.float8_e4m3fn)}, path)
    loaded = load_file(path, device="npu:1")
assert str(loaded["w"].device) == "npu:1" and torch.equal(loaded["w"].cpu(), x)
assert torch.npu.mem_get_info(1)[1] == 1 << 40 and torch.npu.get_device_name(1)
memory = torch.npu.memory_stats(1)
assert memory["active_bytes.all.current"] == memory["reserved_bytes.all.current"] == 160
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=1200)


def test_torch_save_and_load_with_map_location(x: Tensor, tmp_path) -> None:
    torch.save({"w": x.to(SECOND)}, tmp_path / "w.pt")
    load = lambda **options: torch.load(tmp_path / "w.pt", weights_only=True, **options)["w"]  # noqa: E731
    assert str(load().device) == SECOND
    assert torch.equal(load(map_location="cpu"), x)
    assert str(load(map_location=FIRST).device) == FIRST


# --- optimum-quanto


@pytest.mark.parametrize("kind", ["qint8", "qint4", "qfloat8"])
@torch.no_grad()
def test_quantized_modules_equal_cpu(kind: str) -> None:
    from optimum import quanto

    module = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    inputs = torch.randn(4, 128)
    quanto.quantize(module, weights=getattr(quanto, kind))
    quanto.freeze(module)
    reference = module(inputs)
    module.to(SECOND)
    assert str(module[0].weight.device) == SECOND
    assert_close(module(inputs.to(SECOND)), reference)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_and_their_gradients_are_those_of_the_cpu(kind: type[nn.RNNBase], bias: bool) -> None:
    layer, x = kind(8, 6, num_layers=2, bidirectional=True, bias=bias), torch.randn(5, 3, 8)
    on_sim = copy.deepcopy(layer).to(FIRST)
    want, got = layer(x)[0], on_sim(x.to(FIRST))[0]
    assert_close(got, want)
    want.sum().backward()
    got.sum().backward()
    for weight, moved in zip(layer.parameters(), on_sim.parameters(), strict=True):
        assert_close(moved.grad, weight.grad)
    with torch.inference_mode():
        assert_close(on_sim(x.to(FIRST))[0], want.detach())

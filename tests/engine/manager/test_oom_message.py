"""What out-of-memory errors say, in the words of torch's allocators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.manager.oom_message import add_line, read_shortage, tell_holders
from highwater.memory.units import GIB, MIB

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 15.77 GiB of which 1.50 GiB is free."
    " Including non-PyTorch memory, this process has 14.27 GiB memory in use. Of the allocated memory 12.00 GiB is "
    "allocated by PyTorch, and 256.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory"
    " is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
ASYNC = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 6.50 GiB\n"
    "Requested               : 20.00 MiB\nDevice limit            : 8.00 GiB\nFree (according to CUDA): 3.00 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
)
SIMULATED = "sim:2 out of memory. Tried to allocate 4096 bytes: 100 free of 9000, 800 in use, 50 reserved"
XPU = "XPU out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 11.60 GiB."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CUDA, (1, 2 * GIB, int(1.5 * GIB), 12 * GIB + 256 * MIB)),
        (CUDA.replace("CUDA", "HIP"), (1, 2 * GIB, int(1.5 * GIB), 12 * GIB + 256 * MIB)),
        (ASYNC, (0, 20 * MIB, 3 * MIB, None)),
        (SIMULATED, (2, 4096, 100, 800)),
        (XPU, (0, GIB, None, None)),
        ("trouble on purpose", (None, None, None, None)),
    ],
)
def test_what_an_error_says_is_read(text: str, said: tuple[int | None, ...]) -> None:
    found = read_shortage(torch.OutOfMemoryError(text))
    assert found is not None
    assert (found.device_index, found.asked_bytes, found.free_bytes, found.held_bytes) == said


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (torch.OutOfMemoryError("out of pinned memory. Need 4096 bytes"), False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError(), False),
        (ValueError("CUDA out of memory"), False),
        (None, False),
    ],
)
def test_only_a_devices_memory_counts(error: BaseException | None, counts: bool) -> None:
    assert (read_shortage(error) is not None) is counts


def test_an_error_that_was_raised_from_one_counts() -> None:
    try:
        try:
            raise torch.OutOfMemoryError(CUDA)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the sampler failed") from error
    except RuntimeError as error:
        found = read_shortage(error)
    assert found is not None and found.asked_bytes == 2 * GIB
    looped = RuntimeError("a circle")
    looped.__cause__ = looped
    assert read_shortage(looped) is None


@given(st.text() | st.from_regex(r"(Tried to allocate|Requested\s*:) \d+(\.\d+)? (GiB|MiB|bytes).*", fullmatch=True))
def test_no_text_is_too_odd(text: str) -> None:
    found = read_shortage(torch.OutOfMemoryError(text))
    assert found is None or found.asked_bytes is None or found.asked_bytes >= 0


def test_the_line_is_in_what_the_error_says_once() -> None:
    error = torch.OutOfMemoryError(CUDA)
    for _ in range(2):
        add_line(error, "Highwater: the next run keeps 1.9GiB free for flux")
    assert str(error).splitlines()[1:] == ["Highwater: the next run keeps 1.9GiB free for flux"]
    for odd in (torch.OutOfMemoryError(), torch.OutOfMemoryError(7)):
        add_line(odd, "a line")
        assert "a line" not in str(odd)


def test_what_holds_a_device_adds_up_to_its_size() -> None:
    components = {f"part{number}": number * MIB for number in range(1, 9)}
    told = tell_holders(100 * MIB, 9 * MIB, components, 40 * MIB)
    assert told == (
        "of 100MiB: part8 8.00MiB, part7 7.00MiB, part6 6.00MiB, part5 5.00MiB, part4 4.00MiB, part3 3.00MiB, "
        "2 other components 3.00MiB, activations and other tensors 40.0MiB, the driver and other programs 15.0MiB, "
        "free 9.00MiB"
    )


def test_what_holds_nothing_is_left_out() -> None:
    assert tell_holders(GIB, GIB, {}, 0) == "of 1.00GiB: free 1.00GiB"
    assert tell_holders(GIB, 0, {"model": GIB}, 0) == "of 1.00GiB: model 1.00GiB, free 0B"


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, GIB), max_size=12), st.integers(0, GIB))
def test_a_message_names_the_largest_and_stays_one_line(components: dict[str, int], tensor_bytes: int) -> None:
    told = tell_holders(64 * GIB, GIB, components, tensor_bytes)
    assert "\n" not in told and told.count(",") <= 9
    if any(components.values()):
        assert max(components, key=components.__getitem__) in told

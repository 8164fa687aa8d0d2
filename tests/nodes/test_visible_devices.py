"""What is said of GPUs that torch does not see, or numbers otherwise: from drivers' lists, flags and variables."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.transfer.device_facts import DeviceFacts
from highwater.memory.units import GIB
from highwater.nodes.driver_gpus import DriverGpu, driver_gpus, from_listing, from_nvml
from highwater.nodes.findings import Finding
from highwater.nodes.visible_devices import HostRules, Sight, explain_sight, host_rules

# -- what drivers list

# As NVIDIA's driver writes it, 3060 in the first slot.
INFORMATION = """Model: \t\t {model}
IRQ:   \t\t 131
GPU UUID: \t {uuid}
Video BIOS: \t 94.02.42.00.0e
Bus Type: \t PCIe
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Excluded:\t No
"""
SLOW = DriverGpu(vendor="nvidia", model="NVIDIA GeForce RTX 3060", uuid="3060", pci_address="0000:01:00")
FAST = DriverGpu(vendor="nvidia", model="NVIDIA GeForce RTX 4090", uuid="4090", pci_address="0000:41:00")


def write_nvidia(root: Path, *gpus: DriverGpu) -> None:
    for minor, gpu in enumerate(gpus):
        folder = root / "proc" / "driver" / "nvidia" / "gpus" / f"{gpu.pci_address}.0"
        folder.mkdir(parents=True)
        text = INFORMATION.format(model=gpu.model, uuid=f"GPU-{gpu.uuid}", address=f"{gpu.pci_address}.0", minor=minor)
        (folder / "information").write_text(text)


def write_drm(root: Path, number: int, vendor: str, address: str, product: str = "") -> None:
    device = root / "sys" / "class" / "drm" / f"card{number}" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "uevent").write_text(f"DRIVER=amdgpu\nPCI_CLASS=30000\nPCI_SLOT_NAME={address}\nMODALIAS=pci:v0\n")
    (device.parent.parent / f"card{number}-HDMI-A-1").mkdir()
    (device.parent.parent / f"renderD{128 + number}").mkdir()
    if product:
        (device / "product_name").write_text(f"{product}\n")


def test_linux_lists_nvidias_by_address(tmp_path: Path) -> None:
    write_nvidia(tmp_path, FAST, SLOW)
    assert driver_gpus(tmp_path) == (SLOW, FAST)


def test_the_driver_may_not_know_a_uuid_yet(tmp_path: Path) -> None:
    write_nvidia(tmp_path, replace(FAST, uuid="????????-????-????-????-????????????"))
    assert driver_gpus(tmp_path) == (replace(FAST, uuid=""),)


def test_other_makers_cards_come_from_the_kernel_and_nvidias_count_once(tmp_path: Path) -> None:
    write_nvidia(tmp_path, FAST)
    write_drm(tmp_path, 0, "0x10de", "0000:41:00.0")
    write_drm(tmp_path, 1, "0x1002", "0000:63:00.0", "AMD Radeon RX 7900 XTX")
    write_drm(tmp_path, 2, "0x8086", "0000:00:02.0")
    write_drm(tmp_path, 3, "0x1a03", "0000:05:00.0")  # a board's own for its console
    assert driver_gpus(tmp_path) == (
        FAST,
        DriverGpu(vendor="intel", pci_address="0000:00:02"),
        DriverGpu(vendor="amd", model="AMD Radeon RX 7900 XTX", pci_address="0000:63:00"),
    )


def test_a_machine_without_these_folders_has_none(tmp_path: Path) -> None:
    assert driver_gpus(tmp_path) == ()


class Nvml:
    """The functions of the module ``pynvml`` that are used, over two cards; ``fails`` is where it raises."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails: str = "", *, gives_bytes: bool = False) -> None:
        self.fails, self.gives_bytes, self.num_open = fails, gives_bytes, 0

    def answer(self, name: str, value: str = "") -> Any:
        if name == self.fails:
            raise self.NVMLError
        return value.encode() if self.gives_bytes else value

    def nvmlInit(self) -> None:
        self.answer("init")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> DriverGpu:
        return (SLOW, FAST)[index]

    def nvmlDeviceGetName(self, gpu: DriverGpu) -> Any:
        return self.answer("name", gpu.model)

    def nvmlDeviceGetUUID(self, gpu: DriverGpu) -> Any:
        return self.answer("uuid", f"GPU-{gpu.uuid}")

    def nvmlDeviceGetPciInfo(self, gpu: DriverGpu) -> Any:
        return SimpleNamespace(busId=self.answer("pci", f"0000{gpu.pci_address.upper()}.0"))


@pytest.mark.parametrize("gives_bytes", [False, True])
def test_nvidias_library_tells_the_same(gives_bytes: bool) -> None:
    nvml = Nvml(gives_bytes=gives_bytes)
    assert from_nvml(nvml) == (SLOW, FAST) and nvml.num_open == 0


@pytest.mark.parametrize("fails", ["init", "name", "pci"])
def test_a_library_without_a_driver_tells_nothing(fails: str) -> None:
    nvml = Nvml(fails)
    assert from_nvml(nvml) == () and nvml.num_open == 0


def test_the_tools_list_is_read() -> None:
    text = "GPU 0: NVIDIA GeForce RTX 3060 (UUID: GPU-3060)\nGPU 1: NVIDIA GeForce RTX 4090 (UUID: GPU-4090)\n"
    assert from_listing(text) == (replace(SLOW, pci_address=""), replace(FAST, pci_address=""))
    assert from_listing("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == ()


# -- what is said

OLD = host_rules("if args.cuda_device is not None:\n    environ['CUDA_VISIBLE_DEVICES'] = str(args.cuda_device)\n")
NEW = HostRules(knows_all=True, forces_first_on_windows=True, show_all="--cuda-device all")


def seen(*gpus: DriverGpu) -> tuple[DeviceFacts, ...]:
    return tuple(
        DeviceFacts(name=f"gpu:{number}", model=gpu.model, uuid=gpu.uuid, pci_address=gpu.pci_address, total_bytes=GIB)
        for number, gpu in enumerate(gpus)
    )


def nvidia(*visible: DriverGpu, **more: Any) -> Sight:
    return Sight(vendor="nvidia", drivers=(SLOW, FAST), seen=seen(*visible), **more)


def said(sight: Sight) -> list[str]:
    return [f"{'WARNING ' * found.is_warning}{found.text}: {found.remedy}" for found in explain_sight(sight)]


def test_nothing_is_said_where_all_is_seen_by_the_drivers_numbers() -> None:
    assert said(nvidia(SLOW, FAST)) == said(Sight()) == []


SETS = "or with CUDA_VISIBLE_DEVICES=0,1"


@pytest.mark.parametrize(
    ("visible", "environment", "flags", "wanted"),
    [
        (
            [FAST],
            {"CUDA_VISIBLE_DEVICES": "0"},
            None,
            "WARNING CUDA_VISIBLE_DEVICES='0' hides 1 of 2 NVIDIA GPUs: 0 (NVIDIA GeForce RTX 3060): "
            f"start without the variable CUDA_VISIBLE_DEVICES, {SETS}",
        ),
        (
            [],
            {"CUDA_VISIBLE_DEVICES": ""},
            None,
            "WARNING CUDA_VISIBLE_DEVICES='' hides 2 of 2 NVIDIA GPUs: 0 (NVIDIA GeForce RTX 3060), "
            f"1 (NVIDIA GeForce RTX 4090): start without the variable CUDA_VISIBLE_DEVICES, {SETS}",
        ),
        (
            [FAST],
            {"CUDA_VISIBLE_DEVICES": "1"},  # ComfyUI writes the flag's value over it
            ["--cuda-device", "0"],
            "WARNING --cuda-device 0 hides 1 of 2 NVIDIA GPUs: 0 (NVIDIA GeForce RTX 3060): "
            "start ComfyUI with --cuda-device 0,1, or without the flag",
        ),
        (
            [SLOW, FAST],  # the doctor's own process is not ComfyUI's
            {},
            ["--cuda-device=1"],
            "WARNING --cuda-device 1 hides 1 of 2 NVIDIA GPUs: "
            "start ComfyUI with --cuda-device 0,1, or without the flag",
        ),
        (
            [],
            {},
            ["--cuda-device", "all"],
            "WARNING --cuda-device all hides 2 of 2 NVIDIA GPUs: 0 (NVIDIA GeForce RTX 3060), "
            "1 (NVIDIA GeForce RTX 4090): this version of ComfyUI hides every GPU then: "
            "start it with --cuda-device 0,1",
        ),
        ([SLOW, FAST], {}, ["--cpu"], "WARNING --cpu hides 2 of 2 NVIDIA GPUs: start ComfyUI without --cpu"),
        (
            [SLOW],
            {},
            None,
            "WARNING the driver has 2 NVIDIA GPUs, but torch sees 1: "
            "give a container all of them (docker --gpus all), or install a newer torch or driver",
        ),
    ],
)
def test_what_hides_a_gpu_is_told_with_the_flag_to_change(
    visible: list[DriverGpu], environment: dict[str, str], flags: list[str] | None, wanted: str
) -> None:
    told = said(nvidia(*visible, environment=environment, flags=flags, rules=OLD))
    assert wanted in told
    assert sum(line.startswith("WARNING") for line in told) == 1


@given(st.lists(st.integers(-1, 4), max_size=5), st.integers(1, 4))
def test_a_list_shows_its_gpus_up_to_the_first_that_is_none(numbers: list[int], num_gpus: int) -> None:
    """As the CUDA programming guide says of the variable."""
    value = ",".join(map(str, numbers))
    gpus = tuple(replace(FAST, uuid=str(number), pci_address="") for number in range(num_gpus))
    shown = min(num_gpus, len([*itertools.takewhile(lambda number: 0 <= number < num_gpus, numbers)]))
    sight = Sight(vendor="nvidia", drivers=gpus, environment={"CUDA_VISIBLE_DEVICES": value})
    (told,) = [found for found in explain_sight(sight) if "CUDA_VISIBLE_DEVICES" in found.text]
    assert told.is_warning == (shown < num_gpus)
    assert (f"hides {num_gpus - shown} of {num_gpus} NVIDIA GPU" in told.text) == told.is_warning


def test_windows_shows_one_gpu_where_comfyui_says_so() -> None:
    windows = nvidia(SLOW, flags=[], is_windows=True, rules=NEW, environment={"CUDA_VISIBLE_DEVICES": "0"})
    line = (
        "WARNING ComfyUI's default on Windows hides 1 of 2 NVIDIA GPUs: 1 (NVIDIA GeForce RTX 4090): "
        "start ComfyUI with --cuda-device all"
    )
    assert said(windows) == said(replace(windows, environment={})) == [line]
    (unsure,) = explain_sight(replace(windows, drivers=()))
    assert unsure == Finding(
        check="devices",
        text="ComfyUI's default on Windows selects the devices that torch sees",
        remedy="start ComfyUI with --cuda-device all",
    )
    assert said(replace(windows, drivers=(SLOW,))) == []
    assert said(replace(windows, rules=OLD, environment={}))[0].startswith("WARNING the driver has 2 NVIDIA GPUs, but")
    both = replace(windows, seen=seen(SLOW, FAST), environment={})
    assert said(replace(both, flags=["--cuda-device", "all"])) == []
    assert said(replace(both, is_windows=False)) == []
    assert said(replace(windows, flags=["--cuda-device", "0"])) == [
        "WARNING --cuda-device 0 hides 1 of 2 NVIDIA GPUs: 1 (NVIDIA GeForce RTX 4090): "
        "start ComfyUI with --cuda-device 0,1"
    ]
    assert said(replace(both, flags=None)) == [
        "ComfyUI shows the first GPU alone on Windows, unless started with --cuda-device all: "
    ]


# The lines of three versions that decide, with other names around them.
FIRST_ON_WINDOWS = """
if os.name == "nt" and args.cuda_device is None:
    table["CUDA_VISIBLE_DEVICES"] = "0"
    warn("pass --cuda-device all{more}")
if args.cuda_device == "all":
    info("all")
elif args.cuda_device is not None:
    table['CUDA_VISIBLE_DEVICES'] = str(args.cuda_device)
"""


def test_what_comfyui_does_is_read_off_its_start() -> None:
    assert HostRules(show_all="--cuda-device all") == OLD
    assert host_rules(FIRST_ON_WINDOWS.format(more="")) == NEW
    pinned = "--cuda-device all --disable-pinned-memory"
    more = host_rules(FIRST_ON_WINDOWS.format(more=" --disable-pinned-memory"))
    assert more == replace(NEW, show_all=pinned)
    assert said(nvidia(SLOW, flags=[], is_windows=True, rules=more))[0].endswith(f"start ComfyUI with {pinned}")


FASTEST_FIRST = "gpu:0 is nvidia-smi's 1 (NVIDIA GeForce RTX 4090), gpu:1 is nvidia-smi's 0 (NVIDIA GeForce RTX 3060)"
SET_ORDER = "start with the variable CUDA_DEVICE_ORDER=PCI_BUS_ID to have nvidia-smi's numbers"


def test_other_numbers_than_the_drivers_are_told() -> None:
    assert said(nvidia(FAST, SLOW)) == [f"WARNING {FASTEST_FIRST}: {SET_ORDER}"]
    assert said(nvidia(FAST, SLOW, environment={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}))[0].endswith(SET_ORDER)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"}
    *_, numbers = said(nvidia(FAST, SLOW, environment=order))
    assert numbers == f"{FASTEST_FIRST}: ", "which is what was asked for"
    first, numbers = said(nvidia(FAST, SLOW, flags=["--default-device", "1"]))
    assert first == "--default-device 1: gpu:0 is CUDA's device 1, the others follow in their order: "
    assert numbers == f"{FASTEST_FIRST}: "


def test_where_no_device_tells_which_card_it_is_the_order_is_told() -> None:
    blind = tuple(replace(device, uuid="", pci_address="") for device in seen(FAST, SLOW))
    sight = replace(nvidia(), seen=blind)
    assert said(sight) == [
        f"CUDA numbers GPUs of several models by their speed, nvidia-smi by their places: {SET_ORDER}"
    ]
    assert said(replace(sight, drivers=(SLOW, replace(SLOW, uuid="other")))) == []
    assert said(replace(sight, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})) == []


@pytest.mark.parametrize(
    ("vendor", "name"),
    [("amd", "HIP_VISIBLE_DEVICES"), ("amd", "ROCR_VISIBLE_DEVICES"), ("intel", "ZE_AFFINITY_MASK")],
)
def test_other_makers_variables_are_named_and_no_warning(vendor: str, name: str) -> None:
    """What the kernel lists may be a GPU that their libraries do not support."""
    gpus = tuple(DriverGpu(vendor=vendor, pci_address=f"0000:0{number}:00") for number in range(2))
    sight = Sight(vendor=vendor, drivers=gpus, seen=seen(gpus[1]), environment={name: "1", "CUDA_DEVICE_ORDER": ""})
    (told,) = explain_sight(sight)
    assert told.text.startswith(f"{name}='1' hides 1 of 2 {vendor.upper() if vendor == 'amd' else 'Intel'} GPUs")
    assert told.remedy == f"start without the variable {name}, or with {name}=0,1" and not told.is_warning
    assert explain_sight(replace(sight, environment={})) == []


def test_a_torch_for_no_gpu_is_told() -> None:
    sight = replace(nvidia(), vendor="", torch_version="2.13.0+cpu")
    assert said(sight) == [
        "WARNING the driver has 2 NVIDIA GPUs, but torch 2.13.0+cpu is built for none: "
        "install a build of torch for CUDA, see https://pytorch.org/get-started"
    ]


def test_integrated_gpus_and_doubles_are_told() -> None:
    first, second = seen(SLOW, FAST)
    sight = nvidia(doubles={"gpu:2": "gpu:0"})
    sight = replace(sight, seen=(first, replace(second, is_integrated=True)))
    assert said(sight) == [
        "gpu:1 is integrated: used only where a placement names it: ",
        "gpu:2 is the card that gpu:0 is: it counts once: ",
    ]
    alone = replace(sight, seen=(replace(first, is_integrated=True),), drivers=(SLOW,), doubles={})
    assert said(alone) == [], "the only one is used"


environments = st.dictionaries(
    st.sampled_from(["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "CUDA_DEVICE_ORDER"]),
    st.sampled_from(["", "0", "1,0", "-1", "PCI_BUS_ID", "GPU-4090"]),
)
many_flags = st.none() | st.lists(
    st.sampled_from(["--cuda-device", "all", "0", "0,1", "--default-device=1", "--cpu", "--cuda-device=1"]), max_size=3
)


@given(
    st.sampled_from(["", "nvidia", "amd", "intel", "sim"]),
    st.permutations([SLOW, FAST]).flatmap(lambda gpus: st.sampled_from([[], gpus[:1], gpus])),
    st.sampled_from([(), (SLOW,), (SLOW, FAST)]),
    environments,
    many_flags,
    st.sampled_from([OLD, NEW]),
    st.booleans(),
)
def test_every_finding_is_one_line_and_every_warning_has_a_remedy(
    vendor: str, visible: Any, drivers: Any, environment: Any, flags: Any, rules: HostRules, is_windows: bool
) -> None:
    sight = Sight(
        vendor=vendor, seen=seen(*visible), drivers=drivers, environment=environment, flags=flags, rules=rules,
        is_windows=is_windows,
    )  # fmt: skip
    for found in explain_sight(sight):
        assert "\n" not in found.text + found.remedy
        assert found.remedy or not found.is_warning

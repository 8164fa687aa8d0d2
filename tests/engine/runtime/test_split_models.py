"""Real models over two devices: what their own code does between blocks computes the same, to the bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from highwater.memory import MemoryManager, manage
from highwater.tests.engine.diffusers_models import MODELS

MIB = 1 << 20
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
PLACES = ["resident", "streamed", "split", "split and streamed"]


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval().requires_grad_(False), inputs


def to(value: Any, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def forget(model: nn.Module) -> None:
    """Empty what classes remember of rotary tables, for ever and with their modules."""
    for part in model.modules():
        for value in vars(type(part)).values():
            for cell in getattr(value, "__closure__", None) or ():
                if hasattr(cell.cell_contents, "cache_clear"):
                    cell.cell_contents.cache_clear()


def outputs_of(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf.cpu() for leaf in tree_leaves(model(**inputs, return_dict=False)) if isinstance(leaf, torch.Tensor)]


def budgets(model: nn.Module, manager: MemoryManager, *, split: bool) -> str:
    """Return a profile that leaves room for about half of the blocks of each device."""
    with manage(model, placement="gpu:0&gpu:1", manager=manager) as managed:
        managed_component = managed.members[0].managed
        largest = max(block.weight_bytes for block in managed_component.component.blocks)
        shares = managed_component.plan.shares
    rooms = [share.fixed_bytes + max(1.3 * largest, 0.5 * share.resident_bytes) for share in shares]
    if not split:
        return f"{sum(rooms) / MIB:.4f}MiB"
    return ",".join(f"gpu:{index}={room / MIB:.4f}MiB" for index, room in enumerate(rooms))


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        *(
            pytest.param(place, mode, marks=[] if (place, mode) in (("split", "no_grad"),) else pytest.mark.slow)
            for place in PLACES
            for mode in MODES
            if (place, mode) != ("split and streamed", "inference")
        ),
        ("split and streamed", "inference"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_same(machine, name: str, place: str, mode: str) -> None:
    model, inputs = build(name)
    with machine(64, 64) as manager, MODES[mode]():
        plain = copy.deepcopy(model).to("sim:0")
        here = to(inputs, "sim:0")
        want = outputs_of(plain, here)
        is_split = place.startswith("split")
        profile = budgets(model, manager, split=is_split) if place.endswith("streamed") else "auto"
        with manage(model, profile, placement="gpu:0&gpu:1" if is_split else "gpu:0", manager=manager) as managed:
            for given in (inputs, here):
                got = outputs_of(model, given)
                assert all(map(torch.equal, got, want)) and len(got) == len(want)
            shares = managed.members[0].managed.plan.shares
            if place.endswith("streamed") and name != "unet":  # whose largest block is more than half of all
                assert all(share.streamed for share in shares)
        forget(model)
        del plain, here, model, given
        gc.collect()


def first_block(model: nn.Module, threshold: float = 0.3) -> None:
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=threshold))


def magnitudes(model: nn.Module) -> None:
    from diffusers.hooks import MagCacheConfig, apply_mag_cache

    ratios = torch.linspace(1, 0.9, 6)
    apply_mag_cache(model, MagCacheConfig(num_inference_steps=6, threshold=0.3, retention_ratio=0.2, mag_ratios=ratios))


def layers_left_out(model: nn.Module) -> None:
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    stack = "transformer_blocks" if hasattr(model, "transformer_blocks") else "blocks"
    apply_layer_skip(model, LayerSkipConfig([0, 1], fqn=stack))


def series(model: nn.Module) -> None:
    from diffusers.hooks import TaylorSeerCacheConfig, apply_taylorseer_cache

    apply_taylorseer_cache(model, TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, max_order=1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("flux", first_block), ("flux", magnitudes), ("flux", layers_left_out), ("flux", series),
        ("wan", first_block), ("wan", magnitudes),
    ],
)  # fmt: skip
def test_caches_of_steps_compute_the_same(machine, name: str, cache: Callable[[nn.Module], None], mode: str) -> None:
    """Some hand tensors from the first block to the last in an object that the hooks of all of them hold."""
    model, inputs = build(name)
    num_steps = 5

    def steps(net: nn.Module, given: dict[str, Any]) -> list[list[torch.Tensor]]:
        results = []
        for step in range(num_steps):
            changed = given | {"hidden_states": given["hidden_states"] * (1 + 0.01 * step)}
            with net.cache_context("cond", step_index=step, num_inference_steps=num_steps):
                results.append(outputs_of(net, changed))
        return results

    with machine(64, 64) as manager, MODES[mode]():
        plain = copy.deepcopy(model).to("sim:0")
        without = steps(plain, to(inputs, "sim:0"))
        plain = copy.deepcopy(model).to("sim:0")
        cache(plain)
        want = steps(plain, to(inputs, "sim:0"))
        assert any(not torch.equal(one[0], other[0]) for one, other in zip(want, without, strict=True))
        cache(model)
        with manage(model, placement="gpu:0&gpu:1@0.5", manager=manager):
            got = steps(model, inputs)
            assert all(torch.equal(one[0], other[0]) for one, other in zip(got, want, strict=True))
        del plain, model
        gc.collect()


def test_an_interrupt_leaves_what_blocks_share_at_home(machine) -> None:
    model, inputs = build("flux")
    first_block(model, threshold=-1.0)
    with machine(64, 64) as manager, torch.no_grad():
        managed = manage(model, placement="gpu:0&gpu:1@0.5", manager=manager)
        with model.cache_context("cond"):
            want = outputs_of(model, inputs)
        last = model.single_transformer_blocks[-1]
        states = last._diffusers_hook.get_hook("fbc_block_hook").state_manager._state_cache

        def interrupt(*_: object) -> None:
            assert states["cond"].head_block_output[0].device.index == 1
            raise KeyboardInterrupt

        for register in (last.attn.register_forward_pre_hook, last.attn.register_forward_hook):
            handle = register(interrupt)
            with pytest.raises(KeyboardInterrupt), model.cache_context("cond"):
                model(**inputs)
            handle.remove()
            managed.members[0].managed.passes.recover_for(None)
            assert all(tensor.device.index == 0 for tensor in states["cond"].head_block_output)
            with model.cache_context("cond"):
                assert torch.equal(outputs_of(model, inputs)[0], want[0])
        model._reset_stateful_cache()
        managed.release()
        del model, last, managed
        gc.collect()

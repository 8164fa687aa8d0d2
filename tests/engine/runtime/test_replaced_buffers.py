"""Buffers that other code assigns, points elsewhere, moves between modules or deletes while they are managed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import manage

WIDTH = 64
NUM_BLOCKS = 6
X = torch.ones(1, WIDTH)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gate", torch.full((WIDTH,), float(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.linear(x)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(number) for number in range(NUM_BLOCKS))).eval().requires_grad_(False)


def new(like: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((WIDTH,), value, device=like.device)


def assign(model: Any) -> None:
    model[2].gate = torch.full((WIDTH,), 9.0)


def assign_in_state_dict(model: Any) -> None:
    model.load_state_dict({"2.gate": torch.full((WIDTH,), 9.0)}, strict=False, assign=True)


def assign_data(model: Any) -> None:
    model[2].gate.data = torch.full((WIDTH,), 9.0)


def set_source(model: Any) -> None:
    model[2].gate.set_(torch.full((WIDTH,), 9.0))


def write(model: Any) -> None:
    model[2].gate.data.fill_(9.0)


def swap(model: Any) -> None:
    model[2].gate, model[3].gate = model[3].gate, model[2].gate


def swap_data(model: Any) -> None:
    model[2].gate.data, model[3].gate.data = model[3].gate.data, model[2].gate.data


def move_up(model: Any) -> None:
    model[2].gate = model[3].gate
    model[3].gate = new(model[3].gate, 9.0)


def move_down(model: Any) -> None:
    model[3].gate = model[2].gate
    model[2].gate = new(model[2].gate, 9.0)


def share(model: Any) -> None:
    model[2].gate = model[3].gate


def move_bias_up(model: Any) -> None:
    model[2].linear.bias = model[3].linear.bias
    model[3].linear.bias = nn.Parameter(new(model[3].linear.bias, 9.0), requires_grad=False)


def move_bias_down(model: Any) -> None:
    model[3].linear.bias = model[2].linear.bias
    model[2].linear.bias = nn.Parameter(new(model[2].linear.bias, 9.0), requires_grad=False)


ON_HOST = (assign, assign_in_state_dict, assign_data, set_source)
ANYWHERE = (write, swap, swap_data, move_up, move_down, share, move_bias_up, move_bias_down)
Change = Callable[[Any], None]


def unload_and(managed: Any, model: nn.Module) -> None:
    model(X)
    managed.unload()


WHEN: dict[str, Callable[[Any, nn.Module], Any]] = {
    "before the first run": lambda managed, model: None,
    "off the device": unload_and,
    "on the device": lambda managed, model: model(X),
}
CASES = [(change, when) for change in (*ON_HOST, *ANYWHERE) for when in WHEN if change in ANYWHERE or when[0] != "o"]
CASES += [(change, "off the device") for change in ON_HOST]


@pytest.mark.parametrize("then", ["run", "release", "reprofile"])
@pytest.mark.parametrize("profile", ["auto", "stream", "fp8"])
@pytest.mark.parametrize(("change", "when"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_the_new_value_counts(machine: Any, change: Change, when: str, profile: str, then: str) -> None:
    choices = {"auto": {}, "stream": {"profile": "0.07MiB"}, "fp8": {"precision": "fp8 scaled"}}[profile]
    model, plain = build(), build()
    change(plain)
    with machine(8, 8) as manager, torch.no_grad():
        with manage(model, manager=manager, **choices) as managed:
            WHEN[when](managed, model)
            change(model)
            if then == "reprofile":
                managed.reprofile(placement="gpu:1")
            if then != "release":
                model(X)
                if profile != "fp8":
                    assert torch.equal(model(X).cpu(), plain(X))
        assert [block.gate.tolist() for block in model] == [block.gate.tolist() for block in plain]
        assert [block.linear.bias.tolist() for block in model] == [block.linear.bias.tolist() for block in plain]
        assert all(block.gate.device.type == "cpu" for block in model)


@pytest.mark.filterwarnings("ignore")
def test_the_shared_tables_of_a_deleted_adapter_stay_deleted(machine: Any) -> None:
    """RandLoRA's tables are buffers of one module that all layers have."""
    peft = pytest.importorskip("peft")
    choices = peft.RandLoraConfig(target_modules=["linear"], r=4, init_weights=False)
    with machine(64) as manager, torch.no_grad():
        with manage(blocks := build(), manager=manager):
            blocks(X)
            model = peft.get_peft_model(blocks, choices)
            model(X)
            model.add_adapter("second", choices)
            model(X)
            assert [name for name in model.state_dict() if name.endswith(".second")]
            model.delete_adapter("second")
            for _ in range(2):
                model(X)
                assert not [name for name in model.state_dict() if name.endswith(".second")]
        assert not [name for name in model.state_dict() if name.endswith(".second")]


FORMS = {
    "another shape": lambda gate: torch.full((1,), 7.0),
    "another dtype": lambda gate: torch.full((WIDTH,), 7.0, dtype=torch.float16),
}


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_of_another_form_is_the_modules_own(
    machine: Any, form: str, by_data: bool, when: str, runs: bool
) -> None:
    """It counts, or the forward refuses it in one line; no value is lost."""
    model, plain = build(), build()
    with machine(8) as manager, torch.no_grad():
        with manage(model, manager=manager) as managed:
            WHEN[when](managed, model)
            for each in (model, plain):
                if by_data:
                    each[2].gate.data = FORMS[form](each[2].gate)
                else:
                    each[2].gate = FORMS[form](each[2].gate)
            if runs:
                try:
                    assert torch.equal(model(X).cpu(), plain(X))
                except RuntimeError as error:
                    assert "call reprofile() if weight 'gate'" in str(error) and "\n" not in str(error)
        gate, expected = model[2].gate, plain[2].gate
        assert (type(gate), gate.dtype, gate.device.type) == (torch.Tensor, expected.dtype, "cpu")
        assert torch.equal(gate, expected)

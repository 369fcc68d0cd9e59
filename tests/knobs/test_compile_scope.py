from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune.knobs.base import AS_IS, CodeLines
from autotune.knobs.compile_scope import CompileScope
from autotune.training.training import Training
from tests.knobs.programs import BLOCKS, Block, Net, assert_equal_tensors, baseline_config, gradients, loss_fn, train
from tests.knobs.search_facts import cpu_facts

KNOB = CompileScope()
COMPILED = {"compile_mode": "default"}


def test_blocks_are_offered_where_they_were_found() -> None:
    assert KNOB.choices(cpu_facts()) == ("model", "step", "blocks")
    assert KNOB.choices(cpu_facts(blocks=())) == ("model", "step")
    assert KNOB.conflict("blocks", COMPILED, cpu_facts(blocks=())) == (
        "Net has no repeated blocks that could be compiled one by one"
    )


def test_a_scope_needs_something_that_is_compiled() -> None:
    facts = cpu_facts()
    assert (
        KNOB.conflict("step", {"compile_mode": AS_IS}, facts) == "nothing is compiled, so there is no step to compile"
    )
    assert KNOB.conflict("model", {"compile_mode": AS_IS}, facts) is None
    assert KNOB.conflict("step", COMPILED, facts) is None


def test_parse_lists_what_it_knows() -> None:
    with pytest.raises(ValueError, match="compile_scope has no value 'loss'; known are model, step, blocks"):
        KNOB.parse("loss")


def test_export_is_left_to_the_mode() -> None:
    assert KNOB.export("step", baseline_config(**COMPILED), cpu_facts()) == CodeLines()


LOSSES: list[bool] = []


def noting_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Notes whether it is traced by the compiler."""
    LOSSES.append(torch.compiler.is_compiling())
    return loss_fn(model, batch)


class NotingBlock(Block):
    """A block that notes whether it is traced."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.notes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append(torch.compiler.is_compiling())
        return super().forward(x)


class NotingNet(Net):
    """The model, with blocks that note whether they are traced, and the same weights."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        weights = self.state_dict()
        self.blocks = nn.ModuleList([NotingBlock() for _ in BLOCKS])
        self.load_state_dict(weights)
        self.notes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append(torch.compiler.is_compiling())
        return super().forward(x)


def noting_model() -> nn.Module:
    torch.manual_seed(0)
    return NotingNet()


def traced(training: Training) -> dict[str, bool]:
    """Which parts of a step the compiler traced."""
    LOSSES.clear()
    training.accumulate(next(iter(training.loader)))
    return {
        "loss": LOSSES[-1],
        "model": training.model.notes[-1],  # type: ignore[operator, index]
        "blocks": all(training.model.get_submodule(name).notes[-1] for name in BLOCKS),  # type: ignore[operator, index]
    }


@pytest.mark.usefixtures("nothing_compiled_yet")
@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("model", {"loss": False, "model": True, "blocks": True}),
        ("step", {"loss": True, "model": True, "blocks": True}),
        ("blocks", {"loss": False, "model": False, "blocks": True}),
    ],
)
def test_applied_the_compiler_gets_that_part(scope: str, expected: dict[str, bool]) -> None:
    training = train(make_model=noting_model, loss=noting_loss, compile_scope=scope, **COMPILED)
    assert traced(training) == expected
    assert_equal_tensors(
        gradients(train()), {name: p.grad for name, p in training.model.named_parameters()}, tolerance=1e-4
    )
    assert list(training.model.state_dict()) == list(train().model.state_dict())

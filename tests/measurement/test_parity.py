"""What the record of a parity check tells, and how the check makes do where memory is short."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from autotune.config import TrainingConfig
from autotune.measurement.parity import check_parity
from tests.measurement.parity_programs import (
    Net,
    Residual,
    assert_passed,
    in_autocast,
    noise_by_type,
    parity,
)
from tests.measurement.programs import no_phase, program, request

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")


def test_the_record_tells_losses_errors_and_where() -> None:
    result = parity(program(Net), precision="bf16")
    assert len(result.reference_losses) == len(result.candidate_losses) == 3
    assert result.reference_losses[0] == pytest.approx(result.candidate_losses[0], rel=0.02)
    assert 0 < result.relative_error < result.tolerance
    assert 0.99 < result.cosine <= 1.0
    assert result.loss_tolerance is not None
    for expected, loss in zip(result.reference_losses, result.candidate_losses, strict=True):
        assert abs(loss - expected) < result.loss_tolerance < 0.05 * max(result.reference_losses)
    assert (result.update_error, result.worst_update, result.skipped_steps) == (0.0, None, 0)
    assert 0 < result.floor < 0.05
    assert result.worst_parameter in dict(Net().named_parameters())
    assert result.worst_parameter_error is not None and result.worst_parameter_tolerance is not None
    assert result.worst_parameter_error <= result.worst_parameter_tolerance >= result.tolerance
    assert result.reason == f"gradients differ by {result.relative_error:.2g}, of {result.tolerance:.2g} allowed"


def test_a_reference_that_does_not_fit_is_compared_at_a_smaller_micro_batch() -> None:
    class Hungry(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 4:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    result = parity(program(Hungry), precision="bf16", batch_size=8)
    assert_passed(result)
    assert result.micro_batch_size == 4
    assert result.notes == ("compared at micro-batch 4: the fp32 reference does not fit at the full size",)


def test_what_does_not_fit_the_quick_way_is_compared_at_the_full_size() -> None:
    made: list[nn.Module] = []

    class HungryAtFirst(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(made) < 3:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    def model_fn() -> nn.Module:
        made.append(HungryAtFirst())
        return made[-1]

    result = parity(program(model_fn), precision="bf16", batch_size=8)
    assert_passed(result)
    assert (result.micro_batch_size, result.notes) == (8, ())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_candidate_that_is_not_in_doubt_costs_two_models_and_five_windows_of_the_reference(dropout: float) -> None:
    made: list[Counted] = []

    class Counted(Net):
        windows = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.windows += 1
            return super().forward(x)

    def model_fn() -> nn.Module:
        made.append(Counted(lambda: Residual(dropout)))
        return made[-1]

    assert_passed(parity(program(model_fn), precision="bf16"))
    assert [model.windows for model in made] == [3, 5]


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_program_that_fits_with_some_settings_alone_is_compared_with_these_and_one_model_at_a_time(
    noise: float,
) -> None:
    alive: list[weakref.ref[nn.Module]] = []
    most_alive = 0

    class Lonely(Net):
        """Fits where no other model does, and with a fused update."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal most_alive
            most_alive = max(most_alive, sum(each() is not None for each in alive))
            y = super().forward(x)
            return y + noise * noise_by_type(y) if noise else y

    def model_fn() -> nn.Module:
        model = Lonely()
        alive.append(weakref.ref(model))
        return model

    def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

        def check(*_: object) -> None:
            assert optimizer.defaults["fused"], "nothing else fits"

        optimizer.register_step_pre_hook(check)
        return optimizer

    asked = request("parity", precision="bf16", optimizer_impl="fused", batch_size=8)
    reference = TrainingConfig({"optimizer_impl": "fused"})
    result = check_parity(
        program(model_fn, optimizer_fn=optimizer_fn), asked.model_copy(update={"reference": reference}), no_phase
    )
    assert_passed(result)
    assert most_alive == 1
    by_means = ("it draws random numbers of its own: means over 8 seeds were compared",)
    told = "your step was run with optimizer_impl=fused, without which it fits at no batch"
    assert result.notes == (told, *(by_means if noise else ()))


def test_each_turn_of_the_reference_after_the_candidate_has_a_time_limit_of_its_own() -> None:
    phases: list[str] = []

    class ForgetsHalf(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(phases[-1])
            y = super().forward(x)
            return (y + y.detach()) / 2 if in_autocast() else y

    seen: list[str] = []
    assert not check_parity(program(ForgetsHalf), request("parity", precision="bf16"), phases.append).passed
    assert phases[:3] == ["build", "parity", "compile"]
    assert set(phases[3:]) == {"parity"}
    assert seen.count("compile") == 3, "the candidate's windows alone"


def test_where_memory_is_short_on_a_cpu_fewer_micro_batches_are_compared() -> None:
    class Hungry(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
            return super().forward(x)

    result = parity(program(Hungry), precision="bf16", batch_size=1, global_batch_size=8)
    assert_passed(result)
    assert (result.micro_batch_size, result.micro_batches_per_step) == (1, 2)

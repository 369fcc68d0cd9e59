"""What a program does else with its samples in other batches: rejected where it is a fault, told where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.measurement.parity_programs import (
    SPLIT,
    Net,
    NormNet,
    assert_passed,
    assert_rejected,
    contrastive,
    norm_net,
    parity,
    sum_loss,
    wide,
)
from tests.measurement.programs import WIDTH, program, regression_data

# --- a step that is split ---


class Encoded(nn.Module):
    """A variational autoencoder: noise between two layers, whose gradient it moves by as much as that is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.head(torch.tanh(y + torch.randn_like(y)))


def test_a_sum_is_no_mean_however_far_random_numbers_move_its_gradient() -> None:
    half = {**SPLIT, "batch_size": 4}
    assert_passed(parity(program(Encoded), **half))
    result = parity(program(Encoded, loss_fn=sum_loss), **half)
    assert_rejected(result, r"the loss is a sum, or .*\. Return \(loss_sum, weight\)")


class NormNetWithoutStatistics(NormNet):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)


@pytest.mark.parametrize("model_fn", [NormNet, NormNetWithoutStatistics])
def test_batch_norm_with_another_micro_batch_passes_and_is_explained(model_fn: Callable[[], nn.Module]) -> None:
    result = parity(program(model_fn), **SPLIT)
    assert_passed(result)
    assert result.notes == ("BatchNorm sees the micro-batch: both sides were compared at the same one",)


@pytest.mark.parametrize("model_fn", [NormNet, NormNetWithoutStatistics])
def test_batch_norm_does_not_hide_a_sum_that_is_taken_for_a_mean(model_fn: Callable[[], nn.Module]) -> None:
    assert_rejected(parity(program(model_fn, loss_fn=sum_loss), **SPLIT), r"Return \(loss_sum, weight\)")


class OwnAutocastAndNorm(nn.Module):
    """Where its step is split, that is compared by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.layers(x)).float()


def test_the_programs_own_rounding_is_allowed_where_splitting_is_compared_by_itself() -> None:
    result = parity(program(OwnAutocastAndNorm), **SPLIT)
    assert_passed(result)
    assert_rejected(parity(program(OwnAutocastAndNorm, loss_fn=sum_loss), **SPLIT), "the loss is a sum")


# --- a larger batch ---


class SkipsInLargeBatches(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if len(x) <= 8 else self.head(x)


def test_a_model_that_leaves_a_part_out_of_larger_batches_is_rejected_at_these() -> None:
    result = parity(program(SkipsInLargeBatches), batch_size=32)
    assert_rejected(
        result, "blocks.0.inner.weight has a gradient at your batch of 8 and none at 32: the model leaves a part"
    )
    assert_passed(parity(program(SkipsInLargeBatches), batch_size=4))


def test_a_batch_of_very_many_of_the_users_own_is_held_against_some_of_them() -> None:
    def pairs() -> DataLoader[Any]:
        return regression_data(512, batch_size=2)

    result = parity(program(SkipsInLargeBatches, data_fn=pairs), batch_size=256)
    assert_rejected(result, "has a gradient at your batch of 2 and none at 256: the model leaves a part")
    result = parity(program(wide, loss_fn=contrastive, data_fn=pairs), batch_size=256)
    assert_passed(result)
    assert result.notes == ()


@pytest.mark.parametrize("model_fn", [Net, norm_net])
def test_a_larger_batch_of_a_plain_program_passes_without_a_word(model_fn: Callable[[], nn.Module]) -> None:
    result = parity(program(model_fn), batch_size=32)
    assert_passed(result)
    assert result.notes == ()


def test_a_larger_batch_whose_samples_are_coupled_passes_and_says_so() -> None:
    result = parity(program(wide, loss_fn=contrastive), batch_size=32)
    assert_passed(result)
    assert "another gradient for 32 samples at once than for the same in batches of 8" in result.notes[0]


class TakesTurns(nn.Module):
    """One layer at one call, the other at the next, as a generator and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.even = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.odd(x) if self.calls % 2 else self.even(x)


def test_layers_that_take_turns_are_not_left_out_of_a_larger_batch() -> None:
    assert_passed(parity(program(TakesTurns), batch_size=32))

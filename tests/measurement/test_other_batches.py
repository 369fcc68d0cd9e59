"""What a program does else with its samples in other batches: rejected where it is a fault, told where it is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

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


class KeepsItsState(nn.Module):
    """As a recurrent network does whose state goes on in the next batch: it bears none of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x) if self.state is None else self.inner(x) + self.state)
        self.state = y.detach()
        return self.head(y)


@pytest.mark.parametrize(("length", "drop_last"), [(67, True), (64, False)])
def test_where_no_batch_of_the_users_is_shorter_a_larger_one_is_held_against_whole_ones(
    length: int, drop_last: bool
) -> None:
    def data_fn() -> DataLoader[Any]:
        return DataLoader(regression_data(length).dataset, batch_size=8, drop_last=drop_last)

    assert_passed(parity(program(KeepsItsState, data_fn=data_fn), batch_size=20))


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


class InstanceNormed(nn.Module):
    def __init__(self, tracks: bool = True) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=tracks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.inner(x).unsqueeze(1)).squeeze(1)))


@pytest.mark.parametrize("precision", ["as_is", "bf16"])
def test_instance_norm_that_keeps_statistics_is_compared_at_the_same_micro_batch(precision: str) -> None:
    result = parity(program(InstanceNormed), precision=precision, **SPLIT)
    assert_passed(result)
    assert result.notes == (
        "InstanceNorm's statistics follow the micro-batch: both sides were compared at the same one",
    )
    assert_rejected(parity(program(InstanceNormed, loss_fn=sum_loss), precision=precision, **SPLIT), "loss is a sum")
    without = parity(program(lambda: InstanceNormed(tracks=False)), precision=precision, **SPLIT)
    assert_passed(without)
    assert without.notes == ()


# --- a split that is right by chance ---

RARE_WEIGHT = torch.tensor([1.0, 10.0])


def labelled(rare: tuple[int, ...], samples: int = 64) -> Callable[[], DataLoader[Any]]:
    """Batches of 16; the samples of the rare class, counted from the beginning of each batch, are these."""

    def data_fn() -> DataLoader[Any]:
        x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([int(index % 16 in rare) for index in range(samples)])
        return DataLoader(TensorDataset(x, labels), batch_size=16)

    return data_fn


def by_class(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=RARE_WEIGHT)


def by_class_and_weight(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = F.cross_entropy(model(batch[0]), batch[1], weight=RARE_WEIGHT, reduction="sum")
    return losses, RARE_WEIGHT[batch[1]].sum()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 2))


class NormedClassifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2))


class NoisyClassifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


HALVES: dict[str, Any] = {"batch_size": 8, "global_batch_size": 16}


@pytest.mark.parametrize("model_fn", [classifier, NormedClassifier, NoisyClassifier])
def test_a_mean_by_weights_of_classes_is_rejected_though_both_halves_hold_as_many_of_each(
    model_fn: Callable[[], nn.Module],
) -> None:
    data_fn = labelled((1, 9))
    assert_passed(parity(program(model_fn, data_fn, by_class), batch_size=16, global_batch_size=16))
    assert_rejected(
        parity(program(model_fn, data_fn, by_class), **HALVES),
        r"are cut finer, gradients differ .* must return \(loss_sum, weight\) from loss_fn, and so must one by weights",
    )
    assert_passed(parity(program(model_fn, data_fn, by_class_and_weight), **HALVES))


def test_a_class_that_is_in_one_window_alone_is_seen() -> None:
    def mildly(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0]))

    def data_fn() -> DataLoader[Any]:
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, (torch.arange(64) == 35).long()), batch_size=16)

    assert_rejected(parity(program(classifier, data_fn, mildly), **HALVES), "are cut finer")


def test_what_a_mean_has_none_of_in_smaller_parts_alone_is_told() -> None:
    def over_a_few(model: nn.Module, batch: Any) -> torch.Tensor:
        chosen = batch[1] > 0
        return F.cross_entropy(model(batch[0])[chosen], batch[1][chosen])

    def counted(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        count = (batch[1] > 0).sum()
        return over_a_few(model, batch) * count, count  # 0 of 0: nothing that a candidate's micro-batch shows

    data_fn = labelled((1, 9))
    assert_rejected(
        parity(program(classifier, data_fn, over_a_few), **HALVES), r"may have none, must be returned as \(loss_sum"
    )
    assert_passed(parity(program(classifier, data_fn, counted), **HALVES))


class Rows(Dataset[Any]):
    """Gives whole batches of another data set."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Any:
        return self.rows[indices]


def as_it_is(batch: Any) -> Any:
    return batch


def test_whole_batches_of_a_data_set_are_cut_finer_too() -> None:
    def data_fn() -> DataLoader[Any]:
        return DataLoader(Rows(labelled((1, 9))().dataset), batch_size=16, collate_fn=as_it_is)

    assert_rejected(parity(program(classifier, data_fn, by_class), **HALVES), "are cut finer")
    assert_passed(parity(program(classifier, data_fn, by_class_and_weight), **HALVES))


@pytest.mark.parametrize(("micro", "batch"), [(4, 8), (5, 15)])
@pytest.mark.parametrize("in_rows", [False, True])
def test_no_part_is_a_single_sample_where_none_of_the_candidates_is(micro: int, batch: int, in_rows: bool) -> None:
    def data_fn() -> DataLoader[Any]:
        rows = labelled(())().dataset
        return DataLoader(Rows(rows), batch, collate_fn=as_it_is) if in_rows else DataLoader(rows, batch)

    def with_a_variance(model: nn.Module, batch: Any) -> torch.Tensor:
        y = model(batch[0])
        return F.cross_entropy(y, batch[1]) + 1e-4 * y.var(0).mean()  # which a single sample has none of

    functions = program(classifier, data_fn, with_a_variance)
    assert_passed(parity(functions, batch_size=micro, global_batch_size=batch))


def test_what_no_smaller_batch_can_be_run_by_passes() -> None:
    def in_fours(model: nn.Module, batch: Any) -> torch.Tensor:
        assert len(batch[0]) % 4 == 0
        return F.cross_entropy(model(batch[0]), batch[1])

    assert_passed(parity(program(classifier, labelled((1, 9)), in_fours), **HALVES))


def test_a_small_term_that_couples_the_samples_is_held_to_the_candidates_own_split() -> None:
    def hardly_coupled(model: nn.Module, batch: Any) -> torch.Tensor:
        y = model(batch[0])
        return F.cross_entropy(y, batch[1]) + 5e-3 * y.var(0, correction=0).mean()

    assert_passed(parity(program(classifier, labelled((1, 9)), hardly_coupled), **HALVES))


def test_a_loss_that_counts_its_calls_tells_nothing_in_smaller_parts() -> None:
    calls = itertools.count()

    def annealed(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * (1 + next(calls) / 1000)

    assert "are cut finer" not in parity(program(classifier, labelled((1, 9)), annealed), **HALVES).reason

"""What a user's function may return by mistake, and what is said of it: one sentence with what to change."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autotune.config import TrainingConfig
from autotune.errors import WorkloadError
from autotune.measurement.facts import read_facts
from autotune.records import Conditions, TrialRequest
from autotune.workload import UserFunctions


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def model_fn() -> nn.Module:
    return nn.Linear(4, 1)


def data_fn() -> DataLoader[Any]:
    x = torch.randn(32, 4)
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=8)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def three_arguments(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


@pytest.mark.parametrize(
    ("functions", "sentence"),
    [
        (
            {"data_fn": lambda: (data_fn(), data_fn())},
            "data_fn returned a tuple of 2 (DataLoader, DataLoader); it must",
        ),
        ({"data_fn": lambda: [data_fn()]}, "data_fn returned a list of 1 (DataLoader)"),
        ({"data_fn": lambda: {"train": data_fn()}}, "data_fn returned dict"),
        ({"data_fn": lambda: "data/train"}, "data_fn returned str"),
        ({"data_fn": Nothing}, "the data set is empty"),
        ({"loss_fn": three_arguments}, "loss_fn is called as loss_fn(model, batch), which three_arguments(model"),
        ({"optimizer_fn": lambda: None}, "optimizer_fn is called as optimizer_fn(model)"),
        (
            {"optimizer_fn": lambda model: torch.optim.SGD(model_fn().parameters(), 0.1)},
            "optimizer_fn returned an optimizer that holds no parameter of the model",
        ),
    ],
)
def test_mistakes_are_told_in_one_sentence(functions: dict[str, Any], sentence: str) -> None:
    given = {"model_fn": model_fn, "data_fn": data_fn, "loss_fn": loss_fn, **functions}
    conditions = Conditions(device="cpu", global_batch_size=None)
    request = TrialRequest(kind="facts", config=TrainingConfig({}), conditions=conditions)
    with pytest.raises(WorkloadError) as raised:
        read_facts(UserFunctions(**given), request, lambda phase: None)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_list_of_samples_is_a_data_set() -> None:
    samples = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    request = TrialRequest(
        kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None)
    )
    facts = read_facts(UserFunctions(model_fn, lambda: samples, loss_fn), request, lambda phase: None)
    assert facts.dataset_length == 16

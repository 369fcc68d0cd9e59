"""What a user's function may return by mistake, and what is said of it: one sentence with what to change."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autotune.config import TrainingConfig
from autotune.errors import WorkloadError
from autotune.measurement.facts import read_facts
from autotune.processes.failures import classify
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


def with_accuracy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    return loss_fn(model, batch), 0.25


def with_another_metric(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    loss = loss_fn(model, batch)
    return loss, 100 + loss.detach()


def with_weights_of_samples(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights = 1 + batch[1].abs()
    return (weights * (model(batch[0]) - batch[1]) ** 2).sum(), weights.sum()


def a_generator() -> Any:
    yield model_fn()


def with_scheduler(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10)


class WantsAClosure(torch.optim.Optimizer):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class WantsAnEpoch:
    def step(self, epoch: int) -> None:
        raise AssertionError(epoch)


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
        ({"model_fn": nn.Linear(4, 1)}, "model_fn is an object (Linear); it must be a function: `def model_fn()"),
        ({"model_fn": lambda: nn.Linear}, "model_fn returned the class Linear"),
        ({"data_fn": data_fn()}, "data_fn is an object (DataLoader)"),
        (
            {"data_fn": lambda: TensorDataset},
            "data_fn returned the class TensorDataset; it must return an object of it",
        ),
        ({"loss_fn": nn.MSELoss()}, "loss_fn is torch's MSELoss, which takes an output and a target"),
        ({"loss_fn": nn.functional.mse_loss}, "loss_fn is torch's mse_loss"),
        ({"loss_fn": with_accuracy}, "loss_fn returned a loss and 0.25, which is taken for its weight"),
        ({"loss_fn": with_another_metric}, "and is another after a step on the same batch: if it is a metric, return"),
        ({"model_fn": a_generator}, "model_fn returned generator; it must return a torch.nn.Module"),
        ({"loss_fn": lambda model, batch: None}, "loss_fn returned None (is a return missing?)"),
        ({"optimizer_fn": torch.optim.AdamW}, "write `def optimizer_fn(model): return torch.optim.AdamW(model.para"),
        ({"optimizer_fn": functools.partial(torch.optim.SGD, lr=0.1)}, "optimizer_fn is the class SGD"),
        ({"optimizer_fn": with_scheduler}, "the optimizer alone, and the scheduler from scheduler_fn(optimizer)"),
        (
            {"optimizer_fn": lambda model: WantsAClosure(model.parameters(), {})},
            "WantsAClosure, whose step needs a clos",
        ),
        (
            {"scheduler_fn": lambda optimizer: WantsAnEpoch()},
            "scheduler_fn returned WantsAnEpoch; it must return a lear",
        ),
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


class StepsNot(torch.optim.SGD):
    """Where no step fits."""

    def step(self, closure: Any = None) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("forward_only", [False, True])
def test_weights_need_not_be_whole_numbers(forward_only: bool) -> None:
    request = TrialRequest(
        kind="facts",
        config=TrainingConfig({}),
        conditions=Conditions(device="cpu", global_batch_size=None),
        facts_forward_only=forward_only,
    )
    functions = UserFunctions(
        model_fn,
        data_fn,
        with_weights_of_samples,
        (lambda model: StepsNot(model.parameters())) if forward_only else None,
    )
    assert read_facts(functions, request, lambda phase: None).loss_weighted


def test_a_list_of_samples_is_a_data_set() -> None:
    samples = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    request = TrialRequest(
        kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None)
    )
    facts = read_facts(UserFunctions(model_fn, lambda: samples, loss_fn), request, lambda phase: None)
    assert facts.dataset_length == 16


def test_a_loss_that_takes_other_arguments_is_told_how_it_is_called() -> None:
    def swapped(batch: Any, model: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    request = TrialRequest(
        kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None)
    )
    with pytest.raises(TypeError) as caught:
        read_facts(UserFunctions(model_fn, data_fn, swapped), request, lambda phase: None)
    assert classify(caught.value, "compile").message.endswith(
        "(loss_fn is called as loss_fn(model, batch), and is defined as loss_fn(batch, model))"
    )


class WithClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            return closure()


def test_an_optimizer_that_wants_a_closure_is_told_that_it_gets_none() -> None:
    functions = UserFunctions(model_fn, data_fn, loss_fn, lambda model: WithClosure(model.parameters()))
    request = TrialRequest(
        kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None)
    )
    with pytest.raises(TypeError) as caught:
        read_facts(functions, request, lambda phase: None)
    assert classify(caught.value, "compile").message.endswith(
        "(the optimizer is stepped without a closure, and one that needs it is not supported)"
    )

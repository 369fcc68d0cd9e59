"""Small programs of kinds that people bring: each is read, measured, compared and run on, as a search would."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, get_worker_info

from autotune.measurement.facts import read_facts
from autotune.measurement.measure import measure
from autotune.measurement.parity import check_parity
from autotune.measurement.soak import soak
from autotune.processes.failures import classify
from autotune.records import Measurement, WorkloadFacts
from autotune.workload import UserFunctions
from tests.measurement.programs import WIDTH, mse, no_phase, perceptron, regression_data, request

Collate = Callable[[list[Any]], Any]


def facts_of(functions: UserFunctions) -> WorkloadFacts:
    return read_facts(functions, request("facts"), no_phase)


def measured(functions: UserFunctions, **changes: Any) -> Measurement:
    return measure(functions, request("measure", minimum_blocks=2, maximum_blocks=2, **changes), no_phase)


def runs_through(functions: UserFunctions, **changes: Any) -> WorkloadFacts:
    """Reads, measures with and without workers, compares in bf16 and runs on; nothing but a slow machine is found."""
    facts = facts_of(functions)
    blocks = facts.blocks
    for workers in (0, 2) if facts.workers_fixed_reason is None else (facts.num_workers,):
        measurement = measured(functions, num_workers=workers, blocks=blocks, **changes)
        assert max(measurement.blocks.samples) / max(measurement.blocks.steps) <= facts.batch_size
    parity = check_parity(functions, request("parity", blocks=blocks, precision="bf16", **changes), no_phase)
    assert parity.passed, parity
    result = soak(functions, request("soak", maximum_blocks=2, blocks=blocks, precision="bf16", **changes), no_phase)
    assert [finding for finding in result.findings if "throughput fell" not in finding] == []
    return facts


# --- batches ----------------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.randn(1, generator=generator)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Item:
    x: torch.Tensor
    y: torch.Tensor
    names: list[str]
    weight: None = None


class Encoding(UserDict[str, Any]):
    """As tokenizers return them: a mapping with a move of its own."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: item.to(device) for name, item in self.data.items()})


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Any) -> torch.Tensor:
        return self.head(self.inner(x)[1][0])


class TellsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return SimpleNamespace(loss=nn.functional.mse_loss(self.inner(x), y), logits=None)


def _stacked(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*rows, strict=True)
    return torch.stack(x), torch.stack(y)


def _pair(rows: list[Any]) -> Pair:
    return Pair(*_stacked(rows))


def _item(rows: list[Any]) -> Item:
    return Item(*_stacked(rows), names=["a"] * len(rows))


def _encoding(rows: list[Any]) -> Encoding:
    x, y = _stacked(rows)
    return Encoding(x=x, y=y)


def _detection(rows: list[Any]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Inputs in one list, targets of unequal length in another."""
    targets = [{"y": y.repeat(1 + index % 3), "name": str(index)} for index, (_, y) in enumerate(rows)]
    return [x for x, _ in rows], targets


def _packed(rows: list[Any]) -> Any:
    packed = pack_sequence([x.repeat(1 + index % 3, 1) for index, (x, _) in enumerate(rows)], enforce_sorted=False)
    return packed, torch.stack([y for _, y in rows])


def _arrays(rows: list[Any]) -> Any:
    x, y = _stacked(rows)
    return {"x": x.numpy(), "y": y.numpy(), "count": len(rows), "nothing": None}


def _by_name(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch.x), batch.y)


def _of_item(model: Any, batch: Any) -> torch.Tensor:
    assert type(batch) is Item
    assert len(batch.names) == len(batch.x)
    return _by_name(model, batch)


def _of_detection(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(torch.stack(inputs)), torch.stack([target["y"][:1] for target in targets]))


def _of_arrays(model: Any, batch: Any) -> torch.Tensor:
    assert isinstance(batch["x"], np.ndarray)
    assert batch["count"] == len(batch["x"])
    return nn.functional.mse_loss(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"]))


def _popping(model: Any, batch: Any) -> torch.Tensor:
    y = batch.pop("y")
    return nn.functional.mse_loss(model(**batch), y)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("collate", "model_fn", "loss_fn"),
    [
        (_encoding, ByKeyword, _popping),
        (_pair, perceptron, _by_name),
        (_item, perceptron, _of_item),
        (_encoding, TellsItsLoss, None),
        (_detection, perceptron, _of_detection),
        (_packed, Packs, mse),
        (_arrays, perceptron, _of_arrays),
    ],
)
def test_batches(collate: Collate, model_fn: Any, loss_fn: Any) -> None:
    def data_fn() -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=8, collate_fn=lambda rows: collate(rows))

    facts = runs_through(UserFunctions(model_fn, data_fn, loss_fn, None, None))
    assert (facts.batch_size, facts.batch_fixed_reason) == (8, None)


# --- loaders ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Rows without a length, all of them in each worker."""

    def __iter__(self) -> Iterator[Any]:
        rows = Rows()
        return (rows[index] for index in range(20))


class SetUpInWorkers(Rows):
    """Needs what `worker_init_fn` does."""

    def __getitem__(self, index: int) -> Any:
        worker: Any = get_worker_info()
        if worker is not None:
            assert worker.dataset.handle == worker.id
        return super().__getitem__(index)


def set_up(worker_id: int) -> None:
    worker: Any = get_worker_info()
    worker.dataset.handle = worker_id


def in_twos() -> DataLoader[Any]:
    return DataLoader(Rows(), batch_sampler=BatchSampler(SubsetRandomSampler(range(8)), 2, False))


@pytest.mark.parametrize(
    ("data_fn", "batch_fixed", "workers_fixed"),
    [
        (lambda: DataLoader(Stream(), batch_size=8), "", "workers that are seeded alike get the same samples"),
        (lambda: DataLoader(SetUpInWorkers(), batch_size=8, worker_init_fn=set_up), "", ""),
        (in_twos, "a batch_sampler of its own (BatchSampler)", ""),
        (lambda: DataLoader([_stacked([Rows()[0]] * 8)] * 3, batch_size=None), "batch_size=None", ""),
    ],
)
def test_loaders(data_fn: Any, batch_fixed: str, workers_fixed: str) -> None:
    facts = runs_through(UserFunctions(perceptron, data_fn, mse, None, None))
    for reason, text in ((facts.batch_fixed_reason, batch_fixed), (facts.workers_fixed_reason, workers_fixed)):
        assert (text in reason) if text else (reason is None), reason


# --- models and optimizers --------------------------------------------------------------------------------------------


class OwnsALock(nn.Module):
    """Can be neither copied nor pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)
        self.lock = threading.Lock()
        self.counter = iter(range(10**9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            next(self.counter)
            return self.inner(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Collects(nn.Module):
    """A hook in each block collects features for a second term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.features: list[torch.Tensor] = []
        for block in self.blocks:
            block.inner.register_forward_hook(lambda module, inputs, output: self.features.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features.clear()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_features(model: Any, batch: Any) -> torch.Tensor:
    loss = mse(model, batch)
    assert len(model.features) == 3
    return loss + 0.01 * sum(feature.square().mean() for feature in model.features)


def not_started(model: Any) -> torch.optim.Optimizer:
    """A warm-up of the user's own begins at a rate of 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 1000))
    return optimizer


@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
@pytest.mark.parametrize(
    ("model_fn", "loss_fn", "optimizer_fn", "changes"),
    [
        (OwnsALock, mse, None, {}),
        (Collects, of_features, None, {"activation_checkpointing": "all"}),
        (perceptron, mse, not_started, {"optimizer_impl": "foreach"}),
    ],
)
def test_models_and_optimizers(model_fn: Any, loss_fn: Any, optimizer_fn: Any, changes: dict[str, Any]) -> None:
    runs_through(UserFunctions(model_fn, regression_data, loss_fn, optimizer_fn, None), **changes)


class Doubled(torch.autograd.Function):
    """A product by hand whose backward knows nothing of autocast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def test_a_function_by_hand_that_knows_no_autocast_fails_alone_and_says_why() -> None:
    functions = UserFunctions(ByHand, regression_data, mse, None, None)
    assert measured(functions).samples_per_second > 0
    with pytest.raises(RuntimeError) as caught:
        measured(functions, precision="bf16")
    failure = classify(caught.value, "compile")
    assert failure.kind == "user_error"
    assert "dtype" in failure.message
    assert "in backward" in failure.detail

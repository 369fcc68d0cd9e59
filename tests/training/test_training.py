from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from autotune.config import TrainingConfig
from autotune.errors import WorkloadError
from autotune.records import Conditions
from autotune.training.training import Training
from autotune.workload import UserFunctions
from tests.measurement.programs import WIDTH, config, mse, program, regression_data

SAMPLES = 20


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def model_fn() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return model_fn


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def built(
    functions: UserFunctions,
    *,
    batch_size: int = 8,
    global_batch_size: int | None = None,
    clip_grad_norm: float | None = None,
    blocks: tuple[str, ...] = (),
    **changes: Any,
) -> Training:
    conditions = Conditions(device="cpu", global_batch_size=global_batch_size, clip_grad_norm=clip_grad_norm)
    return Training(functions, config(batch_size, **changes), conditions, blocks=blocks)


def data(samples: int = SAMPLES, batch_size: int = 8) -> Callable[[], DataLoader[Any]]:
    return lambda: regression_data(samples, batch_size)


def trained(training: Training) -> dict[str, torch.Tensor]:
    """The weights after one pass."""
    for window in training.loader:
        training.step(window)
    return training.model.state_dict()


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=1e-6)


# --- accumulation ---


def clipped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("clip_grad_norm", [None, 0.1])
@pytest.mark.parametrize("scheduler_fn", [None, halving])
def test_a_split_step_trains_as_the_whole_one(micro: int, clip_grad_norm: float | None, scheduler_fn: Any) -> None:
    # 20 samples and windows of 8: the last window holds 4.
    functions = program(seeded(perceptron), data(), mse, clipped if clip_grad_norm else sgd, scheduler_fn)
    whole = built(functions, global_batch_size=8, clip_grad_norm=clip_grad_norm)
    split = built(functions, batch_size=micro, global_batch_size=8, clip_grad_norm=clip_grad_norm)
    assert len(list(split.loader)) == len(list(whole.loader)) == 3
    assert_same(trained(split), trained(whole))
    if split.scheduler is not None:
        assert split.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_micro_batches_of_a_partial_window_count_by_their_samples() -> None:
    # The last window holds 8 and 3 samples.
    functions = program(seeded(perceptron), data(27), mse, sgd)
    whole = built(functions, batch_size=16, global_batch_size=16)
    split = built(functions, batch_size=8, global_batch_size=16)
    assert [[item.samples for item in window] for window in split.loader] == [[8, 8], [8, 3]]
    losses = [float(split.step(window)) for window in split.loader]
    assert losses == pytest.approx([float(whole.step(window)) for window in whole.loader])
    assert_same(split.model.state_dict(), whole.model.state_dict())


class Ragged(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(2 + index * 7 % 11) + index) % 10


def ragged_data() -> DataLoader[Any]:
    return DataLoader(Ragged(), batch_size=8, collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows, True, -1))


def token_sum(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    targets = batch[:, 1:]
    scores = model(batch[:, :-1].clamp_min(0)).flatten(0, 1)
    return F.cross_entropy(scores, targets.flatten(), ignore_index=-1, reduction="sum"), (targets >= 0).sum()


@pytest.mark.parametrize("clip_grad_norm", [None, 0.1])
def test_a_sum_with_its_weight_is_divided_once_by_all_weights(clip_grad_norm: float | None) -> None:
    def reader() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10))

    functions = program(seeded(reader), ragged_data, token_sum, sgd)
    whole = built(functions, global_batch_size=8, clip_grad_norm=clip_grad_norm)
    split = built(functions, batch_size=2, global_batch_size=8, clip_grad_norm=clip_grad_norm)
    pairs = list(zip(split.loader, whole.loader, strict=True))
    for window, whole_window in pairs:
        assert float(split.step(window)) == pytest.approx(float(whole.step(whole_window)))
        assert float(split.last_weight) == float(whole.last_weight) > 8
    assert_same(split.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("clip_grad_norm", [None, 1e-3])
def test_what_is_unfrozen_later_is_trained_as_the_rest(clip_grad_norm: float | None) -> None:
    def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return mse(model, batch) * len(batch[0]), len(batch[0])

    def last_layer_alone() -> nn.Module:
        model = perceptron().requires_grad_(False)
        model[-1].requires_grad_(True)
        return model

    trainings = [
        built(program(seeded(last_layer_alone), data(64), loss, sgd), clip_grad_norm=clip_grad_norm)
        for loss in (mse, summed)
    ]
    window = next(iter(trainings[0].loader))
    for training in trainings:
        training.step(window)
        training.model.requires_grad_(True)
        training.step(window)
    assert_same(trainings[0].model.state_dict(), trainings[1].model.state_dict())


def test_a_weight_can_be_a_plain_number() -> None:
    def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    mean = built(program(seeded(perceptron), data(), mse, sgd), batch_size=2, global_batch_size=8)
    total = built(program(seeded(perceptron), data(), summed, sgd), batch_size=2, global_batch_size=8)
    assert_same(trained(total), trained(mean))
    assert mean.last_weight is None
    assert total.last_weight == 4


def test_clipping_acts_on_the_whole_gradient_unscaled() -> None:
    functions = program(seeded(perceptron), data(), mse, clipped)
    plain, split = built(functions), built(functions, batch_size=2, global_batch_size=8, clip_grad_norm=0.01)
    before = [parameter.detach().clone() for parameter in split.model.parameters()]
    window = next(iter(split.loader))
    split.step(window)
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(split.model.parameters(), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)
    plain.accumulate(next(iter(plain.loader)))
    direction = torch.cat([p.grad.flatten() for p in plain.model.parameters()])
    assert float(F.cosine_similarity(moved, -direction, dim=0)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("clip_grad_norm", [None, 0.1])
def test_fp16_with_its_scaler_trains_as_fp32_nearly_does(clip_grad_norm: float | None) -> None:
    functions = program(seeded(perceptron), data(), mse, sgd)
    plain = built(functions, clip_grad_norm=clip_grad_norm)
    scaled = built(functions, batch_size=4, global_batch_size=8, clip_grad_norm=clip_grad_norm, precision="fp16")
    assert scaled.scaler is not None
    assert plain.scaler is None
    expected, actual = trained(plain), trained(scaled)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-2, atol=2e-3)


def test_a_loss_is_detached_and_gradients_are_cleared_after_the_step() -> None:
    training = built(program())
    loss = training.step(next(iter(training.loader)))
    assert loss.shape == ()
    assert not loss.requires_grad
    assert all(parameter.grad is None for parameter in training.model.parameters())


# --- the user's objects ---


def test_the_optimizer_is_the_users_object_with_its_groups_and_hooks() -> None:
    made: list[torch.optim.Optimizer] = []
    calls: list[str] = []

    def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
        first, last = model[0], model[2]
        optimizer = torch.optim.AdamW(
            [{"params": first.parameters(), "lr": 0.5, "weight_decay": 0.0}, {"params": last.parameters()}], lr=0.1
        )
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        made.append(optimizer)
        return optimizer

    training = built(program(perceptron, data(), mse, optimizer_fn, halving), optimizer_impl="fused")
    training.step(next(iter(training.loader)))
    assert training.optimizer is made[-1]
    assert calls == ["before", "after"]
    assert [group["lr"] for group in training.optimizer.param_groups] == [0.25, 0.05]
    assert [group["weight_decay"] for group in training.optimizer.param_groups] == [0.0, 0.01]
    assert all(group["fused"] for group in training.optimizer.param_groups)


def test_a_model_that_comes_in_evaluation_is_trained_and_parts_that_do_stay_so() -> None:
    """`from_pretrained` returns the whole in evaluation mode; who freezes statistics puts parts of it into that mode."""
    whole = built(program(lambda: perceptron().eval()))
    assert whole.came_in_evaluation
    assert all(module.training for module in whole.model.modules())

    def partly_frozen() -> nn.Module:
        model = perceptron()
        model[2].eval()
        return model

    frozen = built(program(partly_frozen))
    assert not frozen.came_in_evaluation
    assert [module.training for module in frozen.model] == [True, True, False]


def test_without_an_optimizer_fn_it_is_adamw() -> None:
    assert type(built(program()).optimizer) is torch.optim.AdamW


def test_gradient_hooks_of_the_users_run_for_each_micro_batch() -> None:
    calls: list[int] = []

    def model_fn() -> nn.Module:
        model = perceptron()
        model[0].weight.register_hook(lambda gradient: calls.append(1))
        return model

    training = built(program(model_fn), batch_size=2, global_batch_size=8)
    training.step(next(iter(training.loader)))
    assert len(calls) == 4


class Tied(nn.Module):
    """Two layers with one weight, one frozen layer, and one parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(self.frozen(torch.tanh(self.first(x))))))


@pytest.mark.parametrize("changes", [{}, {"optimizer_impl": "fused"}, {"batch_size": 2, "global_batch_size": 8}])
def test_tied_frozen_and_unused_parameters_train_as_they_would(changes: dict[str, Any]) -> None:
    training = built(program(seeded(Tied), data(), mse), **changes)
    plain = built(program(seeded(Tied), data(), mse))
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    after = trained(training)
    assert training.model.first.weight is training.model.second.weight
    assert_same(after, trained(plain))
    for name, tensor in after.items():
        stays = name.startswith("frozen") or name == "unused"
        assert torch.equal(tensor, before[name]) == stays, name


# --- saving and loading ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = ("blocks.0", "blocks.1")


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": "all", "precision": "bf16"},
        {"compile_mode": "default", "compile_scope": "model", "activation_checkpointing": "alternate"},
    ],
)
def test_checkpoints_of_the_model_load_into_the_plain_one(changes: dict[str, Any]) -> None:
    training = built(program(seeded(Net), data(), mse, sgd), blocks=BLOCKS, **changes)
    training.step(next(iter(training.loader)))
    plain = Net()
    plain.load_state_dict(training.model.state_dict())
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(training.model.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scope", "graphs"), [("step", 0), ("model", 1), ("blocks", 1)])
def test_an_evaluation_runs_what_is_compiled_of_the_model_and_not_a_compiled_loss(scope: str, graphs: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    functions = program(seeded(Net), data(), mse, sgd)
    training = built(functions, blocks=BLOCKS[:1], compile_mode="default", compile_scope=scope)
    window = next(iter(training.loader))
    loss = training.evaluate(window)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not loss.requires_grad
    torch.testing.assert_close(loss, mse(seeded(Net)(), window[0].data).detach())


@pytest.mark.parametrize("precision", ["as_is", "fp16"])
def test_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(precision: str) -> None:
    functions = program(seeded(perceptron), data(64), mse, None, halving)
    whole, first, second = (built(functions, precision=precision, optimizer_impl="foreach") for _ in range(3))
    windows = list(whole.loader)
    for window in windows:
        whole.step(window)
    for window in windows[:3]:
        first.step(window)
    state = first.state_dict()
    assert set(state) == {"model", "optimizer", "scheduler", *(["scaler"] if precision == "fp16" else [])}
    second.load_state_dict(state)
    for window in windows[3:]:
        second.step(window)
    assert_same(second.model.state_dict(), whole.model.state_dict())
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_a_scheduler_of_the_users_own_needs_no_state() -> None:
    class Halving:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.groups = optimizer.param_groups

        def step(self) -> None:
            for group in self.groups:
                group["lr"] /= 2

    class Telling(Halving):
        def state_dict(self) -> dict[str, Any]:
            return {"of": "no use to anyone"}

    for scheduler_fn in (Halving, Telling):
        saved, other = (built(program(scheduler_fn=scheduler_fn)) for _ in range(2))
        saved.step(next(iter(saved.loader)))
        other.load_state_dict(saved.state_dict())
        assert other.optimizer.param_groups[0]["lr"] == 1e-3 / 2


def test_a_state_of_another_configuration_keeps_this_ones_optimizer_flags() -> None:
    saved, other = built(program(), optimizer_impl="foreach"), built(program(), optimizer_impl="fused")
    saved.step(next(iter(saved.loader)))
    other.load_state_dict(saved.state_dict())
    assert [(group["foreach"], group["fused"]) for group in other.optimizer.param_groups] == [(False, True)]
    other.step(next(iter(other.loader)))
    assert float(other.optimizer.state_dict()["state"][0]["step"]) == 2


# --- loaders ---


class Stream(IterableDataset[torch.Tensor]):
    """Fourteen samples in a row, without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randn(14, WIDTH, generator=torch.Generator().manual_seed(0)))


class ReadyBatches(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index >= 4:
            raise IndexError
        return torch.full((5, WIDTH), float(index))


class OwnLoader(DataLoader[Any]):
    """Makes its batches itself."""

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.ones(3, WIDTH), torch.ones(2, WIDTH))


def plain_tensors() -> Dataset[Any]:
    return TensorDataset(torch.randn(14, WIDTH, generator=torch.Generator().manual_seed(0)))


LOADERS: dict[str, tuple[Callable[[], Any], list[list[int]]]] = {
    "IterableDataset": (lambda: DataLoader(Stream(), batch_size=4), [[4, 4], [4, 2]]),
    "IterableDataset, drop_last": (lambda: DataLoader(Stream(), batch_size=4, drop_last=True), [[4, 4]]),
    "drop_last": (lambda: DataLoader(plain_tensors(), batch_size=4, drop_last=True), [[4, 4]]),
    "batch_size=None": (lambda: DataLoader(ReadyBatches(), batch_size=None), [[5, 5], [5, 5]]),
    "batch_sampler": (
        lambda: DataLoader(plain_tensors(), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7]]),
        [[3, 1], [2, 2]],
    ),
    "torch's own BatchSampler": (
        lambda: DataLoader(plain_tensors(), batch_sampler=BatchSampler(SequentialSampler(range(14)), 4, False)),
        [[4, 4], [4, 2]],
    ),
    "subclass": (lambda: OwnLoader(plain_tensors(), batch_size=4), [[3, 2]]),
}


def any_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch if isinstance(batch, torch.Tensor) else batch[0]).square().mean()


@pytest.mark.parametrize("name", LOADERS)
def test_windows_of_every_kind_of_loader(name: str) -> None:
    data_fn, expected = LOADERS[name]
    training = built(program(perceptron, data_fn, any_loss), batch_size=4, global_batch_size=8)
    windows = list(training.loader)
    assert [[item.samples for item in window] for window in windows] == expected
    for window in windows:
        assert torch.isfinite(training.step(window))


@pytest.mark.parametrize("data_fn", [plain_tensors, Stream])
def test_a_bare_data_set_gets_a_loader(data_fn: Callable[[], Any]) -> None:
    training = Training(
        program(perceptron, data_fn, any_loss),
        TrainingConfig({}),
        Conditions(device="cpu", global_batch_size=None),
    )
    assert [[item.samples for item in window] for window in training.loader] == [[14]]


# --- batches ---


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass
class Sample:
    inputs: torch.Tensor
    names: list[str]


class Rows(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def row(index: int) -> torch.Tensor:
    return torch.full((WIDTH,), float(index))


def dataclass_collate(rows: list[torch.Tensor]) -> Sample:
    return Sample(torch.stack(rows), ["a"] * len(rows))


BATCHES: dict[str, tuple[Callable[[], DataLoader[Any]], Callable[[Any], torch.Tensor]]] = {
    "named tuple": (
        lambda: DataLoader(Rows(lambda index: Pair(row(index), row(index)[:1])), batch_size=2),
        lambda batch: batch.inputs + batch.targets,
    ),
    "dataclass": (
        lambda: DataLoader(Rows(row), batch_size=2, collate_fn=dataclass_collate),
        lambda batch: batch.inputs * len(batch.names),
    ),
    "nested": (
        lambda: DataLoader(Rows(lambda index: {"x": [row(index), (row(index), {"deep": row(index)})]}), batch_size=2),
        lambda batch: batch["x"][0] + batch["x"][1][1]["deep"],
    ),
    "list of strings": (
        lambda: DataLoader(Rows(lambda index: f"text {index}"), batch_size=2),
        lambda batch: torch.tensor([[float(text.split()[1])] * WIDTH for text in batch]),
    ),
    "bare tensor": (lambda: DataLoader(Rows(row), batch_size=2), lambda batch: batch),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_every_form_reach_the_loss_as_they_were_collated(name: str) -> None:
    data_fn, inputs = BATCHES[name]
    seen: list[torch.Tensor] = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(inputs(batch))
        return model(seen[-1]).mean()

    training = built(program(perceptron, data_fn, loss_fn), batch_size=2, global_batch_size=4)
    windows = list(training.loader)
    assert [[item.samples for item in window] for window in windows] == [[2, 2], [2]]
    training.step(windows[0])
    assert [tuple(x.shape) for x in seen] == [(2, WIDTH), (2, WIDTH)]


# --- what a function of the user's may not return ---


def no_model() -> Any:
    return "model"


def frozen() -> nn.Module:
    return perceptron().requires_grad_(False)


@pytest.mark.parametrize(
    ("model_fn", "text"),
    [
        (no_model, r"model_fn returned str; it must return a torch.nn.Module"),
        (frozen, r"model_fn returned a model with no parameter that requires a gradient; nothing to train"),
        (lambda: nn.Linear(WIDTH, 1, device="meta"), r"parameters on the meta device, .* call its to_empty"),
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            r"a lazy layer \(0\) whose parameters have no shape yet; run one batch through the model inside model_fn",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_an_error(model_fn: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        built(program(model_fn))


def test_a_model_may_move_without_returning_itself() -> None:
    class Moving(nn.Linear):
        def to(self, *places: Any) -> None:  # type: ignore[override]  # as some users write it
            super().to(*places)

    training = built(program(lambda: Moving(WIDTH, 1)))
    assert training.step(next(iter(training.loader))).isfinite()


def test_a_lazy_layer_that_has_its_shape_is_none_any_more() -> None:
    def model_fn() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(1))
        model(torch.zeros(2, WIDTH))
        return model

    training = built(program(model_fn))
    assert torch.isfinite(training.step(next(iter(training.loader))))


class Noam:
    """A rate that follows the steps, around an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.inner, self.steps = sgd(model), 0

    def step(self) -> None:
        self.steps += 1
        self.inner.param_groups[0]["lr"] = self.steps**-0.5
        self.inner.step()


@pytest.mark.parametrize(
    ("optimizer_fn", "text"),
    [
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            "LBFGS, whose step needs a closure; that is not supported",
        ),
        (lambda model: [sgd(model), sgd(model)], r"returned a list of 2 \(SGD, SGD\); it must return one torch.optim"),
        (
            Noam,
            r"returned Noam, which is no torch.optim.Optimizer but holds one; return that \(its .inner\), and a scheduler",
        ),
        (lambda model: None, "optimizer_fn returned NoneType; it must return one torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_stepped_is_an_error(optimizer_fn: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        built(program(optimizer_fn=optimizer_fn))


def test_an_optimizer_of_the_users_own_clears_gradients_as_it_does() -> None:
    class Clearing(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]  # as some users write it
            super().zero_grad(set_to_none=False)

    training = built(program(optimizer_fn=lambda model: Clearing(model.parameters(), lr=0.1)))
    training.step(next(iter(training.loader)))
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in training.model.parameters())


def test_an_optimizer_fn_that_expects_something_else_is_told_what_it_is_given() -> None:
    with pytest.raises(TypeError, match="can only optimize Tensors") as raised:
        built(program(optimizer_fn=lambda params: torch.optim.AdamW(params)))
    said = "optimizer_fn is called as optimizer_fn(model), and is defined as optimizer_fn(params)"
    assert raised.value.__notes__ == [said]


@pytest.mark.parametrize(
    ("scheduler_fn", "text"),
    [
        (
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            "scheduler_fn returned ReduceLROnPlateau; it must return a learning",
        ),
        (lambda optimizer: None, "scheduler_fn returned NoneType; .* stepped once per optimizer step without a metric"),
    ],
)
def test_a_scheduler_that_needs_a_metric_is_an_error(scheduler_fn: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        built(program(scheduler_fn=scheduler_fn))


def test_a_type_error_in_the_users_loss_is_theirs_and_without_a_loss_fn_it_is_explained() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0], None, None)

    training = built(program(loss_fn=loss_fn))
    with pytest.raises(TypeError, match="positional argument"):
        training.step(next(iter(training.loader)))
    training = built(program(loss_fn=None))
    with pytest.raises(WorkloadError, match="calling the model with it raised TypeError"):
        training.step(next(iter(training.loader)))


class TrainsByItself(nn.Linear):
    """All that it can do is a method of its own, as in Lightning."""

    forward = nn.Module.forward

    def training_step(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(F.linear(batch[0], self.weight, self.bias), batch[1])


class NotEverywhere(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError("no such kernel")


def test_a_model_without_a_forward_needs_a_loss_fn() -> None:
    training = built(program(lambda: TrainsByItself(WIDTH, 1), loss_fn=None))
    with pytest.raises(WorkloadError, match=r"missing the required .*\. Write\n    def loss_fn\(model, batch\)"):
        training.step(next(iter(training.loader)))
    training = built(program(lambda: TrainsByItself(WIDTH, 1), loss_fn=TrainsByItself.training_step))
    training.step(next(iter(training.loader)))
    training = built(program(lambda: NotEverywhere(WIDTH, 1), loss_fn=None))
    with pytest.raises(NotImplementedError, match="no such kernel"):
        training.step(next(iter(training.loader)))

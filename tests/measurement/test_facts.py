from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from autotune.errors import WorkloadError
from autotune.failure import TrialFailure
from autotune.measurement.facts import read_facts
from autotune.records import Phase, WorkloadFacts
from autotune.workload import UserFunctions
from tests.measurement.programs import (
    WIDTH,
    Features,
    holds,
    mse,
    no_phase,
    pause,
    perceptron,
    program,
    regression_data,
    request,
)
from tests.surgery.models import MODELS, square_loss


def facts_of(functions: UserFunctions) -> WorkloadFacts:
    return read_facts(functions, request("facts"), no_phase)


def test_a_program_is_told_in_full() -> None:
    phases: list[Phase] = []
    facts = read_facts(program(), request("facts"), phases.append)
    assert phases == ["build", "compile", "measure"]
    assert facts.batch_structure == f"list of 2: float32 [8, {WIDTH}], float32 [8, 1]"
    assert facts.sample_bytes == 4 * (WIDTH + 1)
    assert (facts.batch_size, facts.batch_held, facts.dataset_kind, facts.dataset_length) == (8, True, "map", 64)
    assert (facts.batch_fixed_reason, facts.workers_fixed_reason) == (None, None)
    assert (facts.num_workers, facts.pin_memory, facts.drop_last) == (0, False, False)
    count = 32 * WIDTH + 32 + 32 + 1
    assert (facts.parameter_count, facts.trainable_parameter_count, facts.parameter_bytes) == (count, count, 4 * count)
    assert (facts.model_class, facts.optimizer_class, facts.has_scheduler) == ("Sequential", "AdamW", False)
    assert set(facts.optimizer_variants) == {"foreach", "fused"}
    assert (facts.has_batch_norm, facts.has_dropout, facts.model_is_compiled) == (False, False, False)
    assert facts.loss_convention == "loss_fn(model, batch) returns a scalar, taken as the mean over the samples"
    assert not facts.loss_weighted
    assert facts.first_loss > 0
    assert facts.process_settings["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert (facts.block_class, facts.blocks) == (None, ())


@pytest.mark.parametrize("tracks", [False, True])
def test_instance_norm_that_keeps_statistics_is_seen(tracks: bool) -> None:
    def normed() -> nn.Module:
        norm = nn.InstanceNorm1d(1, track_running_stats=tracks)
        return nn.Sequential(nn.Unflatten(1, (1, -1)), norm, nn.Flatten(), nn.Linear(WIDTH, 1))

    facts = facts_of(program(normed))
    assert (facts.has_batch_norm, facts.has_tracking_instance_norm) == (False, tracks)


def in_double() -> nn.Module:
    return perceptron().double()


def partly_in_double() -> nn.Module:
    model = perceptron()
    model[2].double()  # type: ignore[index]
    return model


def test_a_model_in_double_is_told() -> None:
    def in_its_type(model: Any, batch: Any) -> torch.Tensor:
        x = batch[0]
        for layer in model:
            x = layer(x.to(next(iter(layer.parameters()), x).dtype))
        return x.square().mean()

    facts = facts_of(program(in_double, loss_fn=in_its_type))
    assert facts.parameters_are_double
    assert "all parameters of the model are float64" in facts.notes[0]
    partly = facts_of(program(partly_in_double, loss_fn=in_its_type))
    assert (partly.parameters_are_double, partly.notes) == (False, ())


def test_a_model_that_comes_in_evaluation_is_told() -> None:
    facts = facts_of(program(lambda: perceptron().eval()))
    assert facts.comes_in_evaluation
    assert "model_fn returns the model in evaluation mode" in facts.notes[0]
    assert not facts_of(program()).notes


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_blocks_are_found(name: str) -> None:
    model_fn, batch = MODELS[name]
    data = DataLoader(list(batch()), batch_size=2)
    facts = facts_of(program(model_fn, lambda: data, square_loss))
    assert facts.block_class in ("GptBlock", "BasicBlock")
    assert len(facts.blocks) >= 4
    assert facts.has_batch_norm == (name == "resnet")
    assert facts.convolution_ranks == ((4,) if name == "resnet" else ())


def test_where_no_step_fits_a_forward_pass_without_gradients_tells_as_much() -> None:
    model_fn, batch = MODELS["gpt"]
    data = DataLoader(list(batch()), batch_size=2)
    with_gradients: list[bool] = []

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        with_gradients.append(torch.is_grad_enabled())
        return square_loss(model, given)

    whole, forward = (
        read_facts(
            program(model_fn, lambda: data, loss_fn),
            request("facts").model_copy(update={"facts_forward_only": only, "facts_batch_size": 1}),
            no_phase,
        )
        for only in (False, True)
    )
    assert (whole.step_fits, forward.step_fits) == (True, False)
    assert "not even at a batch of 1" in forward.notes[0]
    differing = {"step_fits", "notes", "first_loss", "step_seconds"}
    assert forward.model_dump(exclude=differing) == whole.model_dump(exclude=differing)
    assert forward.blocks and forward.optimizer_variants
    assert with_gradients[-3:-1] == [False, False], "but where the blocks are looked for"


@pytest.mark.parametrize(("arguments", "expected"), [({}, 2), ({"num_workers": 1, "prefetch_factor": 5}, 5)])
def test_batches_held_ready_are_those_of_the_users_loader(arguments: dict[str, int], expected: int) -> None:
    facts = facts_of(program(data_fn=lambda: DataLoader(regression_data().dataset, batch_size=8, **arguments)))
    assert facts.prefetch_factor == expected


def test_dropout_frozen_parts_schedulers_and_weights_are_seen() -> None:
    def model_fn() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.1), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model

    def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return mse(model, batch) * len(batch[1]), len(batch[1])

    facts = facts_of(
        program(
            model_fn,
            loss_fn=summed,
            optimizer_fn=lambda model: torch.optim.SGD(model[2].parameters(), lr=0.1),
            scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        )
    )
    assert facts.trainable_parameter_count == 5 < facts.parameter_count
    assert (facts.has_dropout, facts.has_scheduler, facts.loss_weighted, facts.optimizer_class) == (
        True,
        True,
        True,
        "SGD",
    )
    assert "(loss_sum, weight)" in facts.loss_convention


def of_a_number(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.tensor(mse(model, batch).item(), requires_grad=True)


def stepping_in_the_backward_pass() -> nn.Module:
    model = perceptron()

    def step(parameter: torch.Tensor) -> None:
        parameter.data -= 0.01 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return model


@pytest.mark.parametrize("functions", [program(loss_fn=of_a_number), program(stepping_in_the_backward_pass)])
def test_a_step_that_leaves_the_optimizer_no_gradient_is_refused(functions: UserFunctions) -> None:
    with pytest.raises(WorkloadError, match="gives no gradient to any parameter of the optimizer"):
        facts_of(functions)


def test_gradients_that_are_turned_off_are_told() -> None:
    def data_without_gradients() -> DataLoader[Any]:
        torch.set_grad_enabled(False)
        return regression_data()

    with torch.enable_grad(), pytest.raises(WorkloadError, match=r"^gradients are turned off for good"):
        facts_of(program(data_fn=data_without_gradients))


def test_samples_with_a_graph_of_their_own_are_trained_on_as_often_as_need_be() -> None:
    assert facts_of(program(data_fn=lambda: DataLoader(Features(), batch_size=8))).first_loss > 0


def test_a_loss_that_leaves_gradients_behind_is_refused() -> None:
    def adversarial(model: nn.Module, batch: Any, clears: bool) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        mse(model, (x, batch[1])).backward()
        if clears:
            model.zero_grad()
        return mse(model, (batch[0] + 0.1 * x.grad.sign(), batch[1]))

    text = r"^0\.weight has a gradient as soon as the loss is computed.*torch\.autograd\.grad"
    with pytest.raises(WorkloadError, match=text):
        facts_of(program(loss_fn=functools.partial(adversarial, clears=False)))
    facts_of(program(loss_fn=functools.partial(adversarial, clears=True)))


@pytest.mark.parametrize("returned", [torch.Tensor.detach, torch.Tensor.item])
def test_a_loss_that_trains_by_itself_is_told_so_whatever_it_returns(returned: Any) -> None:
    def by_chunks(model: nn.Module, batch: Any) -> Any:
        total = torch.zeros(())
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = mse(model, (x, y)) / 2
            loss.backward()
            total += loss.detach()
        return returned(total)

    with pytest.raises(
        WorkloadError, match=r"has a gradient as soon as the loss is computed.*calls \.backward\(\) itself"
    ):
        facts_of(program(loss_fn=by_chunks))


def test_gradients_that_a_loss_leaves_in_what_is_not_optimized_are_the_users() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        model[0](batch[0]).sum().backward()
        return mse(model, batch)

    def last_alone(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[-1].parameters(), lr=0.1)

    assert facts_of(program(loss_fn=loss_fn, optimizer_fn=last_alone)).first_loss > 0


def test_sparse_gradients_fix_the_optimizer() -> None:
    facts = facts_of(
        program(
            lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)),
            lambda: DataLoader(torch.arange(10), batch_size=2),
            lambda model, batch: model(batch).mean(),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
    )
    assert facts.optimizer_variants == ()
    assert facts.optimizer_fixed_reason == "SGD gets sparse gradients, which fused kernels refuse"


def test_a_model_that_the_user_compiles_is_told_and_has_no_blocks() -> None:
    facts = facts_of(program(lambda: torch.compile(perceptron(), backend="eager")))
    assert facts.model_is_compiled
    assert facts.blocks == ()


class CompilesItsForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    @torch.compile
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class IsNotToBeCompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def test_a_part_that_is_kept_from_compilation_is_not_compiled_and_may_be_recomputed() -> None:
    facts = facts_of(program(lambda: nn.Sequential(IsNotToBeCompiled(), IsNotToBeCompiled(), nn.Linear(WIDTH, 1))))
    assert not facts.model_is_compiled
    assert facts.blocks == ("0", "1")


def compiled_in_place() -> nn.Module:
    model = perceptron()
    model.compile()
    return model


@pytest.mark.parametrize("model_fn", [CompilesItsForward, compiled_in_place])
def test_other_ways_to_compile_a_model_are_seen(model_fn: Any) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert facts_of(program(model_fn)).model_is_compiled


def test_a_bare_data_set_is_not_held() -> None:
    facts = facts_of(program(data_fn=lambda: regression_data().dataset))
    assert (facts.batch_size, facts.batch_held) == (32, False)


class Stream(IterableDataset[Any]):
    sharded = True

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.sharded else None
        for index in range(0 if info is None else info.id, 20, 1 if info is None else info.num_workers):
            yield torch.full((WIDTH,), float(index)), torch.zeros(1)

    def __len__(self) -> int:
        raise AssertionError("an iterable data set's length must not be asked")


class WholeStream(Stream):
    sharded = False


@pytest.mark.parametrize(("dataset_class", "sharded"), [(Stream, True), (WholeStream, False)])
def test_an_iterable_data_set_has_no_length_and_is_looked_at_for_sharding(dataset_class: Any, sharded: bool) -> None:
    facts = facts_of(program(data_fn=lambda: DataLoader(dataset_class(), batch_size=4)))
    assert (facts.dataset_kind, facts.dataset_length, facts.batch_size) == ("iterable", None, 4)
    assert (facts.workers_fixed_reason is None) == sharded


def test_ready_batches_are_fixed_at_the_size_they_have() -> None:
    batches = [(torch.zeros(5, WIDTH), torch.zeros(5, 1))] * 3
    facts = facts_of(program(data_fn=lambda: DataLoader(batches, batch_size=None)))
    assert facts.batch_size == 5
    assert facts.batch_fixed_reason == "the loader has batch_size=None: the data set makes the batches"


def test_the_step_is_timed_warm() -> None:
    class Warming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, 1)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            pause(0.3 if self.calls == 1 else 0.01)
            return self.net(x)

    def is_warm() -> bool:
        seconds = facts_of(program(Warming)).step_seconds
        assert seconds > 0.01
        return seconds < 0.2

    assert holds(is_warm)


def test_the_fingerprint_follows_the_program() -> None:
    def wider() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, 1))

    same = facts_of(program()).fingerprint
    assert facts_of(program()).fingerprint == same
    others = [
        facts_of(program(wider)).fingerprint,
        facts_of(program(data_fn=lambda: regression_data(batch_size=4))).fingerprint,
        facts_of(program(optimizer_fn=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))).fingerprint,
        facts_of(program(loss_fn=lambda model, batch: (mse(model, batch), 1))).fingerprint,
    ]
    assert len({same, *others}) == 5


# --- what is wrong, and what to change ---


def needs_width(width: int) -> nn.Module:
    return nn.Linear(width, 1)


def needs_nothing(width: int = WIDTH, *args: Any, **kwargs: Any) -> nn.Module:
    return nn.Linear(width, 1)


def test_a_function_that_needs_an_argument_is_an_error_that_shows_it() -> None:
    text = (
        "model_fn is called without arguments, but needs_width(width: 'int') -> 'nn.Module' needs width; give it a "
        "default, or pass functools.partial(needs_width, width=...)"
    )
    with pytest.raises(WorkloadError, match=re.escape(text)):
        facts_of(program(needs_width))
    with pytest.raises(WorkloadError, match=r"data_fn is called without arguments, but <lambda>\(root\) needs root"):
        facts_of(program(data_fn=lambda root: regression_data()))
    assert facts_of(program(needs_nothing)).model_class == "Linear"
    assert facts_of(program(functools.partial(needs_width, width=WIDTH))).model_class == "Linear"


def test_a_data_fn_that_yields_is_an_error() -> None:
    def data_fn() -> Iterator[Any]:
        yield torch.zeros(2, WIDTH)

    with pytest.raises(WorkloadError, match="data_fn returned a generator, which can be read only once"):
        facts_of(program(data_fn=data_fn))


def test_a_loss_that_is_not_finite_ends_it_before_anything_is_tuned() -> None:
    with pytest.raises(
        TrialFailure, match="the user's own step gives a loss of nan at its first step, in fp32"
    ) as caught:
        facts_of(program(loss_fn=lambda model, batch: mse(model, batch) * float("nan")))
    assert caught.value.kind == "numerics"


def once(make: Callable[[], nn.Module], then: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """A model_fn whose first call makes a model and whose next calls make another one from that."""
    made: list[nn.Module] = []

    def model_fn() -> nn.Module:
        made.append(then(made[0]) if made else make())
        return made[-1]

    return model_fn


def test_the_same_model_at_the_second_call_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="model_fn returned the same model twice; it must make a fresh one"):
        facts_of(program(once(perceptron, lambda first: first)))


def test_a_backbone_that_two_models_share_is_an_error() -> None:
    backbone = nn.Linear(WIDTH, 8)

    def model_fn() -> nn.Module:
        return nn.Sequential(backbone, nn.Linear(8, 1))

    text = "two models from model_fn share parameters (0.weight), so that training one changes the other"
    with pytest.raises(WorkloadError, match=re.escape(text)):
        facts_of(program(model_fn))


def test_a_shared_part_is_found_wherever_it_lies() -> None:
    def moved(first: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), first)

    with pytest.raises(WorkloadError, match=re.escape("share parameters (1.0.weight)")):
        facts_of(program(once(perceptron, moved)))


def test_a_second_call_that_fails_is_an_error() -> None:
    def fails(first: nn.Module) -> nn.Module:
        raise KeyError("already registered")

    text = "model_fn failed at its second call (KeyError: 'already registered'); it must return a fresh model at every"
    with pytest.raises(WorkloadError, match=re.escape(text)):
        facts_of(program(once(perceptron, fails)))


def test_a_batch_that_gives_no_loss_is_an_error_with_the_lines_to_write() -> None:
    with pytest.raises(WorkloadError, match=r"no loss_fn is given and the batch \(list of 2: .*\) does not tell how"):
        facts_of(program(loss_fn=None))


def test_an_error_in_the_users_loss_passes_through() -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("theirs")

    with pytest.raises(ZeroDivisionError, match="theirs"):
        facts_of(program(loss_fn=broken))


class MakesALayerLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "later"):
            self.later = nn.Linear(WIDTH, 1)
        return self.inner(x) + self.later(x)


def test_parameters_that_no_optimizer_knows_are_told() -> None:
    with pytest.raises(
        WorkloadError, match=r"in its first step \(later.weight, later.bias\), which no optimizer knows"
    ):
        facts_of(program(MakesALayerLater))

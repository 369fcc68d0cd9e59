from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autotune.knobs.activation_checkpointing import ActivationCheckpointing, recomputed
from autotune.knobs.base import AS_IS
from tests.knobs.programs import BLOCKS, WIDTH, Net, assert_equal_tensors, baseline_config, gradients, steps, train
from tests.knobs.search_facts import cpu_facts

KNOB = ActivationCheckpointing()


def test_it_is_offered_where_blocks_were_found() -> None:
    assert KNOB.choices(cpu_facts()) == (AS_IS, "alternate", "all")
    assert KNOB.choices(cpu_facts(blocks=())) == (AS_IS,)
    assert KNOB.conflict("all", {}, cpu_facts(blocks=())) == "Net has no repeated blocks that could be recomputed"


def test_alternate_takes_every_second_block() -> None:
    assert recomputed(("a", "b", "c"), "alternate") == ("a", "c")
    assert recomputed(("a", "b", "c"), "all") == ("a", "b", "c")
    assert recomputed(("a", "b", "c"), AS_IS) == ()


def test_parse_lists_what_it_knows() -> None:
    with pytest.raises(
        ValueError, match="activation_checkpointing has no value 'some'; known are as_is, alternate, all"
    ):
        KNOB.parse("some")


def counting_forwards(training: Any) -> list[int]:
    """How often the layer inside each block has run, kept up to date."""
    counts = [0] * len(BLOCKS)
    for index, name in enumerate(BLOCKS):

        def count(module: nn.Module, args: Any, index: int = index) -> None:
            counts[index] += 1

        training.model.get_submodule(f"{name}.linear").register_forward_pre_hook(count)
    return counts


@pytest.mark.parametrize(
    ("value", "expected"), [(AS_IS, [1, 1, 1, 1]), ("alternate", [2, 1, 2, 1]), ("all", [2, 2, 2, 2])]
)
def test_applied_blocks_run_again_in_the_backward_pass(value: str, expected: list[int]) -> None:
    training = train(activation_checkpointing=value)
    forwards = counting_forwards(training)
    steps(training, 1)
    assert forwards == expected


def saved_bytes(training: Any) -> int:
    """What a forward keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    batch = next(iter(training.loader))[0].data
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        training.parts.compute_loss(training.model, batch)
    return sum(kept.values())


def test_applied_less_is_kept_for_backward() -> None:
    plain, some, least = (saved_bytes(train(activation_checkpointing=value)) for value in (AS_IS, "alternate", "all"))
    assert least < some < plain


@pytest.mark.parametrize("value", ["alternate", "all"])
def test_applied_gradients_and_running_statistics_are_the_same_to_the_bit(value: str) -> None:
    plain, recomputing = train(), train(activation_checkpointing=value)
    assert_equal_tensors(gradients(recomputing), gradients(plain))
    steps(plain, 3)
    steps(recomputing, 3)
    assert_equal_tensors(recomputing.model.state_dict(), plain.model.state_dict())
    # One accumulated window and three steps of one micro-batch each.
    assert int(recomputing.model.state_dict()["blocks.0.norm.num_batches_tracked"]) == 4
    assert recomputing.model.get_submodule("blocks.0.norm").momentum == 0.1


def test_applied_a_cumulative_average_is_kept_too() -> None:
    def cumulative() -> nn.Module:
        torch.manual_seed(0)
        net = Net(norm=True)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = None
        return net

    plain, recomputing = (train(make_model=cumulative, activation_checkpointing=value) for value in (AS_IS, "all"))
    steps(plain, 3)
    steps(recomputing, 3)
    assert_equal_tensors(recomputing.model.state_dict(), plain.model.state_dict())
    assert recomputing.model.get_submodule("blocks.0.norm").momentum is None


def test_applied_dropout_is_drawn_once() -> None:
    def dropping() -> nn.Module:
        torch.manual_seed(0)
        net = Net(norm=False)
        for block in net.blocks:
            block.norm = nn.Dropout(0.5)
        return net

    plain, recomputing = (train(make_model=dropping, activation_checkpointing=value) for value in (AS_IS, "all"))
    torch.manual_seed(1)
    expected = gradients(plain)
    torch.manual_seed(1)
    assert_equal_tensors(gradients(recomputing), expected)


def test_applied_a_blocks_own_hooks_run_once_and_names_stay() -> None:
    training = train(activation_checkpointing="all")
    seen: list[torch.Tensor] = []
    training.model.get_submodule("blocks.1").register_forward_hook(lambda module, args, output: seen.append(output))
    steps(training, 1)
    assert len(seen) == 1
    assert list(training.model.state_dict()) == list(Net(norm=True).state_dict())


def test_applied_nothing_is_recomputed_in_evaluation() -> None:
    training = train(activation_checkpointing="all")
    forwards = counting_forwards(training)
    x = torch.randn(4, 6)
    training.model.eval()
    training.model(x).sum().backward()
    training.model.train()
    with torch.no_grad():
        training.model(x)
    assert forwards == [2, 2, 2, 2]


class Interrupted(nn.Module):
    """A block of which one part is never compiled, so that the compiler gives up on the block's recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x + self.norm(x)


@pytest.mark.usefixtures("nothing_compiled_yet")
@pytest.mark.parametrize("broken", [False, True])
def test_applied_under_compile_gradients_and_statistics_are_those_of_the_plain_step(broken: bool) -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        if broken:
            return nn.Sequential(Interrupted(), Interrupted(), nn.Linear(6, 1))
        return Net(norm=True)

    blocks = ("0", "1") if broken else BLOCKS
    plain = train(make_model=make_model, blocks=blocks)
    compiled = train(make_model=make_model, blocks=blocks, activation_checkpointing="all", compile_mode="default")
    assert_equal_tensors(gradients(compiled), gradients(plain), tolerance=1e-4)
    assert broken or counters["stats"]["unique_graphs"] == 1
    assert bool(counters["graph_break"]) == broken
    assert_equal_tensors(compiled.model.state_dict(), plain.model.state_dict(), tolerance=1e-4)
    tracked = [value for name, value in compiled.model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert tracked
    assert all(int(count) == 1 for count in tracked)


@pytest.mark.parametrize("has_batch_norm", [False, True])
def test_export_does_what_the_knob_does(has_batch_norm: bool) -> None:
    lines = KNOB.export("alternate", baseline_config(), cpu_facts(has_batch_norm=has_batch_norm))
    exported, plain = train(norm=has_batch_norm), train(norm=has_batch_norm)
    forwards = counting_forwards(exported)
    exec("\n".join((*lines.imports, *lines.wrap)), {"model": exported.model})
    assert_equal_tensors(gradients(exported), gradients(plain))
    assert_equal_tensors(exported.model.state_dict(), plain.model.state_dict())
    assert forwards == [2, 1, 2, 1]


class InstanceNormed(nn.Module):
    """Two blocks that keep running statistics of each sample's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = [nn.InstanceNorm1d(1, track_running_stats=True) for _ in range(2)]
        self.blocks = nn.ModuleList([nn.Sequential(nn.Unflatten(1, (1, -1)), norm, nn.Flatten()) for norm in norms])
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_export_leaves_the_statistics_of_instance_norm_as_they_are() -> None:
    facts = cpu_facts(has_batch_norm=False, has_tracking_instance_norm=True, blocks=("blocks.0", "blocks.1"))
    lines = KNOB.export("all", baseline_config(), facts)
    exported, plain = train(make_model=InstanceNormed), train(make_model=InstanceNormed)
    exec("\n".join((*lines.imports, *lines.wrap)), {"model": exported.model})
    assert_equal_tensors(gradients(exported), gradients(plain))
    assert_equal_tensors(exported.model.state_dict(), plain.model.state_dict())

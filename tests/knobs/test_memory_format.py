import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.knobs.base import CodeLines
from autotune.knobs.memory_format import MemoryFormat
from tests.knobs.programs import assert_equal_tensors, baseline_config, gradients, train
from tests.knobs.search_facts import cpu_facts, cuda_facts

KNOB = MemoryFormat()


class Images(nn.Module):
    """Two convolutions with BatchNorm; keeps the strides of what the second one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 1)
        self.channels_last = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.norm(self.first(x))))
        self.channels_last = x.is_contiguous(memory_format=torch.channels_last)
        return self.head(x.mean((2, 3)))


def images() -> DataLoader[tuple[torch.Tensor, ...]]:
    x = torch.randn(8, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.mean((1, 2, 3))[:, None]), batch_size=4)


def test_it_is_offered_where_there_are_2d_convolutions_and_no_others() -> None:
    for facts in (cpu_facts(convolution_ranks=(4,)), cuda_facts(convolution_ranks=(3, 4))):
        assert KNOB.choices(facts) == ("as_is", "channels_last")
        assert KNOB.prior(facts)[0] == "channels_last"
        assert KNOB.conflict("channels_last", {}, facts) is None
    assert KNOB.choices(cuda_facts()) == ("as_is",)
    assert KNOB.conflict("channels_last", {}, cuda_facts()) == "the model has no 2-D convolution"
    assert "3-D convolutions" in str(KNOB.conflict("channels_last", {}, cuda_facts(convolution_ranks=(4, 5))))


def test_export_converts_the_model() -> None:
    lines = KNOB.export("channels_last", baseline_config(), cuda_facts(convolution_ranks=(4,)))
    expected = CodeLines(imports=("import torch",), model=("model = model.to(memory_format=torch.channels_last)",))
    assert lines == expected


@pytest.mark.parametrize("value", ["as_is", "channels_last"])
def test_applied_weights_and_outputs_lie_channels_last(value: str) -> None:
    training = train(make_model=Images, data=images, memory_format=value)
    parameters = list(training.model.parameters())
    gradients(training)
    assert training.model.channels_last is (value == "channels_last")
    lies_so = training.model.second.weight.is_contiguous(memory_format=torch.channels_last)
    assert lies_so is (value == "channels_last")
    held = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    assert all(one is other for one, other in zip(parameters, held, strict=True))


def test_applied_it_computes_the_same() -> None:
    expected = gradients(train(make_model=Images, data=images))
    assert_equal_tensors(
        gradients(train(make_model=Images, data=images, memory_format="channels_last")), expected, tolerance=1e-5
    )

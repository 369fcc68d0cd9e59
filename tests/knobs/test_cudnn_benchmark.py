from collections.abc import Iterator

import pytest
import torch

from autotune.knobs.base import CodeLines
from autotune.knobs.cudnn_benchmark import CudnnBenchmark
from tests.knobs.programs import baseline_config, train
from tests.knobs.search_facts import cpu_facts, cuda_facts

KNOB = CudnnBenchmark()


@pytest.fixture(autouse=True)
def flag_put_back() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def test_it_is_offered_for_convolutions_on_a_gpu() -> None:
    assert KNOB.choices(cuda_facts(convolution_ranks=(4,))) == ("as_is", "on")
    assert KNOB.choices(cuda_facts(convolution_ranks=(3,))) == ("as_is", "on")
    assert KNOB.conflict("on", {}, cuda_facts()) == "the model has no convolution"
    assert KNOB.conflict("on", {}, cpu_facts(convolution_ranks=(4,))) == "cuDNN runs on a GPU alone"


@pytest.mark.parametrize("setting", ["cudnn_benchmark_set", "deterministic_algorithms"])
def test_what_the_user_set_globally_stays(setting: str) -> None:
    facts = cuda_facts(convolution_ranks=(4,), process_settings={setting: True})
    assert KNOB.choices(facts) == ("as_is",)
    assert "your program" in str(KNOB.conflict("on", {}, facts))


def test_the_first_step_is_slow_only_where_it_is_on() -> None:
    assert KNOB.first_step_limit_seconds("on") == 60
    assert KNOB.first_step_limit_seconds("as_is") is None


def test_export_sets_the_flag() -> None:
    lines = KNOB.export("on", baseline_config(), cuda_facts(convolution_ranks=(4,)))
    assert lines == CodeLines(imports=("import torch",), process=("torch.backends.cudnn.benchmark = True",))


@pytest.mark.parametrize(
    ("value", "own", "expected"), [("as_is", False, False), ("as_is", True, True), ("on", False, True)]
)
def test_applied_the_flag_stands_and_a_flag_of_the_users_is_kept(value: str, own: bool, expected: bool) -> None:
    torch.backends.cudnn.benchmark = own
    train(cudnn_benchmark=value)
    assert torch.backends.cudnn.benchmark is expected

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import MarkStepBox

from autotune.config import TrainingConfig
from autotune.knobs.base import AS_IS
from autotune.knobs.compile_mode import CompileMode
from autotune.knobs.registry import compiles_in_evaluation
from tests.knobs.programs import assert_equal_tensors, baseline_config, gradients, loss_fn, steps, train
from tests.knobs.search_facts import cpu_facts, cuda_facts

KNOB = CompileMode()


pytestmark = pytest.mark.usefixtures("nothing_compiled_yet")


def test_choices_follow_the_device() -> None:
    every = (AS_IS, "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
    assert KNOB.choices(cuda_facts()) == every
    assert KNOB.choices(cpu_facts()) == (AS_IS, "default", "max-autotune-no-cudagraphs")
    assert KNOB.conflict("reduce-overhead", {}, cpu_facts()) == "reduce-overhead uses CUDA graphs, which need a GPU"


def test_without_a_cpp_compiler_nothing_is_offered_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert KNOB.choices(cpu_facts()) == (AS_IS,)
    assert KNOB.conflict("default", {}, cpu_facts()) == (
        "compiling for a CPU needs a C++ compiler, and none of g++, clang++, c++ is on the PATH"
    )
    assert "default" in KNOB.choices(cuda_facts())


def test_a_model_that_is_compiled_already_is_not_compiled_again() -> None:
    facts = cuda_facts(model_is_compiled=True)
    assert KNOB.conflict("default", {}, facts) == "model_fn compiles the model already"
    assert KNOB.conflict(AS_IS, {}, facts) is None


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_and_accumulation_are_a_conflict(mode: str) -> None:
    facts = cuda_facts(global_batch_size=64)
    assert KNOB.conflict(mode, {"batch_size": 64}, facts) is None
    assert KNOB.conflict(mode, {"batch_size": 16}, facts) == (
        f"{mode} uses CUDA graphs, which overwrite gradients that are accumulated over several micro-batches; "
        "use a micro-batch of 64, or max-autotune-no-cudagraphs"
    )
    assert KNOB.conflict("default", {"batch_size": 16}, facts) is None


def test_parse_lists_what_it_knows() -> None:
    with pytest.raises(
        ValueError, match="compile_mode has no value 'fast'; known are as_is, default, reduce-overhead, "
    ):
        KNOB.parse("fast")


def config(**changes: Any) -> TrainingConfig:
    return baseline_config(**changes)


def test_exports_compile_what_the_scope_names() -> None:
    facts = cuda_facts(blocks=("h.0", "h.1"))
    assert KNOB.export("default", config(), facts).wrap == (
        'model.forward = torch.compile(model.forward, mode="default")',
    )
    assert KNOB.export("default", config(compile_scope="step"), facts).wrap == (
        'compute_loss = torch.compile(compute_loss, mode="default")',
    )
    assert KNOB.export("default", config(compile_scope="blocks"), facts).wrap[0] == "for name in ['h.0', 'h.1']:"
    assert KNOB.export("default", config(), facts).micro_step == ()
    begin = ("torch.compiler.cudagraph_mark_step_begin()",)
    assert KNOB.export("reduce-overhead", config(), facts).micro_step == begin


def test_an_evaluation_compiles_where_the_models_own_forward_is_compiled() -> None:
    compiled = [(scope, mode) for scope in ("model", "blocks", "step") for mode in ("default", "reduce-overhead")]
    answers = {
        scope: compiles_in_evaluation(config(compile_scope=scope, compile_mode=mode)) for scope, mode in compiled
    }
    assert answers == {"model": True, "blocks": True, "step": False}
    assert not compiles_in_evaluation(config(cudnn_benchmark="on"))


def test_applied_the_model_is_one_graph_with_the_same_gradients() -> None:
    training = train(compile_mode="default")
    actual = gradients(training)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert_equal_tensors(actual, gradients(train()), tolerance=1e-4)
    assert list(training.model.state_dict()) == list(train().model.state_dict())


def test_applied_the_models_of_torchs_own_classes_are_compiled_too() -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))

    steps(train(make_model=make_model, compile_mode="default"), 1)
    assert counters["stats"]["unique_graphs"] == 1


def test_applied_the_step_is_one_graph_with_the_loss_in_it() -> None:
    training = train(compile_mode="default", compile_scope="step")
    steps(training, 1)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_applied_as_is_compiles_nothing() -> None:
    steps(train(), 1)
    assert counters["stats"]["unique_graphs"] == 0


def test_applied_the_mode_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    compile_of_torch = torch.compile

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("mode"))
        return compile_of_torch(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", noting)
    train(compile_mode="max-autotune-no-cudagraphs")
    assert seen == ["max-autotune-no-cudagraphs"]


@pytest.mark.parametrize(("mode", "marks"), [("reduce-overhead", 2), ("default", 0)])
def test_applied_cuda_graphs_are_told_where_a_micro_batch_begins(mode: str, marks: int) -> None:
    training = train(compile_mode=mode)
    before = MarkStepBox.mark_step_counter
    steps(training, 2)
    assert before - MarkStepBox.mark_step_counter == marks


def test_applied_with_autocast_the_compiled_gradients_are_those_of_autocast() -> None:
    compiled = gradients(train(compile_mode="default", compile_scope="step", precision="bf16"))
    assert counters["stats"]["unique_graphs"] == 1
    assert_equal_tensors(compiled, gradients(train(precision="bf16", loss=loss_fn)), tolerance=3e-2)

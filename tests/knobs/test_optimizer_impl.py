from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.knobs.base import AS_IS
from autotune.knobs.optimizer_impl import OptimizerImpl
from tests.knobs.programs import assert_equal_tensors, baseline_config, steps, train
from tests.knobs.search_facts import cpu_facts, cuda_facts

KNOB = OptimizerImpl()


def test_choices_are_what_the_optimizer_can_be_switched_to() -> None:
    assert KNOB.choices(cpu_facts(optimizer_variants=("foreach", "fused"))) == (AS_IS, "fused", "foreach")
    assert KNOB.choices(cpu_facts(optimizer_variants=())) == (AS_IS,)


def test_the_prior_begins_with_fused() -> None:
    facts = cuda_facts(optimizer_variants=("for_loop", "fused"))
    assert KNOB.prior(facts) == ("fused", AS_IS, "for_loop")


def test_an_optimizer_without_the_flags_is_a_conflict_with_its_reason() -> None:
    facts = cpu_facts(optimizer_variants=(), optimizer_fixed_reason="SignStep takes no foreach/fused")
    assert KNOB.conflict("fused", {}, facts) == "SignStep takes no foreach/fused"


def test_an_implementation_that_is_lacking_or_in_use_is_a_conflict() -> None:
    facts = cuda_facts(optimizer_class="RMSprop", optimizer_variants=("for_loop",))
    assert KNOB.conflict("for_loop", {}, facts) is None
    assert KNOB.conflict("fused", {}, facts) == (
        "RMSprop on cuda can be switched to for_loop, not to fused, which it lacks or uses as it is"
    )


def test_parse_lists_what_it_knows() -> None:
    with pytest.raises(
        ValueError, match="optimizer_impl has no value 'apex'; known are as_is, fused, foreach, for_loop"
    ):
        KNOB.parse("apex")


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.25)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [adamw, adagrad])
@pytest.mark.parametrize("value", ["fused", "foreach", "for_loop"])
def test_export_sets_what_the_knob_sets(make: Any, value: str) -> None:
    lines = KNOB.export(value, baseline_config(), cpu_facts())
    optimizer = make(nn.Linear(3, 2))
    exec("\n".join(lines.optimizer), {"optimizer": optimizer})
    expected = train(optimizer_fn=make, optimizer_impl=value).optimizer
    flags = ("foreach", "fused")
    assert [optimizer.param_groups[0][flag] for flag in flags] == [expected.param_groups[0][flag] for flag in flags]
    assert optimizer._step_supports_amp_scaling == expected._step_supports_amp_scaling


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.name().removeprefix("aten::").split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("value", "runs", "never"),
    [
        ("fused", "_fused_adamw_", "addcdiv_"),
        ("foreach", "_foreach_addcdiv_", "addcdiv_"),
        (AS_IS, "addcdiv_", "_fused_adamw_"),
    ],
)
def test_applied_the_optimizer_steps_by_that_implementation(value: str, runs: str, never: str) -> None:
    training = train(optimizer_fn=adamw, optimizer_impl=value)
    training.accumulate(next(iter(training.loader)))
    with Calls() as calls:
        training.update()
    assert calls.count[runs]
    assert not calls.count[never]


def test_applied_for_loop_undoes_what_the_user_set() -> None:
    def fused(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    training = train(optimizer_fn=fused, optimizer_impl="for_loop")
    training.accumulate(next(iter(training.loader)))
    with Calls() as calls:
        training.update()
    assert calls.count["addcdiv_"]
    assert not calls.count["_fused_adamw_"]


@pytest.mark.parametrize("make", [adamw, adagrad])
@pytest.mark.parametrize("value", ["fused", "foreach"])
def test_applied_training_goes_as_before(make: Any, value: str) -> None:
    plain, switched = (train(norm=False, optimizer_fn=make, optimizer_impl=each) for each in (AS_IS, value))
    assert steps(switched, 4) == pytest.approx(steps(plain, 4), rel=1e-5)
    assert_equal_tensors(switched.model.state_dict(), plain.model.state_dict(), tolerance=1e-4)

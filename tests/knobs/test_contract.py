"""What every knob keeps to, whichever it is."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from autotune.config import TrainingConfig
from autotune.knobs.base import CodeLines, Knob, TrainingParts
from autotune.knobs.registry import KNOBS, batch_knob, knob
from autotune.records import SearchFacts
from tests.knobs.programs import BLOCKS, Net, data_fn
from tests.knobs.search_facts import FACTS, cpu_facts, cuda_facts

every_knob = pytest.mark.parametrize("the_knob", KNOBS, ids=lambda each: each.name)
all_facts = pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())


def baselines(facts: SearchFacts) -> dict[str, Any]:
    return {each.name: each.baseline(facts) for each in KNOBS}


@every_knob
@all_facts
def test_the_baseline_is_a_choice_of_rank_zero_and_conflicts_with_nothing(the_knob: Knob, facts: SearchFacts) -> None:
    baseline = the_knob.baseline(facts)
    assert baseline in the_knob.choices(facts)
    assert the_knob.rank(baseline, facts) == 0
    for other in KNOBS:
        for value in other.choices(facts):
            if other is not the_knob:
                others = {**baselines(facts), other.name: value}
                del others[the_knob.name]
                assert the_knob.conflict(baseline, others, facts) is None


@every_knob
@all_facts
def test_choices_are_distinct_json_scalars_and_the_same_each_time(the_knob: Knob, facts: SearchFacts) -> None:
    choices = the_knob.choices(facts)
    assert len(set(choices)) == len(choices) <= 40
    assert json.loads(json.dumps(choices)) == list(choices)
    assert all(type(choice) in (str, int, float, bool) for choice in choices)
    assert the_knob.choices(facts) == choices


@every_knob
@all_facts
def test_what_is_refused_is_no_choice_and_a_knob_left_at_its_baseline_says_why(
    the_knob: Knob, facts: SearchFacts
) -> None:
    choices, refused = the_knob.choices(facts), the_knob.refused(facts)
    assert not set(refused) & set(choices)
    assert (None not in refused) or len(choices) == 1
    assert refused or len(choices) > 1
    assert all(len(reason.split()) > 1 and "\n" not in reason for reason in refused.values())


@every_knob
@all_facts
def test_the_prior_is_a_permutation_of_the_choices(the_knob: Knob, facts: SearchFacts) -> None:
    prior = the_knob.prior(facts)
    assert len(prior) == len(the_knob.choices(facts))
    assert set(prior) == set(the_knob.choices(facts))


@every_knob
@all_facts
def test_companions_are_values_of_other_knobs_that_conflict_with_nothing(the_knob: Knob, facts: SearchFacts) -> None:
    baseline = {other.name: other.baseline(facts) for other in KNOBS}
    for value in the_knob.choices(facts):
        companions = the_knob.companions(value, facts)
        together = {**baseline, the_knob.name: value, **companions}
        assert the_knob.name not in companions
        for name, best in companions.items():
            assert best in knob(name).choices(facts)
            assert knob(name).conflict(best, together, facts) is None


@every_knob
@all_facts
def test_what_saves_memory_is_a_choice_other_than_the_baseline(the_knob: Knob, facts: SearchFacts) -> None:
    saving = the_knob.saving(facts)
    assert set(saving) <= set(the_knob.choices(facts)) - {the_knob.baseline(facts)}
    assert len(set(saving)) == len(saving)
    assert "memory" in the_knob.cures or not saving


@every_knob
@all_facts
def test_no_value_is_simpler_than_the_baseline(the_knob: Knob, facts: SearchFacts) -> None:
    assert all(
        the_knob.rank(value, facts) > 0 for value in the_knob.choices(facts) if value != the_knob.baseline(facts)
    )


@every_knob
@all_facts
def test_conflicts_are_one_sentence(the_knob: Knob, facts: SearchFacts) -> None:
    others = baselines(facts)
    del others[the_knob.name]
    for value in (*the_knob.choices(facts), *the_knob.choices(cuda_facts())):
        reason = the_knob.conflict(value, others, facts)
        assert reason is None or (len(reason.split()) > 3 and "\n" not in reason and not reason.endswith("."))


@every_knob
@all_facts
def test_every_choice_is_parsed_from_its_text(the_knob: Knob, facts: SearchFacts) -> None:
    for value in the_knob.choices(facts):
        parsed = the_knob.parse(json.dumps(value).strip('"'))
        assert parsed == value and type(parsed) is type(value)


@every_knob
def test_what_is_no_value_is_refused_by_name(the_knob: Knob) -> None:
    with pytest.raises(ValueError, match=rf"^{the_knob.name} (has no value|takes a whole number, not) 'fast'"):
        the_knob.parse("fast")


def source(lines: CodeLines) -> str:
    loader = "".join(f"{name}={value}, " for name, value in lines.loader_arguments.items())
    parts = [
        *lines.imports,
        *lines.process,
        *lines.model,
        *lines.optimizer,
        *lines.wrap,
        f"dict({loader})",
        *lines.micro_step,
        lines.context or "",
        lines.scaler or "",
        lines.micro_batches_per_step or "",
    ]
    return "\n".join(parts)


@every_knob
@all_facts
def test_exports_are_plain_python(the_knob: Knob, facts: SearchFacts) -> None:
    others = {**baselines(facts), "compile_mode": "default"}
    for scope in ("model", "step", "blocks"):
        for value in the_knob.choices(facts):
            config = TrainingConfig({**others, "compile_scope": scope, the_knob.name: value})
            text = source(the_knob.export(value, config, facts))
            compile(text, the_knob.name, "exec")
            assert "autotune" not in text.replace("max-autotune", "")


@every_knob
def test_the_baseline_exports_nothing(the_knob: Knob) -> None:
    facts = cpu_facts(global_batch_size=32)
    config = TrainingConfig(baselines(facts))
    assert the_knob.export(config[the_knob.name], config, facts) == CodeLines()


def process_flags() -> list[Any]:
    return [
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
        torch.is_autocast_enabled("cpu"),
    ]


@every_knob
def test_hooks_at_the_baseline_leave_the_program_alone(the_knob: Knob) -> None:
    loader = data_fn()
    facts = cpu_facts(batch_size=loader.batch_size)
    value = the_knob.baseline(facts)
    model = Net(norm=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def compute_loss(model: nn.Module, batch: Any) -> Any:
        raise AssertionError("no hook runs the step")

    parts = TrainingParts(TrainingConfig({}), torch.device("cpu"), None, model, compute_loss, optimizer, BLOCKS)
    before = copy.copy(parts.__dict__), process_flags(), copy.deepcopy(optimizer.state_dict()), set(optimizer.__dict__)
    weights = copy.deepcopy(model.state_dict())

    the_knob.configure_process(value, parts.device)
    the_knob.transform_model(value, parts)
    the_knob.set_optimizer(value, parts)
    the_knob.wrap_model(value, parts)

    assert the_knob.environment(value) == {}
    assert the_knob.transform_batch(value, parts) is None
    assert the_knob.step_context(value, parts) is None
    assert the_knob.backward(value, parts) is None
    assert all(getattr(loader, name) == kept for name, kept in the_knob.loader_kwargs(value, parts).items())
    after = parts.__dict__, process_flags(), optimizer.state_dict(), set(optimizer.__dict__)
    assert after == before
    assert parts.compile_targets == []
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_names_are_distinct_and_found() -> None:
    assert len({each.name for each in KNOBS}) == len(KNOBS)
    assert all(knob(each.name) is each for each in KNOBS)
    assert all(each.summary and "\n" not in each.summary for each in KNOBS)


def test_an_unknown_knob_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"^there is no knob 'speed'; known are batch_size, num_workers, "):
        knob("speed")


def test_one_knob_moves_the_batch() -> None:
    assert [each for each in KNOBS if each.stage == "batch"] == [batch_knob()]

"""What a search would try and what it would refuse, told before there is one: from the facts alone."""

from __future__ import annotations

from autotune.config import Value
from autotune.knobs.registry import KNOBS
from autotune.options import CheckReport, RefusedValue, SearchOptions
from autotune.space import SearchSpace

TYPICAL_TRIALS = 30
"""A search of the default space runs about so many, confirmation included (design, section 1)."""
TRIAL_SECONDS, STEPS_PER_TRIAL, COMPILE_SECONDS = 3.0, 15.0, 25.0
"""A trial costs its start and its blocks, or so many steps where those are longer; a compiled one its compilation."""


def preview(space: SearchSpace, options: SearchOptions) -> CheckReport:
    """What `autotune check` tells of the space that these options leave."""
    facts = space.facts
    conflicts = [
        RefusedValue(knob=name, value=value, reason=reason)
        for name, values in space.choices.items()
        for value in values
        if (reason := _lasting_conflict(space, name, value)) is not None
    ]
    not_offered = [
        RefusedValue(knob=knob.name, value=value, reason=reason)
        for knob in KNOBS
        for value, reason in knob.refused(facts).items()
    ]
    in_conflict = {(one.knob, one.value) for one in conflicts}
    return CheckReport(
        facts=facts,
        offered={
            name: tuple(value for value in values if (name, value) not in in_conflict)
            for name, values in space.choices.items()
        },
        refused=(*conflicts, *not_offered),
        estimated_search_seconds=_estimated_seconds(space, options),
        budget_seconds=options.budget_seconds,
        warnings=facts.workload.notes,
    )


def _lasting_conflict(space: SearchSpace, name: str, value: Value) -> str | None:
    """Why a value cannot be used beside the baseline, and not beside any change of one other knob either."""
    config = space.baseline.replace({name: value})
    reason = space.conflict(config)
    if reason is None:
        return None
    for other, values in space.choices.items():
        if other != name and any(space.conflict(config.replace({other: one})) is None for one in values):
            return None
    return reason.removeprefix(f"{name}: ")


def _estimated_seconds(space: SearchSpace, options: SearchOptions) -> float:
    """A rough first idea of what a search would take that has the time."""
    trials = min(TYPICAL_TRIALS, 2 * space.size, options.trials or TYPICAL_TRIALS)
    compiles = any(
        knob.first_step_limit_seconds(value) is not None for knob in KNOBS for value in space.choices[knob.name]
    )
    seconds = trials * max(TRIAL_SECONDS, STEPS_PER_TRIAL * space.facts.workload.step_seconds)
    return seconds + (trials / 3 * COMPILE_SECONDS if compiles else 0.0)

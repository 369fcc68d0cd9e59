"""How long measurements take, and how long they may: shorter in a short budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.config import TrainingConfig
from autotune.knobs.base import LONGEST_COMPILE_SECONDS
from autotune.knobs.registry import first_step_limit_seconds
from autotune.records import PhaseTimeouts, SearchFacts, Settings, TrialKind, TrialRequest
from autotune.space import SearchSpace
from autotune.stats import FEWEST_ROUNDS

SHORT_BUDGET_SECONDS = 400.0
"""Processes differ by more than their blocks do: below this, confirming is more rounds rather than longer blocks."""
VERY_SHORT_BUDGET_SECONDS = 240.0
"""Below this, no third round is kept time for where a gain is plain, nor a long soak."""
FEWEST_STARTS = 6
FEWEST_TRIALS = 8
"""What is left is short where it is less than so many times what starting took (importing torch and the program, and one
step of it), and later less than so many times what the baseline took. A quiet machine is far from either: on two cores
that had little else to do, starting took 3.5 s and a small program's baseline 3.3 s."""


@dataclass(frozen=True)
class Pace:
    """How long each measurement takes."""

    block_seconds: float = 0.3
    minimum_blocks: int = 3
    maximum_blocks: int = 6
    confirm_block_seconds: float = 1.0
    confirm_minimum_blocks: int = 6
    confirm_maximum_blocks: int = 12
    rounds_of_a_plain_gain: int = FEWEST_ROUNDS
    """That the confirmation keeps time for where the best is far ahead already."""
    soak_seconds: float = 20.0
    unhurried: Pace | None = None
    """The pace that the budget asked for, where it turned out to be short for this program on this machine, as it is just
    now, and this one is gone at instead."""

    @property
    def hurried(self) -> bool:
        """Whether this one is gone at for lack of time."""
        return self.unhurried is not None

    @property
    def longest_seconds(self) -> float:
        """Of the blocks of a measurement, not of a confirmation."""
        return self.maximum_blocks * self.block_seconds


def pace_for(budget_seconds: float) -> Pace:
    """The design's block lengths where there is time for them; half-second blocks to confirm in a short budget; in a very
    short one also two rounds where these are likely to be enough, and a soak of 8 s."""
    if budget_seconds >= SHORT_BUDGET_SECONDS:
        return Pace()
    short = Pace(confirm_block_seconds=0.5, confirm_minimum_blocks=4, confirm_maximum_blocks=8)
    if budget_seconds >= VERY_SHORT_BUDGET_SECONDS:
        return short
    return replace(short, rounds_of_a_plain_gain=2, soak_seconds=8.0)


def hurried(pace: Pace) -> Pace:
    """Fewer and shorter blocks, and a soak of 4 s: a further trial or round tells more than a longer one.

    On a machine that is busy with other work processes differ by much more than their blocks do, however long these are.
    """
    return replace(
        pace,
        block_seconds=min(0.2, pace.block_seconds),
        maximum_blocks=4,
        confirm_block_seconds=0.25,
        confirm_minimum_blocks=3,
        confirm_maximum_blocks=4,
        rounds_of_a_plain_gain=2,
        soak_seconds=min(4.0, pace.soak_seconds),
        unhurried=pace,
    )


def trial_request(
    kind: TrialKind,
    config: TrainingConfig,
    *,
    confirm: bool,
    space: SearchSpace,
    settings: Settings,
    pace: Pace,
) -> TrialRequest:
    """The request for a trial, with blocks and timeouts that suit it. `confirm`: measured for the confirmation."""
    facts = space.facts
    maximum_blocks = pace.confirm_maximum_blocks if confirm else pace.maximum_blocks
    if kind == "soak":
        maximum_blocks = max(4, round(pace.soak_seconds / pace.block_seconds))
    return TrialRequest(
        kind=kind,
        config=config,
        conditions=settings.conditions,
        blocks=facts.workload.blocks,
        block_seconds=pace.confirm_block_seconds if confirm else pace.block_seconds,
        minimum_blocks=pace.confirm_minimum_blocks if confirm else pace.minimum_blocks,
        maximum_blocks=maximum_blocks,
        measure_resident=not confirm,
        timeouts=_timeouts(
            facts,
            budget_seconds=settings.budget_seconds,
            effective_batch_size=space.effective_batch(config),
            limit_seconds=LONGEST_COMPILE_SECONDS
            if facts.workload.model_is_compiled
            else first_step_limit_seconds(config),
            block_seconds=pace.confirm_block_seconds,
        ),
    )


def _timeouts(
    facts: SearchFacts,
    *,
    budget_seconds: float,
    effective_batch_size: int,
    limit_seconds: float | None,
    block_seconds: float,
) -> PhaseTimeouts:
    """Twenty of the user's own steps scaled to this batch, and never so long that one hang takes the budget.

    Only where something may be compiled or tuned does the first step get minutes: `limit_seconds`, in a longer budget.
    """
    workload = facts.workload
    step_seconds = workload.step_seconds * max(1.0, effective_batch_size / max(1, workload.batch_size))
    quarter = budget_seconds / 4
    eager = min(max(15.0, 20 * step_seconds), max(15.0, quarter))
    return PhaseTimeouts(
        build_seconds=max(30.0, min(120.0, quarter)),
        compile_seconds=eager if limit_seconds is None else min(limit_seconds, max(30.0, quarter)),
        measure_seconds=max(30.0, min(240.0, eager + 40 * block_seconds)),
    )

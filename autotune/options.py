"""What a person can ask for, and what `check`, `memory` and `verify` answer: for `autotune.fit` and the command line."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from autotune.config import TrainingConfig, Value
from autotune.errors import UserError
from autotune.records import SCHEMA_VERSION, Answer, Ceiling, Failure, ParityResult, Record, SearchFacts, Strategy

Objective = Literal["throughput", "memory"]
DeviceKind = Literal["cuda", "cpu"]
VerifyOutcome = Literal[
    "holds", "holds_differently", "no_longer_better", "trains_differently", "no_longer_runs", "unclear"
]
HOLDING: frozenset[VerifyOutcome] = frozenset({"holds", "holds_differently"})
"""The outcomes that say: the recommendation is still worth following."""
VERIFY_BUDGET_SECONDS = 300.0
"""What `verify` may take by default; it ends as soon as the answer is clear."""


OUTPUT_DIRECTORY = "processes"
"""In a study's directory: what its processes printed, a file each, of a trial N `*-trial-N.log`."""
FRACTIONS = ("budget", "memory_margin", "clip_grad_norm")
"""The numbers that need not be whole."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Everything about a search but the workload. The defaults are those of `autotune.fit` and of `autotune search`."""

    budget_seconds: float = 600.0
    """Wall clock of the whole search, confirmation included."""
    trials: int | None = None
    """At most so many before the confirmation, that of the user's program among them; None: as the budget allows."""
    strategy: Strategy = "staged"
    """Which points are measured: all others than the default are there for comparison, or to know the whole space."""
    space: str = "default"
    """The name of a preset, or the path of a space file."""
    only: tuple[str, ...] = ()
    """Knobs to move, the others stay at the baseline; empty: all of the space."""
    blocks: tuple[str, ...] = ()
    """Module names, or class names, of the blocks to recompute and compile one by one; empty: they are looked for."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Knob name to the text of the value it must have; the knob parses it."""
    global_batch_size: int | None = None
    """Samples of one optimizer step to keep; None: the user's own DataLoader decides."""
    free_batch: bool = False
    """Hold no batch, not even that of a DataLoader."""
    objective: Objective | None = None
    """None: the one that the space names, or throughput."""
    memory_limit_bytes: int | None = None
    """Tune as if the card (on CPU: the process) had no more than this."""
    memory_margin: float = 0.05
    """Share of the memory that a recommended configuration leaves unreserved."""
    train_samples: int | None = None
    """Samples of the whole training, to tell hours before and after."""
    device: DeviceKind | None = None
    """None: cuda where there is a GPU, else cpu."""
    study: Path = Path("autotune-study")
    """Directory of the study, made where it is missing, continued where it is there."""
    seed: int = 0
    fresh: bool = False
    """Start over where the directory holds a study already."""
    clip_grad_norm: float | None = None
    """To which the gradients of an optimizer step are clipped, as the user's own loop does; None: they are not."""

    def __post_init__(self) -> None:
        """Raises `UserError`, in the words of `fit`, which has no parser before it as the command line has; and for a
        strategy that needs what is not installed, which is told before anything is run."""
        above_zero = {
            "budget": self.budget_seconds,
            "trials": self.trials,
            "global_batch_size": self.global_batch_size,
            "memory_limit": self.memory_limit_bytes,
            "train_samples": self.train_samples,
            "clip_grad_norm": self.clip_grad_norm,
        }
        for name, number in {**above_zero, "memory_margin": self.memory_margin, "seed": self.seed}.items():
            _refuse_no_number(name, number)
        for name, number in above_zero.items():
            if number is not None and not 0 < number < math.inf:
                raise UserError(f"{name} must be above 0, not {number}" if number != math.inf else f"{name} has no end")
        if not 0 <= self.memory_margin < 1:
            raise UserError(
                f"memory_margin is a share of at least 0 and below 1, such as 0.05, not {self.memory_margin}"
            )
        if self.objective is not None and self.objective not in get_args(Objective):
            raise UserError(f"objective must be {' or '.join(get_args(Objective))}, not {self.objective!r}")
        if self.strategy not in get_args(Strategy):
            raise UserError(f"strategy must be one of {', '.join(get_args(Strategy))}, not {self.strategy!r}")
        if self.strategy == "gp" and importlib.util.find_spec("scipy") is None:
            raise UserError("--strategy gp needs scipy, which is not installed; install torch-autotune[gp]")
        if self.device is not None and self.device not in get_args(DeviceKind):
            raise UserError(f"device must be {' or '.join(get_args(DeviceKind))}, not {self.device!r}")
        if self.free_batch and self.global_batch_size is not None:
            raise UserError("global_batch_size holds a batch, and free_batch holds none; give one of them")


def _refuse_no_number(name: str, number: object) -> None:
    kind, words = (Real, "a number") if name in FRACTIONS else (Integral, "a whole number")
    if number is not None and (isinstance(number, bool) or not isinstance(number, kind)):
        raise UserError(f"{name} must be {words}, not {number!r}")


class RefusedValue(Record):
    """A value of a knob that is not tried here."""

    knob: str
    value: Value | None
    """None: every value but the baseline."""
    reason: str


class CheckReport(Record):
    """What `autotune check` found: one step of the user's program was run, nothing was searched."""

    schema_version: int = SCHEMA_VERSION
    facts: SearchFacts
    offered: dict[str, tuple[Value, ...]]
    """Knob name to the values that a search would choose from, the baseline included."""
    refused: tuple[RefusedValue, ...]
    estimated_search_seconds: float
    """What trying all of this is likely to take, whatever the budget."""
    budget_seconds: float
    warnings: tuple[str, ...] = ()


class MemoryReport(Record):
    """What `autotune memory` found: how far the batch goes in each memory class."""

    schema_version: int = SCHEMA_VERSION
    facts: SearchFacts
    baseline: TrainingConfig
    ceilings: tuple[Ceiling, ...]
    limit_bytes: int | None
    """What the processes were allowed: the card, or the limit that was asked for; None on a CPU without one."""
    warnings: tuple[str, ...] = ()


class VerifyReport(Record):
    """What `autotune verify` found: a recommendation of an earlier search, measured again today."""

    schema_version: int = SCHEMA_VERSION
    outcome: VerifyOutcome
    verdict: str
    """The answer in a sentence or two."""
    changed: tuple[str, ...]
    """What differs from the machine and the program that it was found with, one sentence each."""
    baseline_then: Answer
    best_then: Answer
    baseline: Answer
    """The user's program, measured today."""
    reference_settings: dict[str, Value] = Field(default_factory=dict)
    """What `baseline` takes beside the user's own settings, since their program fits at no batch without."""
    best: Answer | None
    """What was recommended, measured today; None where it was not measured to the end, or is the baseline."""
    parity: ParityResult | None
    """Today's check that it trains the same; None where nothing that is computed differs, or it came to no check."""
    failure: Failure | None
    warnings: tuple[str, ...] = ()
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the recommendation is still worth following."""
        return self.outcome in HOLDING

    def __str__(self) -> str:
        """The answer, what has changed, and what makes it less sure, one sentence a line."""
        return "\n".join([self.verdict, *(f"changed: {one}" for one in self.changed), *self.warnings])

    def __repr__(self) -> str:
        """The answer alone, as at the end of a notebook's cell."""
        return f"<VerifyReport: {self.verdict}>"

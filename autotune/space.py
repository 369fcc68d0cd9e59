"""`SearchSpace`: which knobs a search may turn here, to which values, and what it may ask about a point of it."""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import json
import math
import reprlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from autotune.config import TrainingConfig, Value, value_text
from autotune.errors import UserError
from autotune.knobs.base import Knob
from autotune.knobs.batch_size import micro_batches_per_step
from autotune.knobs.registry import KNOBS, batch_knob, knob
from autotune.options import Objective
from autotune.records import SearchFacts

MOST_CHANGES_FROM_FIXED = 2
"""How many other knobs may be moved so that what the user fixed can run at all."""


MemoryClass = tuple[tuple[str, Value], ...]
"""Knobs with values: configurations that share them share the largest batch that fits."""


class SpaceError(UserError):
    """A preset, a knob's name or a value that cannot be used; the text says which, where, and what is known."""


@dataclass(frozen=True)
class SearchSpace:
    """The points that a search may try, fixed for a study."""

    facts: SearchFacts
    choices: dict[str, tuple[Value, ...]]
    """Every knob, in the order in which knobs are applied; one value where it is fixed or not searched."""
    baseline: TrainingConfig
    """The user's program as it is. Not a point of the space where something else is fixed; measured all the same."""
    start: TrainingConfig
    """The point next to the baseline: the baseline itself unless something is fixed."""

    @property
    def varied(self) -> tuple[str, ...]:
        """Knobs with more than one choice."""
        return tuple(name for name, values in self.choices.items() if len(values) > 1)

    @property
    def size(self) -> int:
        """How many points it has, those in conflict included."""
        return math.prod(len(values) for values in self.choices.values())

    @property
    def batch_name(self) -> str:
        """The knob that holds the micro-batch."""
        return batch_knob().name

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The micro-batches of the space, ascending."""
        return tuple(sorted(int(value) for value in self.choices[self.batch_name]))

    def probe_sizes(self, config: TrainingConfig) -> Sequence[int]:
        """The micro-batches, ascending, that a memory probe may run beside these values: on no grid, since the ceiling
        lies on none."""
        return range(1, self.facts.largest_batch_size + 1)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the knobs, their choices and the baseline."""
        parts = [[name, list(values), self.baseline[name]] for name, values in self.choices.items()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    def conflict(self, config: TrainingConfig) -> str | None:
        """Why a configuration cannot be used, `knob: reason`; None where it can."""
        return _conflict(config, self.facts)

    def beside_own(self, config: TrainingConfig) -> dict[str, Value]:
        """The values that differ from the user's program, but for the micro-batch."""
        changes = config.changes_from(self.baseline)
        return {name: value for name, value in changes.items() if name != self.batch_name}

    def memory_class(self, config: TrainingConfig) -> MemoryClass:
        """The values that need a ceiling of their own: configurations that share them share the ceiling."""
        return tuple((one.name, config[one.name]) for one in KNOBS if one.memory == "class")

    def numerics_key(self, config: TrainingConfig) -> str:
        """Equal for configurations that compute the same: they differ in how batches are loaded alone."""
        return TrainingConfig({one.name: config[one.name] for one in KNOBS if one.stage != "loader"}).key

    def gradient_key(self, config: TrainingConfig) -> tuple[object, ...]:
        """Equal for configurations whose gradients come about in the same way: precision, recomputation, compilation,
        and as many micro-batches a step."""
        return (*self.memory_class(config), self.micro_batches(config))

    def credit(self, config: TrainingConfig) -> float:
        """What a rate of this configuration counts for beside others, at most 1."""
        return math.prod(one.credit(config[one.name], self.facts) for one in KNOBS)

    def rank(self, config: TrainingConfig) -> float:
        """How far from simple a configuration is; the baseline is 0."""
        return sum(one.rank(config[one.name], self.facts) for one in KNOBS)

    def micro_batch(self, config: TrainingConfig) -> int:
        """Samples of one forward and backward."""
        return int(config[self.batch_name])

    def micro_batches(self, config: TrainingConfig) -> int:
        """Micro-batches of one optimizer step. Raises ValueError where they do not add up to the global batch."""
        return micro_batches_per_step(self.micro_batch(config), self.facts.global_batch_size)

    def effective_batch(self, config: TrainingConfig) -> int:
        """Samples of one optimizer step. Raises as `micro_batches` does."""
        return self.micro_batch(config) * self.micro_batches(config)

    def holds(self, config: TrainingConfig, batch_size: int | None) -> bool:
        """Whether an optimizer step takes as many samples as are held; any number will do where none is."""
        return batch_size is None or self.effective_batch(config) == batch_size


def build_space(
    facts: SearchFacts, *, preset: str, only: Sequence[str] = (), fixed: Mapping[str, Value] | None = None
) -> SearchSpace:
    """The space that a preset leaves of what the knobs offer here.

    `preset` is a name from `preset_names()` or a path that ends in .toml. `only` names the knobs to search, those that
    the preset leaves out too; all others stay at the baseline. `fixed` sets knobs to one value, which need not be among
    their choices; texts as from a command line are parsed.

    Raises `SpaceError` for unknown names and values, and for fixed values that nothing in the space makes usable.
    """
    baseline = TrainingConfig({one.name: one.baseline(facts) for one in KNOBS})
    table = _read_preset(preset).knobs
    fixed_values = {name: _parse(_known(name), value) for name, value in (fixed or {}).items()}
    searched = [_known(name).name for name in only] or list(table)
    choices: dict[str, tuple[Value, ...]] = {}
    for one in KNOBS:
        if one.name in fixed_values:
            choices[one.name] = (fixed_values[one.name],)
        elif one.name in searched:
            choices[one.name] = _narrow(one, table.get(one.name, "all"), baseline, facts)
        else:
            choices[one.name] = (baseline[one.name],)
    start = _usable_start(baseline.replace(fixed_values), choices, facts) if fixed_values else baseline
    _refuse_unheld(fixed_values, facts)
    return SearchSpace(facts=facts, choices=choices, baseline=baseline, start=start)


def _refuse_unheld(fixed: Mapping[str, Value], facts: SearchFacts) -> None:
    """A micro-batch that the held batch is no multiple of: every point would train otherwise than the user does."""
    name, held = batch_knob().name, facts.global_batch_size
    if held is not None and name in fixed and held % int(fixed[name]):
        raise SpaceError(
            f"{name}={fixed[name]} does not make up the {held} samples of an optimizer step, which are kept: fix a divisor "
            f"of {held}, free the batch (--free-batch, free_batch=True), or name another one (--global-batch-size "
            f"{fixed[name]})"
        )


def refuse_unknown(*, preset: str, only: Sequence[str], fixed: Mapping[str, Value]) -> None:
    """Raises `SpaceError` for what `build_space` would refuse on any machine: unknown names and values."""
    _read_preset(preset)
    for name in only:
        _known(name)
    for name, value in fixed.items():
        _parse(_known(name), value)


def preset_objective(preset: str) -> Objective:
    """What a search of this preset makes better unless it is told. Raises `SpaceError` as `build_space` does."""
    return _read_preset(preset).objective


def preset_names() -> dict[str, str]:
    """The presets that come with autotune: name to summary, smallest first."""
    summaries = {name: str(_load(file)["summary"]) for name, file in _preset_files().items()}
    return {name: summaries[name] for name in sorted(summaries, key=_search_order)}


def _search_order(name: str) -> tuple[int, str]:
    """The number of values and knobs that a preset asks for, with `all` counted high; then its name."""
    knobs = _load(_preset_files()[name])["knobs"]
    return sum(100 if wanted == "all" else len(wanted) for wanted in knobs.values()), name


# --- presets ----------------------------------------------------------------------------------------------------------

Wanted = Literal["all"] | tuple[Value, ...]


class _Preset(NamedTuple):
    knobs: dict[str, Wanted]
    objective: Objective


def _preset_files() -> dict[str, Traversable]:
    """The preset files: inside the package where it is installed from a wheel, beside it in a checkout."""
    inside = importlib.resources.files("autotune") / "_search_spaces"
    folder: Traversable = inside if inside.is_dir() else Path(__file__).parent.parent / "search_spaces"
    return {
        file.name.removesuffix(".toml"): file
        for file in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if file.name.endswith(".toml")
    }


def _read_preset(preset: str) -> _Preset:
    """What a preset file says. Raises `SpaceError`."""
    if preset.endswith(".toml"):
        return _checked(Path(preset), preset)
    files = _preset_files()
    if preset not in files:
        raise SpaceError(
            f"there is no search space {preset!r}; known are {', '.join(files)}, or give a path that ends in .toml"
        )
    return _checked(files[preset], files[preset].name)


def _load(file: Traversable) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _checked(file: Traversable, shown: str) -> _Preset:
    try:
        content = _load(file)
    except OSError as error:
        raise SpaceError(f"cannot read the search space {shown}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpaceError(f"{shown} is not valid TOML: {error}") from None
    unknown = sorted(set(content) - {"summary", "objective", "knobs"})
    if unknown:
        raise SpaceError(
            f"{shown} has an unknown entry {unknown[0]!r}; known are summary, objective and the table [knobs]"
        )
    objective = content.get("objective", "throughput")
    if objective not in get_args(Objective):
        raise SpaceError(f"{shown}: objective must be {' or '.join(get_args(Objective))}, not {objective!r}")
    knobs = content.get("knobs")
    if not isinstance(knobs, dict) or not knobs:
        raise SpaceError(f'{shown} needs a table [knobs] with lines such as precision = "all"')
    return _Preset({name: _checked_wanted(name, wanted, shown) for name, wanted in knobs.items()}, objective)


def _checked_wanted(name: str, wanted: object, shown: str) -> Wanted:
    if wanted == "all":
        _known(name, shown)
        return "all"
    if not isinstance(wanted, list) or not wanted:
        raise SpaceError(f'{shown}: {name} must be "all" or a list of values, not {reprlib.repr(wanted)}')
    return tuple(_parse(_known(name, shown), value, shown) for value in wanted)


# --- knobs and values -------------------------------------------------------------------------------------------------


def _known(name: str, shown: str = "") -> Knob:
    try:
        return knob(name)
    except ValueError as error:
        raise SpaceError(f"{shown}: {error}" if shown else str(error)) from None


def _parse(one: Knob, value: Value, shown: str = "") -> Value:
    """A value of the knob, from itself or from its text."""
    try:
        return one.parse(value_text(value))
    except ValueError as error:
        raise SpaceError(f"{shown}: {error}" if shown else str(error)) from None


def _narrow(one: Knob, wanted: Wanted, baseline: TrainingConfig, facts: SearchFacts) -> tuple[Value, ...]:
    """What the knob offers here, as far as it is wanted, and always its baseline.

    A knob offers numbers on a grid, and others are as good: a wanted number off the grid is added where nothing speaks
    against it.
    """
    offered = one.choices(facts)
    if wanted == "all":
        return offered
    own = baseline[one.name]
    kept = [value for value in offered if value in wanted or value == own]
    added = [
        value
        for value in wanted
        if _is_count(value) and value not in offered and one.conflict(value, baseline, facts) is None
    ]
    if not added:
        return tuple(kept)
    return tuple(sorted({*kept, *added}, key=int))


def _is_count(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _conflict(config: TrainingConfig, facts: SearchFacts) -> str | None:
    for one in KNOBS:
        reason = one.conflict(config[one.name], config, facts)
        if reason is not None:
            return f"{one.name}: {reason}"
    return None


def _usable_start(wished: TrainingConfig, choices: dict[str, tuple[Value, ...]], facts: SearchFacts) -> TrainingConfig:
    """The simplest configuration without conflict that differs from the wished one in the fewest knobs.

    Fixing a value can ask for another one: a part of the step to compile needs something that compiles. Raises
    `SpaceError` with the wished configuration's conflict where moving a few knobs does not help.
    """
    for changes in range(MOST_CHANGES_FROM_FIXED + 1):
        usable = [config for config in _neighbours(wished, choices, changes) if _conflict(config, facts) is None]
        if usable:
            return min(usable, key=lambda config: sum(one.rank(config[one.name], facts) for one in KNOBS))
    raise SpaceError(f"what is fixed cannot be used: {_conflict(wished, facts)}")


def _neighbours(
    config: TrainingConfig, choices: dict[str, tuple[Value, ...]], changes: int
) -> Iterable[TrainingConfig]:
    """Every configuration that differs in exactly so many knobs."""
    for names in itertools.combinations([name for name, values in choices.items() if len(values) > 1], changes):
        other_values = [[value for value in choices[name] if value != config[name]] for name in names]
        for values in itertools.product(*other_values):
            yield config.replace(dict(zip(names, values, strict=True)))

"""The whole search, stage after stage."""

from __future__ import annotations

from autotune.config import TrainingConfig
from autotune.knobs.registry import KNOBS, batch_knob
from autotune.records import OUT_OF_MEMORY, Ceiling, Trial
from autotune.search.answers import WORTHWHILE_GAIN
from autotune.search.baseline import run_baseline
from autotune.search.compute import (
    bottleneck_of,
    loader_comes_first,
    search_batch,
    search_compute,
    seconds_of_the_cure,
    step_bottleneck_of,
)
from autotune.search.confirm import confirm, reserve
from autotune.search.exhaust import exhaust
from autotune.search.explore import explore, sample
from autotune.search.loader import search_loader
from autotune.search.memory import find_ceiling
from autotune.search.rescue import saving
from autotune.search.session import Session

OWN_CEILING_SHARE = 0.1
SAVER_CEILING_SHARE = 0.03
"""Of the budget, for the ceiling of the user's own program and for that of each way to save memory."""
STEPS_PER_PROBE = 4
QUICK_GAIN = 1.1
"""Before anything is compiled, a batch is doubled again only after a doubling that gained so much."""
MOST_CYCLES = 3
"""A larger batch makes other values of the step's knobs pay, and those a larger batch: so often at most."""


class Search:
    """One search over a session. After `go_on`, or after a Ctrl-C in it, `ceilings` and the session hold the evidence."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ceilings: dict[tuple[tuple[str, object], ...], Ceiling] = {}

    def begin(self) -> None:
        """Measures the baseline. Raises `UserError` where it does not run."""
        run_baseline(self.session)

    def go_on(self) -> None:
        """What the strategy measures, then confirm; `begin` came before."""
        session = self.session
        reserve(session)
        strategy = session.settings.strategy
        if strategy == "exhaustive":
            exhaust(session)
        elif strategy != "staged":
            sample(session)
        else:
            self._stages()
        confirm(session)

    def _stages(self) -> None:
        """Memory, compute, loader, explore."""
        start = self._start()
        if start is not None:
            self._first_ceilings(start)
            self._descend(self._roomier(start))
        reserve(self.session)
        explore(self.session)

    def _descend(self, start: Trial) -> None:
        """One kind of knob after the other, each from what led before."""
        session = self.session
        # A loader that holds the step back is cured first: it is cheap, and what follows is measured with it.
        # Where it does not, the step is moved first: until it is faster, no number of workers shows a gain.
        leader = search_loader(session, start) if loader_comes_first(session, start) else start
        freer = None
        if self._may_free_the_batch() and step_bottleneck_of(session, leader) in batch_knob().cures:
            leader = search_compute(session, leader, quick_only=True)
            freer = self._quickly_freed(leader)
        for cycle in range(MOST_CYCLES):
            size = session.space.micro_batch(leader.config)
            if self._batch_comes_first(leader):
                leader = self._batch(leader)
            elif not cycle and freer is None and self._batch_may_grow(leader):
                # Each size is compiled anew, so that growing what is not compiled yet is cheap; but where that gains little,
                # the next thing to try is a compilation.
                leader = self._batch(search_compute(session, leader, quick_only=True), go_on_gain=QUICK_GAIN)
                reserve(session)
            leader = search_compute(session, leader)
            reserve(session)
            leader = self._batch(leader)
            reserve(session)
            if session.space.micro_batch(leader.config) == size:
                break
        self._free_batch(search_loader(session, leader), freer)

    def _batch_comes_first(self, leader: Trial) -> bool:
        """Where the batch itself cures what holds the step back, or memory is the aim, it is cheaper to move before
        anything is compiled."""
        memory_is_the_aim = self.session.settings.objective == "memory"
        return memory_is_the_aim or bottleneck_of(self.session, leader) in batch_knob().cures

    def _first_ceilings(self, start: Trial) -> None:
        """How far the user's program goes, and what saving memory would bring, where that is cheap beside the budget.

        Where that is dear, the sizes that trials ran are what is told; `autotune memory` finds the ends.
        """
        session = self.session
        seconds = self._ceiling_seconds(start)
        session.watcher.stage("memory", "how far the batch goes")
        own, *savers = self.memory_candidates(start.config)
        if seconds < OWN_CEILING_SHARE * session.budget.seconds and session.budget.allows(seconds):
            self.ceiling(own)
        for config in savers:
            if seconds < SAVER_CEILING_SHARE * session.budget.seconds and session.budget.allows(seconds):
                self.ceiling(config)

    def _roomier(self, start: Trial) -> Trial:
        """Where the program fits at no batch as it is, the same with what saves most memory at a larger batch, up to the
        user's, if that is faster: a tiny batch may cost more than recomputation."""
        session, space = self.session, self.session.space
        if not session.results().reference_settings:
            return start
        savers = [knob.name for knob in KNOBS if knob.only_saves_memory and knob.name in space.varied]
        lean = start.config.replace({name: values[-1] for name, values in saving(space).items() if name in savers})
        for _ in range(2):
            known = self.ceilings.get(space.memory_class(lean))
            largest = space.micro_batch(space.baseline)
            if known is not None:
                largest = min(largest, known.largest_batch_size or 1)
            sizes = [s for s in space.batch_sizes if space.micro_batch(start.config) < s <= largest]
            if not sizes:
                break
            candidate = lean.replace({space.batch_name: sizes[-1]})
            if session.obstacle(candidate) is None and session.affords(candidate):
                session.watcher.stage("compute", "what saves most memory, at a larger batch")
                trial = session.measure(candidate, "compute", incumbent=start)
                if trial.failure is None and session.compute_score(trial) > session.compute_score(start):
                    return trial
                if trial.failure is None or trial.failure.kind not in OUT_OF_MEMORY:
                    break
            self.ceiling(lean)
        return start

    def _ceiling_seconds(self, start: Trial) -> float:
        """What three probes are likely to take: one at this batch, one in the middle, one at the end."""
        session, measurement = self.session, start.measurement
        assert measurement is not None
        size = session.space.micro_batch(start.config)
        times = session.facts.largest_batch_size / size
        limit, reserved = session.memory_limit_bytes(), measurement.memory.reserved_bytes
        if limit is not None and reserved:
            times = min(times, limit / reserved)
        step_seconds = size / measurement.samples_per_second
        return 3 * measurement.process_seconds + STEPS_PER_PROBE * step_seconds * (1 + 1.5 * times)

    def memory_candidates(self, config: TrainingConfig) -> list[TrainingConfig]:
        """The configuration, and the same with each value of the knobs that do nothing but save memory."""
        session = self.session
        savers = [knob for knob in KNOBS if knob.memory == "class" and knob.only_saves_memory]
        others = [
            config.replace({knob.name: value})
            for knob in savers
            for value in session.space.choices[knob.name]
            if value != config[knob.name]
        ]
        return [config, *(other for other in others if session.space.conflict(other) is None)]

    def _start(self) -> Trial | None:
        """Where the descent begins: the baseline, or the baseline with the values that the user fixed.

        Where those do not run, the first way to save memory with which they do; None where nothing was found to run.
        """
        session, space = self.session, self.session.space
        assert session.baseline is not None
        if space.start == space.baseline:
            return session.baseline_trial()
        lean = space.beside_own(session.baseline)
        fixed = space.start.replace({name: value for name, value in lean.items() if name in space.varied})
        if space.batch_name not in session.settings.fixed:
            fixed = fixed.replace({space.batch_name: space.micro_batch(session.baseline)})
        for config in self.memory_candidates(fixed):
            reason = session.obstacle(config)
            if reason is None and (config == fixed or session.affords(config)):
                trial = session.measure(config, "baseline")
                if trial.failure is None:
                    return trial
                reason = trial.failure.message
            if config == fixed:
                session.warnings.append(f"what is fixed does not run beside your other settings: {reason}")
                session.watcher.note(session.warnings[-1])
        return None

    def ceiling(self, config: TrainingConfig) -> Ceiling:
        """The ceiling of the configuration's memory class, found once."""
        memory_class = self.session.space.memory_class(config)
        if memory_class not in self.ceilings:
            self.ceilings[memory_class] = find_ceiling(self.session, config)
        return self.ceilings[memory_class]

    def _batch(self, leader: Trial, *, go_on_gain: float = WORTHWHILE_GAIN) -> Trial:
        """The batch where it may move: freely, or up to the held one; downwards where memory is the aim."""
        session = self.session
        held = session.settings.conditions.global_batch_size
        may_shrink = len(session.space.batch_sizes) > 1 and session.settings.objective == "memory"
        if not (may_shrink or self._batch_may_grow(leader)) or not session.affords(leader.config):
            return leader
        return search_batch(session, leader, "compute", free=held is None, go_on_gain=go_on_gain)

    def _batch_may_grow(self, leader: Trial) -> bool:
        space, held = self.session.space, self.session.settings.conditions.global_batch_size
        return len(space.batch_sizes) > 1 and (held is None or space.micro_batch(leader.config) < held)

    def _may_free_the_batch(self) -> bool:
        """Whether a second answer is asked for, with a batch above the held one."""
        settings = self.session.settings
        held = settings.conditions.global_batch_size
        return held is not None and settings.objective != "memory" and len(self.session.space.batch_sizes) > 1

    def _quickly_freed(self, leader: Trial) -> Trial | None:
        """The batch of the second answer where a larger one cures what holds the step back, found before anything is
        compiled: a trial takes seconds there, and each batch is another compilation. Time is left for the step's own cure,
        and for three more trials such as these: what it takes longer than expected, its check, and the loader."""
        session = self.session
        session.budget.reserved_seconds += seconds_of_the_cure(session, leader) + 3 * leader.seconds
        freer = search_batch(session, leader, "explore", free=True, until_it_waits=True)
        reserve(session)
        return None if session.allowed(freer.config) else freer

    def _free_batch(self, leader: Trial, freer: Trial | None) -> None:
        """The second answer: the leader's settings with a batch above the held one; that of `freer`, where it is known,
        which stands where there is no time for both."""
        session, space = self.session, self.session.space
        if not self._may_free_the_batch():
            return
        reserve(session, frees_the_batch=True)
        if freer is not None:
            both = leader.config.replace({space.batch_name: space.micro_batch(freer.config)})
            if session.obstacle(both) is None and session.affords(both):
                trial = session.measure(both, "explore", incumbent=freer)
                better = trial.failure is None and session.compute_score(trial) > session.compute_score(freer)
                freer = trial if better else freer
            leader = search_loader(session, freer)
        if session.affords(leader.config):
            search_batch(session, leader, "explore", free=True)

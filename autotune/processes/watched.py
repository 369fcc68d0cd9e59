"""`WatchedBackend`: trials on a GPU that is watched meanwhile; a rate that heat has spoilt is measured once more."""

from __future__ import annotations

from collections.abc import Callable

from autotune.gpu_watch import GpuWatch
from autotune.processes.pool import TrialPool
from autotune.records import Phase, TrialAnswer, TrialRequest


class WatchedBackend:
    """A `TrialBackend` around a pool. Measurements carry in `gpu_notes` what NVML showed while they were timed."""

    def __init__(self, pool: TrialPool, watch: Callable[[], GpuWatch] = GpuWatch) -> None:
        self._pool = pool
        self._watch = watch

    def run(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None = None) -> TrialAnswer:
        """As the pool does. Where the GPU was slowed down by heat or by the hardware, the trial is run a second time
        and the less disturbed answer counts; its `seconds` are those of both."""
        if request.kind != "measure" or request.conditions.device != "cuda":
            return self._pool.run(request, on_phase)
        answer, slow_share = self._watched(request, on_phase)
        if answer.measurement is None or slow_share == 0.0:
            return answer
        again, slow_share_again = self._watched(request, on_phase)
        seconds = answer.seconds + again.seconds
        better = again if again.measurement is not None and slow_share_again < slow_share else answer
        return better.model_copy(update={"seconds": seconds})

    def close(self) -> None:
        """Ends the pool."""
        self._pool.close()

    def _watched(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None) -> tuple[TrialAnswer, float]:
        """The answer with its notes, and the share of the timed part in which the GPU was slowed down notably."""

        timed = False

        def heard(phase: Phase) -> None:
            nonlocal timed
            if phase == "measure" and not timed:  # it is told again for the steps on resident batches
                timed = True
                watch.restart()
            if on_phase is not None:
                on_phase(phase)

        with self._watch() as watch:
            answer = self._pool.run(request, heard)
        if answer.measurement is None:
            return answer, 0.0
        measurement = answer.measurement.model_copy(update={"gpu_notes": watch.notes()})
        share = watch.slow_share() if watch.slowed_down() else 0.0
        return answer.model_copy(update={"measurement": measurement}), share

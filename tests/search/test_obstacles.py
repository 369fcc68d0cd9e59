"""What fails once is not run again in another dress."""

import pytest

from autotune.config import Value
from autotune.records import Failure, FailureKind, MemoryMarks, MemoryProbe, Phase, Trial, TrialAnswer
from autotune.search.obstacles import Obstacles
from autotune.space import build_space
from tests.knobs.search_facts import cpu_facts

SPACE = build_space(cpu_facts(batch_size=8, num_workers=1), preset="default")
BASE = SPACE.baseline


def after(kind: FailureKind, changes: dict[str, Value], phase: Phase = "measure") -> Obstacles:
    obstacles = Obstacles(SPACE)
    failure = Failure(kind=kind, phase=phase, message="as it went")
    obstacles.learn_trial(
        Trial(
            number=1,
            stage="compute",
            config=BASE.replace(changes),
            failure=failure,
            started_at=0.0,
            seconds=1.0,
            machine_identity="aaaabbbbcccc",
        )
    )
    return obstacles


@pytest.mark.parametrize(
    ("kind", "failed", "same", "other"),
    [
        ("user_error", {"precision": "bf16"}, {"precision": "bf16", "batch_size": 16}, {"batch_size": 16}),
        ("timeout", {"compile_mode": "default"}, {"compile_mode": "default", "num_workers": 2}, {"num_workers": 2}),
        ("crash", {"batch_size": 32}, {"batch_size": 64, "precision": "bf16"}, {"batch_size": 24}),
        ("timeout", {"num_workers": 2}, {"num_workers": 4}, {"num_workers": 0}),
        ("timeout", {"num_workers": 0}, {"num_workers": 0, "precision": "bf16"}, {"num_workers": 2}),
        ("user_error", {"batch_size": 24}, {"batch_size": 24}, {"batch_size": 32}),
        ("numerics", {"precision": "bf16", "num_workers": 2}, {"precision": "bf16"}, {"num_workers": 2}),
        ("device_oom", {"batch_size": 32}, {"batch_size": 48, "num_workers": 2}, {"batch_size": 24}),
    ],
)
def test_a_failure_blames_what_was_changed(
    kind: FailureKind, failed: dict[str, Value], same: dict[str, Value], other: dict[str, Value]
) -> None:
    obstacles = after(kind, failed)
    assert obstacles.reason(BASE.replace(same), BASE) is not None
    assert obstacles.reason(BASE.replace(other), BASE) is None


def test_the_baseline_is_never_blamed() -> None:
    assert after("timeout", {}).reason(BASE.replace({"batch_size": 16}), BASE) is None


def test_a_check_that_could_not_be_made_blames_nothing() -> None:
    changes: dict[str, Value] = {"precision": "bf16"}
    assert after("user_error", changes, phase="parity").reason(BASE.replace(changes), BASE) is None


def test_what_failed_may_turn_out_to_run() -> None:
    obstacles = after("timeout", {"batch_size": 32})
    obstacles.learn_trial(
        Trial(number=1, stage="compute", config=BASE, started_at=0.0, seconds=1.0, machine_identity="aaaabbbbcccc")
    )
    assert obstacles.reason(BASE.replace({"batch_size": 32}), BASE) is None


def test_a_loader_that_hangs_alone_is_not_tried_with_the_step() -> None:
    obstacles = Obstacles(SPACE)
    hung = TrialAnswer(failure=Failure(kind="timeout", phase="loader", message="it hung"))
    obstacles.learn_probe("loader", BASE.replace({"num_workers": 2}), hung)
    reason = obstacles.reason(BASE.replace({"num_workers": 3, "batch_size": 16}), BASE)
    assert reason == "failed alike (timeout): it hung"
    assert obstacles.reason(BASE.replace({"num_workers": 0}), BASE) is None


def test_where_workers_give_other_samples_their_number_does_not_matter() -> None:
    obstacles = after("numerics", {"num_workers": 2}, "loader")
    assert (
        obstacles.reason(BASE.replace({"num_workers": 4, "precision": "bf16"}), BASE)
        == "trains differently: as it went"
    )
    assert obstacles.reason(BASE.replace({"precision": "bf16"}), BASE) is None


def test_what_did_not_fit_says_nothing_of_a_leaner_update_that_ran() -> None:
    obstacles = after("device_oom", {"batch_size": 2})
    fused = BASE.replace({"optimizer_impl": "fused"})
    assert obstacles.reason(fused.replace({"batch_size": 4}), BASE) is not None, "so far nothing says that it would fit"
    ran = TrialAnswer(
        memory=MemoryProbe(
            micro_batch_size=2,
            memory=MemoryMarks(peak_allocated_bytes=1),
            limit_bytes=None,
            fits=True,
            step_seconds=0.1,
        )
    )
    obstacles.learn_probe("memory", fused.replace({"batch_size": 2}), ran)
    assert obstacles.reason(fused.replace({"batch_size": 4}), BASE) is None
    assert obstacles.reason(BASE.replace({"batch_size": 4}), BASE) is not None
    assert obstacles.misfits() == {}, "of the class as a whole"

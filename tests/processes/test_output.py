from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.config import TrainingConfig
from autotune.processes.output import KEPT_BYTES, LARGEST_BYTES, shorten
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, PhaseTimeouts, TrialRequest
from autotune.workload import Workload

PRINTS = """
import os, time, torch

data_fn = lambda: [torch.zeros(1)] * 8


def model_fn():
    for _ in range(18):
        print("x" * 10**6)
    while os.fstat(1).st_size > 16 * 2**20:
        time.sleep(0.01)
    print("what happened in the end")
    raise RuntimeError
"""


def test_what_is_within_bounds_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * LARGEST_BYTES)
    shorten(str(path))
    assert path.stat().st_size == LARGEST_BYTES
    shorten(str(tmp_path / "removed"))


def test_of_what_grows_too_large_the_end_is_kept_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * LARGEST_BYTES + b"end\n")
        shorten(str(path))
        writer.write(b"more\n")
    head, _, kept = path.read_bytes().partition(b"\n")
    assert head == f"[autotune: {LARGEST_BYTES + 4 - KEPT_BYTES:,} bytes of output before this were dropped]".encode()
    assert len(kept) == KEPT_BYTES + 5
    assert kept.endswith(b"xend\nmore\n")


def test_a_trial_that_prints_without_end_fills_no_disk(
    tmp_path: Path, file_workload: Callable[[str], Workload]
) -> None:
    with TrialPool(file_workload(PRINTS), tmp_path) as pool:
        answer = pool.run(
            TrialRequest(
                kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None),
                timeouts=PhaseTimeouts(build_seconds=200, compile_seconds=200, measure_seconds=200),
            )
        )  # fmt: skip
    assert answer.output_path is not None
    printed = Path(answer.output_path).read_bytes()
    assert len(printed) <= LARGEST_BYTES
    assert b"bytes of output before this were dropped" in printed
    assert b"what happened in the end" in printed

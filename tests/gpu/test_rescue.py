"""A program that fits at no batch on a GPU: the settings with which it does are found, and others are held against it."""

from pathlib import Path

import pytest

from autotune.options import SearchOptions
from autotune.search.baseline import run_baseline
from autotune.search.watcher import QuietWatcher
from autotune.sessions import open_session
from autotune.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MODULE = "tests.gpu.programs"
ROOT = str(Path(__file__).parents[2])
LIMIT_BYTES = 5 * 2**28
"""1.25 GiB. Parameters, gradients and the moments of AdamW take 1 GiB; the grouped kernels of its update 0.25 GiB more, and
so do, without recomputation, the activations of one sample beside parameters and moments."""


def test_a_program_of_which_a_pair_of_settings_alone_makes_a_step_fit(tmp_path):
    names = {"model_fn": "wide_model", "data_fn": "wide_data", "loss_fn": "regression_loss"}
    workload = Workload("module", MODULE, {role: f"{MODULE}:{name}" for role, name in names.items()}, None, (ROOT,))
    options = SearchOptions(study=tmp_path / "study", device="cuda", memory_limit_bytes=LIMIT_BYTES)
    with open_session(workload, options, QuietWatcher()) as opened:
        session = opened.session
        assert not session.facts.workload.step_fits
        assert len(session.facts.workload.blocks) == 16
        trial = run_baseline(session)
        assert trial.measurement.memory.reserved_bytes <= 0.95 * LIMIT_BYTES
        assert session.baseline is not None
        assert session.space.beside_own(session.baseline).keys() == {"optimizer_impl", "activation_checkpointing"}
        assert session.space.effective_batch(session.baseline) == 8
        # Not bf16: autocast keeps the weights of all blocks as bf16 too, for which there is no room.
        candidate = session.baseline.replace({"precision": "tf32"})
        assert session.measure(candidate, "compute").failure is None
        checked = session.parity(candidate)
        assert checked.passed, checked
        assert checked.notes[0].startswith("your step was run with ")

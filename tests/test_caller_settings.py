"""What a caller set in torch holds in its trials: read without importing torch, put in force where it differs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autotune.caller_settings import put_in_force, settings_of_this_process
from autotune.config import TrainingConfig
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, TrialRequest
from autotune.workload import workload_from_functions

OTHERS = {
    "torch_threads": 3, "default_dtype": "float64", "float32_matmul_precision": "high", "cudnn_allow_tf32": False,
    "cudnn_benchmark_set": True, "deterministic_algorithms": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    before = settings_of_this_process()
    yield
    put_in_force(before)


@pytest.mark.parametrize("deterministic", [True, "warn_only"])
def test_settings_that_differ_are_put_in_force(deterministic: bool | str) -> None:
    others = {**OTHERS, "deterministic_algorithms": deterministic}
    assert settings_of_this_process().keys() == others.keys()
    put_in_force(others)
    assert settings_of_this_process() == others


def test_who_wants_warnings_of_what_is_not_deterministic_gets_no_errors() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    wanted = settings_of_this_process()
    torch.use_deterministic_algorithms(False)
    put_in_force(wanted)
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))


def test_where_torch_is_not_imported_nothing_was_set() -> None:
    program = "import sys, autotune.caller_settings as it; print(it.settings_of_this_process(), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told == "{} False\n"


@pytest.mark.parametrize("start_method", ["fork", "fresh"])
def test_they_hold_in_the_trials_of_functions_that_were_handed_over(tmp_path: Path, start_method: str) -> None:
    put_in_force({"torch_threads": 3, "default_dtype": "float64", "float32_matmul_precision": "high"})

    def model_fn() -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def data_fn() -> list[torch.Tensor]:
        return list(torch.ones(64, 4))

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen = torch.get_num_threads(), torch.get_float32_matmul_precision(), model.weight.dtype, batch.dtype
        assert seen == (3, "high", torch.float64, torch.float64), seen
        return model(batch).square().mean()

    workload = workload_from_functions({"model_fn": model_fn, "data_fn": data_fn, "loss_fn": loss_fn})
    request = TrialRequest(
        kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None)
    )
    with TrialPool(workload, tmp_path, start_method=start_method) as pool:
        answer = pool.run(request)
    assert answer.failure is None, answer.failure
    assert answer.facts is not None and answer.facts.process_settings["torch_threads"] == 3

"""What only a real GPU shows: memory marks, poisoned contexts, memory that comes back, precision and compile modes."""

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.gpu_watch import GpuWatch, occupied
from autotune.machine import read_machine_facts
from autotune.nvml import gpu_used_bytes
from autotune.records import PhaseTimeouts
from tests.gpu.programs import KEPT_BYTES
from tests.invented_nvml import Nvml

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MIB = 2**20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def network(program):
    return program("classification_loss", "network_model", "network_data", compiles=True)


@pytest.fixture(scope="module")
def perceptron(program):
    return program("regression_loss", compiles=True)


@pytest.fixture(scope="module")
def keeping(program):
    return program("regression_loss", "keeping_model", "keeping_data")


def test_machine_facts_show_the_gpu(network):
    (gpu,) = network.facts.machine.gpus[:1]
    assert gpu.total_bytes > 2**33
    assert gpu.compute_capability is not None
    assert network.facts.machine.driver_version
    with GpuWatch() as watch:
        assert watch.notes() == ()


def test_a_measurement_has_all_marks(network):
    measurement = network.run("measure").measurement
    memory = measurement.memory
    assert 0 < memory.allocated_after_forward_bytes < memory.peak_forward_backward_bytes
    assert 0 < memory.peak_optimizer_step_bytes <= memory.peak_allocated_bytes
    assert memory.peak_allocated_bytes <= memory.reserved_bytes <= memory.driver_used_bytes
    assert memory.allocator_retries == 0
    assert measurement.resident_samples_per_second > 0
    assert 0 <= measurement.device_lag_share <= 1
    assert measurement.start_method == "fork"


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_honest_precision_passes_parity_on_convolutions_with_batch_norm(network, precision):
    result = network.run("parity", {"precision": precision}).parity
    assert result.passed, result.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"compile_mode": "default"},
        {"compile_mode": "default", "compile_scope": "step", "precision": "bf16"},
        {"activation_checkpointing": "all"},
        {"optimizer_impl": "fused", "pin_memory": True, "num_workers": 2},
        {"batch_size": 32},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_knobs_run_and_train_the_same(network, changes):
    measured = network.run("measure", changes)
    assert measured.failure is None
    result = network.run("parity", changes).parity
    assert result.passed, result.reason


def test_cuda_graphs_run_and_train_the_same(perceptron):
    changes = {"compile_mode": "reduce-overhead", "compile_scope": "step"}
    measured = perceptron.run("measure", changes)
    assert measured.failure is None
    assert measured.measurement.compiled_graphs > 0
    assert perceptron.run("parity", changes).parity.passed


@pytest.mark.parametrize("compile_mode", ["default", "reduce-overhead"])
def test_a_compiled_step_runs_on_evaluates_and_loads_what_it_saved(perceptron, compile_mode):
    changes = {"precision": "fp16", "optimizer_impl": "fused", "compile_mode": compile_mode}
    answer = perceptron.run("soak", changes)
    assert answer.failure is None, answer.failure
    assert answer.soak.growth_bytes_per_step == 0.0
    assert not [line for line in answer.soak.findings if "evaluation" in line or "state" in line], answer.soak.findings


@pytest.mark.parametrize(
    ("way", "model_name", "changes"),
    [
        ("compiled", "perceptron_model", {"compile_mode": "reduce-overhead"}),
        ("graphed", "graphed_model", {}),
    ],
    ids=["compiled", "graphed"],
)
def test_cuda_graphs_that_overwrite_accumulated_gradients_are_rejected(program, way, model_name, changes):
    """Forced past the conflict. Whether they do overwrite is found out in plain PyTorch, not taken from the check."""
    script = [sys.executable, "-m", "tests.gpu.graphed_accumulation", way]
    finished = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    error = float(finished.stdout.split()[-1])
    answer = program("regression_loss", model_name, compiles=True).run("parity", {"batch_size": 16, **changes})
    rejected = answer.failure is not None or not answer.parity.passed
    assert rejected == (error > 1e-3), (error, answer)
    if answer.parity is not None:
        assert answer.parity.micro_batches_per_step == 4
        assert answer.parity.relative_error == pytest.approx(error, rel=0.5, abs=1e-3)


def test_allocated_bytes_are_affine_with_the_true_slope(keeping):
    peaks = {
        size: keeping.run("memory", {"batch_size": size}).memory.memory.peak_allocated_bytes for size in (8, 32, 64)
    }
    slope = (peaks[64] - peaks[32]) / 32
    assert slope == pytest.approx(4 * KEPT_BYTES, rel=0.02)
    assert peaks[8] == pytest.approx(peaks[64] - 56 * slope, rel=0.02)


def test_a_memory_limit_makes_the_card_smaller(keeping):
    answer = keeping.run("memory", {"batch_size": 64}, memory_limit_bytes=2 * 2**30)
    assert answer.failure.kind == "device_oom"
    assert keeping.run("memory", {"batch_size": 16}, memory_limit_bytes=2 * 2**30).memory.fits


def test_a_device_assertion_poisons_one_trial_only(program):
    poisoned = program("out_of_range_loss")
    answer = poisoned.run("measure", {"batch_size": 128})
    assert answer.failure.kind == "cuda_error"
    assert poisoned.run("measure").failure is None


def test_memory_is_back_after_a_kill_in_the_middle_of_a_step(program, perceptron):
    before = gpu_used_bytes()
    killed = perceptron.pool  # another program's pool stays open beside it
    assert killed is not None
    with pytest.raises(AssertionError, match="SIGKILL"):
        program("dying_loss")
    assert gpu_used_bytes() <= before + 64 * MIB


def test_memory_is_back_after_a_trial_is_killed_while_the_device_works(program):
    endless = program("endless_loss")
    before = gpu_used_bytes()
    answer = endless.run("measure", {"batch_size": 128}, timeouts=PhaseTimeouts(compile_seconds=5.0))
    assert (answer.failure.kind, answer.failure.phase) == ("timeout", "compile")
    assert "in endless_loss" in answer.failure.detail
    assert gpu_used_bytes() <= before + 64 * MIB
    assert endless.run("measure").failure is None


def test_another_process_on_the_gpu_is_said():
    holding = (
        "import torch, sys; x = torch.ones(3 * 2**28, device='cuda'); print('holds', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "holds\n"
        assert "on GPU 0" in occupied(read_machine_facts().gpus[0])
    finally:
        other.kill()
        other.communicate()


def test_without_nvml_torch_tells_of_the_same_gpu():
    by_nvml, by_torch = read_machine_facts().gpus[0], read_machine_facts(nvml=Nvml(absent=True)).gpus[0]
    assert (by_torch.name, by_torch.compute_capability) == (by_nvml.name, by_nvml.compute_capability)
    assert by_torch.total_bytes == pytest.approx(by_nvml.total_bytes, rel=0.05)


def test_cuda_at_import_means_a_fresh_interpreter_for_each_trial(program):
    early = program("loss_fn", "model_fn", "data_fn", module="tests.gpu.cuda_at_import")
    assert any("CUDA" in note for note in early.pool.notes)
    assert early.run("measure").measurement.start_method == "fresh"

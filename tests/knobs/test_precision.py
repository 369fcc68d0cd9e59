from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autotune.knobs.base import AS_IS, CodeLines
from autotune.knobs.precision import Precision
from autotune.training.training import Training
from tests.knobs.programs import baseline_config, gradients, loss_fn, steps, train
from tests.knobs.search_facts import T4, cpu_facts, cuda_facts

KNOB = Precision()


@pytest.fixture(autouse=True)
def _process_settings_restored() -> Iterator[None]:
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


def test_choices_follow_the_device() -> None:
    assert KNOB.choices(cuda_facts()) == (AS_IS, "tf32", "bf16", "fp16")
    assert KNOB.choices(cuda_facts(gpu=T4)) == (AS_IS, "fp16")
    assert KNOB.choices(cpu_facts()) == (AS_IS, "bf16")


def test_conflicts_say_what_the_device_lacks() -> None:
    assert KNOB.conflict("tf32", {}, cpu_facts()) == "tf32 needs a GPU"
    assert KNOB.conflict("bf16", {}, cuda_facts(gpu=T4)) == (
        "bf16 needs a GPU of compute capability 8.0, and this one has 7.5"
    )
    unknown = T4.model_copy(update={"compute_capability": None})
    assert KNOB.conflict("tf32", {}, cuda_facts(gpu=unknown)) == (
        "tf32 needs a GPU of compute capability 8.0, and this GPU's is not known"
    )


def test_a_model_in_double_is_left_as_it_is() -> None:
    for facts in (cpu_facts(parameters_are_double=True), cuda_facts(gpu=T4, parameters_are_double=True)):
        assert KNOB.choices(facts) == KNOB.prior(facts) == (AS_IS,)
        assert KNOB.saving(facts) == ()
        assert KNOB.refused(facts) == {
            None: "all parameters of the model are float64, which autocast and TF32 leave as it is"
        }
        assert KNOB.conflict("bf16", {}, facts) == KNOB.refused(facts)[None]


def test_autocast_leaves_double_as_it_is() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.Linear(4, 4).double()(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64


def test_the_prior_begins_with_bf16() -> None:
    assert KNOB.prior(cuda_facts()) == ("bf16", "tf32", "fp16", AS_IS)


def test_parse_lists_what_it_knows() -> None:
    with pytest.raises(ValueError, match="precision has no value 'half'; known are as_is, tf32, bf16, fp16"):
        KNOB.parse("half")


def test_exports_autocast_and_scaler() -> None:
    assert KNOB.export("fp16", baseline_config(), cuda_facts()) == CodeLines(
        imports=("import torch",),
        context="torch.autocast(device.type, dtype=torch.float16)",
        scaler="torch.amp.GradScaler(device.type)",
    )
    assert KNOB.export("bf16", baseline_config(), cuda_facts()).scaler is None


def types_in_a_step(training: Training) -> set[torch.dtype]:
    """Output types of the linear layers."""
    seen: set[torch.dtype] = set()
    for module in training.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    steps(training, 1)
    return seen


@pytest.mark.parametrize(
    ("value", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), (AS_IS, torch.float32)]
)
def test_applied_layers_compute_in_the_type_and_weights_stay(value: str, dtype: torch.dtype) -> None:
    training = train(precision=value)
    assert types_in_a_step(training) == {dtype}
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def small_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Small enough that fp16 holds its gradients times the scaler's first scale, 65536."""
    return loss_fn(model, batch) / 1000


def test_applied_fp16_scales_what_is_propagated_and_steps_unscaled() -> None:
    training, plain = train(norm=False, loss=small_loss, precision="fp16"), train(norm=False, loss=small_loss)
    assert plain.scaler is None
    assert training.scaler is not None
    scale = training.scaler.get_scale()
    scaled, expected = gradients(training), gradients(plain)
    assert all(
        float(scaled[name].norm() / expected[name].norm()) == pytest.approx(scale, rel=0.05) for name in expected
    )
    weights = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    training.update()
    # Adam's first step moves every weight by about the learning rate, whatever the gradient's size.
    moved = [float((p.detach() - weights[name]).abs().max()) for name, p in training.model.named_parameters()]
    assert moved == pytest.approx([1e-3] * len(moved), rel=0.1)


def test_applied_bf16_gradients_are_close() -> None:
    rounded, expected = gradients(train(precision="bf16")), gradients(train())
    difference = sum(float((rounded[name] - expected[name]).square().sum()) for name in expected) ** 0.5
    norm = sum(float(gradient.square().sum()) for gradient in expected.values()) ** 0.5
    assert 0 < difference / norm < 0.1


def test_applied_tf32_is_a_setting_of_the_process() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    train(precision="bf16")
    assert torch.get_float32_matmul_precision() == "highest"
    train(precision="tf32")
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32 is True

"""What the gate must let pass although it is not the same to the bit."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune.measurement.facts import read_facts
from autotune.workload import UserFunctions
from tests.measurement.parity_programs import (
    BLOCKS,
    SPLIT,
    Net,
    Residual,
    Sensitive,
    assert_passed,
    assert_rejected,
    in_autocast,
    noise_by_type,
    parity,
)
from tests.measurement.programs import WIDTH, mse, no_phase, program, regression_data, request
from tests.surgery.models import Gpt, ResNet

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "compiled": {"compile_mode": "default", "compile_scope": "step"},
    "recomputed": {"activation_checkpointing": "all"},
    "split": SPLIT,
    "fp16": {"precision": "fp16"},
    "fused": {"optimizer_impl": "fused"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_heavy_dropout_is_no_reason_to_reject(variant: str) -> None:
    result = parity(program(lambda: Net(lambda: Residual(0.6))), blocks=BLOCKS, **VARIANTS[variant])
    assert_passed(result)
    assert result.tolerance < 0.1


class FunctionalDropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.first(x), 0.6, self.training).unsqueeze(0)
        return self.last(F.scaled_dot_product_attention(x, x, x, dropout_p=0.6)[0])


@pytest.mark.parametrize("variant", ["bf16", "compiled", "split"])
def test_functional_dropout_is_no_reason_to_reject(variant: str) -> None:
    def no_attention_over_samples(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.stack([mse_of_one(model, x, y) for x, y in zip(*batch, strict=True)]).mean()

    def mse_of_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x[None])[0].float(), y)

    result = parity(program(FunctionalDropouts, loss_fn=no_attention_over_samples), **VARIANTS[variant])
    assert_passed(result)
    assert result.tolerance < 0.1


class ReadsDropout(nn.Module):
    """Its module for dropout never runs; what it holds is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.6), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).unsqueeze(0)
        return self.last(F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout.p)[0])


def test_dropout_that_is_read_from_a_module_is_no_reason_to_reject() -> None:
    assert_passed(parity(program(ReadsDropout), precision="bf16"))


def images(samples: int = 32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(10, (samples,), generator=generator)), batch_size=8)


def token_data() -> DataLoader[Any]:
    tokens = torch.randint(0, 50, (64, 13), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens), batch_size=8)


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1).float(), batch[0][:, 1:].flatten())


RESNET = program(lambda: ResNet(width=4), images, classify)
GPT = program(lambda: Gpt(depth=2), token_data, next_token)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("functions", [RESNET, GPT], ids=["resnet", "gpt"])
def test_honest_bf16_passes(functions: UserFunctions, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", _shifted(torch.manual_seed, seed))
    assert_passed(parity(functions, precision="bf16"))


def _shifted(seed_with: Callable[[int], Any], by: int) -> Callable[[int], Any]:
    """Other weights: the parity check seeds them by numbers of its own."""
    return lambda seed: seed_with(seed + 1000 * by)


def test_a_resnets_floor_is_measured_and_a_gpt_is_held_to_a_tenth_of_it() -> None:
    resnet, gpt = parity(RESNET, precision="bf16"), parity(GPT, precision="bf16")
    assert resnet.tolerance > 5 * gpt.tolerance
    assert gpt.tolerance < 0.05


def test_a_network_that_rounding_alone_moves_far_is_compared_with_its_norms_evaluated() -> None:
    result = parity(program(Sensitive), precision="bf16")
    assert_passed(result)
    assert re.search("rounding alone moves the gradient by .* with BatchNorm in evaluation", " ".join(result.notes))
    assert result.tolerance < 0.1


def test_everything_at_once_passes_on_a_resnet_and_on_a_gpt() -> None:
    stages = tuple(f"layer{stage}.{index}" for stage in (1, 2, 3) for index in range(3))
    everything: dict[str, Any] = {"precision": "bf16", "activation_checkpointing": "all", "optimizer_impl": "fused"}
    assert_passed(parity(RESNET, blocks=stages, **everything, batch_size=4, global_batch_size=8))
    assert_passed(parity(GPT, blocks=("h.0", "h.1"), **everything, **SPLIT, compile_mode="default"))


class Partly(Net):
    """A frozen layer, a parameter that is never used, and a branch that few batches take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(3))
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 100:
            x = self.rare(x)
        return super().forward(x)


@pytest.mark.parametrize("variant", ["bf16", "recomputed", "split", "fused"])
def test_frozen_unused_and_rarely_used_parameters_pass(variant: str) -> None:
    result = parity(program(Partly), blocks=BLOCKS, **VARIANTS[variant])
    assert_passed(result)
    assert result.missing_gradients == ()


class DropsLayers(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return self.head(x)


class DropsLayersAndSkips(DropsLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if in_autocast():
            x = 0.5 * x
        return super().forward(x)


def test_layers_dropped_at_random_pass_and_are_no_excuse_for_another_network() -> None:
    result = parity(program(DropsLayers), precision="bf16")
    assert_passed(result)
    assert result.tolerance < 0.1
    assert_rejected(parity(program(DropsLayersAndSkips), precision="bf16"), "gradients differ by")


class Noisy(Net):
    """Noise of its own on the input, as in diffusion or a variational autoencoder."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.3 * torch.randn_like(x))


class NoisyAndSkips(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - 0.9 * (y - y.detach()) if in_autocast() else y


def test_noise_drawn_by_the_model_is_drawn_alike_and_held_to_the_same_gate() -> None:
    for changes in (VARIANTS["recomputed"], SPLIT, VARIANTS["bf16"]):
        result = parity(program(Noisy), blocks=BLOCKS, **changes)
        assert_passed(result)
        assert result.tolerance < 0.1
    assert_rejected(parity(program(NoisyAndSkips), precision="bf16"), "gradients differ by 0.9, of ")


class LoudAndNormalised(nn.Module):
    """Noise that is louder than what it is added to, behind a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return self.head(torch.tanh(y + 3 * noise_by_type(y)))


def test_noise_so_loud_that_means_tell_little_is_not_taken_for_rounding() -> None:
    result = parity(program(LoudAndNormalised), precision="bf16")
    assert_passed(result)
    assert result.notes == ("it draws random numbers of its own: means over 8 seeds were compared",)
    assert result.floor > 0.3


def test_a_compiled_model_that_draws_from_the_compilers_generator_is_compared_by_means_over_seeds() -> None:
    result = parity(program(Noisy), compile_mode="default")
    assert_passed(result)
    assert result.notes == ("it draws random numbers of its own: means over 8 seeds were compared",)


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))


def test_a_mask_of_infinities_is_no_difference() -> None:
    result = parity(program(Masked), precision="bf16")
    assert_passed(result)
    assert result.buffer_error == 0.0


def test_the_users_own_compile_is_compared_with_the_eager_step() -> None:
    def compiled() -> nn.Module:
        model = Net()
        model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
        return model

    assert_passed(parity(program(compiled), optimizer_impl="fused"))


class RarelyBranching(Net):
    """A branch that one sample in five windows takes, whose gradient is a small part of the whole or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.taken: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rare = x[:, :1] > RARE
        self.taken.append(int(rare.sum()))
        if rare.any():
            x = torch.where(rare, x + 0.1 * self.rare(x), x)
        return super().forward(x)


RARE = 1.4
"""Of the first three windows only the second holds a sample beyond it."""


@pytest.mark.parametrize("variant", ["bf16", "recomputed", "split", "fused", "compiled"])
def test_a_branch_that_is_rarely_active_passes(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced and differentiated as always; only no machine code is made of it, which takes half a minute for each branch.
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compile_it(function, backend="aot_eager"))
    made: list[RarelyBranching] = []

    def model_fn() -> RarelyBranching:
        made.append(RarelyBranching())
        return made[-1]

    assert_passed(parity(program(model_fn), blocks=BLOCKS, **VARIANTS[variant]))
    reference = made[1].taken[:3]
    assert min(reference) == 0 < max(reference)


@pytest.mark.parametrize("variant", ["bf16", "recomputed", "split", "fp16", "fused"])
def test_tied_weights_pass(variant: str) -> None:
    model = Gpt()
    assert model.lm_head.weight is model.wte.weight
    assert_passed(parity(GPT, blocks=("h.0", "h.1"), **VARIANTS[variant]))


def test_a_model_that_trains_in_evaluation_mode_is_compared_in_it() -> None:
    """As the user's own loop would train it: nobody calls `train()` for them."""
    made: list[nn.Module] = []

    def evaluated() -> nn.Module:
        made.append(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
        made[-1][2].eval()
        made[-1][0].eval()
        return made[-1]

    for changes in ({"precision": "bf16"}, SPLIT):
        assert_passed(parity(program(evaluated), **changes))
    for model in made:
        assert [module.training for module in model] == [False, True, False, True]
        assert int(model[0].num_batches_tracked) == 0


def small_program(seed: int) -> UserFunctions:
    """A random small model of one of five kinds, with a loss, an optimizer and a schedule of its own."""
    chance = random.Random(seed)
    width, depth = chance.choice([4, 8, 32]), chance.choice([1, 2, 3])
    activation = chance.choice([nn.ReLU, nn.Tanh, nn.GELU])
    norm = chance.choice([nn.Identity, nn.LayerNorm, nn.BatchNorm1d])
    optimizer_fn = chance.choice(
        [
            None,
            lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4),
            lambda model: torch.optim.Adagrad(model.parameters(), 1e-2),
            lambda model: torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.1),
        ]
    )
    scheduler_fn = chance.choice([None, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)])

    def perceptron() -> nn.Module:
        layers = [(nn.Linear(width, width), norm(width), activation()) for _ in range(depth)]
        return nn.Sequential(*itertools.chain(*layers), nn.Linear(width, 1))

    def convolutions() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 3), activation(), nn.Conv2d(width, width, 3, 2), nn.Flatten(), nn.Linear(4 * width, 10)
        )

    def critic(model: nn.Module, batch: Any) -> torch.Tensor:
        """A difference of means: the loss itself is next to nothing."""
        return (model(batch[0]).float() * torch.sign(batch[1])).mean()

    kinds: list[tuple[Any, Any, Any]] = [
        (perceptron, lambda: regression_data(width=width), mse),
        (perceptron, lambda: regression_data(width=width), critic),
        (convolutions, images, classify),
        (lambda: Gpt(width=max(8, width), depth=depth), token_data, next_token),
        (lambda: Recurrent(width), lambda: regression_data(width=12), mse),
    ]
    return program(*kinds[seed % len(kinds)], optimizer_fn, scheduler_fn)


class Recurrent(nn.Module):
    """Reads a row of twelve numbers as a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x[:, :, None])[0][:, -1])


@pytest.mark.parametrize("seed", range(10))
def test_small_models_of_all_kinds_pass(seed: int) -> None:
    """None of them is refused by a hair."""
    for changes in ({"precision": "bf16"}, {"optimizer_impl": "foreach"}, {"precision": "bf16", **SPLIT}):
        result = parity(small_program(seed), **changes)
        assert_passed(result)
        assert result.update_error < 1e-5


class Complex(nn.Module):
    """A complex layer, and a complex buffer that follows what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4, dtype=torch.complex64))
        self.head = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = x.float().to(torch.complex64) @ self.weight
        with torch.no_grad():
            self.mean.mul_(0.9).add_(spectrum.mean(0))
        return self.head(spectrum.abs())


def test_complex_numbers_are_compared_whole() -> None:
    result = parity(program(Complex), optimizer_impl="foreach")
    assert_passed(result)
    assert result.relative_error < 1e-6
    assert_passed(parity(program(Complex), precision="bf16"))


class Grows(nn.Module):
    """A queue of what it saw, and a cache that is made in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)
        self.register_buffer("queue", torch.zeros(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.queue, x.detach().float()])[-20:]
        self.register_buffer("cache", x.detach().float().mean(0))
        return self.inner(x)


class Holds(Net):
    """Holds something of a rare kind under a name, and does something with it at each call."""

    def __init__(self, name: str, value: Any, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.use(self, x))


def unused(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x


def late(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "late"):
        model.late = nn.Parameter(torch.ones(1))
    return x * model.late


def of_the_conjugate(model: Any, x: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = torch.view_as_real(model.held.conj().resolve_conj()).sum()
    return x * (1 + scale)


@pytest.mark.parametrize(
    ("value", "use"),
    [
        (torch.eye(4).to_sparse(), unused),
        (torch.eye(4).to_sparse_csr(), unused),
        (torch.eye(4, dtype=torch.complex64).conj(), unused),
        (torch.ones(4).to(torch.float8_e4m3fn), unused),
        (torch.ones(1).expand(4), unused),
        (nn.Parameter(torch.eye(4).to_sparse_csr(), requires_grad=False), unused),
        (nn.Parameter(torch.ones(1).expand(4), requires_grad=False), unused),
        (nn.Parameter(torch.full((4, 4), -torch.inf).triu(1), requires_grad=False), unused),
        (nn.Parameter(torch.ones(2, dtype=torch.complex64)), of_the_conjugate),
        (torch.ones(1), late),
    ],
    ids=[
        "sparse",
        "csr",
        "conjugated",
        "float8",
        "expanded",
        "frozen csr",
        "frozen expanded",
        "frozen mask",
        "gradient of a conjugate",
        "late",
    ],
)
def test_tensors_of_rare_kinds_pass(value: Any, use: Any) -> None:
    functions = program(lambda: Holds("held", value, use), optimizer_fn=lambda m: torch.optim.SGD(m.parameters(), 0.01))
    assert_passed(parity(functions, precision="bf16"))


def test_buffers_may_come_and_grow() -> None:
    assert_passed(parity(program(Grows), precision="bf16"))


# --- programs that are not the same at every call ---


def normalising_in_place(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    x.sub_(1.0).div_(10.0)
    return F.mse_loss(model(x).float(), y)


@pytest.mark.parametrize("variant", [{}, {"precision": "bf16"}, SPLIT])
def test_a_loss_that_changes_its_batch_in_place_is_given_it_as_it_was(variant: dict[str, Any]) -> None:
    assert_passed(parity(program(loss_fn=normalising_in_place), **variant))


def unseeded_data() -> DataLoader[Any]:
    x = torch.from_numpy(np.random.default_rng().normal(size=(64, WIDTH))).float()
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=8, shuffle=True)


def test_data_that_are_others_at_every_call_of_data_fn_can_be_split() -> None:
    result = parity(program(data_fn=unseeded_data), **SPLIT)
    assert_passed(result)
    assert result.relative_error < 1e-5


def annealed() -> Callable[[Any, Any], torch.Tensor]:
    """A term of the loss that grows with the number of calls, which is counted outside the model."""
    calls = itertools.count()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch) * (1 + next(calls) / 2000)

    return loss_fn


def test_a_loss_that_counts_its_calls_is_allowed_what_the_count_changes() -> None:
    result = parity(program(loss_fn=annealed()))
    assert_passed(result)
    assert "differs from itself" in result.notes[0]


def test_a_loss_with_parameters_of_its_own_is_run_from_the_same_ones() -> None:
    centre = nn.Parameter(torch.ones(1))

    def to_the_centre(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() - batch[1] - centre).square().mean()

    def with_the_centre(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), centre], lr=0.2)

    for changes in (SPLIT, VARIANTS["bf16"], VARIANTS["fused"]):
        result = parity(program(loss_fn=to_the_centre, optimizer_fn=with_the_centre), **changes)
        assert_passed(result)
        assert result.notes == ()


def with_chance_alone(model: nn.Module, batch: Any) -> torch.Tensor:
    chosen = torch.distributions.Categorical(logits=model(batch[0]))
    actions = chosen.sample()
    return -(chosen.log_prob(actions) * torch.randn(len(actions))).mean()


def test_a_gradient_that_is_all_noise_may_be_split() -> None:
    assert_passed(parity(program(lambda: nn.Linear(WIDTH, 8), loss_fn=with_chance_alone), **SPLIT))


class KeepsItsNoise(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.net, self.size = nn.Linear(WIDTH, 1), size
        self.register_buffer("noise", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise.copy_(torch.randn(WIDTH))
        return self.net(x + self.size * self.noise)


@pytest.mark.parametrize("size", [1e-5, 0.3], ids=["little", "much"])
def test_a_buffer_that_holds_what_was_drawn_may_be_another_where_a_step_is_split(size: float) -> None:
    assert_passed(parity(program(lambda: KeepsItsNoise(size)), **SPLIT))


class DrawsFromTheSystem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * random.SystemRandom().uniform(0.1, 2.0))


def test_what_differs_from_itself_by_much_is_not_excused_and_says_so() -> None:
    result = parity(program(DrawsFromTheSystem))
    assert_rejected(result, "nothing can be told: the user's own program, run twice from the same weights")
    assert "differs from itself" in result.notes[0]


# --- programs that compute in less than fp32 by themselves ---


class OwnAutocast(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def in_bf16() -> nn.Module:
    return Net().to(torch.bfloat16)


def mse_in_bf16(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0].to(torch.bfloat16)).float(), batch[1])


def coupled(model: nn.Module, batch: Any) -> torch.Tensor:
    y = model(batch[0])[:, 0]
    return (y[:, None] - y[None]).square().mean()


@pytest.mark.parametrize(("model_fn", "loss_fn"), [(OwnAutocast, mse), (in_bf16, mse_in_bf16)])
@pytest.mark.parametrize("variant", ["split", "fused"])
def test_the_programs_own_rounding_is_allowed(model_fn: Any, loss_fn: Any, variant: str) -> None:
    result = parity(program(model_fn, loss_fn=loss_fn), **VARIANTS[variant])
    assert_passed(result)
    assert 4 * 2.0**-8 <= result.tolerance < 0.1


@pytest.mark.parametrize(("model_fn", "loss_fn"), [(OwnAutocast, mse), (in_bf16, mse_in_bf16)])
def test_the_programs_own_rounding_is_not_told_as_what_a_larger_batch_changes(model_fn: Any, loss_fn: Any) -> None:
    result = parity(program(model_fn, loss_fn=loss_fn), batch_size=32, global_batch_size=None)
    assert_passed(result)
    assert not result.notes


def summed(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1], reduction="sum")


@pytest.mark.parametrize(("model_fn", "precision"), [(OwnAutocast, "as_is"), (Net, "bf16")])
@pytest.mark.parametrize(("loss_fn", "text"), [(coupled, "couples the samples"), (summed, "the loss is a sum")])
def test_no_rounding_excuses_a_step_that_is_split_wrong(model_fn: Any, precision: str, loss_fn: Any, text: str) -> None:
    result = parity(program(model_fn, loss_fn=loss_fn), precision=precision, **SPLIT)
    assert_rejected(result, text)
    assert result.tolerance < 0.3


class Recording(Net):
    """Its buffer grows with each forward; in fp16 its first steps overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.seen = torch.cat([self.seen, y.detach().float().flatten()])
        return y * 8


def test_a_buffer_that_grows_is_as_it_was_before_a_step_that_is_skipped() -> None:
    result = parity(program(Recording), precision="fp16")
    assert_passed(result)
    assert result.skipped_steps > 0


class Table(Dataset[Any]):
    """Gives many rows at once, as one tensor."""

    def __len__(self) -> int:
        return 64

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))[indices]


def table() -> DataLoader[Any]:
    return DataLoader(Table(), batch_size=8, shuffle=True, collate_fn=lambda rows: (rows, rows[:, :1]))


class Columns(Table):
    def __getitems__(self, indices: list[int]) -> Any:
        rows = super().__getitems__(indices)
        return [rows, rows[:, :1], rows[:, 0].tolist()]


def columns() -> DataLoader[Any]:
    return DataLoader(Columns(), batch_size=8, shuffle=True, collate_fn=lambda parts: parts)


@pytest.mark.parametrize("data_fn", [table, columns])
def test_whole_batches_of_a_data_set_are_compared_with_their_parts(data_fn: Callable[[], Any]) -> None:
    assert_passed(parity(program(data_fn=data_fn), **SPLIT))
    assert_rejected(parity(program(data_fn=data_fn, loss_fn=summed), **SPLIT), "the loss is a sum")


# --- collate functions ---


class MixUp:
    """Mixes each sample with another of its batch, by a share that is the batch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __call__(self, samples: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        share, order = self.draw(), torch.randperm(len(x))
        return {
            "x": share * x + (1 - share) * x[order],
            "targets": [y, y[order]],
            "share": share,
            "names": ["a"] * len(x),
        }

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        losses = [F.mse_loss(model(batch["x"]).float(), target) for target in batch["targets"]]
        return batch["share"] * losses[0] + (1 - batch["share"]) * losses[1]


def mixing(draw: Callable[[], float], factor: Callable[[Any], float] = lambda batch: 1.0) -> UserFunctions:
    mix = MixUp(draw)
    data = regression_data().dataset
    return program(
        data_fn=lambda: DataLoader(data, batch_size=8, collate_fn=mix),
        loss_fn=lambda model, batch: mix.loss(model, batch) * factor(batch),
    )


@pytest.mark.parametrize("variant", [SPLIT, {"batch_size": 24}], ids=["split", "larger"])
def test_what_a_collate_function_draws_is_the_same_on_both_sides(variant: dict[str, Any]) -> None:
    result = parity(mixing(random.random), **variant)
    assert_passed(result)
    assert result.notes == ()


def test_a_sum_shows_beside_what_a_collate_function_draws() -> None:
    assert_rejected(parity(mixing(random.random, lambda batch: len(batch["x"])), **SPLIT), "the loss is a sum")


def test_a_collate_function_that_keeps_count_is_named() -> None:
    generator = random.Random(0)
    assert_rejected(parity(mixing(generator.random), **SPLIT), r"^the collate function gives .* \(gradients differ")
    assert parity(mixing(generator.random), batch_size=16).notes == ()


def test_what_a_count_gives_both_sides_alike_is_not_named() -> None:
    """Where a collate function draws from torch too, the larger batch is put together of the smaller ones."""
    generator, own = torch.Generator().manual_seed(0), regression_data().dataset

    def noisy(samples: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return x + torch.rand(len(x), 1, generator=generator) + 0.1 * torch.rand_like(x), y

    functions = program(data_fn=lambda: DataLoader(own, batch_size=8, collate_fn=noisy))
    assert_passed(parity(functions, **SPLIT))
    assert_rejected(parity(replace(functions, loss_fn=summed), **SPLIT), "^(?!the collate).*the loss is a sum")


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_ragged_batches_that_a_collate_function_draws_are_no_failure(layout: torch.layout) -> None:
    def ragged(samples: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        torch.rand(1)
        rows = torch.nested.nested_tensor(list(x.unsqueeze(1).unbind()), layout=layout)
        return {"rows": rows, "x": x, "y": y}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]).float(), batch["y"])

    own = regression_data().dataset
    assert_passed(parity(program(data_fn=lambda: DataLoader(own, 8, collate_fn=ragged), loss_fn=loss), **SPLIT))


class Parts(Dataset[Any]):
    """Its samples can be read once."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return index, (torch.randn(WIDTH // 4, generator=generator) for _ in itertools.count())


def put_together(samples: list[Any]) -> Any:
    """In place, so that what is collated a second time must be another copy."""
    x = torch.stack([torch.cat([part.mul_(2.0) for part in itertools.islice(parts, 4)]) for _, parts in samples])
    return x, x[:, :1]


@pytest.mark.parametrize("variant", [SPLIT, {"batch_size": 24}], ids=["split", "larger"])
def test_samples_that_can_be_read_once_are_collated_for_both_sides(variant: dict[str, Any]) -> None:
    assert_passed(parity(program(data_fn=lambda: DataLoader(Parts(), 8, collate_fn=put_together)), **variant))


# --- programs that cannot be watched ---


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)))


def with_jacobian(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse(model, batch) + 0.01 * torch.func.vmap(torch.func.jacrev(model))(batch[0]).square().mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "functions", [program(scripted), program(loss_fn=with_jacobian)], ids=["scripted", "function transforms"]
)
def test_what_cannot_be_watched_is_compared_all_the_same(functions: UserFunctions) -> None:
    assert read_facts(functions, request("facts"), no_phase).blocks == ()
    assert_passed(parity(functions, precision="bf16"))

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autotune.measurement.determinism import (
    HIGHEST,
    DropoutSeen,
    Precision,
    dropout_off,
    eager,
    outputs_rounded,
    round_to,
)
from autotune.surgery.generators import random_state

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Functional(nn.Module):
    """A model of nothing but one call of torch.nn.functional."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.5),
    "Dropout in place": lambda: nn.Dropout(0.5, inplace=True),
    "Dropout1d": lambda: nn.Dropout1d(0.5),
    "AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.5),
    "MultiheadAttention": Attention,
    "RNN": Recurrent,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True),
    "F.dropout": lambda: Functional(lambda x: F.dropout(x, 0.5, True)),
    "F.dropout by default": lambda: Functional(lambda x: F.dropout(x)),
    "F.dropout by name": lambda: Functional(lambda x: F.dropout(x, p=0.5, training=True)),
    "F.dropout2d": lambda: Functional(lambda x: F.dropout2d(x[None], 0.5)[0]),
    "F.alpha_dropout": lambda: Functional(lambda x: F.alpha_dropout(x, training=True)),
    "F.attention": lambda: Functional(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
    "F.attention by place": lambda: Functional(lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_dropout_off_draws_nothing_and_is_undone(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    before = {attribute: getattr(F, attribute) for attribute in dir(F)}
    with dropout_off(model):
        assert model.training
        state = random_state()
        first, second = model(X.clone()), model(X.clone())
        assert random_state() == state
    assert torch.equal(first, second)
    assert {attribute: getattr(F, attribute) for attribute in dir(F)} == before
    assert not torch.equal(model(X.clone()), model(X.clone()))


@pytest.mark.parametrize("name", MODELS)
def test_dropout_shows_while_it_is_off(name: str) -> None:
    seen = DropoutSeen()
    model = MODELS[name]()
    with dropout_off(model, seen):
        model(X.clone())
    assert seen.ran
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_dropout_that_does_not_run_does_not_show() -> None:
    seen = DropoutSeen()
    model = nn.Sequential(nn.Dropout(0.5).eval(), nn.Dropout(0.0), Functional(lambda x: F.dropout(x, 0.5, False)))
    with dropout_off(model, seen):
        model(X.clone())
    assert (seen.ran, seen.held) == (False, True)


def test_dropout_off_is_undone_when_the_step_fails() -> None:
    model = nn.Sequential(nn.Dropout(0.3), nn.GRU(2, 2, num_layers=2, dropout=0.4))
    function = F.dropout
    with pytest.raises(RuntimeError, match="the step failed"), dropout_off(model):
        raise RuntimeError("the step failed")
    assert F.dropout is function
    assert (model[0].p, model[1].dropout) == (0.3, 0.4)


def test_dropout_off_leaves_batch_norm_in_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))
    with dropout_off(model):
        model(X)
    assert int(model[0].num_batches_tracked) == 1


@pytest.mark.parametrize(("kind", "bits"), [("bfloat16", 8), ("float16", 11), ("tf32", 11)])
def test_round_to_keeps_so_many_bits_and_the_type(kind: str, bits: int) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded = round_to(x, kind)
    assert rounded.dtype == torch.float32
    assert 0 < float(((rounded - x).abs() / x.abs()).max()) <= 2.0**-bits
    assert torch.equal(round_to(rounded, kind), rounded)


def test_round_to_leaves_other_types_alone() -> None:
    for x in (torch.arange(3), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.bfloat16)):
        assert round_to(x, "bfloat16") is x


def test_outputs_rounded_rounds_what_modules_return_and_its_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8))
    x = X.clone().requires_grad_()
    with outputs_rounded(model, "bfloat16"):
        hidden = model[0](X)
        output = model[1](hidden)[0]
    with outputs_rounded(nn.Sequential(identity := nn.Identity()), "bfloat16"):
        (identity(x) * torch.pi).sum().backward()
    for tensor in (hidden, output, x.grad):
        assert torch.equal(round_to(tensor, "bfloat16"), tensor)
    assert float(x.grad[0, 0, 0]) == 3.140625
    assert not torch.equal(round_to(model[0](X), "bfloat16"), model[0](X))


def test_precision_is_set_and_put_back() -> None:
    before = Precision.now()
    with Precision("medium", True).applied():
        assert Precision.now() == Precision("medium", True) != before
    with pytest.raises(RuntimeError, match="the step failed"), Precision("medium", True).applied():
        raise RuntimeError("the step failed")
    assert Precision.now() == before


def test_precision_matters_to_matrix_products_or_to_convolutions() -> None:
    linear: dict[str, torch.Tensor | None] = {"weight": torch.zeros(2, 2), "frozen": None}
    convolution: dict[str, torch.Tensor | None] = {"weight": torch.zeros(2, 2, 3)}
    assert not HIGHEST.matters_to(linear)
    assert not HIGHEST.matters_to(convolution)
    assert Precision("high", False).matters_to(linear)
    assert not Precision("highest", True).matters_to(linear)
    assert Precision("highest", True).matters_to(convolution)


def test_eager_runs_what_the_user_compiled_uncompiled() -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with eager():
        compiled(X)
    assert not counters["stats"]["unique_graphs"]
    compiled(X)
    assert counters["stats"]["unique_graphs"] == 1

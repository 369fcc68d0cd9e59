from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from autotune.errors import WorkloadError
from autotune.surgery.blocks import NO_BLOCKS, Blocks, find_blocks, named_blocks
from tests.surgery.models import MODELS, BasicBlock, Gpt, GptBlock, square_loss, tokens

EXPECTED = {
    "gpt": Blocks("GptBlock", ("h.0", "h.1", "h.2", "h.3")),
    "bert": Blocks("BertLayer", ("encoder.layer.0", "encoder.layer.1", "encoder.layer.2")),
    "vit": Blocks("VitBlock", ("blocks.0", "blocks.1", "blocks.2", "blocks.3")),
    "resnet": Blocks("BasicBlock", tuple(f"layer{stage}.{index}" for stage in (1, 2, 3) for index in range(3))),
    "unet": Blocks("DoubleConv", ("down1", "down2", "bottom", "merge2", "merge1")),
}


def found(model: nn.Module, batch: torch.Tensor) -> Blocks:
    kept = find_blocks(model, lambda: square_loss(model, batch))
    assert find_blocks(model, lambda: square_loss(model, batch), keep_saved=False) == kept
    return kept


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_well_known_shapes(name: str) -> None:
    make_model, make_batch = MODELS[name]
    assert found(make_model(), make_batch()) == EXPECTED[name]


def test_watching_leaves_the_model_and_the_gradients_as_they_were() -> None:
    torch.manual_seed(0)
    model, other = Gpt(), Gpt()
    other.load_state_dict(model.state_dict())
    found(model, tokens())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    square_loss(model, tokens()).backward()
    square_loss(other, tokens()).backward()
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)  # type: ignore[arg-type]


def test_what_a_step_saves_may_be_let_go_at_once() -> None:
    class Watching(nn.Module):
        """How much of what was made for the backward pass is still there."""

        def __init__(self) -> None:
            super().__init__()
            self.made: list[weakref.ref[torch.Tensor]] = []
            self.most_alive = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = x.exp()  # which saves its result
            self.made.append(weakref.ref(made))
            self.most_alive = max(self.most_alive, sum(each() is not None for each in self.made))
            return made.cos()

    def most_alive(keep_saved: bool) -> int:
        layer = Watching()
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), layer) for _ in range(6)])
        find_blocks(model, lambda: model(torch.zeros(1, 4)).sum(), keep_saved=keep_saved)
        return layer.most_alive

    assert most_alive(keep_saved=False) == 1


@pytest.mark.parametrize("name", MODELS)
def test_where_memory_runs_out_in_the_midst_what_ran_until_then_is_enough(name: str) -> None:
    make_model, make_batch = MODELS[name]
    model = make_model()

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB")

    full = model.get_submodule(EXPECTED[name].names[-2])
    full.register_forward_hook(run_out)
    blocks = find_blocks(model, lambda: square_loss(model, make_batch()), keep_saved=False)
    assert blocks.class_name == EXPECTED[name].class_name
    assert sorted(blocks.names) == sorted(EXPECTED[name].names)


def test_what_fails_otherwise_is_no_step_to_judge_by() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("an index is out of range")

    model = Gpt()
    model.h[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of range"):
        find_blocks(model, lambda: square_loss(model, tokens()))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_container_around_the_blocks_is_no_block() -> None:
    blocks = nn.Sequential(*[GptBlock(16) for _ in range(4)])
    model = nn.Sequential(blocks, nn.Linear(16, 1))
    assert found(model, torch.randn(2, 5, 16)).names == ("0.0", "0.1", "0.2", "0.3")


def test_stages_of_blocks_are_too_coarse() -> None:
    stages = [nn.Sequential(*[BasicBlock(4, 4, 1) for _ in range(4)]) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *stages)
    assert found(model, torch.randn(2, 3, 8, 8)).class_name == "BasicBlock"


class Wrapper(nn.Module):
    """Holds a block and adds nothing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GptBlock(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_of_classes_that_save_the_same_the_outer_one_is_taken() -> None:
    model = nn.Sequential(Wrapper(), Wrapper())
    assert found(model, torch.randn(2, 5, 16)) == Blocks("Wrapper", ("0", "1"))


class Nested(nn.Module):
    """A block inside a block of its own class."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.inner = Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.sigmoid(self.mix(x)) * x)


def test_a_block_inside_a_block_is_not_counted() -> None:
    model = nn.Sequential(Nested(2), Nested(2))
    assert found(model, torch.randn(2, 8)) == Blocks("Nested", ("0", "1"))


class OneOfTwo(nn.Module):
    """Only one of its blocks runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used = GptBlock(16)
        self.unused = GptBlock(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(2, 4)),
        (OneOfTwo(), torch.randn(2, 5, 16)),
        (nn.Sequential(GptBlock(16), nn.Linear(16, 1)), torch.randn(2, 5, 16)),
        (nn.Sequential(*[weight_norm(nn.Linear(64, 64)) for _ in range(3)]), torch.randn(2, 64)),
    ],
    ids=["leaves alone", "only one runs", "only one", "weights that are computed"],
)
def test_there_may_be_none(model: nn.Module, batch: torch.Tensor) -> None:
    assert found(model, batch) == NO_BLOCKS


class Heads(nn.Module):
    """Two small heads behind a large trunk that repeats nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(16, 512), nn.Sigmoid(), nn.Sigmoid(), nn.Linear(512, 4)])
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(4, 2), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.trunk:
            x = layer(x)
        return self.heads[0](x) + self.heads[1](x)


def test_a_repeated_detail_is_no_block() -> None:
    assert found(Heads(), torch.randn(8, 16)) == NO_BLOCKS


class Stubborn(nn.Module):
    """One of its blocks raises in every forward, and the model goes on without it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([GptBlock(16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            try:
                block(x[:, :, :3])
            except RuntimeError:
                x = block(x)
        return x


class WithAScriptedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scripted(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_blocks_beside_a_scripted_part_are_found() -> None:
    model = WithAScriptedPart()
    assert find_blocks(model, lambda: model(torch.randn(4, 8)).sum()).names == ("blocks.0", "blocks.1")


def test_a_forward_that_raises_does_not_confuse_the_count() -> None:
    model: Any = Stubborn()
    assert found(model, torch.randn(2, 5, 16)).names == ("blocks.0", "blocks.1", "blocks.2")


def test_blocks_named_by_the_user() -> None:
    model = Gpt()
    assert named_blocks(model, ["GptBlock"]) == EXPECTED["gpt"]
    assert named_blocks(model, ["h.1", "h.3"]) == Blocks("GptBlock", ("h.1", "h.3"))
    inside = next(name for name, module in model.h[0].named_modules() if name)
    assert named_blocks(model, ["h.0", f"h.0.{inside}"]).names == ("h.0",)


def test_a_block_that_the_model_does_not_have_is_an_error_that_lists_classes() -> None:
    with pytest.raises(WorkloadError, match=r"no module and no class named 'Layer'.*GptBlock"):
        named_blocks(Gpt(), ["Layer"])

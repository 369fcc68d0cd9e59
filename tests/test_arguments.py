from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from autotune.arguments import parse_arguments as parse_with_forms
from autotune.arguments import search_options
from autotune.errors import UserError
from autotune.options import SearchOptions

EVERYTHING = [
    "search", "train.py", "--budget", "1h30m", "--trials", "40", "--space", "quick", "--only", "precision,compile_mode",
    "--fix", "batch_size=32,num_workers=4", "--fix", "pin_memory=true", "--global-batch-size", "512",
    "--clip-grad-norm", "0.5",
    "--objective", "memory", "--memory-limit", "24GiB", "--memory-margin", "8%", "--train-samples", "1e6",
    "--device", "cpu", "--study", "studies/one", "--seed", "7", "--fresh",
]  # fmt: skip


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    return parse_with_forms(argv, export_forms=["json", "python"])


def test_every_option_reaches_the_search() -> None:
    arguments = parse_arguments([*EVERYTHING, "--json"])
    assert (arguments.command, arguments.target, arguments.json) == ("search", "train.py", True)
    assert search_options(arguments) == SearchOptions(
        budget_seconds=5400,
        trials=40,
        space="quick",
        only=("precision", "compile_mode"),
        fixed={"batch_size": "32", "num_workers": "4", "pin_memory": "true"},
        global_batch_size=512,
        clip_grad_norm=0.5,
        objective="memory",
        memory_limit_bytes=24 * 2**30,
        memory_margin=0.08,
        train_samples=1_000_000,
        device="cpu",
        study=Path("studies/one"),
        seed=7,
        fresh=True,
    )


@pytest.mark.parametrize("command", ["search", "check", "memory"])
def test_what_is_not_given_keeps_the_default(command: str) -> None:
    assert search_options(parse_arguments([command, "train.py"])) == SearchOptions()


def test_the_batch_can_be_freed() -> None:
    assert search_options(parse_arguments(["search", "train.py", "--free-batch"])).free_batch


@pytest.mark.parametrize("command", ["check", "memory"])
def test_check_and_memory_take_what_applies_to_them(command: str) -> None:
    options = search_options(parse_arguments([command, "a.b", "--memory-limit", "1GiB", "--fix", "precision=bf16"]))
    assert options.memory_limit_bytes == 2**30
    assert options.fixed == {"precision": "bf16"}
    with pytest.raises(UserError, match="unrecognized arguments: --train-samples 5"):
        parse_arguments([command, "a.b", "--train-samples", "5"])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "the following arguments are required: COMMAND; see autotune --help"),
        (["search"], "the following arguments are required: TARGET; see autotune search --help"),
        (["serch", "train.py"], "invalid choice: 'serch'"),
        (
            ["search", "a.py", "--budget", "soon"],
            "argument --budget: 'soon' is not a time; write it as 90s, 10m or 1h30m",
        ),
        (["search", "a.py", "--trials", "0"], "argument --trials: '0' is not a whole number above 0"),
        (
            ["search", "a.py", "--memory-limit", "24"],
            "argument --memory-limit: '24' is not a size; write it with its unit",
        ),
        (["search", "a.py", "--memory-margin", "5"], "argument --memory-margin: '5' is all of it or more"),
        (["search", "a.py", "--clip-grad-norm", "0"], "argument --clip-grad-norm: '0' is not a number above 0"),
        (["search", "a.py", "--only", ","], "argument --only: ',' names nothing"),
        (["search", "a.py", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["search", "a.py", "--seed", "x"], "argument --seed: "),
        (["search", "a.py", "--free-batch", "--global-batch-size", "8"], "not allowed with argument --free-batch"),
        (["search", "a.py", "--budg", "10m"], "unrecognized arguments: --budg 10m"),
        (["search", "a.py", "--fix=--"], "argument --fix: expected one argument"),
        (["export", "best.json", "--to=--"], "argument --to: expected one argument"),
        (["export", "best.json", "--to", "yaml"], "argument --to: invalid choice: 'yaml'"),
        (["export", "best.json"], "the following arguments are required: --to"),
    ],
)
def test_what_cannot_be_understood_is_said_in_a_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_arguments(argv)
    assert sentence in str(caught.value)


def test_a_fix_that_is_no_assignment_names_the_option() -> None:
    arguments = parse_arguments(["search", "train.py", "--fix", "batch_size"])
    with pytest.raises(UserError, match="argument --fix: 'batch_size' is not an assignment; write it as batch_size=32"):
        search_options(arguments)


@pytest.mark.parametrize(
    "argv",
    [
        ["best.json", "train.py", "--budget", "90s", "--json"],
        ["best.json", "--budget", "90s", "--json", "train.py"],
        ["--json", "best.json", "train.py", "--budget", "90s"],
    ],
)
def test_verify_takes_the_target_wherever_it_stands(argv: list[str]) -> None:
    arguments = parse_arguments(["verify", *argv])
    assert (arguments.result, arguments.target) == (Path("best.json"), "train.py")
    assert (arguments.budget_seconds, arguments.json) == (90.0, True)


def test_verify_needs_no_target_and_takes_one_alone() -> None:
    arguments = parse_arguments(["verify", "best.json"])
    assert (arguments.target, arguments.budget_seconds, arguments.json) == (None, 300.0, False)
    with pytest.raises(UserError, match="unrecognized arguments: other.py"):
        parse_arguments(["verify", "best.json", "--json", "train.py", "other.py"])
    with pytest.raises(UserError, match="unrecognized arguments: --device"):
        parse_arguments(["verify", "best.json", "--device", "cpu"])

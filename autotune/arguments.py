"""The arguments of the command line: what can be written, and the `SearchOptions` that it means. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import autotune
from autotune.errors import UserError
from autotune.options import VERIFY_BUDGET_SECONDS, DeviceKind, Objective, SearchOptions
from autotune.quantities import (
    format_duration,
    parse_assignments,
    parse_duration,
    parse_names,
    parse_positive_count,
    parse_positive_number,
    parse_seed,
    parse_share,
    parse_size,
)
from autotune.records import Strategy

DEFAULTS = SearchOptions()
EXAMPLES = """\
examples:
  autotune check train.py                is it understood, what would be tried?
  autotune memory train.py               does it fit, how far does the batch go?
  autotune search train.py --budget 10m  fastest settings that train the same
  autotune show autotune-study           all that was tried
  autotune export autotune-study/best.json --to python > train_fast.py
  autotune verify autotune-study/best.json   does it still hold?
"""
TARGET_HELP = (
    "FILE.py or package.module with model_fn and data_fn; loss_fn, optimizer_fn and scheduler_fn if it has them"
)
JSON_HELP = "print JSON on stdout; progress goes to stderr either way"

Parsed = TypeVar("Parsed")


def parse_arguments(argv: list[str], *, export_forms: list[str]) -> argparse.Namespace:
    """What was asked; `command` is its name. Raises `UserError`, and SystemExit(0) after `--help` and `--version`."""
    parser = _parser(export_forms)
    for word in argv:
        if word.startswith("--") and word.endswith("=--"):  # Python 3.11 would read it as no value, and not complain
            parser.error(f"argument {word[:-3]}: expected one argument")
    arguments, left = parser.parse_known_args(argv)
    # argparse takes an optional positional for missing where an option stands between it and the one before.
    if arguments.command == "verify" and arguments.target is None and left and not left[0].startswith("-"):
        arguments.target, *left = left
    if left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    return arguments


def search_options(arguments: argparse.Namespace) -> SearchOptions:
    """What was given on the command line; what was not keeps the default of `SearchOptions`. Raises `UserError`."""
    fields = {field.name for field in dataclasses.fields(SearchOptions)}
    given = {name: value for name, value in vars(arguments).items() if name in fields}
    if "fixed" in given:
        try:
            given["fixed"] = parse_assignments(given["fixed"])
        except ValueError as error:
            raise UserError(f"argument --fix: {error}") from None
    return SearchOptions(**given)


class _Parser(argparse.ArgumentParser):
    """Complains by an exception, so that there is one place that prints and chooses an exit code."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser(export_forms: list[str]) -> _Parser:
    parser = _Parser(
        prog="autotune",
        description="Finds, by measuring on your own machine, the fastest way to run your PyTorch\ntraining step.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"autotune {autotune.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    search = _add_command(commands, "search", "find the fastest settings that fit and train the same")
    _add_workload_options(search)
    _add_search_options(search)
    check = _add_command(commands, "check", "run one step of your program and say what a search would try")
    _add_workload_options(check)
    memory = _add_command(commands, "memory", "find how large a batch fits, with each way to save memory")
    _add_workload_options(memory)
    _add_verify(commands)
    _add_command(commands, "knobs", "list what can be moved")
    _add_command(commands, "spaces", "list the presets that --space takes")
    show = _add_command(commands, "show", "list all trials of a study and why the failed ones failed, or show a result")
    show.add_argument(
        "study", metavar="STUDY", type=Path, help="the directory that search was given as --study, or a BEST.json"
    )
    export = _add_command(commands, "export", "print a result in another form")
    export.add_argument("result", metavar="BEST.json", type=Path, help="the file that a search or save wrote")
    export.add_argument("--to", dest="form", choices=export_forms, required=True, help="the form to print")
    export.add_argument("--free-batch", action="store_true", help="the second answer, with the batch free")
    return parser


def _add_verify(commands: Any) -> None:
    verify = _add_command(commands, "verify", "measure a result again and say whether it still holds")
    verify.epilog = "Exit code: 0 it holds, 1 it does not (or there was no answer), 2 something of yours is at fault."
    verify.add_argument("result", metavar="BEST.json", type=Path, help="the file that a search or save wrote")
    verify.add_argument(
        "target", metavar="TARGET", nargs="?", help=f"{TARGET_HELP} (default: where the search found it)"
    )
    verify.add_argument(
        "--budget",
        dest="budget_seconds",
        type=_checked(parse_duration),
        metavar="TIME",
        default=VERIFY_BUDGET_SECONDS,
        help=f"time it may take at most (default {format_duration(VERIFY_BUDGET_SECONDS)})",
    )
    verify.add_argument("--json", action="store_true", help=JSON_HELP)


def _add_command(commands: Any, name: str, summary: str) -> _Parser:
    description = f"{summary[0].upper()}{summary[1:]}."
    parser: _Parser = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
    return parser


def _add_workload_options(parser: _Parser) -> None:
    """What says which program is meant, what may be changed in it, and on which machine."""
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    _option(
        parser,
        "--budget",
        "budget_seconds",
        parse_duration,
        f"time it may take, as 90s, 10m, 1h30m (default {format_duration(DEFAULTS.budget_seconds)})",
        metavar="TIME",
    )
    _option(parser, "--space", "space", str, f"preset or space file (default {DEFAULTS.space})", metavar="NAME_OR_FILE")
    _option(parser, "--only", "only", parse_names, "move these knobs only", metavar="KNOB,KNOB")
    _option(
        parser,
        "--blocks",
        "blocks",
        parse_names,
        "modules to recompute or compile one by one, or their class (default: looked for)",
        metavar="NAME,NAME",
    )
    parser.add_argument(
        "--fix",
        dest="fixed",
        action="append",
        metavar="KNOB=VALUE",
        default=argparse.SUPPRESS,
        help="hold a knob at a value; may be repeated",
    )
    batch = parser.add_mutually_exclusive_group()
    _option(
        batch,
        "--global-batch-size",
        "global_batch_size",
        parse_positive_count,
        "samples of an optimizer step to keep (default: the batch of your DataLoader)",
        metavar="N",
    )
    _flag(batch, "--free-batch", "free_batch", "let the samples of an optimizer step change")
    _option(
        parser,
        "--clip-grad-norm",
        "clip_grad_norm",
        parse_positive_number,
        "clip the gradients of each optimizer step to this norm, as your loop does",
        metavar="NORM",
    )
    _option(
        parser, "--memory-limit", "memory_limit_bytes", parse_size, "tune for a smaller card, as 24GiB", metavar="SIZE"
    )
    _option(
        parser,
        "--memory-margin",
        "memory_margin",
        parse_share,
        f"share of the memory to leave free (default {DEFAULTS.memory_margin:g})",
        metavar="SHARE",
    )
    parser.add_argument(
        "--device", choices=get_args(DeviceKind), default=argparse.SUPPRESS, help="default: cuda where there is a GPU"
    )
    _option(
        parser, "--seed", "seed", parse_seed, f"of the weights and of the search (default {DEFAULTS.seed})", metavar="N"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def _add_search_options(parser: _Parser) -> None:
    """What only a search needs to know."""
    _option(
        parser,
        "--trials",
        "trials",
        parse_positive_count,
        "at most this many trials before the confirmation, that of your program among them",
        metavar="N",
    )
    parser.add_argument(
        "--objective",
        choices=get_args(Objective),
        default=argparse.SUPPRESS,
        help="what to make better (default throughput, or what the space names)",
    )
    parser.add_argument(
        "--strategy",
        choices=get_args(Strategy),
        default=argparse.SUPPRESS,
        help=f"which points are measured: what stages lead to, what one of Optuna's samplers proposes (gp needs the extra "
        f"of that name), or all of them (default {DEFAULTS.strategy})",
    )
    _option(
        parser,
        "--train-samples",
        "train_samples",
        parse_positive_count,
        "samples of your whole training, to be told its hours before and after",
        metavar="N",
    )
    _option(
        parser,
        "--study",
        "study",
        Path,
        f"where trials and best.json are kept (default {DEFAULTS.study})",
        metavar="DIR",
    )
    _flag(parser, "--fresh", "fresh", "start over where the directory holds a study already")


def _option(
    parser: argparse._ActionsContainer, flag: str, field: str, parse: Callable[[str], Any], text: str, *, metavar: str
) -> None:
    """An option that sets a field of `SearchOptions`, and leaves it out where it is not given."""
    parser.add_argument(
        flag, dest=field, type=_checked(parse), metavar=metavar, default=argparse.SUPPRESS, help=text.replace("%", "%%")
    )


def _flag(parser: argparse._ActionsContainer, flag: str, field: str, text: str) -> None:
    parser.add_argument(flag, dest=field, action="store_true", default=argparse.SUPPRESS, help=text)


def _checked(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """`parse`, with its own sentence as the error: argparse would put `invalid value` in its place."""

    def parse_or_complain(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_or_complain

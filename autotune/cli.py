"""The command line: calls `autotune.api` with what is asked, prints what came back, and decides the exit code.

Exit codes: 0 an answer, "keep your settings" included; 2 the user's input is at fault and the message says what to
change; 130 interrupted, the best so far kept, and likewise 143 by SIGTERM and 129 by a terminal that was closed; 1 ended
without an answer for another reason, and from `verify` also: it does not hold any more. The answer goes to stdout,
everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

import autotune.export
from autotune.arguments import parse_arguments, search_options
from autotune.errors import NoAnswerError, SearchInterrupted, UserError
from autotune.options import CheckReport, MemoryReport, SearchOptions, VerifyReport
from autotune.records import OtherSearch, Probe, Recommendation, Record, Trial
from autotune.report.document import Document, several_lines
from autotune.search.watcher import SearchWatcher
from autotune.workload import Workload, workload_from_reference, workload_from_target

ANSWER, NO_ANSWER, USER_AT_FAULT, INTERRUPTED = 0, 1, 2, 130
_OF_A_PATH = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
"""What the system says of a path that was given."""
DOES_NOT_HOLD = 1
"""As `cmp` and `diff` have it: whoever asks in a script wants to branch on the answer."""


class HoldsRecommendation(Protocol):
    """What a search returns, and what a file is loaded as."""

    @property
    def recommendation(self) -> Recommendation: ...


class Api(Protocol):
    """What the command line calls; the module `autotune.api` is one."""

    def search(self, workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> HoldsRecommendation: ...

    def check(self, workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> CheckReport: ...

    def memory(self, workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> MemoryReport: ...

    def verify_workload(
        self, claimed: Recommendation, workload: Workload, budget_seconds: float, watcher: SearchWatcher
    ) -> VerifyReport: ...

    def load(self, path: Path) -> HoldsRecommendation: ...

    def open_study(self, directory: Path) -> tuple[Recommendation | None, list[Trial], list[Probe]]: ...

    def other_searches(self, directory: Path) -> Sequence[OtherSearch]: ...


LoadApi = Callable[[], Api]
"""Called by the commands that need it, so that help and lists stay quick."""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; `--help` and `--version` leave through SystemExit(0)."""
    _open_what_is_closed()
    endings = _Endings()
    endings.hear()
    try:
        exit_code = run(list(sys.argv[1:] if argv is None else argv), _import_api)
    except KeyboardInterrupt:  # a second one, after what the first led to was told
        exit_code = INTERRUPTED
    if exit_code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done: one more ends Python's own ending, without a word
    return 128 + endings.received if exit_code == INTERRUPTED and endings.received else exit_code


def _open_what_is_closed() -> None:
    """Where a shell or a service has closed stdin, stdout or stderr, they lead nowhere instead.

    What is opened next would take their place otherwise, and be written to by what prints.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


class _Endings:
    """Makes Ctrl-C of what ends a program from outside: a scheduler's SIGTERM, and the SIGHUP of a closed terminal."""

    def __init__(self) -> None:
        self.received = 0

    def hear(self) -> None:
        """From now on; what is ignored already, as under `nohup`, stays so."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        for same in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal says so twice, and the end is on its way
            signal.signal(same, signal.SIG_IGN)
        self.received = number
        _do_without_terminal()
        raise KeyboardInterrupt


def _do_without_terminal() -> None:
    """Where a terminal is gone, what would be written to it goes nowhere instead of raising."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def run(argv: list[str], load_api: LoadApi) -> int:
    """Runs one command. Every exception that means something to the user becomes a sentence and an exit code here."""
    arguments = None
    try:
        arguments = parse_arguments(argv, export_forms=_export_forms())
        exit_code = COMMANDS[arguments.command](arguments, load_api)
        sys.stdout.flush()
        return exit_code
    except ValueError as error:
        return _complain(error, USER_AT_FAULT)
    except NoAnswerError as error:
        return _complain(error, NO_ANSWER)
    except OSError as error:
        if isinstance(error, _OF_A_PATH) or error.errno == errno.ENAMETOOLONG:
            return _complain(UserError(f"cannot use {error.filename}: {error.strerror}"), USER_AT_FAULT)
        _drop_output()
        # A closed pipe is no complaint: whoever read it has seen enough.
        return NO_ANSWER if isinstance(error, BrokenPipeError) else _complain(_unwritten(error, arguments), NO_ANSWER)
    except KeyboardInterrupt:
        print("autotune: interrupted", file=sys.stderr)
        return INTERRUPTED


def _import_api() -> Api:
    from autotune import api

    return api


def _complain(error: Exception, exit_code: int) -> int:
    """One sentence, and the user's own frames where their code raised."""
    with contextlib.suppress(OSError):  # where it goes to may be full as well
        print(f"autotune: error: {several_lines(str(error))}", file=sys.stderr)
        detail = getattr(error, "detail", "")
        if detail:
            print(several_lines(detail.rstrip()), file=sys.stderr)
    return exit_code


def _unwritten(error: OSError, arguments: argparse.Namespace | None) -> NoAnswerError:
    """What the system would not write, and where the answer of a search still is."""
    if error.filename is not None:
        return NoAnswerError(f"cannot write {error.filename}: {error.strerror}")
    kept = ""
    if arguments is not None and arguments.command == "search":
        kept = f"; the answer is kept, and `autotune show {search_options(arguments).study}` tells it"
    return NoAnswerError(f"cannot write the output: {error.strerror}{kept}")


def _drop_output() -> None:
    """What is still to be written to stdout goes nowhere, or Python would complain of it once more at its end."""
    with contextlib.suppress(OSError):  # it is no file where somebody has replaced it
        descriptor = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _search(arguments: argparse.Namespace, load_api: LoadApi) -> int:
    from autotune.report.recommendation import recommendation_document
    from autotune.report.terminal import LiveView

    options = search_options(arguments)
    workload = workload_from_target(arguments.target)
    exit_code = ANSWER
    try:
        with LiveView(sys.stderr) as watcher:
            recommendation = load_api().search(workload, options, watcher).recommendation
    except SearchInterrupted as interruption:
        kept = "nothing new was measured" if interruption.result is None else "the best so far is kept"
        print(f"autotune: interrupted; {kept}, and the same command goes on where this one stopped", file=sys.stderr)
        if interruption.result is None:
            return INTERRUPTED
        recommendation, exit_code = interruption.result.recommendation, INTERRUPTED
    _print_answer(arguments, recommendation, lambda: recommendation_document(recommendation, options.study))
    return exit_code


def _check(arguments: argparse.Namespace, load_api: LoadApi) -> int:
    from autotune.report.listings import check_document
    from autotune.report.terminal import LiveView

    options = search_options(arguments)
    workload = workload_from_target(arguments.target)
    with LiveView(sys.stderr) as watcher:
        report = load_api().check(workload, options, watcher)
    _print_answer(arguments, report, lambda: check_document(report))
    return ANSWER


def _memory(arguments: argparse.Namespace, load_api: LoadApi) -> int:
    from autotune.report.listings import memory_document
    from autotune.report.terminal import LiveView

    options = search_options(arguments)
    workload = workload_from_target(arguments.target)
    with LiveView(sys.stderr) as watcher:
        report = load_api().memory(workload, options, watcher)
    _print_answer(arguments, report, lambda: memory_document(report))
    return ANSWER


def _verify(arguments: argparse.Namespace, load_api: LoadApi) -> int:
    from autotune.report.terminal import LiveView
    from autotune.report.verification import verification_document

    api = load_api()
    claimed = api.load(arguments.result).recommendation
    if arguments.target is not None:
        workload = workload_from_target(arguments.target)
    else:
        workload = workload_from_reference(claimed.reference)
    try:
        with LiveView(sys.stderr) as watcher:
            watcher.note(f"the program is {workload.location}")
            report = api.verify_workload(claimed, workload, arguments.budget_seconds, watcher)
    except KeyboardInterrupt:
        print("autotune: interrupted; nothing is said about the result, which stays as it is", file=sys.stderr)
        return INTERRUPTED
    _print_answer(arguments, report, lambda: verification_document(report))
    return ANSWER if report.holds else DOES_NOT_HOLD


def _knobs(arguments: argparse.Namespace, load_api: LoadApi) -> int:
    from autotune.knobs.registry import KNOBS
    from autotune.report.listings import KnobLine, knobs_document

    _show(knobs_document([KnobLine(knob.name, knob.summary, knob.effect, tuple(sorted(knob.cures))) for knob in KNOBS]))
    return ANSWER


def _spaces(arguments: argparse.Namespace, load_api: LoadApi) -> int:
    from autotune.report.listings import spaces_document
    from autotune.space import preset_names

    _show(spaces_document(preset_names()))
    return ANSWER


def _show_study(arguments: argparse.Namespace, load_api: LoadApi) -> int:
    from autotune.report.recommendation import recommendation_document
    from autotune.report.trials import trials_document

    if arguments.study.is_file():
        _show(recommendation_document(load_api().load(arguments.study).recommendation, None))
        return ANSWER
    api = load_api()
    recommendation, trials, probes = api.open_study(arguments.study)
    _show(trials_document(trials, probes, recommendation, arguments.study, api.other_searches(arguments.study)))
    return ANSWER


def _export(arguments: argparse.Namespace, load_api: LoadApi) -> int:
    recommendation = load_api().load(arguments.result).recommendation
    answer = recommendation.free_batch if arguments.free_batch else recommendation.best
    if answer is None:
        raise UserError(f"{arguments.result} has no second answer with the batch free; leave --free-batch out")
    exporter = importlib.import_module(f"autotune.export.{arguments.form}")
    print(exporter.export(recommendation, answer.config), end="")
    if missing := exporter.missing_functions(recommendation):
        roles = ", ".join(missing)
        why = "which cannot be imported from where fit was given them"
        print(f"autotune: the script lacks {roles}, {why}: put them where it says so", file=sys.stderr)
    return ANSWER


def _export_forms() -> list[str]:
    """A form is a module of `autotune.export`; what begins with an underscore is a part of one."""
    names = (module.name for module in pkgutil.iter_modules(autotune.export.__path__))
    return sorted(name for name in names if not name.startswith("_"))


COMMANDS: dict[str, Callable[[argparse.Namespace, LoadApi], int]] = {
    "search": _search,
    "check": _check,
    "memory": _memory,
    "verify": _verify,
    "knobs": _knobs,
    "spaces": _spaces,
    "show": _show_study,
    "export": _export,
}


def _print_answer(arguments: argparse.Namespace, record: Record, document: Callable[[], Document]) -> None:
    if arguments.json:
        # ASCII alone: what would steer a terminal is escaped, that of Unicode too.
        print(json.dumps(json.loads(record.model_dump_json()), indent=2))
    else:
        _show(document())


def _show(document: Document) -> None:
    from autotune.report.terminal import show

    show(document, sys.stdout)


if __name__ == "__main__":
    sys.exit(main())

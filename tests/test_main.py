"""Ctrl-C in the first instants, while Python imports, ends the command with a line and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import autotune

INTERRUPTED_AT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
        return None

{before}
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["spaces"]
from autotune.__main__ import main
sys.exit(main())
"""


def ended(module: str, before: str = "") -> subprocess.CompletedProcess[str]:
    script = INTERRUPTED_AT.format(module=module, before=before)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize("module", ["autotune.cli", "pydantic", "autotune.report.listings"])
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    ran = ended(module)
    assert (ran.returncode, ran.stderr, ran.stdout) == (130, "autotune: interrupted\n", "")


def test_next_to_nothing_is_imported_before_ctrl_c_is_heard() -> None:
    script = "import sys; before = set(sys.modules); import autotune.__main__; print(*set(sys.modules) - before)"
    root = Path(autotune.__file__).parents[1]
    command = [sys.executable, "-S", "-c", script]  # without what an installed package imports at each start
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}, check=True
    )
    assert "autotune.__main__" in ran.stdout.split()
    assert not {"typing", "contextlib", "importlib", "re", "warnings"} & set(ran.stdout.split())


def test_where_ctrl_c_is_ignored_it_stays_so() -> None:
    ran = ended("autotune.cli", "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert ran.returncode == 0, ran.stderr
    assert "default" in ran.stdout


def test_it_runs_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "autotune", "--version"], capture_output=True, text=True, timeout=400, check=False
    )
    assert ran.returncode == 0
    assert ran.stdout.startswith("autotune ")


def test_the_signal_is_heard_as_usual_once_the_command_runs() -> None:
    script = (
        "import signal, sys; import autotune.cli; from autotune.__main__ import main\n"
        "autotune.cli.main = lambda: int(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)\n"
        "sys.exit(main())"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=400, check=False).returncode == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

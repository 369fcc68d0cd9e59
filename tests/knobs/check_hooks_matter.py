"""Empties each hook of each knob in turn and sees that the knob's `test_applied_...` tests then fail.

    python tests/knobs/check_hooks_matter.py [KNOB ...]

A hook that can be emptied without a failing test is applied by nobody, or tested by nobody. Exits with 1 if there is one.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autotune.knobs.base import Knob  # noqa: E402
from autotune.knobs.registry import KNOBS, knob  # noqa: E402

HOOKS = (
    "environment",
    "configure_process",
    "loader_kwargs",
    "transform_model",
    "set_optimizer",
    "wrap_model",
    "transform_batch",
    "step_context",
    "backward",
)


def own_hooks(the_knob: Knob) -> list[str]:
    """The hooks that the knob overrides."""
    return [name for name in HOOKS if name in vars(type(the_knob))]


@contextlib.contextmanager
def emptied(the_knob: Knob, hook: str) -> Iterator[None]:
    """The knob without its own hook: the base class's, which does nothing, is called."""
    own = vars(type(the_knob))[hook]
    delattr(type(the_knob), hook)
    try:
        yield
    finally:
        setattr(type(the_knob), hook, own)


def applied_tests(the_knob: Knob) -> pytest.ExitCode:
    """Runs them, quietly, until the first failure."""
    file = ROOT / "tests" / "knobs" / f"test_{the_knob.name}.py"
    with contextlib.redirect_stdout(io.StringIO()):
        return pytest.ExitCode(pytest.main(["-q", "-x", "-k", "test_applied", "-p", "no:cacheprovider", str(file)]))


def main(names: list[str]) -> int:
    unnoticed = 0
    for the_knob in [knob(name) for name in names] or list(KNOBS):
        hooks = own_hooks(the_knob)
        assert hooks, f"{the_knob.name} applies nothing"
        assert applied_tests(the_knob) is pytest.ExitCode.OK, f"the applied tests of {the_knob.name} fail as they stand"
        for hook in hooks:
            with emptied(the_knob, hook):
                noticed = applied_tests(the_knob) is pytest.ExitCode.TESTS_FAILED
            unnoticed += not noticed
            print(f"{the_knob.name}.{hook} emptied: {'its tests fail' if noticed else 'NOBODY NOTICES'}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

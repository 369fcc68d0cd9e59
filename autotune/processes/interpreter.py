"""How a Python of our own is started, wherever the user stands and whatever lies there."""

from __future__ import annotations

import sys
from pathlib import Path

_HOME = str(Path(__file__).resolve().parent.parent.parent)


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `main()` of a module of ours in a new interpreter.

    `python -m` would let a `types.py` or `random.py` in the working directory take the place of Python's own; the user's
    directories come in when the user's module is imported. Where autotune is not installed it is found all the same.
    """
    code = f"import sys; sys.path.append({_HOME!r}); from {module} import main; main()"
    return [sys.executable, "-P", "-c", code, *arguments]

"""`sources`: texts by which a function that the user hands over is told from what it was before a change."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

_PLAIN = (str, bytes, int, float, complex, bool, type(None))

_MOST_ITEMS = 1000
"""Of a list or dictionary: what is longer is data."""


def sources(thing: Any) -> Iterator[str]:
    """The file that a function, class or callable object stands in, and the plain values that it holds.

    What stands in no file, as in a notebook or a terminal, gives its bytecode and that of all it names there.
    """
    yield from _told(thing, set())


def _told(thing: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(thing, _PLAIN):
        yield repr(thing)
    elif id(thing) in seen:
        return
    elif isinstance(thing, (list, tuple, dict)):
        seen.add(id(thing))  # while it is told: it may hold itself
        yield from _told_of_items(thing, seen)
        seen.remove(id(thing))
    else:
        seen.add(id(thing))
        yield from _told_of_code(thing, seen)


def _told_of_items(thing: list[Any] | tuple[Any, ...] | dict[Any, Any], seen: set[int]) -> Iterator[str]:
    yield str(len(thing))
    if isinstance(thing, dict):
        for key, value in islice(thing.items(), _MOST_ITEMS):
            yield repr(key) if isinstance(key, _PLAIN) else ""
            yield from _told(value, seen)
    else:
        for item in thing[:_MOST_ITEMS]:
            yield from _told(item, seen)


def _told_of_code(thing: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(thing, partial):
        yield from _told([thing.func, thing.args, thing.keywords], seen)
    elif isinstance(thing, MethodType):
        yield from _told([thing.__func__, thing.__self__], seen)
    elif isinstance(thing, FunctionType):
        text = file_text(thing)
        if text is not None:
            yield text
        else:
            yield from _told_of_bytecode(thing.__code__)
            named = [thing.__globals__.get(name) for name in _names(thing.__code__)]
            yield from _told([named, thing.__defaults__, thing.__kwdefaults__], seen)
        yield from _told([_contents(cell) for cell in thing.__closure__ or ()], seen)
    elif isinstance(thing, type):
        text = file_text(thing)
        yield text or thing.__qualname__
        if text is None and not _is_native(thing):
            # what the class statement adds by itself may tell the line, which a comment above changes
            own = [value for name, value in vars(thing).items() if name[:2] != "__" or isinstance(value, FunctionType)]
            yield from _told([*thing.__bases__, *own], seen)
    else:
        yield type(thing).__qualname__
        if callable(thing):  # a module of the user's; a data set is told by what a trial sees of it
            yield from _told(type(thing), seen)
            held = getattr(thing, "__dict__", {})
            yield from (f"{name}={value!r}" for name, value in held.items() if isinstance(value, _PLAIN))


def file_text(thing: Any) -> str | None:
    """Of the file, where there is one."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(thing))
    except TypeError:  # in native code, or a class whose module has no file
        return None
    return Path(file).read_text(encoding="utf-8", errors="replace") if file and Path(file).is_file() else None


def _is_native(a_class: type) -> bool:
    module = sys.modules.get(a_class.__module__)
    return a_class.__module__ in sys.builtin_module_names or hasattr(module, "__file__")


def _told_of_bytecode(code: CodeType) -> Iterator[str]:
    """What the function does, wherever it stands."""
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _told_of_bytecode(constant)
        else:
            yield repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _names(code: CodeType) -> list[str]:
    """All names that the function and those within it may look up."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet bound
        return None

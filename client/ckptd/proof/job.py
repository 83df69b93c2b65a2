"""Where a user's job is: `module:function` or `path.py:function`, so that a fresh interpreter finds it again."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ckptd.errors import InvalidArgument

_TODO = (
    "write it as a function at the top of a file and give that: check_resume(make_job) or 'train.py:make_job'"
)


@dataclass(frozen=True, slots=True)
class JobAddress:
    """A function of a module or of a file.

    Attributes:
        place: A module's dotted name, or an absolute path that ends in .py.
        function: The function's qualified name in it.
    """

    place: str
    function: str

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")

    def __str__(self) -> str:
        return f"{Path(self.place).name if self.is_file else self.place}:{self.function}"


def address_of(job: Callable[[], Any] | str) -> JobAddress:
    """Where a fresh interpreter finds the function.

    Raises:
        InvalidArgument: It can't: a lambda, a function in a function, one typed into a notebook or a prompt,
            one that isn't there under its name, one that needs arguments; or a text that is no address.
    """
    if isinstance(job, str):
        return parse_address(job)
    module, name = getattr(job, "__module__", None), getattr(job, "__qualname__", None)
    if not callable(job) or not isinstance(module, str) or not isinstance(name, str):
        raise _refused("not a function", type(job).__name__)
    if "<" in name:
        raise _refused("a lambda, or a function inside another", name)
    if _found(module, name) is not job:
        raise _refused("not the function of this name in its module", f"{module}:{name}")
    check_no_arguments(job)
    return JobAddress(_place_of(module), name)


def parse_address(text: str) -> JobAddress:
    """`package.module:function` or `path/to/file.py:function`.

    Raises:
        InvalidArgument: It isn't one, or there is no such file.
    """
    place, _, function = text.rpartition(":")
    if not place or not all(part.isidentifier() for part in function.split(".")):
        raise InvalidArgument(
            "not the address of a function", where="job", seen=repr(text)[:200],
            wanted="MODULE:FUNCTION or FILE.py:FUNCTION", todo="such as train.py:make_job",
        )  # fmt: skip
    if not place.endswith(".py"):
        if not all(part.isidentifier() for part in place.split(".")):
            raise InvalidArgument("not a module's name", where="job", seen=repr(place)[:200])
        return JobAddress(place, function)
    path = Path(place).absolute()
    if not path.is_file():
        raise InvalidArgument("no such file", where=str(path), todo="check the path before the colon")
    return JobAddress(str(path), function)


def load_job(address: JobAddress) -> Callable[[], Any]:
    """Import the module, or run the file as a module of its name (not as `__main__`), and return the function.

    Raises:
        InvalidArgument: There is no such module or function, or it needs arguments.
        Exception: What the user's module raises when it is imported.
    """
    module = _load_file(Path(address.place)) if address.is_file else _import(address.place)
    value: Any = module
    for part in address.function.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise InvalidArgument(
            "no such function", where=str(address), seen=type(value).__name__, wanted="make_job()"
        )
    check_no_arguments(value)
    job: Callable[[], Any] = value
    return job


def check_no_arguments(job: Callable[..., Any]) -> None:
    try:
        inspect.signature(job).bind()
    except TypeError as error:
        raise InvalidArgument(
            "the job's function needs arguments", where=getattr(job, "__qualname__", "job"), seen=str(error),
            wanted="none", todo="write one that calls it with them",
        ) from error  # fmt: skip
    except ValueError:  # one without a signature; calling it will show
        return


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise InvalidArgument(
                "no such module",
                where=name,
                todo="run it from where `import` finds it, or give FILE.py:FUNCTION",
            ) from error
        raise


def _load_file(path: Path) -> ModuleType:
    # Under its own name and in sys.modules, so that a DataLoader worker or a dataclass finds it there.
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    name = path.stem if known is None else f"_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument("not a Python file", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _found(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _place_of(module: str) -> str:
    """The module's name where a fresh interpreter can import it, else its file."""
    live = sys.modules[module]
    if module == "__main__":
        module = getattr(live.__spec__, "name", "")  # `python -m package.module`
    if module and _can_be_imported(module):
        return module
    file = str(getattr(live, "__file__", None) or "")
    if not file.endswith(".py") or not Path(file).is_file():
        raise _refused("a function that is in no file (a notebook, a prompt, python -c)", live.__name__)
    return os.path.abspath(file)  # noqa: PTH100 - no links resolved, as Python itself leaves them


def _can_be_imported(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None and module != "__main__"
    except (ImportError, ValueError):
        return False


def _refused(what: str, seen: str) -> InvalidArgument:
    return InvalidArgument(
        what, where="make_job", seen=seen, wanted="a function another process can find", todo=_TODO
    )

"""Who may import whom: ckptd never ckptd_daemon; daemon, verifier and CLI neither torch nor numpy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLIENT, DAEMON = ROOT / "client" / "ckptd", ROOT / "daemon" / "ckptd_daemon"
HEAVY = ("torch", "numpy")

#: Modules of ckptd whose whole purpose is tensors: the only ones that may load torch when imported.
TENSOR_MODULES = {
    ".".join(path.relative_to(CLIENT.parent).with_suffix("").parts)
    for path in CLIENT.rglob("*.py")
    if "TID253" in path.read_text("utf-8").split("from __future__")[0]
}

#: What daemon, verifier and every command load, and the library they read a root with.
LIGHT_MODULES = [
    "ckptd",
    *(
        ".".join(path.relative_to(CLIENT.parent).with_suffix("").parts)
        for folder in ("snapshot", "format", "disk", "link")
        for path in sorted((CLIENT / folder).glob("*.py"))
        if path.stem
        not in (
            "__init__",
            "recorder",
            "resume",
            "from_slot",
            "restoration",
            "inline_writer",
            "writers",
        )  # the trainer's own
    ),
    *(
        ".".join(path.relative_to(DAEMON.parent).with_suffix("").parts)
        for path in sorted(DAEMON.rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ),
]


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


@pytest.mark.parametrize("path", sorted(CLIENT.rglob("*.py")), ids=lambda path: path.name)
def test_the_client_package_never_imports_the_daemons(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.split(".")[0] == "ckptd_daemon"]


#: They write it, for a check number over values or for numbers in one go, and never read it.
WRITE_MARSHAL = {"loader_kept.py", "loader_packing.py"}


@pytest.mark.parametrize(
    "path", sorted([*CLIENT.rglob("*.py"), *DAEMON.rglob("*.py")]), ids=lambda path: path.name
)
def test_nothing_imports_pickle_and_only_watch_imports_watchdog(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports_of(path)}
    if path.name in WRITE_MARSHAL:
        assert "marshal.load" not in path.read_text()
        tops.remove("marshal")
    assert not tops & {"pickle", "cPickle", "dill", "marshal", "shelve"}
    assert path.name == "watch.py" or "watchdog" not in tops


@pytest.mark.parametrize("path", sorted(DAEMON.rglob("*.py")), ids=lambda path: path.name)
def test_the_daemon_package_imports_no_tensors_anywhere(path: Path) -> None:
    # Not in a function either: the one exception is `ckptd migrate`, which loads ckptd.tensors.migrate when it runs.
    names = imports_of(path)
    assert not [name for name in names if name.split(".")[0] in HEAVY]
    allowed = {"ckptd.tensors.migrate"} if path.name == "migrate.py" else set()
    assert not [name for name in names - allowed if name in TENSOR_MODULES]


def test_no_source_root_is_a_package() -> None:
    # A package called `daemon` would collide with python-daemon.
    assert not (ROOT / "client" / "__init__.py").exists() and not (ROOT / "daemon" / "__init__.py").exists()


def test_importing_the_daemon_the_verifier_or_a_command_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {LIGHT_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [top for top in {HEAVY!r} if top in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_the_list_of_light_modules_is_not_empty_nor_everything() -> None:
    assert (
        len(LIGHT_MODULES) > 20
        and "ckptd.disk.series" in LIGHT_MODULES
        and "ckptd_daemon.core.server" in LIGHT_MODULES
    )
    assert "ckptd.tensors.capture" in TENSOR_MODULES and len(TENSOR_MODULES) < 100


def test_a_verifier_loads_nothing_that_it_needs_only_for_runs_of_earlier_lives() -> None:
    needless = (
        "argparse",
        "msgspec",
        "uuid",
        "ckptd.disk.series",
        "ckptd.disk.rootdir",
        "ckptd.disk.durable",
    )
    code = "import sys, ckptd_daemon.verify.verifier; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(needless) & set(done.stdout.split())

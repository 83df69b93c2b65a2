"""What daemon and verifier load, and what they don't until they use it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

#: Each would be loaded for something that neither does. typing_extensions would be, and needs inspect.
NEEDLESS = {
    "ast", "bz2", "dis", "inspect", "ipaddress", "locale", "lzma", "base64", "tempfile",
}  # fmt: skip
VERIFIER = ("-m", "ckptd_daemon.verify", "--root", "/", "--parent", "0")  # not its parent: it leaves


def loaded_by(*argv: str) -> set[str]:
    command = [sys.executable, "-P", "-X", "importtime", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }


def said_by(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_daemon_loads_no_module_for_what_it_never_does() -> None:
    loaded = loaded_by("-m", "ckptd_daemon", "--nonsense")
    assert {"ckptd_daemon.core.process", "msgspec._core", "zmq"} <= loaded
    assert not NEEDLESS & loaded


def test_a_verifier_loads_no_module_for_what_it_never_does() -> None:
    loaded = loaded_by(*VERIFIER)
    assert {"ckptd_daemon.verify.verifier", "watchdog.observers"} <= loaded
    assert not (NEEDLESS | {"shutil", "subprocess", "msgspec"}) & loaded


def test_a_module_that_was_put_off_is_whole_once_something_of_it_is_used() -> None:
    said = said_by("""
        import sys
        from ckptd_daemon import lean
        lean.begin()
        import ctypes.util, inspect
        from locale import getpreferredencoding
        print("ast" in sys.modules, hasattr(inspect, "__path__"), inspect.signature(lambda a, b=1: 0))
        print(ctypes.util.find_library("c") is not None, "ast" in sys.modules, hasattr(inspect, "nothing"))
        import inspect
        print(inspect.__name__, inspect.__file__.endswith("inspect.py"), callable(getpreferredencoding))
    """)
    assert said.splitlines() == [
        "False False (a, b=1)",
        "True True False",
        "inspect True True",
    ]


def test_two_threads_may_be_the_first_to_use_it(tmp_path: os.PathLike[str]) -> None:
    # The second asks while the first is in the midst of loading it.
    with open(os.path.join(tmp_path, "slow.py"), "w") as file:
        file.write("import shared; shared.begun.set(); shared.asked.wait(60)\nvalue = 7\n")
    with open(os.path.join(tmp_path, "shared.py"), "w") as file:
        file.write("import threading; begun, asked = threading.Event(), threading.Event()\n")
    said = said_by(f"""
        import sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        from ckptd_daemon import lean
        import shared
        slow, seen = lean._Later("slow"), []
        sys.modules["slow"] = slow
        first = threading.Thread(target=lambda: seen.append(slow.value))
        first.start()
        shared.begun.wait(60)
        def second():
            shared.asked.set()
            seen.append(slow.value)
        other = threading.Thread(target=second)
        other.start()
        first.join(), other.join()
        print(seen)
    """)
    assert said == "[7, 7]"


def test_what_is_loaded_already_stays_as_it_is() -> None:
    said = said_by("""
        import inspect
        from ckptd_daemon import lean
        lean.begin()
        import sys
        print(sys.modules["inspect"] is inspect, type(inspect).__name__)
    """)
    assert said == "True module"


@pytest.mark.parametrize(
    "needs", ["try:\n    import other\nexcept ImportError:\n    other = None", "import other"]
)
def test_a_module_is_imported_without_another_only_if_it_does_without(
    tmp_path: os.PathLike[str], needs: str
) -> None:
    for name, text in (("one", needs), ("other", "")):
        with open(os.path.join(tmp_path, f"{name}.py"), "w") as file:
            file.write(text + "\n")
    said = said_by(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from ckptd_daemon import lean
        lean.import_without("one", "other")
        print("one" in sys.modules, "other" in sys.modules)
        import one, other
        print(one.other is None)
    """)
    does = needs.startswith("try")
    assert said.splitlines() == [f"{does} False", f"{does}"]

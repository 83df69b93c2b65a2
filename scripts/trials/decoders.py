"""Coverage-guided fuzzing of whatever decodes bytes from a socket, a slot or a disk, by atheris where it is installed.

Usage: decoders.py NAME [libFuzzer's arguments], NAME one of DECODERS; scripts/trials/fuzzing.py runs each for a while.
Any error but the decoder's own is a find, as is a decoder that takes long or much memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import atheris  # type: ignore[import-not-found, unused-ignore]

with atheris.instrument_imports(include=["ckptd", "ckptd_daemon"]):
    from ckptd.errors import CkptdError
    from ckptd.format.archive_check import check_archive
    from ckptd.format.records import index_from_bytes
    from ckptd.format.table_rows import table_from_bytes
    from ckptd.link import wire
    from ckptd.snapshot import slot_header
    from ckptd.snapshot.descriptor_codec import decode
    from ckptd_daemon.series.settings_file import settings_from_toml


def _page(data: bytes) -> None:
    slot_header.newest(data.ljust(4096, b"\0"), lambda header: header.data_bytes < 2**40)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "requests": wire.decode_request,
    "streams": wire.decode_stream,
    "replies": wire.decode_reply,
    "slot-header": _page,
    "descriptor": decode,
    "index": lambda data: index_from_bytes(data, "here"),
    "table": lambda data: table_from_bytes(data, "here"),
    "settings": lambda data: settings_from_toml(data, where="here"),
    "archive": lambda data: check_archive(data, "here", ours=True),
    "archive-v1": lambda data: check_archive(data, "here", ours=False),
}


def main() -> None:
    decoder = DECODERS[sys.argv.pop(1)]

    def once(data: bytes) -> None:
        with contextlib.suppress(CkptdError):
            decoder(data)

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

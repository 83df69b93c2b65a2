"""scripts/bench: runs every section, prints the result and writes what was asked for."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fresh_trainer
import growth
import machine
import ours
import plot
import report
import restoring
import saving
import settings
import tail
import tiny
import training
from rounds import Course, say

_SECTIONS = (
    saving.measure, restoring.measure, tiny.measure, tail.measure, training.measure, fresh_trainer.measure,
    growth.measure_tensors, growth.measure_checkpoints,
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit code 0, whatever the lines say: a figure that is short is a result."""
    wanted, args = settings.parse(argv)
    _refuse_no_place(args.json, args.plot, args.markdown)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # daemons and folders go all the same
    began, at, course = time.monotonic(), report.now(), Course()
    with settings.work_folder(args.root) as work, own_places():
        on = machine.describe(work)
        with ours.daemon(work / "root") as root:
            for section in _SECTIONS:
                section(course, wanted, work, root)
    say("")
    result = report.Report(wanted, on, course, time.monotonic() - began, at)
    print(result.as_text())
    if args.json:
        args.json.write_text(json.dumps(result.as_json(), indent=1) + "\n", "utf-8")
    if args.plot:
        args.plot.write_text(plot.draw(result.lines, course.samples), "utf-8")
    if args.markdown:
        result.into_page(args.markdown)
    return 0


def _refuse_no_place(json_file: Path | None, plot_file: Path | None, page: Path | None) -> None:
    """Before minutes are spent on what nobody could then write down."""
    for file in (json_file, plot_file):
        if file is not None and not file.parent.is_dir():
            raise SystemExit(f"scripts/bench: {file}: there is no folder {file.parent}")
    if page is not None:
        try:
            report.around(page)
        except (OSError, ValueError) as error:
            raise SystemExit(f"scripts/bench: --markdown wants a page with markers: {error}") from error


@contextmanager
def own_places() -> Iterator[None]:
    """Sockets and slots of these daemons in folders of their own, gone at the end."""
    slots = tempfile.TemporaryDirectory(
        prefix="ckptd-bench-", dir=os.environ.get("CKPTD_SHM_DIR", "/dev/shm")
    )
    sockets = tempfile.TemporaryDirectory(prefix="ckptd-bench-", dir="/tmp")  # short: a path has 107 bytes
    with slots, sockets:
        os.environ.update(CKPTD_SHM_DIR=slots.name, CKPTD_RUNTIME_DIR=sockets.name)
        yield


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""SEL on the command line: latest, best, 1200, 1200.2 or a path → the checkpoint's folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from ckptd.disk.root_runs import other_runs
from ckptd.disk.rootdir import Root
from ckptd.disk.series import Checkpoint, best, checkpoints, latest_valid, select
from ckptd.disk.wrong_path import refuse_wrong_path
from ckptd.errors import InvalidArgument, NothingThere
from ckptd_daemon.cli import arguments, output
from ckptd_daemon.series import policy, settings_file


def path_of(args: argparse.Namespace, selector: str) -> Path:
    """The folder that the selector means. A path needs no root.

    Raises:
        NothingThere: Nothing fits it.
        InvalidArgument: It isn't a selector, a path of something else, or `best` by no metric.
    """
    if "/" in selector or selector in (".", ".."):
        path = Path(selector).absolute()
        if not path.exists():
            raise NothingThere("no such checkpoint", where=str(path))
        refuse_wrong_path(path)
        return path
    if selector == "latest":
        return latest(args).path
    root, run = arguments.root_to_read(args), arguments.run(args)
    return _best(args, root, run) if selector == "best" else select(root, run, selector)


def latest(args: argparse.Namespace, *, wait: bool = True) -> Checkpoint:
    """The latest valid checkpoint; what is verified for it, and what is passed over, is said on stderr.

    Args:
        wait: False answers at once with what is verified already.

    Raises:
        NothingThere: There is none.
        NoValidCheckpoint: All fail their checks.
    """
    run, root = arguments.run(args), arguments.root_to_read(args)
    found = latest_valid(root, run, wait=wait, on_progress=output.note)
    if found is None:
        if not wait and checkpoints(root, run):
            raise NothingThere(
                "no verified checkpoint", where=f"{root.path}, run {run}",
                todo="ask without --no-wait to have one verified now",
            )  # fmt: skip
        raise nothing_in(root, run, "no checkpoint")
    return _said(found)


def nothing_in(root: Root, run: str | None, what: str) -> NothingThere:
    """The error for a run (None: all) that has nothing: it may be another one that was meant."""
    where = f"{root.path}" + ("" if run is None else f", run {run}")
    return NothingThere(what, where=where, todo="" if run is None else other_runs(root, run))


def _said(found: Checkpoint) -> Checkpoint:
    for passed in found.passed_over:
        output.note(f"passed over {passed.name}: {passed.reason}")
    return found


def _best(args: argparse.Namespace, root: Root, run: str) -> Path:
    given = arguments.text(args, "monitor")
    if given is not None:
        metric, mode = policy.parse_monitor(given[0])
    else:
        rules = settings_file.read_settings(root.path).policy_for(run)
        if rules.monitor is None or rules.mode is None:
            raise InvalidArgument(
                "no metric to choose the best checkpoint by", seen=f"the policy of run {run} names none",
                todo="give --monitor NAME:min or NAME:max",
            )  # fmt: skip
        metric, mode = rules.monitor, rules.mode
    found = best(root, run, metric, mode, on_progress=output.note)
    if found is None and not checkpoints(root, run):
        raise nothing_in(root, run, "no checkpoint")
    if found is None:
        raise NothingThere(f"no valid checkpoint with the metric {metric}", where=f"{root.path}, run {run}")
    return _said(found).path

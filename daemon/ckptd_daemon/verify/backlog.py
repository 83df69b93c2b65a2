"""What the verifier still has to check, in which order, and when a result may be reported. Pure.

What must be true of it:
- Asked for goes first; then the higher step, for the newest is what `latest` waits for.
- A folder that nobody announced is judged only once it has been unchanged for a while: it may be a copy
  in progress.
- A failure is reported only when a second check of unchanged bytes fails too: a fault reported is acted on.
- The same bytes (by the cheap fingerprint) are reported once, unless asked for again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ckptd.names import parse_step_folder

Key = tuple[str, str]  #: (run, checkpoint name)


@dataclass(frozen=True)
class Job:
    """One checkpoint to check now.

    Attributes:
        asked: The daemon waits for the answer.
        failed: It already failed once with this fingerprint.
        signature: The fingerprint it was queued with; "" when it was only asked for.
        since: When that fingerprint was first seen.
    """

    run: str
    name: str
    asked: bool = False
    failed: bool = False
    signature: str = ""
    since: float = 0.0


class Backlog:
    """The queue; not thread-safe.

    Args:
        settle_s: How long a folder must be unchanged before it is judged.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._asked: dict[Key, None] = {}  # in the order they were asked
        self._seen: dict[Key, Job] = {}
        self._reported: dict[Key, str] = {}

    def __repr__(self) -> str:
        return f"<Backlog asked={len(self._asked)} seen={len(self._seen)} reported={len(self._reported)}>"

    def ask(self, run: str, name: str) -> None:
        """The daemon wants this one checked now."""
        self._asked[run, name] = None

    def any_asked(self) -> bool:
        """Whether the daemon waits for one that hasn't been taken yet."""
        return bool(self._asked)

    def known_good(self, run: str, name: str, signature: str) -> None:
        """It was verified with this fingerprint before; nothing to do until it changes."""
        self._reported[run, name] = signature

    def saw(self, run: str, name: str, signature: str, now: float) -> None:
        """It is there with this fingerprint."""
        key = (run, name)
        if self._reported.get(key) == signature:
            self._seen.pop(key, None)
        elif key not in self._seen:
            self._seen[key] = Job(run, name, signature=signature, since=now)
        elif self._seen[key].signature != signature:
            self._seen[key] = replace(self._seen[key], signature=signature, since=now, failed=False)

    def listed(self, run: str, names: Collection[str]) -> None:
        """These are all there are in the run; forget the others (an asked one is answered as gone)."""
        for memory in (self._seen, self._reported):
            for key in [key for key in memory if key[0] == run and key[1] not in names]:
                job = memory.pop(key)
                if isinstance(job, Job) and job.asked:
                    self.ask(run, key[1])

    def take(self, now: float) -> Job | None:
        """The next one to check, out of the queue; None while there is nothing to do yet."""
        if self._asked:
            run, name = next(iter(self._asked))
            del self._asked[run, name]
            seen = self._seen.pop((run, name), Job(run, name))
            return replace(seen, asked=True)
        due = [job for job in self._seen.values() if now - job.since >= self._settle_s]
        if not due:
            return None
        first = max(due, key=lambda job: (parse_step_folder(job.name) or (0, 0), job.run))
        return self._seen.pop((first.run, first.name))

    def due_in(self, now: float) -> float | None:
        """Seconds until `take` has something; None when it never will by itself."""
        if self._asked:
            return 0.0
        return min((max(0.0, job.since + self._settle_s - now) for job in self._seen.values()), default=None)

    def needs_check(self, job: Job, signature: str, now: float) -> bool:
        """Whether to read it, given its fingerprint now; a changed one settles first unless asked for."""
        if job.asked or signature == job.signature:
            return True
        self._seen[job.run, job.name] = replace(job, signature=signature, since=now, failed=False)
        return False

    def put_off(self, job: Job, signature: str, until: float) -> None:
        """It couldn't be told; try again then. Whoever asked for it still gets the answer."""
        since = until - self._settle_s
        self._again(replace(job, signature=signature, since=since))

    def may_report(self, job: Job, now: float, *, ok: bool, gone: bool, before: str, after: str) -> bool:
        """Whether the result of a check goes out; else it is checked again once it has settled.

        Args:
            before: The fingerprint of what was read.
            after: The fingerprint now.
        """
        key = (job.run, job.name)
        if gone:
            self._reported.pop(key, None)
            return job.asked
        if before != after or not (ok or job.failed):
            self._again(replace(job, failed=before == after, signature=after, since=now))
            return False
        self._reported[key] = after
        return True

    def _again(self, job: Job) -> None:
        """Also where the same bytes were reported before: what was reported may not be so any more."""
        self._reported.pop((job.run, job.name), None)
        self._seen[job.run, job.name] = job

"""Judges a history: what was asked, answered and seen on disk, against a model in memory. Knows nothing of the product.

A history is a list of events, dicts with "op", "run" and monotonic times "call" and "ret":

    policy    keep_last
    snapshot  identity, step, after (identity the state went on from, None for a fresh start), gives_way (whether its
              call may have an older one of its client give way); number, state, way ("slot", "copying", "stream")
              and ret once the call returned
    told      identity, state, sequence: what the client said of it, when it changed
    restore   answer (identity, None for a fresh start), sequence, staged, wanted (a step, or None), torn, error
    latest    answer, sequence, error
    listing   checkpoints: [{name, sequence, client, snapshot, identity, step}]
    final     the same with contents (identities in its tensors) and whole, once nothing is on its way any more
    hit       identity, what: a checkpoint that was damaged or deleted by hand; done: whether it was there until ret
    trouble   the disk failed between call and ret

Identities are unique: the tensors, the metric and the log hold the same number. Those of one trainer are one million,
in the order of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Event = Mapping[str, Any]

NEVER: Final = float("inf")
_COMMITTED: Final = ("committed", "verified", "corrupt")
_REFUSED: Final = ("failed", "superseded", "skipped")


@dataclass
class Snapshot:
    """One snapshot as the model knows it.

    Attributes:
        sequence: As it was told or seen; None while nothing said one.
        acked: When the first answer said that it is durable, or showed it.
        hit: When somebody began to damage or delete its checkpoint.
        bad: From when on it certainly is damaged or gone.
        gone_from: From when on retention or another line may have removed it.
        last: The last state that its client was told.
        sealed: snapshot() returned and it no longer depended on its process.
        may_take_way: Its call may have had an older one of its client give way.
        took_way: The same, and the call never returned.
    """

    identity: int
    step: int
    after: int | None
    call: float
    sequence: int | None = None
    acked: float = NEVER
    hit: float = NEVER
    bad: float = NEVER
    gone_from: float = NEVER
    last: str = ""
    sealed: bool = False
    may_take_way: bool = False
    took_way: bool = False


@dataclass
class Run:
    """One run: all its snapshots, and what is wrong with what was said of them."""

    keep_last: int = 5
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    troubles: list[tuple[float, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def ancestors(self, identity: int) -> Iterator[int]:
        """What a snapshot goes on from, and what that goes on from."""
        one = self.snapshots.get(identity)
        while one is not None and one.after is not None:
            yield one.after
            one = self.snapshots.get(one.after)

    def may_be_gone(self, one: Snapshot, until: float) -> bool:
        """Whether somebody hit it, or retention may have removed it, or a newer line have left it behind."""
        return one.hit < until or one.gone_from < until

    def gave_way(self, one: Snapshot) -> bool:
        """Whether it may have given its slot up for a newer one, and nobody was left to tell or to hear of it.

        on_busy="supersede" says so: the older one is given up before the newer one is copied. The trainer may be
        killed before that is sealed; or the daemon, before its answer is heard: then it is told to be unknown.
        """
        return any(
            other.call > one.call and (other.took_way or (other.may_take_way and one.last == "unknown"))
            for other in self.snapshots.values()
            if other.identity // 10**6 == one.identity // 10**6
        )

    def reckon(self) -> None:
        """From when on each may be gone, once all that was said is known."""
        for other in filter(_may_be_there, self.snapshots.values()):
            past = dict.fromkeys(self.ancestors(other.identity))
            newer = 1
            for name in past:
                one = self.snapshots.get(name)
                if one is not None:
                    if newer >= self.keep_last:
                        one.gone_from = min(one.gone_from, other.call)
                    newer += _may_be_there(one)
            for one in self.snapshots.values():
                if one is not other and one.identity not in past and not self._comes_after(one, other):
                    one.gone_from = min(one.gone_from, other.call)

    def _comes_after(self, one: Snapshot, other: Snapshot) -> bool:
        """Whether one can't have been left behind by the other."""
        if one.call > other.acked:
            return True  # whatever their sequences: see _check_order
        if one.sequence is not None and other.sequence is not None:
            return one.sequence > other.sequence
        return other.identity in self.ancestors(one.identity) or other.call < one.call

    def see(self, identity: int, sequence: int | None, when: float, what: str) -> Snapshot | None:
        """An answer shows this snapshot as a checkpoint."""
        one = self.snapshots.get(identity)
        if one is None:
            self.faults.append(f"{what} shows {identity}, which nobody asked to save")
            return None
        if sequence is not None:
            if one.sequence not in (None, sequence):
                self.faults.append(
                    f"{what}: snapshot {identity} committed twice: sequence {one.sequence}, then {sequence}"
                )
            one.sequence = sequence
        one.acked = min(one.acked, when)
        return one


def _may_be_there(one: Snapshot) -> bool:
    return one.acked < NEVER or one.last not in _REFUSED


def check(events: Iterable[Event]) -> list[str]:
    """Everything in the history that must never be, in words."""
    ordered = sorted(events, key=lambda event: event.get("ret", event["call"]))
    faults: list[str] = []
    for name in sorted({event["run"] for event in ordered}):
        of_run = [event for event in ordered if event["run"] == name]
        faults += [f"run {name}: {fault}" for fault in _check_run(of_run)]
    return faults


def _check_run(events: list[Event]) -> list[str]:
    run = Run()
    for event in events:  # what was asked, before what was answered
        _learn(run, event)
    for event in events:
        _hear(run, event)
    run.reckon()
    for event in events:
        if event["op"] in ("listing", "final"):
            _check_listing(run, event)
        if event["op"] in ("latest", "restore"):
            _check_answer(run, event)
        if event["op"] == "told":
            _check_told(run, event)
        if event["op"] == "final":
            _check_final(run, event)
    _check_order(run)
    _check_refused(run, events)
    return list(dict.fromkeys(run.faults))


def _learn(run: Run, event: Event) -> None:
    match event["op"]:
        case "policy":
            run.keep_last = event["keep_last"]
        case "snapshot":
            one = run.snapshots.setdefault(
                event["identity"], Snapshot(event["identity"], event["step"], event["after"], event["call"])
            )
            one.may_take_way = event["gives_way"]
            one.took_way = "ret" not in event and event["gives_way"]
            if "ret" in event:
                one.last = event["state"]
                one.sealed = event["way"] == "slot" and event["state"] not in (
                    *_REFUSED,
                    "copying",
                    "unknown",
                )
        case "hit":
            if (one_hit := run.snapshots.get(event["identity"])) is not None:
                one_hit.hit = min(one_hit.hit, event["call"])
                one_hit.bad = min(one_hit.bad, event["ret"] if event["done"] else NEVER)
        case "trouble":
            run.troubles.append((event["call"], event.get("ret", NEVER)))


def _hear(run: Run, event: Event) -> None:
    """Take in every answer that says that something is a checkpoint."""
    when = event.get("ret", event["call"])
    match event["op"]:
        case "told":
            one = run.snapshots[event["identity"]]
            one.last = event["state"]
            if event["state"] in _COMMITTED:
                run.see(one.identity, event["sequence"], when, "a ticket")
        case "latest" | "restore" if event.get("answer") is not None and not event.get("staged"):
            run.see(event["answer"], event["sequence"], when, event["op"])
        case "listing" | "final":
            for found in event["checkpoints"]:
                run.see(found["identity"], found["sequence"], when, event["op"])


def _check_listing(run: Run, event: Event) -> None:
    snapshots: dict[tuple[str, int], str] = {}
    sequences: dict[int, str] = {}
    for found in event["checkpoints"]:
        name, key = found["name"], (found["client"], found["snapshot"])
        if key in snapshots:
            run.faults.append(f"snapshot {key} committed twice: {snapshots[key]} and {name}")
        if found["sequence"] in sequences:
            run.faults.append(
                f"sequence {found['sequence']} twice: {sequences[found['sequence']]} and {name}"
            )
        snapshots[key] = sequences[found["sequence"]] = name
        one = run.snapshots.get(found["identity"])
        if one is not None and one.step != found["step"]:
            run.faults.append(f"{name} holds step {found['step']}, asked was {one.step}")


def _check_answer(run: Run, event: Event) -> None:
    """An answer is never older than what was known to be durable before it was asked, and isn't gone by it."""
    what, until = event["op"], event["ret"]
    if event.get("torn"):
        run.faults.append(f"a restore of {event['answer']} brought back a mixture: {event['torn']}")
    if event.get("staged"):
        return
    if event.get("answer") in run.snapshots and run.snapshots[event["answer"]].bad < event["call"]:
        run.faults.append(f"{what} answers {event['answer']}, which had been damaged or deleted")
    if event.get("wanted") is not None:
        return
    seen = event["sequence"] if event.get("answer") is not None else None
    for one in run.snapshots.values():
        if one.acked >= event["call"] or one.sequence is None or run.may_be_gone(one, until):
            continue
        if seen is None or seen < one.sequence:
            said = f"answers {seen}" if seen is not None else event.get("error") or "says there is none"
            run.faults.append(f"{what} {said}, though {one.sequence} ({one.identity}) was durable")
            return


def _check_told(run: Run, event: Event) -> None:
    """Nothing is found corrupt, or gone before it was verified, that nobody damaged and that had to stay."""
    one = run.snapshots[event["identity"]]
    if event["state"] == "corrupt" and not run.may_be_gone(one, event["ret"]):
        run.faults.append(f"{one.identity} was told to be corrupt or gone, and nobody damaged or removed it")


def _check_final(run: Run, event: Event) -> None:
    there = {found["identity"]: found for found in event["checkpoints"]}
    for one in run.snapshots.values():
        lost = one.identity not in there and not run.may_be_gone(one, NEVER)
        if lost and one.acked < NEVER:
            run.faults.append(f"{one.identity} was acknowledged as {one.sequence} and is lost")
        elif lost and one.sealed and one.last not in _REFUSED and not run.troubles and not run.gave_way(one):
            run.faults.append(f"{one.identity} was sealed and is lost; the last that was told: {one.last}")
    for identity, found in there.items():
        model = run.snapshots.get(identity)
        if model is not None and model.hit < NEVER:
            continue
        if not found["whole"]:
            run.faults.append(f"{found['name']} isn't whole, and nobody damaged it")
        elif set(found["contents"]) != {identity}:
            run.faults.append(f"{found['name']} holds {sorted(set(found['contents']))}, asked was {identity}")


def _check_order(run: Run) -> None:
    """Sequences only grow: what is asked after an acknowledgement comes after it.

    But for what somebody damaged or deleted before the later one was acknowledged: the next sequence is one more than
    the highest that anything on disk shows (or a cache knows, which a kill may leave behind), and of that nothing may.
    """
    acked = sorted(
        (one for one in run.snapshots.values() if one.sequence is not None), key=lambda each: each.acked
    )
    for one in sorted(run.snapshots.values(), key=lambda each: each.call):
        for other in acked:
            if other.acked >= one.call:
                break
            falls = one.sequence is not None and other.sequence is not None and one.sequence <= other.sequence
            if falls and other.hit >= one.acked:
                run.faults.append(
                    f"{one.identity} has sequence {one.sequence}, asked after {other.identity} had {other.sequence}"
                )


def _check_refused(run: Run, events: list[Event]) -> None:
    """What was refused for good is no checkpoint."""
    for event in events:
        if event["op"] not in ("listing", "final"):
            continue
        for found in event["checkpoints"]:
            one = run.snapshots.get(found["identity"])
            if one is not None and one.last in _REFUSED:
                run.faults.append(f"{found['name']} is {one.identity}, which was told to be {one.last}")

"""The daemon process: lock, recovery, socket, loop, and a clean exit."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from ckptd import __version__
from ckptd.disk import own_leftovers
from ckptd.disk.lock import RootLock
from ckptd.disk.priority import Urgency, step_back_session
from ckptd.disk.rootdir import DaemonRecord, Root, own_start, private_dir
from ckptd.disk.slot_folder import record_root
from ckptd.disk.too_full import no_space
from ckptd.errors import NO_SPACE, RootMoved
from ckptd_daemon.core import recovery
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.connections import allow_descriptors
from ckptd_daemon.core.cut_memory import surviving_cuts
from ckptd_daemon.core.daemon_settings import DaemonSettings
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.core.endpoint import Endpoint, StreamEndpoint, last_words
from ckptd_daemon.core.late_slots import LateSlots
from ckptd_daemon.core.logs import Logs, say_log
from ckptd_daemon.core.lookup import Lookup
from ckptd_daemon.core.loopback import Doorkeeper, Keys, check_listen
from ckptd_daemon.core.own_memory import OwnMemory, give_back
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.proofs import Proofs
from ckptd_daemon.core.publication import Publication
from ckptd_daemon.core.server import Server, Signals
from ckptd_daemon.core.service import Service
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.core.status import describe
from ckptd_daemon.core.streams import Streams
from ckptd_daemon.core.who_waits import Writes, proof_is_waited_for, somebody_waits
from ckptd_daemon.core.worker import Worker
from ckptd_daemon.series.settings_file import Settings
from ckptd_daemon.verify.rota import check_every
from ckptd_daemon.verify.verifier_process import Verifier

log = logging.getLogger(__name__)

LOG_FILE: Final = "daemon.log"
LEFT_AT_ONCE: Final = 1  #: exit code after a second signal


def run_daemon(settings: DaemonSettings) -> int:
    """Serve a root until a signal, a Stop or idleness ends it; returns the exit code 0.

    SIGTERM, SIGINT and SIGHUP drain: attached clients are served until they leave or the grace is over, and
    everything accepted is written. A second one ends the process at once, by exit code 1: what was accepted
    stays in its slots, and the next start writes it.

    Raises:
        BadRoot: The root can't be used. Nothing was changed.
        RootLocked: Another process holds it. Nothing was changed.
        InvalidArgument: The settings file is wrong. Nothing was changed.
        NoSpace: The disk is too full for what a daemon writes to be found, or for new settings.
        OSError: The disk is broken, so that it couldn't even start.
    """
    allow_descriptors()
    root = Root.open(settings.root, create=True)
    try:
        _serve(root, settings)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise no_space(root.path, error) from error
    return 0


def _serve(root: Root, settings: DaemonSettings) -> None:
    with surviving_cuts(), RootLock(root) as lock:
        policies = settings.into_file(root)
        log_path = settings.log_path or root.service_dir / LOG_FILE
        with Logs(log_path, to_stdout=not (settings.autostarted or settings.quiet)) as logs:
            Daemon(lock, settings, policies, str(log_path), logs.flush).run()


def _record_root(folder: Path, root: Root) -> None:
    try:
        record_root(folder, root.path)
    except OSError as error:  # it only matters should the root's id be lost
        log.warning("slots.root_not_recorded folder=%s error=%s", folder, error)


class Daemon:
    """The parts of one daemon, put together. Its root's lock is held from before until after."""

    def __init__(
        self, lock: RootLock, settings: DaemonSettings, policies: Settings, log_path: str,
        flush_log: Callable[[], None],
    ) -> None:  # fmt: skip
        root = lock.root
        self._lock, self._root, self._settings, self._flush_log = lock, root, settings, flush_log
        self._verifier = Verifier(root.path, scrub_every_s=check_every(policies.scrub_every_s, "scrub"))
        self._maker, self._stream_worker = Worker("ckptd-slots"), Worker("ckptd-streams")
        self._prover = Worker("ckptd-proofs")
        self._disk = Disk(
            root, policies, urgency=Urgency(False, step_back_session), in_place=lock.place.check
        )
        self._disk.root_lost = self._leave_lost_root
        self._budget = policies.budget
        self._pool = SlotPool(root.slot_dir(), prepare=lambda: _record_root(root.slot_dir(), root))
        _record_root(self._pool.folder, root)
        pid, pid_started = own_start()
        self._socket_path, self._stream_path = root.new_socket_path(), root.new_socket_path()
        self._record = DaemonRecord(
            endpoint=f"ipc://{self._socket_path}", pid=pid, pid_started=pid_started,
            daemon_id=secrets.token_hex(8), started_at=time.time(), version=__version__, log=log_path,
        )  # fmt: skip
        self._signals = Signals(self._leave_at_once)

    def run(self) -> None:
        """Recover, serve, leave."""
        log.info("daemon.started pid=%d root=%s version=%s", self._record.pid, self._root.path, __version__)
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._signals.close)
            facts = recovery.open_runs(self._disk, recovery.runs_on_disk(self._root))
            recovery.remove_stale_sockets(self._root)
            recovery.sweep(self._root)
            self._disk.writing.mode.find_out(self._root.service_dir)
            endpoint = Endpoint(self._socket_path)
            leaving.callback(last_words, endpoint)
            inlet = StreamEndpoint(self._stream_path)
            leaving.callback(last_words, inlet)
            clients = self._clients(endpoint, inlet)
            if self._settings.listen is not None:
                self._listen(check_listen(self._settings.listen), endpoint, inlet, clients.streams, leaving)
            leaving.callback(self._close_slots, clients)
            for run, known in facts.items():
                clients.pipeline.opened(run, known)
            adopted = recovery.adopt(self._disk, clients, self._pool)
            gc.freeze()  # what is known of thousands of checkpoints stays: no collection need go through it
            give_back()  # what it took to compile and to recover
            publication = self._publication(endpoint, inlet)
            server = self._server(endpoint, inlet, clients, publication)
            leaving.callback(self._verifier.stop)
            self._start_helpers(leaving)
            publication.publish()
            leaving.callback(publication.withdraw)
            self._say_ready(adopted)
            server.run()
            publication.withdraw()  # from now on nobody new comes; those who just did get an answer
            server.finish()
        log.info("daemon.left pid=%d", self._record.pid)

    def _listen(
        self, address: str, endpoint: Endpoint, inlet: StreamEndpoint, streams: Streams,
        leaving: contextlib.ExitStack,
    ) -> None:  # fmt: skip
        """Take clients by TCP too. The keys are only as secret as daemon.json, so its folder must be ours alone."""
        private_dir(self._root.service_dir)
        keys = Keys.make()
        for one in (endpoint, inlet):
            leaving.callback(Doorkeeper(one.context, keys).close)
        tcp = endpoint.listen(address, keys)
        streams.endpoint_tcp = inlet.listen(f"{address.rpartition(':')[0]}:*", keys)
        self._record = dataclasses.replace(
            self._record, tcp=tcp, tcp_server_key=keys.server, tcp_client_secret=keys.client_secret
        )
        log.info("daemon.listening tcp=%s", tcp)

    def _clients(self, endpoint: Endpoint, inlet: StreamEndpoint) -> Clients:
        clients = Clients(
            daemon_id=self._record.daemon_id, disk=self._disk, pool=self._pool, maker=self._maker,
            send=endpoint.send, say=say_log.info, verify=self._verifier.verify, budget=self._budget,
        )  # fmt: skip
        clients.pipeline = Pipeline(self._disk, self._pool, clients, time.monotonic)
        clients.streams = Streams(
            clients.sessions, self._stream_worker, self._maker, inlet.send, time.monotonic, clients.staged
        )
        clients.streams.pipeline, clients.streams.endpoint = clients.pipeline, inlet.address
        return clients

    def _publication(self, endpoint: Endpoint, inlet: StreamEndpoint) -> Publication:
        return Publication(
            self._lock, self._record, endpoint, self._disk.submit, self._leave_lost_root, inlet=inlet
        )

    def _server(
        self, endpoint: Endpoint, inlet: StreamEndpoint, clients: Clients, publication: Publication
    ) -> Server:
        service = Service(
            clients=clients, pipeline=clients.pipeline, pool=self._pool, send=endpoint.send,
            lookup=Lookup(self._disk, clients.pipeline),
            status=lambda: describe(
                self._root, publication.record, clients, self._pool, self._verifier.status(),
                self._disk.writing.facts(),
            ),
        )  # fmt: skip
        late_slots = LateSlots(self._disk, clients, self._pool, time.monotonic)
        self._proofs = Proofs(clients.pipeline, self._pool, self._prover, time.monotonic, clients.attached)

        memory, writes = OwnMemory(lambda: endpoint.cut_off() + inlet.cut_off()), Writes(clients.pipeline)

        def keep_house() -> None:
            memory.look()
            late_slots.look()
            self._pool.look(time.monotonic())
            self._proofs.look()
            publication.look()
            clients.streams.look()
            self._disk.writing.urgency.set(somebody_waits(clients))
            self._verifier.hurry(proof_is_waited_for(clients))
            self._verifier.writing(writes.under_way())

        return Server(
            endpoint, inlet, service, self._workers(), self._verifier, self._signals,
            grace_s=self._settings.grace_s, idle_exit_s=self._settings.idles_for_s,
            housekeeping=keep_house,
        )  # fmt: skip

    def _start_helpers(self, leaving: contextlib.ExitStack) -> None:
        leaving.callback(own_leftovers.remove, self._root.path)  # once nothing writes any more
        leaving.callback(self._disk.close)
        for worker in self._workers():
            worker.start()
            leaving.callback(worker.stop)
        leaving.callback(self._proofs.stop)
        try:
            self._verifier.start()
        except OSError as error:
            log.warning("verifier.not_started error=%s", error)  # read_reports tries again

    def _workers(self) -> tuple[Worker, ...]:
        return self._stream_worker, self._maker, self._prover, self._disk.worker

    def _say_ready(self, adopted: int) -> None:
        log.info("daemon.ready endpoint=%s adopted=%d", self._record.endpoint, adopted)
        also = f"; writing {adopted} snapshots that were left in shared memory" if adopted else ""
        say_log.info("serving %s (pid %d)%s", self._root.path, self._record.pid, also)

    def _close_slots(self, clients: Clients) -> None:
        """Free all memory but that of clients that live and of snapshots that couldn't be written yet."""
        clients.bury_dead()
        if kept := len(list(self._pool)) + len(self._pool.unread):
            log.warning("slots.kept count=%d folder=%s", kept, self._pool.folder)
        if lost := clients.streams.buffers.unwritten():
            log.error("streams.lost count=%d they couldn't be written, and lie in no shared memory", lost)
        self._pool.close()

    def _leave_lost_root(self, error: RootMoved) -> NoReturn:
        """Nothing at the root's path is ours any more. What is sealed is written where the root is now, by a start
        there: its slots are found by the id that it carries. Where it is no more nobody needs the empty ones.
        """
        log.error("root.lost %s", error)
        say_log.error("%s", error)
        if self._lock.place.removed:
            self._pool.remove_empty()
        self._flush_log()
        with contextlib.suppress(OSError):
            self._socket_path.unlink(missing_ok=True)
            self._stream_path.unlink(missing_ok=True)
        os._exit(LEFT_AT_ONCE)

    def _leave_at_once(self) -> NoReturn:
        """The second signal: sealed snapshots stay in shared memory, and the next start writes them."""
        with contextlib.suppress(OSError):
            self._socket_path.unlink(missing_ok=True)
            self._stream_path.unlink(missing_ok=True)
            self._record.remove(self._root)
        os._exit(LEFT_AT_ONCE)

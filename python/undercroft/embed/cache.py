"""The cache of one namespace in a program of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from undercroft.config import OPTIONS, UndercroftConfig
from undercroft.embed.blocks import Blocks, Group, Job, Layout, Registration, SaveRequest, least_boundary, runs
from undercroft.embed.memory import Attachment, span
from undercroft.engine import close_engine, open_engine
from undercroft.log import LogOnce, logger

if TYPE_CHECKING:
    from undercroft._core import Engine, Extent, Lookup, SaveGrant, Session

EMBED_OPTIONS = tuple(option.name for option in OPTIONS if option.scope in ("engine", "session"))
"""The options of `Cache.open`: those of `kv_connector_extra_config` that concern memory, disks, stores and servers."""
EMBED_DEFAULTS = {"server_timeout_ms": 1000}
"""Defaults that differ from the connector's. vLLM's scheduler prefers a miss to 5 ms without a reply. Here calls wait
for seconds, and a server on a busy host may reply late, so that the same miss would compute what the call could load.
"""
_BEYOND = 1 << 30
"""More tokens than any chain has: a lookup that needs so many reads nothing."""
_RETRY_S = 0.005
"""Seconds after which a save that found no memory asks again."""
_ATTACH_AGAIN_S = 1.0
_STEP_S = 0.001
"""Seconds between two looks at a job that waits for a server or for memory."""


class Cache:
    """One namespace of a cache: the blocks of one model in one format. All methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        groups: Sequence[Group],
        block_tokens: int,
        *,
        owns_engine: bool = True,
    ) -> None:
        """Use `open`."""
        self.engine = engine
        """The engine, for `_core.Engine.stats`, `_core.Engine.info` and `_core.Engine.flush`."""
        self.session = session
        self._owns_engine = owns_engine
        self._layout = Layout(groups, block_tokens)
        self._lock = threading.Lock()
        self._log_once = LogOnce()
        self._attachment: Attachment | None = None
        self._attaching = False
        self._attach_at = 0.0
        self._numbers = itertools.count(1)
        """Of the copier's jobs, and of the names that are not the caller's."""
        self._copying: dict[int, Job] = {}
        """By number of the copier's job."""
        self._granting: dict[int, Job] = {}
        """Saves that wait for a server's grant, by transfer."""
        self._waiting: deque[tuple[float, Job]] = deque()
        """Saves that found no memory, each with the time at which it asks again."""
        self._ended: list[Job] = []
        self._is_closed = False
        self._attach()

    @classmethod
    def open(
        cls,
        options: Mapping[str, Any],
        identity: Mapping[str, Any] | str,
        groups: Sequence[Group],
        block_tokens: int,
        *,
        alignment_tokens: int | None = None,
    ) -> Cache:
        """Open a cache, alone or together with other programs that have the same directories or the same server.

        ``options``: undercroft's options by name, `EMBED_OPTIONS`; those that are left out come from the environment.
        Some defaults differ from the connector's: `EMBED_DEFAULTS`.
        ``identity``: everything that must be equal for bytes to be interchangeable, as JSON: the weights' digest, the
        data type, the layout, sizes. ``groups``: at most 32. ``block_tokens``: tokens of each hash of a chain.
        ``alignment_tokens``: every hit is a multiple of this (default: of a hash).

        Raises ConfigError for an option, a size or a group that cannot be, StoreError for a directory.
        """
        config = UndercroftConfig.parse(options, place="the options", allowed=EMBED_OPTIONS, defaults=EMBED_DEFAULTS)
        return cls.of(open_engine(config), identity, groups, block_tokens, alignment_tokens=alignment_tokens)

    @classmethod
    def of(
        cls,
        engine: Engine,
        identity: Mapping[str, Any] | str,
        groups: Sequence[Group],
        block_tokens: int,
        *,
        alignment_tokens: int | None = None,
        owns_engine: bool = True,
    ) -> Cache:
        """Like `open`, for an engine that is open. ``owns_engine``: the cache closes it, also if this raises."""
        text = identity if isinstance(identity, str) else json.dumps(identity, sort_keys=True, separators=(",", ":"))
        try:
            whole = [Registration(one, one.block_tokens or block_tokens) for one in groups]
            session = engine.register(text, whole, block_tokens, alignment_tokens)
            return cls(engine, session, groups, block_tokens, owns_engine=owns_engine)
        except BaseException:
            if owns_engine:
                engine.close()
            raise

    def add_region(self, memory: Any) -> int:
        """Name memory of this program in which blocks may lie, and return its address: a writable buffer, or a pair of
        an address and a size. It must stay where it is until `close` has returned. Raises ValueError."""
        address, size = span(memory)
        with self._lock:
            self._layout.add_region(address, size)
        return address

    # Questions

    def find(
        self,
        name: str,
        chain: list[bytes],
        *,
        begin: int = 0,
        end: int | None = None,
        wait_s: float | None = None,
        planned: bool = False,
        queued_tokens: int = 0,
    ) -> Lookup:
        """Ask how much of a chain can be loaded, and start the reads that this needs; never waits.

        While `Lookup.pending`, ask again, or `wait`. Then `Lookup.tokens` is the end of the hit. Its blocks stay in
        memory until `begin_load`, `forget`, or another question with this ``name``, which the caller chooses.
        ``begin``: the tokens that the program has. ``end``: where a hit ends at the latest. ``wait_s``: the hit
        ends with the blocks that are read within so many seconds. ``planned``: load the part that takes less time to
        load than to compute, by the steps reported to `_core.Session.report_steps`.
        """
        wait = None if wait_s is None else (wait_s * 1e3, 0.0)
        least = least_boundary(begin, planned)
        return self.session.lookup(name, chain, begin, end, wait, least, planned, queued_tokens)

    def prefetch(
        self,
        name: str,
        chain: list[bytes],
        *,
        begin: int = 0,
        end: int | None = None,
        planned: bool = False,
        queued_tokens: int = 0,
    ) -> None:
        """Start the reads of a later `find` with the same ``name``; demanded reads precede them."""
        self.session.prefetch(name, chain, begin, end, None, least_boundary(begin, planned), planned, queued_tokens)

    def wait(self, name: str, timeout_s: float) -> bool:
        """Wait until `find` has an answer, and return whether it has."""
        return self.session.wait(name, timeout_s)

    def forget(self, name: str) -> None:
        """End the questions with this name. Loads that have begun go on."""
        self.session.finish_request(name)

    def exists(self, chain: list[bytes], *, timeout_s: float = 0.1) -> int:
        """The tokens of the deepest hit in any tier but a remote store, without a read. ``timeout_s``: for a server."""
        return self.exists_each([chain], timeout_s=timeout_s)[0]

    def exists_each(self, chains: Sequence[list[bytes]], *, timeout_s: float = 0.1) -> list[int]:
        """`exists` of several chains, which are asked together."""
        names, until = [self._new_name() for _ in chains], time.monotonic() + timeout_s
        try:
            found = [
                self.session.lookup(name, chain, 0, None, None, _BEYOND)
                for name, chain in zip(names, chains, strict=True)
            ]
            for at, name in enumerate(names):
                if found[at].pending and self.session.wait(name, max(0.0, until - time.monotonic())):
                    found[at] = self.session.lookup(name, chains[at], 0, None, None, _BEYOND)
            return [0 if one.pending else one.shared_tokens for one in found]
        finally:
            for name in names:
                self.forget(name)

    # Loads and saves

    def load(self, chain: list[bytes], blocks: Sequence[Blocks], *, begin: int = 0, timeout_s: float = 5.0) -> Job:
        """Read blocks into the program's memory, and wait for them. Blocks that are not read within ``timeout_s``
        seconds are misses. ``begin``: the tokens before the first block."""
        name, until = self._new_name(), time.monotonic() + timeout_s
        job, is_shorter = self._layout.job(blocks, is_load=True, is_awaited=True), True
        try:
            with self._ended_after_an_error([job]):
                while is_shorter:
                    found = self._found(name, chain, begin, until)
                    count, end = job.copied_bytes, 0 if found.pending else found.tokens
                    job.ended = False
                    self._wait_for(self._load(job, name, begin, end))
                    # Blocks for which there was no memory follow when those before them have left it.
                    is_shorter = end < found.shared_tokens and count < job.copied_bytes and time.monotonic() < until
                    begin = end
                return job
        finally:
            self.forget(name)

    def _found(self, name: str, chain: list[bytes], begin: int, until: float) -> Lookup:
        """The answer of `find` that there is until then."""
        wait_s = max(0.0, until - time.monotonic())
        found = self.find(name, chain, begin=begin, wait_s=wait_s)
        while found.pending and (left := until - time.monotonic()) > 0 and self.wait(name, left):
            found = self.find(name, chain, begin=begin, wait_s=wait_s)
        return found

    def save(self, chain: list[bytes], blocks: Sequence[Blocks], *, timeout_s: float = 5.0) -> Job:
        """Save blocks, and wait until they are in memory of the cache; they are written to the disk afterwards. Blocks
        for which there is no memory within ``timeout_s`` seconds are not saved."""
        return self.save_each([(chain, blocks)], timeout_s=timeout_s)[0]

    def save_each(self, saves: Sequence[tuple[list[bytes], Sequence[Blocks]]], *, timeout_s: float = 5.0) -> list[Job]:
        """`save` of the blocks of several chains, which are under way together."""
        jobs = [self._layout.job(blocks, is_load=False, is_awaited=True) for _, blocks in saves]
        with self._ended_after_an_error(jobs):
            for job, (chain, _) in zip(jobs, saves, strict=True):
                self._save(job, chain, timeout_s)
            return [self._wait_for(job) for job in jobs]

    def begin_load(self, name: str, blocks: Sequence[Blocks], *, begin: int, end: int) -> Job:
        """Start the copies of a hit that `find` has found, from ``begin`` to ``end`` tokens. `poll` returns the job.
        Blocks that the hit does not have are left as they are. Raises ValueError for memory outside the regions."""
        return self._load(self._layout.job(blocks, is_load=True), name, begin, end)

    def _load(self, job: Job, name: str, begin: int, end: int) -> Job:
        load = self.session.begin_load(name, begin, end - begin) if end > begin else None
        with self._lock:
            if load is None:
                self._end(job)
                return job
            job._transfer = load.transfer_id
            with self._or_miss(job):
                self._copy(job, load.session, load.extents)
        return job

    def begin_save(self, chain: list[bytes], blocks: Sequence[Blocks], *, timeout_s: float = 5.0) -> Job:
        """Start to save blocks. `poll` returns the job. The memory must keep its content until then. Raises ValueError
        for memory outside the regions."""
        return self._save(self._layout.job(blocks, is_load=False), chain, timeout_s)

    def _save(self, job: Job, chain: list[bytes], timeout_s: float) -> Job:
        job._until = time.monotonic() + timeout_s
        ends = [int(one.numbers[-1] + 1) * self._layout.tokens(one.group) for one in job.blocks if len(one.numbers)]
        tokens = min(max(ends, default=0), len(chain) * self._layout.block_tokens)
        job._asks = SaveRequest(self._new_name(), chain, tokens)
        with self._lock, self._or_miss(job):
            self._ask(job)
        return job

    def poll(self) -> list[Job]:
        """The loads and saves that have ended since the last call, but not those of `load` and `save`."""
        with self._lock:
            if self._copying or self._granting or self._waiting:
                self._advance()
            ended, self._ended = self._ended, []
            return ended

    @property
    def busy(self) -> bool:
        """Whether `poll` has more jobs to return."""
        with self._lock:
            return bool(self._copying or self._granting or self._waiting or self._ended)

    def drain(self) -> None:
        """End all jobs: copies that run are finished, and saves that wait for memory are given up. Waits for copies
        only, never for a disk or a server."""
        with self._ended_after_an_error(()):
            while True:
                with self._lock:
                    self._advance()
                    for job in [*(job for _, job in self._waiting), *self._granting.values(), *self._copying.values()]:
                        job._until = 0.0
                    self._end_waiting()
                    attachment = self._attachment
                    if not self._copying or attachment is None:
                        return
                attachment.copier.drain()

    def give_up(self, reason: str) -> None:
        """Save nothing more of the saves under way. `poll` returns them when none of their copies runs any more.

        ``reason``: see `_core.Session.give_up`.
        """
        with self._lock:
            for job in (*self._copying.values(), *self._granting.values()):
                if not job.is_load:
                    job._given_up = reason
            waiting, self._waiting = self._waiting, deque()
            for _, job in waiting:
                self._end(job)

    # The cache

    def stats(self) -> dict[str, Any]:
        """Counters and gauges since the start: `_core.Engine.stats`."""
        return self.engine.stats()

    def reset(self, timeout_s: float = 10.0) -> bool:
        """Drop everything of this namespace. Returns False if this is not durable in time."""
        return self.session.reset(timeout_s)

    def close(self) -> None:
        """End all jobs, finish the writes in flight (bounded) and release directories and memory. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            # From now on no copy begins, so none follows those that `drain` waits for.
            self._is_closed = True
        # An error of one must not keep the others open.
        with contextlib.ExitStack() as in_turn:
            if self._owns_engine:
                in_turn.callback(close_engine, self.engine)
            in_turn.callback(self.session.close)
            in_turn.callback(self._let_go)
            self.drain()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_name(self) -> str:
        return f"#{next(self._numbers)}"

    # Inside, with the lock

    def _ask(self, job: Job) -> None:
        """Ask for the slots of a save."""
        asks = job._asks
        asks.found_no_memory = False
        held = [run for one in job.blocks for run in runs(one)]
        grant = self.session.begin_save(asks.name, asks.chain, asks.tokens, held, only_offers=True)
        if grant is None:
            self._end(job)
        elif grant.pending:
            self._granting[grant.transfer_id] = job
        else:
            self._granted(job, grant)

    def _granted(self, job: Job, grant: SaveGrant) -> None:
        job._asks.found_no_memory, job._asks.kept = grant.refused == "host_full", grant.tokens
        job.lacks = {}
        for group, first, end in grant.lacks:
            job.lacks[group] = job.lacks.get(group, frozenset()).union(range(first, end))
        if not grant.extents:
            self._copied(job, ok=True)
            return
        job._transfer = grant.transfer_id
        if job._given_up:
            self._copied(job, ok=False)
            return
        self._copy(job, grant.session, grant.extents)

    def _copy(self, job: Job, session: int, extents: list[Extent]) -> None:
        """Start the copies of a transfer."""
        attachment = self._attached(session)
        if attachment is None:
            self._copied(job, ok=False)
            return
        number = next(self._numbers)
        size, job._piece, lacking = attachment.copier.submit_blocks(not job.is_load, number, extents, job._places)
        if lacking and not job.is_load:
            raise RuntimeError(f"the engine asks for blocks of group {min(lacking)} that the job does not bring")
        if not job._piece:
            self._copied(job, ok=True)
        else:
            self._copying[number] = job
            job.copied_bytes += size

    def _copied(self, job: Job, *, ok: bool) -> None:
        """A transfer of a job has ended, or could not begin."""
        if job._given_up:
            if job._transfer is not None:
                self.session.give_up(job._transfer, job._given_up)
            self._end(job)
            return
        if job._transfer is not None:
            self.session.end_transfer(job._transfer, ok)
            job._transfer = None
        if ok:
            for group, numbers in job._piece.items():
                job.done[group] = job.done.get(group, frozenset()).union(numbers)
        job._piece = {}
        if job.is_load:
            self._end(job)
            return
        if ok:
            self._layout.note_kept(job)
        if job._asks.found_no_memory and time.monotonic() < job._until:
            self._waiting.append((time.monotonic() + _RETRY_S, job))
        else:
            self._end(job)

    def _end(self, job: Job) -> None:
        if job.ended:
            return
        job.ended, job._asks.chain = True, []
        if not job._is_awaited:
            self._ended.append(job)
        if not job.is_load:
            self.session.finish_request(job._asks.name)

    @contextlib.contextmanager
    def _or_miss(self, job: Job) -> Iterator[None]:
        """An error in a step of a job is logged and ends the job, as a disk that fails does."""
        try:
            yield
        except Exception as error:
            kind = "a load" if job.is_load else "a save"
            self._log_once(logging.ERROR, type(error), "undercroft: %s failed: %s", kind, error, error=error)
            with contextlib.suppress(Exception):
                if job._transfer is not None:
                    self.session.end_transfer(job._transfer, False)
            with contextlib.suppress(Exception):
                self._end(job)

    def _advance(self) -> None:
        for grant in self.session.poll_saves() if self._granting else ():
            if (job := self._granting.pop(grant.transfer_id, None)) is not None:
                with self._or_miss(job):
                    self._granted(job, grant)
        attachment = self._attachment
        for number, seconds in attachment.copier.poll() if attachment is not None else ():
            if (job := self._copying.pop(number, None)) is None:
                continue
            job.seconds += seconds
            with self._or_miss(job):
                # If the engine has ended meanwhile, the slots may have had other bytes.
                self._copied(job, ok=attachment is not None and self._is_current(attachment))
        self._end_waiting()
        now = time.monotonic()
        for _ in range(len(self._waiting)):
            if self._waiting[0][0] > now:
                break
            job = self._waiting.popleft()[1]
            with self._or_miss(job):
                self._ask(job)

    # The arena

    def _is_current(self, attachment: Attachment) -> bool:
        address = self.engine.arena
        return (address.arena_id, address.session) == (attachment.arena.arena_id, attachment.session)

    def _attached(self, session: int) -> Attachment | None:
        """The arena with the slots of a session. If it is not here, the next one is fetched on a thread."""
        if self._is_closed:
            return None
        attachment = self._attachment
        if attachment is not None and attachment.session == session and self._is_current(attachment):
            return attachment
        if not self._attaching and time.monotonic() >= self._attach_at:
            self._attaching = True
            try:
                threading.Thread(target=self._attach, name="undercroft-attach", daemon=True).start()
            except RuntimeError as error:  # the system has no thread left
                self._attach_later(error)
        return None

    def _attach(self) -> None:
        """Release an arena whose engine has ended, and attach the present one."""
        from undercroft import _core

        try:
            old = self._attachment
            if old is not None:
                old.copier.drain()
                with self._lock:
                    self._advance()
                    self._attachment = None
                old.arena.let_go()
            address = self.engine.arena
            if address.socket:
                arena = _core.Arena.attach(address.socket, address.session)
                attachment = Attachment(arena, _core.Copier(arena), address.session)
                with self._lock:
                    is_late = self._is_closed
                    if not is_late:
                        self._attachment = attachment
                if is_late:
                    arena.let_go()
            self._attach_later(None)
        except Exception as error:
            self._attach_later(error)

    def _let_go(self) -> None:
        with self._lock:
            attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.arena.let_go()

    def _attach_later(self, error: Exception | None) -> None:
        if error is not None:
            logger.warning("undercroft: the engine's memory cannot be used yet: %s", error)
        self._attach_at = time.monotonic() + _ATTACH_AGAIN_S
        self._attaching = False

    def _wait_for(self, job: Job) -> Job:
        """Wait for a job: copies end by themselves, and saves by their time limit."""
        while True:
            with self._lock:
                attachment = self._attachment
                self._advance()
                if job.ended:
                    return job
                is_copying = job in self._copying.values()
            if is_copying and attachment is not None:
                attachment.copier.drain()
            else:
                time.sleep(_STEP_S)

    @contextlib.contextmanager
    def _ended_after_an_error(self, jobs: Sequence[Job]) -> Iterator[None]:
        """After an error the caller takes its memory back: no copy uses it any more, and the jobs have ended."""
        try:
            yield
        except BaseException:
            with self._lock:
                for job in jobs:
                    job._given_up, job._until = "" if job.is_load else "retry", 0.0
                attachment = self._attachment
            if attachment is not None:
                attachment.copier.drain()
            with self._lock, contextlib.suppress(Exception):
                self._end_waiting()
                self._advance()
            raise

    def _end_waiting(self) -> None:
        """End saves whose time is over and that wait for memory or a server's grant."""
        now = time.monotonic()
        for transfer, job in list(self._granting.items()):
            if job._until <= now:
                # The grant may still arrive: no copy follows it.
                del self._granting[transfer]
                with self._or_miss(job):
                    self.session.end_transfer(transfer, False)
                    self._end(job)
        if not self._waiting:
            return
        late = [job for _, job in self._waiting if job._until <= now]
        self._waiting = deque(one for one in self._waiting if one[1]._until > now)
        for job in late:
            self._end(job)

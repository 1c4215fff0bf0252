"""The Rust core. Types are documented here and checked against the module."""

from collections.abc import Callable
from typing import Any, final

__version__: str

class UndercroftError(Exception):
    """Base of every error the core raises; the message names what was found and what to do."""

class ConfigError(UndercroftError):
    """A configuration value is impossible on this machine (too large, not a directory, ...)."""

class StoreError(UndercroftError):
    """A disk directory is foreign, damaged, of another format version, or in use."""

def resolve(
    groups: list[tuple[str, int, int, int]],
    hash_block_tokens: int,
    alignment_tokens: int,
    present: list[list[bool]],
    max_tokens: int,
    local_tokens: int = 0,
) -> int:
    """Where a hit may end, in tokens: for tests and tools.

    ``groups``, ``hash_block_tokens``, ``alignment_tokens``: as for `Engine.register`. ``present``: per group and block,
    whether its payload can be had. ``max_tokens``: the deepest boundary of use. ``local_tokens``: what the device has.
    """

@final
class Engine:
    """The engine, embedded: index, host arena, job table, disk tier, and the IO thread."""

    def __new__(
        cls,
        *,
        host_memory: int,
        disks: list[tuple[str, int]] = ...,
        io_engine: str = "auto",
        io_depth: int = 32,
        runtime_dir: str | None = None,
        socket: str | None = None,
        promotion_memory: int | None = None,
        min_load_tokens: int = 1,
        eviction_policy: str = "lru",
        disk_admission: str = "all",
        disk_write_rate: int = 0,
        share: bool = False,
        server_timeout_ms: float = 5.0,
        lookup_spin_us: float = 200.0,
    ) -> Engine:
        """Open the engine.

        ``host_memory``: size of the arena in bytes. ``disks``: (directory, capacity in bytes) of each device.
        ``io_engine``: "auto", "io_uring" or "thread_pool". ``runtime_dir``: where the socket is made (default:
        $XDG_RUNTIME_DIR/undercroft or /tmp/undercroft-<uid>, mode 0700).
        ``socket``: exactly where instead. ``promotion_memory``: most bytes that reads from disk may hold at once
        (default: half of the arena). ``share``: if a directory is in use by another engine of this user, use that one,
        and take the directories over when it ends. The others are as in `undercroft.config`; ``disk_write_rate`` is in
        bytes per second, 0 for no limit.

        Raises ConfigError, StoreError.
        """

    @property
    def is_shared(self) -> bool:
        """Whether another process owns the directories, and this one uses its engine (see ``share``)."""

    @property
    def took_over(self) -> bool:
        """Whether this process has taken the directories over from an engine that ended."""

    @property
    def arena(self) -> tuple[str, int, int]:
        """Where workers get the arena: (socket, generation of the arena, token of the session, 0 if it is not shared).

        The generation is another one whenever the arena is another one.
        """

    def link(self) -> tuple[str, str]:
        """Whether the engine can be used ("up", "late", "down" or "refused"), and why not."""

    def status(self) -> dict[str, Any]:
        """What goes on: as `server_status`."""

    def register(
        self,
        description: str,
        groups: list[tuple[str, int, int, int]],
        hash_block_tokens: int,
        alignment_tokens: int | None = None,
        dropped_tokens: int = 0,
    ) -> Session:
        """A session for one namespace.

        ``description``: canonical JSON of all that must be equal for bytes to be interchangeable; its SHA-256 is the
        namespace. ``groups``: per KV cache group (kind, tokens per block, payload bytes of all ranks together, window
        in tokens or 0), kind one of "full", "sliding_window", "chunked_local", "state", "ignored".
        ``hash_block_tokens``: tokens per block hash; each group's tokens per block is a multiple of it.
        ``alignment_tokens``: every hit is a multiple of this (default: of a block hash). ``dropped_tokens``: how far
        before the end of what is cached every hit must end.

        Raises ConfigError if a payload does not fit the arena.
        """

    def stats(self) -> dict[str, Any]:
        """Counters and gauges since the start, as one flat dict of numbers (keys in `undercroft.connector.stats`)."""

    def info(self) -> dict[str, Any]:
        """What was configured and found: sizes, IO engine, O_DIRECT, blocks recovered, namespaces, messages."""

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until nothing is in flight or waits to be written, at most ``timeout_s`` seconds (GIL released).

        Returns whether that is so.
        """

    def close(self) -> None:
        """Finish writes under way (bounded), stop the IO thread, release the directories. Idempotent."""

@final
class Client:
    """The engine of an `undercroft serve` on this host. It is connected in the background, again and again."""

    def __new__(cls, socket: str, *, server_timeout_ms: float = 5.0, lookup_spin_us: float = 200.0) -> Client:
        """Nothing is done yet. ``server_timeout_ms``: a server that owes a reply for longer counts as gone until it
        answers. ``lookup_spin_us``: longest wait of `Session.poll` for a reply that is on its way."""

    @property
    def is_shared(self) -> bool: ...
    @property
    def took_over(self) -> bool: ...
    @property
    def arena(self) -> tuple[str, int, int]:
        """As `Engine.arena`; ("", 0, 0) before there was a session."""

    def register(
        self,
        description: str,
        groups: list[tuple[str, int, int, int]],
        hash_block_tokens: int,
        alignment_tokens: int | None = None,
        dropped_tokens: int = 0,
    ) -> Session:
        """The session: one for a client. As `Engine.register`.

        If the server is not there the session is opened when it comes. Raises ConfigError if the server refuses it.
        """

    def stats(self) -> dict[str, Any]:
        """As `Engine.stats`, of about a second ago; empty before there was a session."""

    def info(self) -> dict[str, Any]:
        """As `Engine.info`; empty before there was a session."""

    def link(self) -> tuple[str, str]:
        """Whether there is a session ("up", "late", "down" or "refused"), and why not."""

    def close(self) -> None:
        """End the session. Idempotent."""

def server_status(socket: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """What goes on in the server at ``socket``. Raises UndercroftError if nobody answers there.

    Keys: version, pid, uptime_s, socket, stats (`Engine.stats`), info (`Engine.info`), sessions (list of namespace,
    connected, workers, jobs, pending, loads, saves), server (connections, workers, refused, malformed, lookups,
    descriptors).
    """

@final
class Session:
    """One vLLM engine's use of one namespace. Every call takes microseconds and never blocks on IO."""

    @property
    def namespace(self) -> str:
        """Digest of the namespace, hexadecimal."""

    def submit(
        self,
        request_id: str,
        hashes: list[bytes],
        num_computed_tokens: int = 0,
        max_tokens: int | None = None,
        wait_ms: tuple[float, float] | None = None,
    ) -> None:
        """Start the lookup of a request, and the promotion of what lies on disk only. Idempotent.

        ``num_computed_tokens``, ``max_tokens``, ``wait_ms``: as for `poll`.
        """

    def poll(
        self,
        request_id: str,
        hashes: list[bytes],
        num_computed_tokens: int,
        max_tokens: int | None = None,
        wait_ms: tuple[float, float] | None = None,
    ) -> int | None:
        """The deepest usable boundary in tokens, counted from the start of the prompt, or None while it is pending.

        ``num_computed_tokens``: what the device itself already holds; blocks before it are not fetched. An answer not
        above it means that there is nothing to load. ``max_tokens``: the deepest boundary of use (a hit must stay
        below the number of tokens). ``wait_ms``: (base, per 1,000 tokens) after which the answer is what host memory
        holds; None waits for all. A request that was not submitted is submitted.
        """

    def wait(self, request_id: str, timeout_s: float) -> bool:
        """Wait until a lookup is no longer pending, woken by its answer, at most ``timeout_s`` seconds (GIL released).

        Returns whether it is; the answer is then `poll`'s.
        """

    def shared_tokens(self, request_id: str) -> int:
        """How many tokens of the request's prompt its last lookup found a chain for, whether a hit may end there."""

    def tiers(self, request_id: str, num_computed_tokens: int, num_external_tokens: int) -> tuple[int, int]:
        """Of the tokens after ``num_computed_tokens``, how many came from (host, disk). For metrics."""

    def begin_load(
        self, request_id: str, num_computed_tokens: int, num_external_tokens: int
    ) -> tuple[int, int, list[tuple[int, int, bytes]]] | None:
        """Pin the payloads of a load: (job id, session's token, per group (group, first block's index, offsets)).

        The slots are kept for the session with this token (see `Engine.arena`), and for no other.

        ``offsets``: little-endian int64 arena offsets, one per block from that index on; -1 where the group needs no
        block (before a window). None if a payload has meanwhile gone: the caller must then report the load as failed.
        """

    def end_load(self, job_id: int, ok: bool) -> None:
        """All ranks have ended the copies of a load. After ``ok=False`` the request's later lookups answer 0."""

    def begin_save(
        self, request_id: str, hashes: list[bytes], num_tokens: int, offers: list[tuple[int, int, int]] = ...
    ) -> int | None:
        """Ask for slots for the blocks of the first ``num_tokens`` tokens that are not here yet.

        Returns the number of the save, whose answer comes from `grants`: at once from an engine in this process, soon
        from a server. None if no server is there. ``offers``: what the device holds of groups that are not full
        attention, as (group, first block, block after the last); it is added to tokens that were saved before, too.
        """

    def grants(self) -> list[tuple[int, int, int, list[tuple[int, int, bytes]], bool]]:
        """The answers to `begin_save` that have come since the last call.

        (number of the save, job id or 0 if there is nothing to copy, session's token, per group (group, index of the
        first block, offsets), whether blocks were left out). An offset is -1 for a block that is here already or that
        is left out. What was left out (arena full of data in use) can be asked for again.
        """

    def end_save(self, job_id: int, ok: bool) -> None:
        """All ranks have ended the copies of a save: its payloads become visible, or are dropped."""

    def discard(self, request_id: str) -> None:
        """The lookup of a request is not needed any more. Loads and saves under way go on. Idempotent."""

    def finish(self, request_id: str) -> None:
        """The request has finished or was aborted: forget it. Loads and saves under way go on. Idempotent."""

    def reset(self, timeout_s: float = 10.0) -> bool:
        """Drop everything of this namespace, durably. False if that could not be made durable in time."""

    def close(self) -> None:
        """End the session: all of its jobs and leases are freed. Idempotent."""

@final
class Arena:
    """An engine's arena, mapped into this process (a worker's)."""

    @staticmethod
    def attach(socket_path: str, session: int = 0) -> Arena:
        """Get the descriptor from the engine's socket (same uid only) and map it. Raises UndercroftError.

        ``session``: the token of `Engine.arena`.
        """

    @staticmethod
    def create(size: int) -> Arena:
        """An arena of this process alone, for benchmarks and tests of the copiers. Raises UndercroftError."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def generation(self) -> int:
        """The engine's number of this arena, as in `Engine.arena_generation`."""

    @property
    def is_served(self) -> bool:
        """Whether its engine still runs, as far as the socket tells; true without one (`create`)."""

@final
class Copier:
    """Copies between device pages in host memory (vLLM's CPU platform) and the arena, on threads of its own.

    Loads go before saves. When it is dropped, it first finishes what was submitted.
    """

    def __new__(cls, arena: Arena, threads: int = 1) -> Copier: ...
    def submit(self, job_id: int, to_arena: bool, addresses: bytes, offsets: bytes, sizes: bytes) -> None:
        """Queue copies: little-endian int64 arrays of device addresses, arena offsets and sizes in bytes.

        The memory at the addresses must stay valid, and untouched by others, until the job is returned by `poll`. A
        range outside the arena raises UndercroftError and queues nothing.
        """

    def poll(self) -> list[tuple[int, float]]:
        """Jobs that have ended since the last call: (job id, seconds from the first byte to the last)."""

    def drain(self) -> None:
        """Wait until every queued job has ended (GIL released)."""

def bench_replay(
    trace: str, host_blocks: int, disk_blocks: int, policy: str, second_touch: bool = False
) -> dict[str, Any]:
    """Replay a trace on the engine, without payloads: hit rates and insert rates.

    ``policy`` is "lru" or "leafhd"; ``disk_blocks`` 0 means no disk tier. Keys of the result: ``undercroft bench
    replay``. Raises UndercroftError.
    """

def bench_disk(
    directory: str, block_bytes: int, blocks: int, depth: int = 32, io_engine: str = "auto"
) -> dict[str, Any]:
    """The disk tier through the whole engine, against a bare O_DIRECT loop in the same run.

    ``directory`` must be empty and is left so. Keys of the result: ``undercroft bench disk``. Raises UndercroftError.
    """

def bench_recover(directory: str, blocks: int) -> dict[str, Any]:
    """How long opening a directory of ``blocks`` blocks takes.

    ``directory`` must be empty and is left so. Keys of the result: ``undercroft bench recover``. Raises
    UndercroftError.
    """

def inspect(directory: str) -> dict[str, Any]:
    """What a cache directory holds. Changes nothing.

    Keys: format_version, capacity_bytes, used_bytes, records, damaged_records, namespaces (a list of digest,
    description, blocks, bytes, and the age of the oldest and newest block, oldest_s and newest_s, in seconds). Raises
    StoreError.
    """

def verify(directory: str, progress: Callable[[int, int], object]) -> dict[str, Any]:
    """Reads every payload of a cache directory and compares its checksum. Changes nothing.

    ``progress(done, total)`` is called now and then. Keys of the result: checked, corrupt, bytes. Of a directory in
    use, blocks may be replaced meanwhile and count as corrupt. Raises StoreError.
    """

def drop_namespace(directory: str, digest: str) -> int:
    """Remove namespaces from a cache directory that is not in use: how many whose digest starts with ``digest``.

    At least eight hexadecimal digits. Raises StoreError.
    """

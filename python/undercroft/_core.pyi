"""The Rust core. Types are documented here and checked against the module."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np

from undercroft.errors import ConfigError as ConfigError
from undercroft.errors import ServerError as ServerError
from undercroft.errors import StoreError as StoreError
from undercroft.errors import UndercroftError as UndercroftError

__version__: str
__build__: str
"""Profile, platform and commit of the build."""

class _Group(Protocol):
    """A KV cache group."""

    @property
    def kind(self) -> str:
        """One of "full", "sliding_window", "chunked_local", "state", "ignored"."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block: a multiple of the hash block size."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block, of all ranks together."""

    @property
    def window_tokens(self) -> int:
        """Tokens of the window or chunk; ignored for other kinds."""

class _Offer(Protocol):
    """Blocks of a group, which is not of full attention, that the device holds."""

    @property
    def group(self) -> int:
        """Index of the group."""

    @property
    def first_block(self) -> int:
        """Index of the first block in the request's block table of that group."""

    @property
    def end_block(self) -> int:
        """Index of the block after the last."""

def resolve(
    groups: Sequence[_Group],
    hash_block_size: int,
    alignment_tokens: int,
    present: list[list[bool]],
    max_tokens: int,
    num_computed_tokens: int = 0,
) -> int:
    """The boundary at which a hit ends, in tokens, for tests and tools.

    ``groups``, ``hash_block_size``, ``alignment_tokens``: as for `Engine.register`. ``present``: per group and block,
    whether its payload is cached. ``max_tokens``: the deepest boundary that can be used. ``num_computed_tokens``:
    tokens that the device holds. Raises ConfigError.
    """

@final
class ArenaAddress:
    """The address from which workers get the arena."""

    @property
    def socket(self) -> str:
        """The engine's socket; empty before the first session with a server."""

    @property
    def arena_id(self) -> int:
        """Id of the arena. Each arena has another id."""

    @property
    def session(self) -> int:
        """The token of the session with which workers attach; 0 for the engine of this process."""

@final
class Lookup:
    """How much of a prompt is cached."""

    @property
    def pending(self) -> bool:
        """Whether payloads are being read from disk or a server's reply is due. The caller asks again later."""

    @property
    def tokens(self) -> int:
        """The deepest usable boundary, counted from the start of the prompt; 0 if there is nothing to load."""

    @property
    def shared_tokens(self) -> int:
        """Tokens of the prompt whose chain is in the index, usable or not: other prompts share them. 0 if pending."""

@final
class Extent:
    """Blocks of one group, with the arena offset of each."""

    @property
    def group(self) -> int:
        """Index of the group."""

    @property
    def first_block(self) -> int:
        """Index of the first block in the request's block table of that group."""

    @property
    def offsets(self) -> bytes:
        """One little-endian int64 for each block: bytes from the start of the arena, -1 if nothing is to be copied."""

@final
class Load:
    """A load that has begun: its payloads stay in their slots until `Session.end_transfer`."""

    @property
    def transfer_id(self) -> int:
        """Id of the load for `Session.end_transfer`."""

    @property
    def session(self) -> int:
        """The session that the payloads are kept for, and no other: that of `ArenaAddress`."""

    @property
    def extents(self) -> list[Extent]:
        """The slots to copy from."""

    @property
    def host_tokens(self) -> int:
        """Tokens that were in host memory."""

    @property
    def disk_tokens(self) -> int:
        """Tokens that were read from disk."""

    @property
    def remote_tokens(self) -> int:
        """Tokens that were read from the remote store."""

@final
class SaveGrant:
    """The grant of slots for a save, which may be pending."""

    @property
    def transfer_id(self) -> int:
        """Id of the save for `Session.end_transfer`, and of its pending grant."""

    @property
    def pending(self) -> bool:
        """Whether `Session.poll_saves` returns the grant with this `transfer_id` later; other fields are unused."""

    @property
    def session(self) -> int:
        """The session that the slots are kept for, and no other: that of `ArenaAddress`."""

    @property
    def extents(self) -> list[Extent]:
        """The slots to fill. Empty and not pending: there is nothing to copy, and the save has ended."""

    @property
    def tokens(self) -> int:
        """With the blocks that are copied now, the cache has every block of full attention up to here."""

    @property
    def refused(self) -> str | None:
        """Why the save does not go further: "host_full" (memory is full: it may be retried) or "prefix_gone"."""

    @property
    def lacks(self) -> list[tuple[int, int, int]]:
        """Blocks of full attention that neither the cache nor the caller has: group, first number, end."""

@final
class Engine:
    """An engine that opens sessions: of this process, of the process that has its directories open, or of a server."""

    def __new__(cls, options: dict[str, Any]) -> Engine:
        """Open the engine. ``options`` have the names of `undercroft.config`, except for sizes. Each may be left out:

        ``server`` ("unix:///path"), ``server_timeout_ms``, ``lookup_spin_us``, ``host_memory`` (bytes), ``disks`` (list
        of {"path", "capacity" in bytes}), ``promotion_memory`` (bytes; default: half of the arena), ``pin_memory``
        (bytes; default: three tenths of it), ``io_engine``, ``io_depth``,
        ``min_load_tokens``, ``load_margin``, ``disk_admission``,
        ``disk_write_rate`` (bytes per second), ``disk_ttl`` (seconds), ``remote`` (URL), ``remote_object`` (bytes),
        ``remote_write``,
        ``remote_write_rate`` (bytes per second), ``remote_ttl`` (seconds), ``remote_any_owner``, ``verify_host``,
        ``socket_dir``, ``socket`` (the socket's path, instead of a path in ``socket_dir``), and ``share`` (if a
        directory is in use by another engine of this user, use that engine, and take the directories over when it
        ends). With ``server`` the engine's own options have no effect.

        Raises ConfigError, StoreError.
        """

    @property
    def is_shared(self) -> bool:
        """Whether another process runs the engine, or did when it was opened."""

    @property
    def took_over(self) -> bool:
        """Whether this process has taken over the directories of an engine that ended."""

    @property
    def arena(self) -> ArenaAddress:
        """The address from which workers get the arena now."""

    def register(
        self,
        description: str,
        groups: Sequence[_Group],
        hash_block_size: int,
        alignment_tokens: int | None = None,
        dropped_tokens: int = 0,
    ) -> Session:
        """Open a session for one namespace. An engine of another process accepts one, opened when its server answers.

        ``description``: canonical JSON of all that must be equal for bytes to be interchangeable; its SHA-256 is the
        namespace. ``hash_block_size``: tokens per block hash. ``alignment_tokens``: every hit is a multiple of this
        (default: of a block hash). ``dropped_tokens``: how far before the end of the cached tokens every hit must end.

        Raises ConfigError if a payload does not fit the arena or the server refuses the session, StoreError if the
        owner of the directories does not answer.
        """

    def stats(self) -> dict[str, Any]:
        """Counters and gauges since the start, as one flat dict of numbers (keys: `connector.observe.stats`).

        A server's numbers are about a second old, and empty before the first session.
        """

    def info(self) -> dict[str, Any]:
        """The engine's options, and the findings on its disks; empty before the first session with a server.

        Keys: host_memory, huge_pages, io_engine, io_fallback, registered_buffers, disks (list of path, capacity,
        o_direct, blocks_recovered, health, fault), blocks_recovered, records_dropped, records_damaged, namespaces.
        """

    def status(self) -> dict[str, Any]:
        """The result of `server_status` for the engine's own server. Raises ServerError."""

    def connection(self) -> tuple[str, str]:
        """Whether the engine can be used ("up", "late", "down" or "refused"), and why not."""

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until no block is in flight or waits to be written, at most ``timeout_s`` seconds (GIL released).

        Returns whether this state is reached. Does not wait for the engine of another process.
        """

    def limit_reads(self, bytes_per_s: float | None = None) -> bool:
        """For benchmarks: let reads from the disks end at a rate. With 0 they never end. None removes the limit.

        False unless the engine is in this process and was opened with ``inject_faults``, an option of builds with the
        feature ``faults`` such as that of ``make build``.
        """

    def close(self) -> None:
        """End the session with a server. For an engine of this process: finish writes in flight (bounded), stop the
        threads and release the directories. Idempotent; nothing in a forked child, which has none of these."""

def take_log() -> list[tuple[str, str]]:
    """The lines for the log since the last call, in order, each with its level ("info" or "warning"). They are those of
    all engines of this process."""

def wait_log(timeout_s: float) -> None:
    """Wait at most ``timeout_s`` seconds for lines for the log, and leave them for `take_log` (GIL released)."""

def operate(socket: str, operation: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
    """Let the engine at ``socket`` carry out an operation, and return the answer. Raises ServerError.

    ``{"explain": {"request": PREFIX, "misses": bool, "before": int | None}}``: ``lookups``, the latest first, and
    ``before``, with which to ask for more. ``{"clear": {"what": "all" | {"namespace": DIGITS} | {"older_than":
    SECONDS}, "erase": bool}}``, ``{"cleared": {}}``, ``{"drain": {"cancel": bool}}`` and ``{"drained": {}}``: the
    progress, as the commands of these names print it with ``--json``; ``error`` if it is refused. ``{"resize":
    {"host_bytes": BYTES, "disk_bytes": BYTES}}`` and ``{"resized": {}}``: the sizes, likewise. ``{"describe":
    {"namespace": DIGEST}}``: its ``description``, or None.
    """

def server_status(socket: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """The status of the server at ``socket``. Raises ServerError if no server answers there.

    Keys: version, pid, uptime_s, socket, stats (`Engine.stats`), info (`Engine.info`), sessions (list of namespace,
    connected, workers, lookups, pending, loads, saves), server (connections, workers, refused, malformed, lookups,
    descriptors).
    """

def default_server_socket() -> str:
    """The default socket of `undercroft serve` and `undercroft status`."""

@final
class Session:
    """One vLLM scheduler's use of one namespace.

    Calls take microseconds and never wait for IO, except calls with a timeout. Each call may be repeated. No call
    fails: without an engine there are misses.
    """

    @property
    def namespace(self) -> str:
        """Digest of the namespace, hexadecimal."""

    def lookup(
        self,
        request_id: str,
        hashes: list[bytes],
        num_computed_tokens: int = 0,
        max_tokens: int | None = None,
        wait_ms: tuple[float, float] | None = None,
        min_tokens: int = 0,
        planned: bool = False,
        queued_tokens: int = 0,
    ) -> Lookup:
        """Look up a prompt. Starts to promote the payloads that are on disk only.

        ``num_computed_tokens``: tokens that the device itself already holds; their blocks are not fetched.
        ``max_tokens``: the deepest boundary that can be used. ``min_tokens``: the least boundary that can be used. If
        no hit can end there or beyond, nothing is promoted, and `Lookup.shared_tokens` is the end of the deepest hit.
        ``wait_ms``: (base, per 1,000 tokens), after which the answer is the hit in host memory. Without it, ``planned``
        loads only tokens that take less time to load than to compute; without both, the lookup waits for all.
        ``queued_tokens``: tokens of earlier requests that are not computed. The payloads of a hit stay in the arena
        until the request's next lookup, its load, or its end.
        """

    def prefetch(
        self,
        request_id: str,
        hashes: list[bytes],
        num_computed_tokens: int = 0,
        max_tokens: int | None = None,
        wait_ms: tuple[float, float] | None = None,
        min_tokens: int = 0,
        planned: bool = False,
        queued_tokens: int = 0,
    ) -> int:
        """Like `lookup`, but the scheduler does not wait yet: reads of demanded lookups precede its reads.

        Returns the shared tokens, like `Lookup.shared_tokens`; 0 while a server has not answered.
        """

    def wait(self, request_id: str, timeout_s: float) -> bool:
        """Wait until a lookup is no longer pending, woken by its answer, at most ``timeout_s`` seconds (GIL released).

        Returns whether it is answered. The next `lookup` returns the answer.
        """

    def ended_waits(self) -> list[str]:
        """The requests whose `lookup` was pending and would now be answered otherwise; each is named once.

        All other lookups that were pending still are.
        """

    def rest(self, request_id: str) -> tuple[str, int | None] | None:
        """The reason why the last answer of a request has no more tokens: a name of `undercroft.reasons.REASONS`, and
        the seconds since the missing block was evicted or lost. None before the first answer."""

    def end_lookup(self, request_id: str) -> None:
        """End the request's lookup: the request was admitted without a load, or the lookup was given up."""

    def begin_load(self, request_id: str, num_computed_tokens: int, num_external_tokens: int) -> Load | None:
        """Begin the load of the tokens after ``num_computed_tokens``, up to a boundary that the last hit covers.

        None if no hit covers these tokens: the caller reports the load as failed.
        """

    def begin_save(
        self,
        request_id: str,
        hashes: list[bytes],
        num_tokens: int,
        offers: Sequence[_Offer] = ...,
        only_offers: bool = False,
        wanted: bool = False,
    ) -> SaveGrant | None:
        """Ask for slots for the full blocks of the first ``num_tokens`` tokens that are not cached yet.

        None if no server can be asked. ``offers`` may belong to hash blocks that are cached already. ``only_offers``:
        the caller holds no other blocks, of full attention neither. Then a save ends before the first block that it
        needs and nobody has (`SaveGrant.lacks`), and without the beginning of the chain it takes no slot. ``wanted``: a
        hint names the blocks, so that no policy refuses them for being worth little.
        """

    def hint(
        self,
        request_id: str,
        hashes: list[bytes],
        verb: str,
        max_tokens: int | None = None,
        ttl_s: float = 300.0,
        name: str = "",
    ) -> tuple[str, int, str]:
        """Give a hint about a prompt's future use. ``verb``: "prefetch", "pin", "demote" or "release".

        Returns "accepted", "clipped", "rejected" or "pending", the number of tokens to which the hint applies, and for
        a rejected hint the reason. Finish the request afterwards: it holds hashes in a server. Raises ValueError for
        another verb.
        """

    def take_events(
        self, restart: bool = False
    ) -> tuple[bool, list[tuple[bool, str, int, bytes, bytes | None]], bool] | None:
        """The changes in the tiers since the last call; None if there is no change.

        ``restart``: the caller has forgotten all earlier changes, so every block in the tiers is reported again.

        Returns whether all earlier changes are void, the changes (stored, tier, group, hash, parent's
        hash; the tiers are "host", "disk" and "remote"), and whether more changes can be taken at once.
        """

    def poll_saves(self) -> list[SaveGrant]:
        """The grants of pending saves that have arrived since the last call."""

    def end_transfer(self, transfer_id: int, ok: bool) -> None:
        """All ranks have ended the copies of a load or a save, or no rank will copy.

        After a failed load the request's lookups are misses. A failed save is dropped.
        """

    def give_up(self, transfer_id: int, reason: str) -> None:
        """End a load or a save that is not wanted any more, when no rank copies any more. Neither counts as failed.

        ``reason``: "reset", "weights" (of a save), or "retry" (of a save that is asked for again). Raises ValueError
        for another reason.
        """

    def finish_request(self, request_id: str, turn_end: int = 0) -> None:
        """The request has finished or was aborted. Its loads and saves go on.

        ``turn_end`` is the same 32-bit number for turns whose last tokens are the same; 0: not known. Raises
        OverflowError for a number out of range.
        """

    def report_steps(self, steps: Sequence[tuple[int, int, int, float]]) -> None:
        """Steps that the vLLM has run, for the planner: prompt tokens, the sum of their positions, decodes, seconds."""

    def reset(self, timeout_s: float = 10.0) -> bool:
        """Drop everything of this namespace. Returns False if the reset is not durable in time."""

    def change_weights(self, description: str | None = None) -> None:
        """The weights change: use the namespace of ``description`` from now on, or with None a namespace that is shared
        with no other session. Earlier hits end. Saves under way end in the namespace in which they began."""

    def close(self) -> None:
        """End the session: its lookups, leases, loads and saves. Idempotent."""

@final
class Arena:
    """An engine's arena, mapped into this process (a worker's)."""

    @staticmethod
    def attach(socket_path: str, session: int) -> Arena:
        """Get the descriptor from the engine's socket (same uid only) and map it. Raises ServerError.

        ``session``: the token in `ArenaAddress`.
        """

    def let_go(self) -> None:
        """Tell the engine that this process will not copy from or to the arena any more.

        Without this call the engine keeps the slots of pending copies until the process ends.
        """

    @staticmethod
    def create(size: int) -> Arena:
        """An arena of this process alone, for benchmarks and tests of the copiers. Raises ConfigError."""

    def prefault(self, offset: int, length: int) -> None:
        """Allocate the memory of a range and map it into this process, in huge pages if the kernel has some.

        Before Linux 5.14, which lacks the call, nothing happens. Raises OSError if there is no memory, or if the range
        lies outside the arena.
        """

    def fileno(self) -> int:
        """The descriptor of the memory, which belongs to the arena.

        All processes that map the arena share one open file description. A process that locks the file against the
        other processes must open the file anew.
        """

    @property
    def nodes(self) -> list[int]:
        """NUMA nodes over which the memory is interleaved; empty if the kernel chooses the nodes."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    @property
    def arena_id(self) -> int:
        """Tells one arena from another; the same as in `ArenaAddress`."""

    @property
    def is_served(self) -> bool:
        """Whether the arena's engine still runs, by the state of the socket; true without an engine (`create`)."""

@final
class BlockPlaces:
    """The places of one group's blocks in the program's memory, checked."""

    def __new__(
        cls,
        group: int,
        parts: Sequence[int],
        numbers: np.ndarray,
        addresses: np.ndarray,
        regions: list[tuple[int, int]],
    ) -> BlockPlaces:
        """``parts``: the bytes of each part of a block. ``numbers`` and ``addresses`` are int64 arrays: the ascending
        numbers of the blocks, and the address of each part of each block. ``regions``: the beginning and the end of
        each region, ascending. Raises ValueError for a part outside the regions, and for arrays that do not fit
        together.
        """

@final
class Copier:
    """Copies between device pages in host memory (vLLM's CPU platform) and the arena, on threads of its own.

    Loads come before saves. When a copier is dropped, it first finishes the submitted jobs.
    """

    def __new__(cls, arena: Arena, threads: int = 1) -> Copier: ...
    def submit(self, to_arena: bool, jobs: list[tuple[int, list[BlockPieces]]]) -> None:
        """Queue all jobs, or none of them. Each job is a pair: its number, and its pieces.

        The memory at the addresses must stay valid, and no other thread may use it, until `poll` returns the job. A
        range outside the arena raises UndercroftError and queues nothing.
        """

    def submit_blocks(
        self, to_arena: bool, job: int, extents: list[Extent], places: list[BlockPlaces]
    ) -> tuple[int, dict[int, list[int]], dict[int, list[int]]]:
        """Queue the copies of one job between the slots of blocks and their places in the program's memory.

        ``places``: at most one entry for each group. Returns the bytes to be copied, and by group the numbers of the
        blocks that are copied, and of those that have slots and no places. A save that lacks places queues nothing;
        neither does a job without pieces. The memory at the places must stay valid, and no other thread may use it,
        until `poll` returns the job. A range outside the arena raises UndercroftError and queues nothing.
        """

    @property
    def routine(self) -> str:
        """Name of the routine that copies: the fastest routine on this processor. Waits for the measurement."""

    def poll(self) -> list[tuple[int, float]]:
        """Jobs that have ended since the last call: (job id, seconds from the first byte to the last)."""

    def drain(self) -> None:
        """Wait until every queued job has ended (GIL released)."""

@final
class BlockPages:
    """The pages of the blocks of one KV cache group on one rank."""

    def __new__(cls, addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, offsets: np.ndarray) -> BlockPages:
        """int64 arrays, an entry for each page: address in block 0, bytes from one block to the next, bytes, and offset
        in the block's shard. Raises ValueError for arrays of different lengths, and for negative numbers.
        """

    @property
    def aligned(self) -> bool:
        """Whether the pages can be copied by `StagedCopies`: they begin and end at multiples of 16 bytes."""

    def pieces(self, blocks: np.ndarray, offsets: np.ndarray, chunk: int | None = None) -> BlockPieces:
        """The pieces of blocks whose shards are at these offsets in the arena (int64 arrays), in order.

        Neighbours on both sides are one piece, and no piece lies on both sides of a multiple of ``chunk`` bytes in the
        arena.
        Raises ValueError for arrays of different lengths, for negative numbers, and for a chunk of 0 bytes.
        """

@final
class BlockPieces:
    """Runs of bytes to copy between a device and the arena, made by `BlockPages.pieces`."""

    def list(self) -> list[tuple[int, int, int]]:
        """The pieces: (device address, offset in the arena, bytes)."""

@final
class CopyBatches:
    """Copies between host and device on one stream of a CUDA device, in batches of 128 of which few are in flight.

    A call of the driver that finds no room for its copies waits for the device under a lock that every launch of the
    model needs. Here a thread waits for room without this lock and without Python's.
    """

    def __new__(cls, functions: Sequence[int], stream: int) -> CopyBatches:
        """``functions``: the addresses of eight functions of the driver: ``cuMemcpyBatchAsync`` (interface of CUDA
        12.8), ``cuEventCreate``, ``cuEventRecord``, ``cuEventQuery``, ``cuStreamWaitEvent``, ``cuModuleLoadData``,
        ``cuModuleGetFunction`` and ``cuLaunchKernel``. ``stream``: handle of a stream that is never destroyed. Raises
        ValueError for a null address.
        """

    def queue(self, to_arena: bool, pieces: BlockPieces, arena: int) -> None:
        """Queue copies, and wait while too many are in flight (GIL released). ``arena``: the arena's address.

        One thread at a time calls it for a stream. Raises RuntimeError if the driver refuses; earlier copies are then
        queued.
        """

@final
class StagedCopies:
    """Copies of small pages through a staging buffer, queued without Python's lock: kernels move the pages between the
    KV cache and shards in the buffer, and whole shards are copied.
    """

    def __new__(cls, copies: CopyBatches, kernels: int) -> StagedCopies:
        """``copies``: those of the stream of copies. ``kernels``: handle of a stream that is never destroyed. Raises
        RuntimeError if the driver refuses the kernel.
        """

    def queue(self, to_arena: bool, pieces: BlockPieces, staging: tuple[int, int], arena: int) -> None:
        """Queue the copies of the blocks of ``pieces`` as `CopyBatches.queue` does. ``staging``: address and bytes of
        the staging buffer. After another buffer, the caller waits for both streams first.

        Raises ValueError for pages that are not aligned, or a buffer without room for a shard, and RuntimeError if the
        driver refuses: then both streams may have work that the other one does not wait for.
        """

@final
class Replay:
    """Replays a trace on the engine's index, slots and policies. Stores no payloads."""

    def __new__(
        cls,
        host_blocks: int,
        disk_blocks: int = 0,
        second_touch: bool = False,
        disk_writes_per_s: float = 0.0,
    ) -> Replay:
        """An empty engine. Capacities are in blocks; without disk blocks there is no disk tier. The disk writes
        ``disk_writes_per_s`` blocks a second, or each block at once if that is 0. Raises ConfigError.
        """

    def request(self, prompt: int, blocks: list[int]) -> tuple[int, int]:
        """Serve a request: look up the first ``prompt`` of its blocks, then save all its blocks.

        A block's number, below 2**64, identifies the content of the block and of all blocks before it. Returns the
        number of blocks found in host memory, and the number found on disk.
        """

    def pass_time(self, seconds: float) -> None:
        """Let time pass until ``seconds`` after the start of the replay: the disk writes what waits for its rate."""

    @property
    def disk_writes(self) -> int:
        """Blocks written to disk so far."""

    @property
    def dropped_writes(self) -> int:
        """Writes of blocks that were not made because too many waited already."""

@final
class Fleet:
    """Replays a trace on many hosts behind a router, and on the remote store that they share. Stores no payloads."""

    def __new__(
        cls,
        *,
        hosts: int,
        router: str,
        parts: int,
        host_blocks: int,
        disk_blocks: int,
        second_touch: bool,
        disk_writes_per_s: float,
        store_objects: int,
        object_blocks: int,
        store_write: str,
        store_writes_per_s: float,
    ) -> Fleet:
        """Empty hosts, each with the capacities and rates of `Replay`, in blocks of requests.

        ``router``: "prefix", "random" or "sticky". ``parts``: blocks of the engine in a block of a request.
        ``store_objects``: objects that the store holds; 0 for no store. ``object_blocks``: the engine's blocks of an
        object, a power of two. ``store_write``: "all", "second_touch" or "none". ``store_writes_per_s``: blocks a
        second that a host writes to the store, or 0 for each at once. Raises ConfigError.
        """

    def request(self, seconds: float, session: int, prompt: int, blocks: list[int]) -> tuple[int, int, int, int]:
        """Serve a request that arrives ``seconds`` after the start, no earlier than those before.

        ``session``: a number that the requests of a session share. Returns the host's number, and the engine's blocks
        that were found in host memory, on disk and in the store.
        """

    def counts(self) -> dict[str, int]:
        """Counts of the hosts and of the store, by name. Blocks are the engine's; peaks are those of a minute."""

def reference_hits(prompts: list[int], blocks: list[list[int]], capacity: int) -> tuple[int, int]:
    """The blocks of prompts that LRU finds in a cache of ``capacity`` blocks, and those that the optimum finds.

    ``blocks``: the blocks of each request. ``prompts``: how many of them its prompt has.
    """

def available_memory() -> int:
    """Bytes of memory that this process may still take: the kernel's estimate, or the least that the limits of its
    control group and of the groups above leave. Inactive file cache counts as available. Raises UndercroftError if the
    kernel names no figure.
    """

def limiting_group() -> str | None:
    """The control group whose limit determines `available_memory`; None if the machine's memory does."""

def probe_io_uring() -> str | None:
    """Why this process cannot use io_uring, with the likely cause; None if it can. Opens a ring and closes it."""

def slots_in(capacity: int, payload_bytes: int) -> int:
    """Number of payloads of ``payload_bytes`` that a tier of ``capacity`` bytes holds if it holds no other payloads.
    Slots are aligned, and lie in pages. 0 if a payload fits no page."""

def inspect(directory: str) -> dict[str, Any]:
    """The contents of a cache directory. Changes nothing.

    Keys: format_version, used_by (the process that has the directory open), capacity_bytes, used_bytes, records,
    damaged_records, namespaces (a list of digest, description, blocks, bytes, and in seconds the ages of the oldest and
    newest block and of the last use: oldest_s, newest_s, last_use_s). Raises StoreError.
    """

def examine(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The outcome of opening the directories of these options, which have the form for `Engine`. For each directory:
    ``path``, ``error``, ``starts``, ``capacity``, ``is_kept`` and ``notes``. Changes nothing. Raises ConfigError."""

def descriptions(directory: str) -> list[str]:
    """The descriptions of the namespaces in a cache directory. The directory may be in use. Raises StoreError."""

def verify(directory: str, progress: Callable[[int, int], object]) -> dict[str, Any]:
    """Read every payload of a cache directory and compare its checksum. Changes nothing.

    ``progress(done, total)`` is called now and then. Keys of the result: checked, corrupt, bytes, corrupt_blocks (a
    list of namespace, offset, bytes), used_by. Blocks of a directory in use may be replaced meanwhile and count as
    corrupt. Raises StoreError.
    """

def export_namespace(
    directories: list[str], digest: str, path: str, key_file: str, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write the blocks on disk of the namespace whose digest starts with ``digest`` to a new file.

    Keys of the result: namespace, blocks, bytes, left_out. ``key_file`` has the keys of encrypted directories; empty
    for no keys. The written file is not encrypted. ``progress(done, total)`` is called now and then. If it raises, the
    export ends and leaves no file. Raises ConfigError, StoreError, UndercroftError.
    """

def import_namespace(socket: str, path: str, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Save the blocks of a file of `export_namespace` in the engine at ``socket``.

    Keys of the result: namespace, blocks, bytes, saved_blocks. ``progress(step, done, total)`` is called now and then.
    Raises ConfigError, ServerError, UndercroftError.
    """

def drop_namespace(directory: str, digest: str) -> int:
    """Remove the namespaces whose digest starts with ``digest`` from a cache directory that is not in use.

    ``digest`` has at least eight hexadecimal digits. Returns the number of removed namespaces. Raises ConfigError,
    StoreError.
    """

def remote_gc(
    url: str,
    progress: Callable[[list[int]], object],
    *,
    max_bytes: int | None = None,
    max_age: int | None = None,
    min_age: int = 60,
    dry_run: bool = False,
    any_owner: bool = False,
) -> dict[str, Any]:
    """Remove old objects from a remote store; ages are in seconds. ``progress([done, total])`` is called now and then.

    Keys of the result: objects, bytes, removed_objects, removed_bytes, skipped_objects, removed_leftovers,
    excess_bytes, oldest_s, dry_run, seconds. Raises ConfigError, UndercroftError.
    """

def remote_contents(url: str, *, any_owner: bool = False) -> dict[str, Any]:
    """The contents of a remote store. Changes no object.

    Keys: objects, bytes, other_objects, namespaces (a list of digest, description, objects, bytes, oldest_s, newest_s).
    Raises ConfigError, UndercroftError.
    """

def remote_examine(url: str, *, any_owner: bool = False) -> str | None:
    """Why an engine could not use a remote store now, for people; None if it probably could. Sends no request, and
    makes no directory. Raises ConfigError if the engine would refuse to start."""

def remote_check(url: str, *, any_owner: bool = False) -> list[dict[str, str]]:
    """Check a remote store. Each finding has name, status ("ok", "warn" or "fail"), found and advice. Raises
    ConfigError."""

def remote_measure(
    url: str,
    sizes: list[int],
    total: int,
    progress: Callable[[dict[str, Any]], object],
    *,
    any_owner: bool = False,
) -> dict[str, Any]:
    """Measure the speeds of a remote store, with about ``total`` bytes of objects of each size.

    Keys: probe_ms, probe_32_ms, sizes (the values that ``progress`` gets: object_bytes, put_bytes_per_s,
    get_bytes_per_s, bare_get_bytes_per_s, put_cpu_s_per_gb, get_cpu_s_per_gb, bare_get_cpu_s_per_gb),
    advised_bytes. Raises ConfigError, UndercroftError.
    """

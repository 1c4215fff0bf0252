"""Groups, blocks and jobs of a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from undercroft.embed.memory import merged
from undercroft.errors import ConfigError

if TYPE_CHECKING:
    from undercroft._core import BlockPlaces


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of one kind of a chain, such as the keys and values of all layers with full attention."""

    parts: tuple[int, ...]
    """Bytes of the pieces of a block, in their order. Each piece may lie anywhere."""
    kind: str = "full"
    """The blocks that a hit needs: "full" (all before its end), "sliding_window" and "chunked_local" (those of the
    window or chunk before its end) or "state" (the one at its end)."""
    block_tokens: int = 0
    """Tokens of a block, a multiple of the tokens of a hash; 0: as many as a hash."""
    window_tokens: int = 0
    """Tokens of the window or chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of one group, and their places in the program's memory."""

    group: int
    numbers: npt.NDArray[np.int64]
    """The number of each block, ascending: block n begins n times ``block_tokens`` after the chain's start."""
    addresses: npt.NDArray[np.int64]
    """The address of each part of each block, of shape (blocks, parts). Blocks of one part may have one dimension."""


@dataclass(slots=True, eq=False)
class SaveRequest:
    """What a save asks the cache for."""

    name: str = ""
    chain: list[bytes] = field(default_factory=list)
    tokens: int = 0
    """The end of the last block."""
    kept: int = 0
    """Tokens of the chain that the cache has once the copies have succeeded."""
    found_no_memory: bool = False
    """Whether blocks got no slot, so that the save asks again."""


@dataclass(slots=True, eq=False)
class Job:
    """A load or a save. Its fields have their values once it has `ended`."""

    blocks: tuple[Blocks, ...]
    is_load: bool
    ended: bool = False
    done: dict[int, frozenset[int]] = field(default_factory=dict)
    """By group, the numbers of the blocks that a load has brought, or that are in the cache after a save."""
    seconds: float = 0.0
    """Time of the copies."""
    copied_bytes: int = 0
    lacks: dict[int, frozenset[int]] = field(default_factory=dict)
    """By group, the numbers of blocks that neither the cache nor the job has, although a save needs them: its blocks
    after the first of these were refused. Save them together."""

    @property
    def complete(self) -> bool:
        """Whether all blocks are done."""
        return self.ended and all(len(self.done.get(one.group, ())) >= len(one.numbers) for one in self.blocks)

    _places: list[BlockPlaces] = field(default_factory=list)
    """Where the blocks lie, checked."""
    _asks: SaveRequest = field(default_factory=SaveRequest)
    _until: float = 0.0
    _transfer: int | None = None
    _piece: dict[int, list[int]] = field(default_factory=dict)
    """The blocks of the copy that runs."""
    _given_up: str = ""
    """Why nobody wants the save any more: a reason of `_core.Session.give_up`."""
    _is_awaited: bool = False
    """Whether a caller waits for this job, so that `poll` does not return it."""


def chain(pieces: Iterable[bytes], seed: bytes = b"") -> list[bytes]:
    """The hashes of a chain, each of which stands for all pieces up to its own (SHA-256).

    ``pieces``: the content of each block, such as its tokens as bytes. ``seed``: chains with different seeds share
    nothing, whatever their pieces are.
    """
    last, found = hashlib.sha256(b"undercroft" + seed).digest(), []
    for piece in pieces:
        last = hashlib.sha256(last + piece).digest()
        found.append(last)
    return found


class Registration:
    """A group as `_core.Engine.register` takes it."""

    def __init__(self, group: Group, block_tokens: int) -> None:
        if group.kind not in ("full", "sliding_window", "chunked_local", "state"):
            raise ConfigError(
                f'undercroft: a group of kind {group.kind!r}; allowed are "full", "sliding_window", "chunked_local" '
                'and "state"'
            )
        self.kind, self.block_tokens, self.window_tokens = group.kind, block_tokens, group.window_tokens
        self.payload_bytes = sum(group.parts)


class Layout:
    """The groups of a cache's blocks, and the memory of the program in which blocks may lie."""

    def __init__(self, groups: Sequence[Group], block_tokens: int) -> None:
        self.groups = tuple(groups)
        self.block_tokens = block_tokens
        self._regions: list[tuple[int, int]] = []

    def tokens(self, group: int) -> int:
        """Tokens of a block."""
        return self.groups[group].block_tokens or self.block_tokens

    def add_region(self, address: int, size: int) -> None:
        """Blocks may lie in this memory from now on."""
        known = [(begin, end - begin) for begin, end in self._regions]
        self._regions = [(begin, begin + length) for begin, length in merged({*known, (address, size)})]

    def job(self, blocks: Sequence[Blocks], *, is_load: bool, is_awaited: bool = False) -> Job:
        """A job of blocks. Raises ValueError for a group that does not exist or comes twice, and for memory outside the
        regions."""
        from undercroft._core import BlockPlaces

        own: list[Blocks] = []
        places: dict[int, BlockPlaces] = {}
        for group, *arrays in ((one.group, one.numbers, one.addresses) for one in blocks):
            if not 0 <= group < len(self.groups):
                raise ValueError(f"group {group}; there are {len(self.groups)}")
            if group in places:
                raise ValueError(f"group {group} comes twice")
            numbers, addresses = (np.asarray(array, np.int64) for array in arrays)
            places[group] = BlockPlaces(group, self.groups[group].parts, numbers, addresses, self._regions)
            own.append(Blocks(group, numbers, addresses))
        return Job(tuple(own), is_load, _places=list(places.values()), _is_awaited=is_awaited)

    def note_kept(self, job: Job) -> None:
        """Note which blocks of a save the cache has without a copy, and those that it has no more."""
        for one in job.blocks:
            kept = one.numbers[one.numbers < job._asks.kept // self.tokens(one.group)].tolist()
            if self.groups[one.group].kind == "full":
                job.done[one.group] = frozenset(kept)
            elif not job._asks.found_no_memory:
                job.done[one.group] = job.done.get(one.group, frozenset()).union(kept)
        job.done = {group: numbers for group, numbers in job.done.items() if numbers}


class Run(NamedTuple):
    """Blocks of a group, one after the other, that a save may take."""

    group: int
    first_block: int
    end_block: int


def runs(blocks: Blocks) -> list[Run]:
    """The blocks as runs."""
    numbers = blocks.numbers
    if not len(numbers):
        return []
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1:
        return [Run(blocks.group, first, last + 1)]
    breaks = np.nonzero(np.diff(numbers) != 1)[0]
    firsts = numbers[np.concatenate(([0], breaks + 1))]
    lasts = numbers[np.concatenate((breaks, [len(numbers) - 1]))]
    return [Run(blocks.group, int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]


def least_boundary(begin: int, planned: bool) -> int:
    """The least boundary of a hit, in tokens. Without a plan, a hit of one token counts."""
    return 0 if planned else begin + 1

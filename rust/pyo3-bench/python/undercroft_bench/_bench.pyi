"""The Rust part of the benchmarks."""

from typing import Any

def checksum_gbps(block_bytes: int, blocks: int, rounds: int) -> float:
    """How fast one thread compares payloads in the arena with their checksums, in 1e9 bytes/s.

    Raises UndercroftError.
    """

def disk(
    directory: str, block_bytes: int, blocks: int, depth: int = 32, io_engine: str = "auto", key_file: str = ""
) -> dict[str, Any]:
    """The disk tier through the whole engine, against a bare O_DIRECT loop in the same run.

    ``directory`` must be empty and is left so. Keys of the result: ``undercroft bench disk``. Raises UndercroftError.
    """

def recover(directory: str, blocks: int) -> dict[str, Any]:
    """How long opening a directory of ``blocks`` blocks takes.

    ``directory`` must be empty and is left so. Keys of the result: ``undercroft bench recover``. Raises
    UndercroftError.
    """

def replay(trace: str, host_blocks: int, disk_blocks: int, policy: str, second_touch: bool = False) -> dict[str, Any]:
    """Replay a trace on the engine, without payloads: hit rates and insert rates.

    ``policy`` is "lru" or "leafhd"; ``disk_blocks`` 0 means no disk tier. Keys of the result: ``undercroft bench
    replay``. Raises ConfigError, UndercroftError.
    """

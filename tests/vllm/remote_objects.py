"""Objects of a remote store that is a directory, as `docs/remote-format.md` describes them."""

from __future__ import annotations

import struct
from pathlib import Path

ALIGN = 4096
FIXED = 112
"""Bytes of the header before the block hashes; those of its checksum are the last 8."""
HASH = 32
PAYLOAD = struct.Struct("<IIIIQ")
POLYNOMIAL = 0x9A6C9329AC4BC9B5
"""Of CRC-64/NVME, the lowest bit first."""


def checksum(data: bytes) -> int:
    """CRC-64/NVME."""
    sum_ = (1 << 64) - 1
    for byte in data:
        sum_ ^= byte
        for _ in range(8):
            sum_ = sum_ >> 1 ^ (POLYNOMIAL if sum_ & 1 else 0)
    return sum_ ^ (1 << 64) - 1


def blocks_of(path: Path) -> int:
    """Payloads that an object has."""
    return int(struct.unpack_from("<I", path.read_bytes()[:FIXED], 52)[0])


def repeat_block(path: Path) -> None:
    """Put the second payload of an object at the place of the first, too: nothing in the object tells."""
    content = bytearray(path.read_bytes())
    length, hashes, payloads = (struct.unpack_from("<I", content, at)[0] for at in (12, 48, 52))
    at = FIXED + hashes * HASH
    one, other = (list(PAYLOAD.unpack_from(content, at + index * PAYLOAD.size)) for index in (0, 1))
    size = one[2]
    assert payloads >= 2
    assert other[2] == size
    one[4] = other[4]
    PAYLOAD.pack_into(content, at, *one)
    second = length + -(-size // ALIGN) * ALIGN
    content[length : length + size] = content[second : second + size]
    end = at + payloads * PAYLOAD.size
    summed = bytes(content[: FIXED - 8]) + bytes(content[FIXED:end])
    struct.pack_into("<Q", content, FIXED - 8, checksum(summed))
    path.write_bytes(content)

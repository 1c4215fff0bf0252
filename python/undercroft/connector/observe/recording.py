"""The option ``record``: a line for each request, for `undercroft estimate`.

A line holds the time, numbers of tokens, and a number for each block. This number is a hash of vLLM's block hash with a
random key, which is drawn at the start and never stored. So the file reveals neither text nor block hashes. The
scheduler passes the request's list of hashes to a thread, which does the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from undercroft.estimate.trace import FORMAT, VERSION
from undercroft.log import logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft.connector.groups import Groups

FILE_BYTES_MAX = 1 << 30
"""A file grows by some kilobytes with each long prompt."""
PENDING_MAX = 10_000
"""Most lines that wait to be written; further lines are left out."""
_NUMBER_BYTES = 6
_HASHES_AT_ONCE = 128
"""Hashes without a pause, about 0.1 ms. Then the interpreter switches to the scheduler's thread if it waits."""


class Recorder:
    """Appends each lookup to a file. No method raises or waits, but for `close`."""

    def __init__(self, path: Path, groups: Groups) -> None:
        """Raises nothing: an error at the opening of the file is logged."""
        self._groups = groups
        self._path = path
        self._key = os.urandom(32)
        self._pending: queue.SimpleQueue[tuple[float, int, int, int, Sequence[bytes]] | None] = queue.SimpleQueue()
        self._cached: dict[str, int] = {}
        self._admitted: set[str] = set()
        self._left_out = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def looked_up(self, request_id: str, cached: int) -> None:
        """The last lookup found ``cached`` tokens that need not be computed."""
        if request_id not in self._admitted:
            self._cached[request_id] = cached

    def admitted(self, request_id: str) -> None:
        """The request runs with the tokens that were found. After a preemption it is looked up again; that lookup does
        not count."""
        self._admitted.add(request_id)

    def finished(self, request: Request) -> None:
        """A request has ended; its block hashes do not change any more."""
        cached = self._cached.pop(request.request_id, 0)
        self._admitted.discard(request.request_id)
        if self._is_over:
            return
        if self._pending.qsize() >= PENDING_MAX:
            self._left_out += 1
            return
        prompt = request.num_prompt_tokens
        # The last token has no KV yet.
        blocks = max(0, request.num_tokens - 1) // self._groups.hash_block_size
        self._pending.put(
            (
                request.arrival_time,
                prompt,
                request.num_tokens - prompt,
                min(cached, prompt),
                request.block_hashes[:blocks],
            )
        )

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the pending lines, and end."""
        self._pending.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({FORMAT: VERSION, "block_tokens": self._groups.engine_block_size}) + "\n")
                self._write(file)
        except OSError as error:
            logger.error("undercroft: record = %s: %s; requests are not recorded", self._path, error.strerror)
        except Exception as error:
            logger.error("undercroft: record = %s: %r; requests are not recorded any more", self._path, error)
        self._is_over = True

    def _write(self, file: TextIO) -> None:
        while (one := self._pending.get()) is not None:
            arrival, prompt, output, cached, hashes = one
            line = {
                "timestamp": int(arrival * 1e3),
                "input_length": prompt,
                "output_length": output,
                "cached": cached,
                "hash_ids": self._numbers(hashes),
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            if self._pending.empty():
                file.flush()
            if file.tell() > FILE_BYTES_MAX:
                logger.warning(
                    "undercroft: record = %s has reached 1 GiB: requests are not recorded any more", self._path
                )
                return
        if self._left_out:
            logger.warning("undercroft: record = %s lacks %d requests: they came too fast", self._path, self._left_out)

    def _numbers(self, hashes: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        whole = self._groups.hashes(list(hashes))
        for start in range(0, len(whole), _HASHES_AT_ONCE):
            for one in whole[start : start + _HASHES_AT_ONCE]:
                digest = hashlib.blake2b(one, key=self._key, digest_size=_NUMBER_BYTES).digest()
                found.append(int.from_bytes(digest, "little"))
            time.sleep(0)
        return found

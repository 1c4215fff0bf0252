"""The requests of the demonstration: cold, warm from host memory, and warm from disk after a restart."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercroft.cli.output import print_table, say, show_progress
from undercroft.config import UndercroftConfig
from undercroft.demo.server import Answer, Server, ServerError

NAME = "demo"
COLD, WARM_HOST, WARM_DISK = "cold", "warm: host memory", "warm: disk, restarted"
PROMPT_TOKENS = 2000
OUTPUT_TOKENS = 16
RESET_TIMEOUT_S = 30
QUIET_S = 30
FACTS = (
    "The undercroft of the old mill holds {} barrels, and the keeper counts them on day {} of every month. ",
    "Wagon {} left the yard at dawn with {} sacks of flour and came back empty before noon. ",
    "In the ledger, line {} names a debt of {} crowns that nobody ever came to collect. ",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the table."""

    label: str
    kind: str
    answer: Answer
    sources: dict[str, int]
    """Cached tokens by tier."""


class Demo:
    """The whole run."""

    def __init__(self, place: Path, model: str | None, sizes: dict[str, str], vllm_arguments: Sequence[str]) -> None:
        """``place``: a directory of the demonstration's own, where model, cache and logs lie. ``model``: another one
        than the small one. ``sizes``: options of the tiers. Raises ConfigError for wrong ones."""
        self.place = place
        cache = place / "cache"
        # A cold request must find nothing.
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
        config = {"disk_path": str(cache), **sizes}
        # vLLM would tell of a mistake only after its start of half a minute.
        UndercroftConfig.parse(config)
        transfer = {"kv_connector": "UndercroftConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}
        self.arguments = ["--kv-transfer-config", json.dumps(transfer), "--served-model-name", NAME]
        self.arguments += ["--enable-prompt-tokens-details", *self._model(model), *vllm_arguments]
        # The endpoint that empties the device's own prefix cache is one for development.
        self.environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_COLOR": "0"}
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            self.environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        self.prompt = ""

    def _model(self, model: str | None) -> list[str]:
        if model is not None:
            return ["--model", model]
        from undercroft.demo.model import make

        step("making a small model with random weights")
        directory = make(self.place / "model")
        # float32: in bfloat16, batches of another shape round differently, and greedy tokens may flip.
        return ["--model", str(directory), "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]

    def run(self) -> list[Row]:
        """All rows of the table."""
        rows = []
        with self._start("first server") as server:
            self.prompt = text_of(server, PROMPT_TOKENS, 0)
            warm_up(server, 1)
            rows += self._ask(server, COLD)
            step("emptying the device's prefix cache")
            reset_device_cache(server)
            rows += self._ask(server, WARM_HOST)
            step("stopping the server")
        with self._start("second server") as server:
            warm_up(server, 2)
            rows += self._ask(server, WARM_DISK)
            step("stopping the server")
        return rows

    def _start(self, name: str) -> Server:
        step(f"starting vLLM ({name})")
        server = Server(self.arguments, self.environment, self.place / f"{name.replace(' ', '-')}.log")
        # A log file gets a line now and then, a terminal one that counts.
        shown = 0.0

        def progress(elapsed: float) -> None:
            nonlocal shown
            if sys.stderr.isatty() or elapsed - shown >= QUIET_S:
                shown = elapsed
                step(f"starting vLLM ({name}), {elapsed:.0f} s", transient=True)

        try:
            took = server.wait_until_ready(progress)
        except BaseException:
            server.stop()
            raise
        step(f"{name} ready after {took:.0f} s (log: {server.log})")
        return server

    def _ask(self, server: Server, label: str) -> list[Row]:
        return [self._completion(server, label), self._chat(server, label)]

    def _completion(self, server: Server, label: str) -> Row:
        return request(server, label, "completion", "/v1/completions", {"prompt": self.prompt})

    def _chat(self, server: Server, label: str) -> Row:
        messages = [
            {"role": "system", "content": self.prompt[::-1]},
            {"role": "user", "content": "How many barrels are there?"},
        ]
        return request(server, label, "chat", "/v1/chat/completions", {"messages": messages})


def request(server: Server, label: str, kind: str, path: str, body: dict[str, Any]) -> Row:
    """Send one request alone, so that the change of the server's counters is its own."""
    step(f"{label}: {kind}")
    before = server.cached_by_source()
    answer = server.stream(
        path, {"model": NAME, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, **body}
    )
    after = server.cached_by_source()
    sources = {source: after[source] - before.get(source, 0) for source in after}
    return Row(label, kind, answer, {source: tokens for source, tokens in sources.items() if tokens})


def warm_up(server: Server, seed: int) -> None:
    """Send a text that is not used again: delays of a server's first requests alone must not count as cold."""
    step("warming up")
    body = {"model": NAME, "prompt": text_of(server, PROMPT_TOKENS, seed), "max_tokens": 2, "temperature": 0}
    server.stream("/v1/completions", body)


def text_of(server: Server, tokens: int, seed: int) -> str:
    """A text of about so many tokens in the model's own tokenizer."""
    text = "".join(
        FACTS[(index + seed) % len(FACTS)].format(index * 7 + seed, index * 3 + seed) for index in range(tokens)
    )
    count = server.post("/tokenize", {"model": NAME, "prompt": text[: 4 * tokens]})["count"]
    return text[: 4 * tokens * tokens // count]


def reset_device_cache(server: Server) -> None:
    """vLLM refuses while blocks are in use, which blocks being saved are for some milliseconds after a request."""
    deadline = time.monotonic() + RESET_TIMEOUT_S
    while not server.post("/reset_prefix_cache")["success"]:
        if time.monotonic() > deadline:
            raise ServerError(
                f"the device's prefix cache was still in use after {RESET_TIMEOUT_S} s{server.log_tail()}"
            )
        time.sleep(0.1)


def show(rows: list[Row]) -> None:
    """Print the table."""
    print_table(
        ("request", "", "prompt", "time to first token", "cached tokens", "generated tokens"),
        [
            (
                row.label,
                row.kind,
                f"{row.answer.prompt_tokens} tokens",
                f"{row.answer.ttft_s * 1000:.0f} ms",
                ", ".join(f"{tokens} {source}" for source, tokens in sorted(row.sources.items())) or "none",
                verdict(row, rows),
            )
            for row in rows
        ],
    )


def verdict(row: Row, rows: list[Row]) -> str:
    """How the generated tokens compare with those of the cold request."""
    if row.label == COLD:
        return "reference"
    return "the same" if row.answer.token_ids == _reference(row, rows) else "DIFFERENT"


def judge(rows: list[Row]) -> list[str]:
    """The problems of the result."""
    problems = []
    for row in rows:
        name = f"{row.label}, {row.kind}"
        if row.label == COLD:
            continue
        if row.answer.token_ids != _reference(row, rows):
            problems.append(f"{name}: tokens {row.answer.token_ids} instead of {_reference(row, rows)}")
        wanted = "disk" if row.label == WARM_DISK else "host"
        if not row.sources.get(wanted) or not row.answer.cached_tokens:
            problems.append(f"{name}: no tokens came from {wanted} (usage says {row.answer.cached_tokens} cached)")
    return problems


def _reference(row: Row, rows: list[Row]) -> list[int]:
    return next(one.answer.token_ids for one in rows if (one.label, one.kind) == (COLD, row.kind))


def step(message: str, *, transient: bool = False) -> None:
    """A line of progress on stderr. On a terminal the next one overwrites a transient one."""
    if sys.stderr.isatty():
        show_progress(message + ("" if transient else "\n"))
    else:
        say(message, file=sys.stderr, flush=True)

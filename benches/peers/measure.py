"""One part of one round of one system, in a process of its own: everything before the restart, or after it.

    python benches/peers/measure.py SYSTEM before|after DIRECTORY MODEL

The last line of the output is the result in JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from page_cache import forget_pages  # noqa: E402
from peers.systems import DEVICE, DISK, HOST, HOST_MIB, RESTART, connector, serving  # noqa: E402

BLOCK = 32
TOKENS = 2048
ANSWER = 4
ASKED = 4
"""Prompts of each place."""
CHUNK_MIB = 1
"""The KV cache of a block: 32 KiB a token."""
PROMPT_MIB = TOKENS // BLOCK * CHUNK_MIB
NEW_ONES = 12
"""Prompts that nobody has asked before, half as many again as host memory holds."""
CONVERSATIONS, TURNS, NEW, TOGETHER = 8, 4, 384, 4
STILL_S, STILL_LIMIT_S = 0.5, 60.0
COMPUTED = "computed"

assert NEW_ONES * PROMPT_MIB >= 1.5 * HOST_MIB


def model(root: Path) -> Path:
    """32 KiB of KV for a token."""
    from tiny_models import Shape, make_llama

    shape = Shape(hidden=128, intermediate=256, layers=8, heads=8, kv_heads=8, head_dim=64)
    return make_llama(root, shape)


class Usage:
    """Processor time and bytes of this process and of the system's server."""

    def __init__(self, server: int | None) -> None:
        import psutil

        self._own = psutil.Process()
        self._server = psutil.Process(server) if server else None

    def _processes(self) -> list[Any]:
        others = [self._server, *self._server.children(recursive=True)] if self._server else []
        return [self._own, *others]

    def processor_s(self) -> float:
        """Until now."""
        return sum(times.user + times.system for times in (one.cpu_times() for one in self._processes()))

    def moved(self) -> tuple[int, int]:
        """Bytes that were read from a disk, and written to it; what came from the page cache does not count."""
        counters = [one.io_counters() for one in self._processes()]
        return sum(one.read_bytes for one in counters), sum(one.write_bytes for one in counters)


class Client:
    """Asks one engine, and waits for what it leaves to be done."""

    def __init__(self, engine: Any, usage: Usage) -> None:
        self.engine = engine
        self.usage = usage
        self._asked = 0

    def ask(self, ids: Sequence[int]) -> tuple[float, list[int], int]:
        """Milliseconds to the first token, the answer, and the tokens that were not computed."""
        from engine_checks import add

        self._asked += 1
        llm = self.engine.llm.llm_engine
        begin, first = time.perf_counter(), 0.0
        add(self.engine, f"asked-{self._asked}", ids, ANSWER)
        while True:
            for output in llm.step():
                first = first or time.perf_counter() - begin
                if output.finished:
                    self.engine.idle_steps()
                    return first * 1e3, list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    def settle(self) -> None:
        """Until nothing is copied or written any more."""
        self.engine.idle_steps()
        deadline = time.monotonic() + STILL_LIMIT_S
        moved, since = self.usage.moved(), time.monotonic()
        while time.monotonic() - since < STILL_S:
            if time.monotonic() > deadline:
                raise RuntimeError(f"it still writes after {STILL_LIMIT_S:.0f} s")
            time.sleep(0.05)
            self.engine.idle_steps()
            if self.usage.moved() != moved:
                moved, since = self.usage.moved(), time.monotonic()

    def forget(self) -> None:
        """Empty the device's own cache."""
        self.settle()
        if not self.engine.reset_device_cache():
            raise RuntimeError("the device's cache is in use")

    def place(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Ask prompts one after the other: times, answers, tokens cached of each, and the share read from disk."""
        read = self.usage.moved()[0]
        asked = [self.ask(text(number)) for number in numbers]
        share = (self.usage.moved()[0] - read) / (len(asked) * PROMPT_MIB << 20)
        return {
            "ms": [one[0] for one in asked],
            "answers": {str(number): one[1] for number, one in zip(numbers, asked, strict=True)},
            "cached": [one[2] for one in asked],
            "from_disk": share,
        }

    def together(self, prompts: Sequence[Sequence[int]], answer: int) -> tuple[float, list[list[int]]]:
        """Seconds until all prompts are answered, and the answers."""
        begin = time.perf_counter()
        found = self.engine.generate_all(prompts, answer)
        return time.perf_counter() - begin, [one.tokens for one in found]


def text(number: int) -> list[int]:
    """A prompt whose last token is computed in any case."""
    from real_engine import prompt

    return prompt(TOKENS + 1, seed=100 + number)


FIRST = list(range(ASKED))
LATER = list(range(ASKED, ASKED + NEW_ONES))
WARM = [60, 61]


def before(client: Client) -> dict[str, Any]:
    """Cold, device, host memory, prompts that never repeat, disk."""
    found: dict[str, Any] = {COMPUTED: client.place(FIRST)}
    client.settle()
    found[DEVICE] = client.place(FIRST)
    client.forget()
    found[HOST] = client.place(FIRST)
    client.forget()
    processor_s = client.usage.processor_s()
    seconds, answers = client.together([text(number) for number in LATER], ANSWER)
    client.settle()
    found["new"] = {
        "each_s": seconds / NEW_ONES,
        "processor_s": (client.usage.processor_s() - processor_s) / NEW_ONES,
        "answers": {str(number): one for number, one in zip(LATER, answers, strict=True)},
    }
    client.forget()
    # Host memory holds the later ones.
    found[DISK] = client.place(LATER[:ASKED])
    client.settle()
    return found


def after(client: Client) -> dict[str, Any]:
    """The first prompts after a restart, and conversations of which the device holds half."""
    found: dict[str, Any] = {RESTART: client.place(LATER[ASKED : 2 * ASKED])}
    client.forget()
    from real_engine import prompt

    texts = [prompt(NEW, seed=400 + number) for number in range(CONVERSATIONS)]
    processor_s, seconds, answers = client.usage.processor_s(), 0.0, {}
    for turn in range(TURNS):
        taken, said = client.together(texts, ANSWER)
        seconds += taken
        answers |= {f"turn {turn}, {number}": one for number, one in enumerate(said)}
        for number, one in enumerate(said):
            texts[number] = texts[number] + one + prompt(NEW - ANSWER, seed=10 * turn + number)
    requests = CONVERSATIONS * TURNS
    found["turns"] = {
        "each_s": seconds / requests,
        "processor_s": (client.usage.processor_s() - processor_s) / requests,
        "answers": answers,
    }
    return found


@contextmanager
def started(name: str, directory: Path, llama: Path, blocks: int) -> Iterator[Client]:
    """A client of the system, whose memory is populated and which has computed and loaded prompts before."""
    from real_engine import Engine

    settings = {"block_size": BLOCK, "blocks": blocks, "max_model_len": TOKENS + 1024, "max_num_seqs": TOGETHER}
    with serving(name, directory, directory.parent / "server.log") as server:
        usage = Usage(server.process.pid if server.process else None)
        engine = Engine(llama, **connector(name, directory, server), **settings)
        try:
            while any("undercroft-pref" in path.read_text() for path in Path("/proc/self/task").glob("*/comm")):
                time.sleep(0.01)
            client = Client(engine, usage)
            client.place(WARM)
            client.forget()
            client.place(WARM)
            client.forget()
            yield client
        finally:
            engine.close()


def hide_llvmlite() -> None:
    """Let vLLM's CPU platform start beside LMCache. vLLM asks each object of each module for its ``__dict__``, and
    LMCache loads numba, whose library object answers with a function."""
    from llvmlite.binding import ffi

    answer = ffi._lib_wrapper.__getattr__

    def only_functions(library: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(library, name)

    ffi._lib_wrapper.__getattr__ = only_functions


def versions(name: str) -> dict[str, str]:
    """Of the packages that this process runs."""
    from importlib.metadata import version

    import vllm

    found = {"vLLM": vllm.__version__}
    return found | ({"LMCache": version("lmcache")} if name == "lmcache" else {})


def main() -> None:
    """One part."""
    name, part, directory, llama = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    from real_engine import set_environment

    set_environment()
    if name == "lmcache":
        hide_llvmlite()
    model(llama)
    if part == "before":
        blocks = (ASKED + TOGETHER) * (TOKENS // BLOCK + 2)
        with started(name, directory, llama, blocks) as client:
            found = before(client)
    else:
        longest = TURNS * NEW // BLOCK
        forget_pages(directory)
        with started(name, directory, llama, TOGETHER * longest + 8) as client:
            found = after(client)
    for one in found.values():
        if "ms" in one:
            one["median_ms"] = statistics.median(one["ms"])
    print(json.dumps(found | {"versions": versions(name)}))


if __name__ == "__main__":
    main()

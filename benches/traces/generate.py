"""Makes traces of requests as agents, chats, documents and batches send them: `python benches/traces/generate.py KIND`.

`undercroft estimate --trace` reads these files: a JSON object a line, with blocks of 512 tokens. The same
arguments give the same file. `--vary` draws the parameters anew, for a judgement on loads that nobody has tuned for.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

BLOCK_TOKENS = 512
CONTEXT_TOKENS = 65_536
"""A session ends when its prompt is as long."""
Event = tuple[float, list[int], int]
"""A request: seconds, the numbers of its full blocks, tokens."""


@dataclass(slots=True)
class Text:
    """A prompt that grows. A copy shares the full blocks that both have."""

    numbers: Iterator[int]
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0

    def add(self, tokens: float) -> Text:
        self.tokens += max(1, int(tokens))
        while len(self.blocks) < self.tokens // BLOCK_TOKENS:
            self.blocks.append(next(self.numbers))
        return self

    def copy(self, blocks: int | None = None) -> Text:
        kept = len(self.blocks) if blocks is None else min(blocks, len(self.blocks))
        tokens = self.tokens if blocks is None else kept * BLOCK_TOKENS
        return Text(self.numbers, self.blocks[:kept], tokens)

    def at(self, time: float) -> Event:
        return time, list(self.blocks), self.tokens


class Draw:
    """Random choices of one trace. `spread` multiplies a parameter by a factor that stays the same for the trace."""

    def __init__(self, seed: int, vary: float) -> None:
        self.random = random.Random(seed)
        self.vary = vary

    def spread(self, value: float) -> float:
        return value * math.exp(self.random.uniform(-self.vary, self.vary))

    def lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(self.random.gauss(0, sigma))

    def poisson(self, rate: float, end: float, start: float = 0.0) -> Iterator[float]:
        time = start
        while (time := time + self.random.expovariate(rate)) < end:
            yield time

    def rank(self, count: int, skew: float) -> int:
        """A number below `count`, small ones more often (Zipf)."""
        weights = [1 / (rank + 1) ** skew for rank in range(count)]
        return self.random.choices(range(count), weights)[0]

    def tool_pause(self) -> float:
        """86 % of the pauses are below 1 s and 95 % below 10 s, as a router's authors measured it."""
        below = self.random.random()
        if below < 0.86:
            return self.random.uniform(0.05, 1.0)
        return self.random.uniform(1.0, 10.0) if below < 0.95 else self.lognormal(40.0, 1.0)


def agents(draw: Draw, numbers: Iterator[int], seconds: float) -> Iterator[Iterator[Event]]:
    """Sessions of turns of tool calls, over a few programs with a system prompt each; some fork."""
    programs = [Text(numbers).add(draw.lognormal(draw.spread(5000), 0.7)) for _ in range(12)]
    think, more, calls = draw.spread(90), 1 - draw.spread(0.3), draw.spread(7)

    def turns(text: Text, time: float, forks: bool) -> Iterator[Event]:
        while True:
            for _ in range(1 + int(draw.random.expovariate(1 / calls))):
                text.add(draw.lognormal(700, 1.1))
                yield text.at(time)
                text.add(draw.lognormal(150, 0.8))
                if forks and draw.random.random() < 0.04:
                    yield from turns(text.copy(draw.random.randrange(len(text.blocks) + 1)), time + 0.2, forks=False)
                time += 2 + draw.tool_pause()
            if draw.random.random() > more or not forks or text.tokens > CONTEXT_TOKENS:
                return
            time += draw.lognormal(think, 1.0)

    for start in draw.poisson(draw.spread(0.07), seconds):
        yield turns(programs[draw.rank(len(programs), 1.0)].copy().add(200), start, forks=True)


def chats(
    draw: Draw, numbers: Iterator[int], seconds: float, rate: float = 1.0, think: float = 60.0
) -> Iterator[Iterator[Event]]:
    """Conversations: most end after a turn or two, some go on for long."""
    system = Text(numbers).add(draw.spread(1200))
    think = draw.spread(think)

    def turns(time: float) -> Iterator[Event]:
        text, more = system.copy(), draw.random.betavariate(0.7, 0.9)
        text.add(draw.lognormal(1500, 1.3))
        while True:
            yield text.at(time)
            if draw.random.random() > more or text.tokens > CONTEXT_TOKENS:
                return
            text.add(draw.lognormal(400, 0.8)).add(draw.lognormal(150, 1.2))
            time += 5 + draw.lognormal(think, 1.0)

    for start in draw.poisson(draw.spread(rate), seconds):
        yield turns(start)


def documents(draw: Draw, numbers: Iterator[int], seconds: float, rate: float = 2.0) -> Iterator[Iterator[Event]]:
    """Questions about one to three documents, popular ones more often; every question is unique."""
    system = Text(numbers).add(1100)
    count, skew = int(draw.spread(2000)), 0.5 + draw.spread(0.4)
    sizes = [draw.lognormal(4000, 0.8) for _ in range(count)]
    texts: dict[tuple[int, ...], Text] = {(): system}
    for start in draw.poisson(draw.spread(rate), seconds):
        chosen: tuple[int, ...] = ()
        for _ in range(draw.random.choice((1, 1, 2, 3))):
            before = texts[chosen]
            chosen = (*chosen, draw.rank(count, skew))
            if chosen not in texts:
                texts[chosen] = before.copy().add(sizes[chosen[-1]])
        yield iter([texts[chosen].copy().add(draw.lognormal(600, 0.5)).at(start)])


def batch(draw: Draw, numbers: Iterator[int], start: float, count: int, rate: float) -> Iterator[Iterator[Event]]:
    """One job: prompts that never come back, under one instruction."""
    instruction = Text(numbers).add(draw.lognormal(900, 0.5))
    median = draw.lognormal(6000, 0.4)
    for prompt in range(count):
        yield iter([instruction.copy().add(draw.lognormal(median, 0.6)).at(start + prompt / rate)])


def floods(draw: Draw, numbers: Iterator[int], seconds: float) -> Iterator[Iterator[Event]]:
    """Chats, beside which batch jobs run now and then."""
    yield from chats(draw, numbers, seconds, rate=0.6)
    for start in draw.poisson(draw.spread(1 / 600), seconds):
        yield from batch(draw, numbers, start, int(draw.lognormal(400, 0.5)), draw.spread(6))


def tenants(draw: Draw, numbers: Iterator[int], seconds: float) -> Iterator[Iterator[Event]]:
    """Tenants of every kind, which share nothing."""
    for _ in range(3):
        yield from chats(draw, numbers, seconds, rate=draw.lognormal(0.25, 0.5), think=draw.lognormal(90, 0.7))
    for _ in range(2):
        yield from documents(draw, numbers, seconds, rate=draw.lognormal(0.3, 0.5))
    yield from agents(draw, numbers, seconds / 3)
    yield from batch(draw, numbers, seconds / 2, int(draw.spread(800)), 3)


KINDS: dict[str, Callable[[Draw, Iterator[int], float], Iterator[Iterator[Event]]]] = {
    "agents": agents,
    "chats": chats,
    "documents": documents,
    "floods": floods,
    "tenants": tenants,
}


def trace(kind: str, seed: int, seconds: float, vary: float = 0.0) -> Iterator[Event]:
    """The requests of a trace in order of arrival."""
    numbers = itertools.count()
    parts = KINDS[kind](Draw(seed, vary), numbers, seconds)
    requests = [request for part in parts for request in part]
    heapq.heapify(requests)
    while requests:
        yield heapq.heappop(requests)


def main() -> None:
    """Write a trace to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time over which sessions begin (%(default)s)")
    parser.add_argument("--vary", type=float, default=0.0, metavar="LOG", help="spread of the parameters (%(default)s)")
    args = parser.parse_args()
    for time, blocks, tokens in trace(args.kind, args.seed, args.seconds, args.vary):
        if blocks:
            line = {"timestamp": int(time * 1000), "input_length": tokens, "hash_ids": blocks}
            sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

"""The CUDA copy benchmark: its arithmetic on a device that does everything at once, and its refusal without one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import torch

from manual_streams import AtOnceExecutor, Event, ManualStreams, Queue
from undercroft._core import Arena, BlockPieces
from undercroft.cli import main
from undercroft.device.lane import Lanes
from undercroft_bench.copy_cuda import GRID, Bench, Case


class AtOnce(ManualStreams):
    """Runs everything when it is queued, and tells real time."""

    def __init__(self) -> None:
        super().__init__(0)
        self.times: dict[Event, float] = {}

    def record(self, stream: Queue) -> Event:
        event = super().record(stream)
        self.settle()
        self.times[event] = time.perf_counter()
        return event

    def seconds(self, begin: Event, end: Event) -> float:
        return self.times[end] - self.times[begin]

    def run(self, stream: Queue, work: Callable[[], None]) -> None:
        super().run(stream, work)
        self.settle()

    def copy(self, stream: Queue, pieces: BlockPieces, arena: int, *, to_arena: bool) -> None:
        super().copy(stream, pieces, arena, to_arena=to_arena)
        self.settle()


def bench(streams: ManualStreams, cache_bytes: int = 0) -> Bench:
    return Bench(
        Lanes.make(streams, thread=lambda name: AtOnceExecutor()),
        torch.device("cpu"),
        Arena.create(16 << 20),
        lambda size: torch.empty(size, dtype=torch.uint8),
        cache_bytes,
        rounds=2,
        raw_bytes=1 << 20,
        matmul_size=32,
        matmul_seconds=0.001,
    )


def test_fields() -> None:
    result = bench(AtOnce()).run([Case("BLHNC", 4, 32 << 10), Case("LBHNC", 80, 32 << 10)])
    assert (result["raw_bytes"], result["job_blocks"]) == (1 << 20, 64)
    assert result["raw_save_gbps"] > 0
    assert result["raw_load_gbps"] > 0
    first, second = result["cases"]
    # 32 KiB in 80 pages of a multiple of 16 bytes.
    assert (first["block_bytes"], second["block_bytes"]) == (32 << 10, 32_000)
    for case in (first, second):
        for field in ("save_gbps", "load_gbps", "both_gbps", "save_share", "load_share", "both_ratio"):
            assert case[field] > 0, field
        assert case["python_us_per_job"] > 0
        assert case["matmul_covered"] is False, "nothing ran beside the matrix products, and the result must say so"
    json.dumps(result)


def test_the_copies_are_spread_over_a_cache_of_the_size_that_is_asked_for() -> None:
    """vLLM's cache takes most of the device, and kernels and address translation are slower on a large one."""
    case, size = Case("LBHNC", 4, 32 << 10), 64 << 20
    touched: list[int] = []

    class Watched(AtOnce):
        def copy(self, stream: Queue, pieces: BlockPieces, arena: int, *, to_arena: bool) -> None:
            touched.extend(address for address, _, _ in pieces.list())
            super().copy(stream, pieces, arena, to_arena=to_arena)

    one = bench(Watched(), size)
    one.strategy = "direct"
    [result] = one.run([case])["cases"]
    assert result["cache_bytes"] == size
    assert max(touched) - min(touched) > size / 2
    assert bench(AtOnce()).run([case])["cases"][0]["cache_bytes"] < size / 2


def test_every_block_is_copied_once_each_way() -> None:
    copied: list[tuple[str, int]] = []

    class Watching(AtOnce):
        def copy(self, stream: Queue, pieces: BlockPieces, arena: int, *, to_arena: bool) -> None:
            copied.append((stream.name, sum(size for _, _, size in pieces.list())))
            super().copy(stream, pieces, arena, to_arena=to_arena)

    one = bench(Watching())
    one.rounds = 1
    one.matmul_seconds = 1e-9
    result = one.run([Case("BLHNC", 4, 4096)])
    assert result["cases"][0]["jobs"] == 4
    saves = [size for name, size in copied if name == "copies 1"]
    loads = [size for name, size in copied if name == "copies 3"]
    assert sum(saves) > sum(loads), "those of whole steps are saves"
    assert set(loads) == {64 * 4096}
    # Alone and together, once unmeasured and once measured, and beside the matrix products.
    assert len(saves) >= 4 * 4 + 4


def test_a_copy_that_fails_is_no_result() -> None:
    streams = AtOnce()
    streams.fault_rate = 1.0
    with pytest.raises(RuntimeError, match="a copy failed"):
        bench(streams).run([Case("BLHNC", 4, 4096)])


@pytest.mark.parametrize("case", [Case("BLHNC", 80, 1024), Case("BLHNC", 4, 32)])
def test_blocks_too_small_for_their_layers_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="leave less than 16"):
        bench(AtOnce()).run([case])


def test_the_grid_covers_both_layouts_and_all_sizes() -> None:
    assert {case.layout for case in GRID} == {"BLHNC", "LBHNC"}
    assert (min(case.layers for case in GRID), max(case.layers for case in GRID)) == (4, 80)
    assert (min(case.block_bytes for case in GRID), max(case.block_bytes for case in GRID)) == (32 << 10, 4 << 20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_command_without_a_device_names_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "copy", "--device", "cuda", "--json"]) == 1
    message = capsys.readouterr().err
    assert "no CUDA device is usable" in message
    assert "NVIDIA GPU" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "direct"], "--strategy is for --device cuda"),
        (["--device", "cuda", "--blocks", "3"], "64 blocks"),
    ],
)
def test_options_of_the_other_device_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main.main(["bench", "copy", *arguments]) == 2
    assert message in capsys.readouterr().err

"""The option `record`: the line of a request, and that a file that cannot be written harms no request."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undercroft.connector.observe import recording
from undercroft.connector.observe.recording import Recorder

# Two hashes of 16 tokens in each block of the engine's.
GROUPS = SimpleNamespace(hash_block_size=16, engine_block_size=32, hashes=lambda hashes: hashes[1::2])


def request(name: str = "a", prompt: int = 70, tokens: int = 100, arrival: float = 2.5) -> Any:
    hashes = [bytes([number]) * 32 for number in range(tokens // 16)]
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, num_tokens=tokens, arrival_time=arrival, block_hashes=hashes
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_one_line_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = Recorder(path, GROUPS)
    recorder.looked_up("a", 0)
    recorder.looked_up("a", 64)
    recorder.admitted("a")
    # After a preemption.
    recorder.looked_up("a", 96)
    recorder.finished(request())
    recorder.finished(request("b", prompt=40, tokens=97))
    recorder.close()
    header, one, two = lines(path)
    assert header == {"undercroft_trace": 1, "block_tokens": 32}
    numbers = one.pop("hash_ids")
    assert one == {"timestamp": 2500, "input_length": 70, "output_length": 30, "cached": 64}
    assert two["cached"] == 0
    # 99 tokens have KV: three blocks of 32. The same prefix has the same numbers, in this file.
    assert len(numbers) == 3 == len(set(numbers))
    assert two["hash_ids"] == numbers
    assert (recorder._cached, recorder._admitted) == ({}, set())
    again = Recorder(path, GROUPS)
    again.finished(request())
    again.close()
    assert lines(path)[3] == header
    assert not set(lines(path)[4]["hash_ids"]) & set(numbers), "another start has another key"


def test_a_file_ends_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "FILE_BYTES_MAX", 200)
    path = tmp_path / "trace"
    recorder = Recorder(path, GROUPS)
    for _ in range(50):
        recorder.finished(request())
    recorder.close()
    assert 200 < path.stat().st_size < 500
    assert "not recorded any more" in caplog.text
    recorder.finished(request())
    assert recorder._is_over


def test_a_file_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "no" / "trace", GROUPS)
    recorder._thread.join(10)
    recorder.finished(request())
    recorder.close()
    assert caplog.text.count("requests are not recorded") == 1


def test_requests_that_come_too_fast_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "PENDING_MAX", 0)
    recorder = Recorder(tmp_path / "trace", GROUPS)
    recorder.finished(request())
    recorder.close()
    assert len(lines(tmp_path / "trace")) == 1
    assert "lacks 1 requests" in caplog.text

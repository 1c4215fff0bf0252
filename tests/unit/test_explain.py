"""`undercroft explain`, and the reasons on their ways: metrics, log, response, span."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core_values import Group
from undercroft import _core, compat, reasons, request_params
from undercroft.cli import main
from undercroft.connector.observe.stats import SCHEDULER_KEYS, STATS_KEYS
from undercroft.connector.requests.explanations import Explanations
from undercroft.metrics import METRICS

BLOCK = 16


def hashes(prompt: int, blocks: int) -> list[bytes]:
    return [bytes([prompt, block]) * 16 for block in range(blocks)]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_core.Engine]:
    """An engine of 16 MiB with a prompt of 4 blocks of 64 KiB, and requests that looked for prompts."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    disks = [{"path": str(tmp_path / "store"), "capacity": 32 << 20}]
    engine = _core.Engine({"host_memory": 16 << 20, "disks": disks, "min_load_tokens": 0})
    session = engine.register("{}", [Group("full", BLOCK, 64 << 10)], BLOCK)
    for name, prompt, blocks in (("cmpl-1", 1, 4), ("cmpl-2", 2, 4), ("cmpl-3", 1, 6)):
        while session.lookup(name, hashes(prompt, blocks)).pending:
            pass
        if name == "cmpl-1":
            grant = session.begin_save("save", hashes(prompt, blocks), blocks * BLOCK)
            assert grant is not None
            session.end_transfer(grant.transfer_id, True)
            assert session.rest("cmpl-1") == ("never_seen", None)
    yield engine
    engine.close()


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert main.main(["explain", "--json", *argv]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["lookups"]
    return found


def test_explain_shows_the_last_lookups_with_their_reasons(
    engine: _core.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = shown(capsys)
    assert [one["request"] for one in (first, second, third)] == ["cmpl-1", "cmpl-2", "cmpl-3"]
    assert (first["asked_tokens"], first["hit_tokens"], first["reason"]) == (64, 0, "never_seen")
    assert (third["asked_tokens"], third["found_tokens"], third["hit_tokens"]) == (96, 64, 64)
    assert third["missing_block"] == hashes(1, 5)[4][:8].hex()
    assert shown(capsys, "--disk-path", str(tmp_path / "store"), "--request", "cmpl-2") == [second]
    assert shown(capsys, "--last", "1") == [third]
    assert main.main(["explain", "--misses"]) == 0
    table = capsys.readouterr().out
    assert table.count("never seen") == 3 and max(map(len, table.splitlines())) < 120
    assert main.main(["explain", "--request", "cmpl-3"]) == 0
    assert reasons.REASONS["never_seen"] in capsys.readouterr().out


def test_explain_shows_the_difference_to_a_block_of_another_identity(
    engine: _core.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    other = engine.register('{"pages": "vllm 0.33"}', [Group("full", BLOCK, 64 << 10)], BLOCK)
    assert other.lookup("cmpl-4", hashes(1, 4)).tokens == 0
    [told] = shown(capsys, "--request", "cmpl-4")
    assert told["reason"] == "other_identity"
    assert told["other_namespace"] == shown(capsys, "--request", "cmpl-1")[0]["namespace"] != told["namespace"]
    assert main.main(["explain", "--request", "cmpl-4"]) == 0
    assert "it differs: pages not set, that of the request vllm 0.33" in capsys.readouterr().out


def test_a_request_that_is_not_known_or_no_engine_is_one_line(
    engine: _core.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["explain", "--request", "other"]) == 1
    assert "--request other: not among the last" in capsys.readouterr().err
    assert main.main(["explain", "--socket", str(tmp_path / "none.sock")]) == 1
    assert main.main(["explain", "--disk-path", str(tmp_path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_every_reason_has_words_a_counter_and_a_label() -> None:
    source = Path(__file__).parents[2] / "rust/contract/src/explain.rs"
    names = re.findall(r'Self::\w+ => "(\w+)"', source.read_text(encoding="utf-8"))
    assert names == list(reasons.REASONS)
    of_engine, of_vllm = (metric for metric in METRICS if metric.name in ("misses", "missed_tokens"))
    counted = [name for name in names if name != "complete"]
    assert set(of_engine.sources) == {f"misses_{name}" for name in counted if name != "no_server"} <= set(STATS_KEYS)
    others = [f"missed_tokens_{name}" for name in reasons.BESIDE_LOOKUPS]
    assert set(of_vllm.sources) == {*others, *(f"missed_tokens_{name}" for name in counted)} <= set(SCHEDULER_KEYS)
    assert reasons.sentence("evicted_host", 40).endswith("(40 s before)")
    assert "before)" not in reasons.sentence("planned", 40)


def test_misses_are_counted_by_their_reason(engine: _core.Engine) -> None:
    stats = engine.stats()
    assert (stats["misses_never_seen"], stats["misses_evicted_host"]) == (2, 0)


class Session:
    """Says the same of each request."""

    def __init__(self, reason: tuple[str, int | None] | None) -> None:
        self.reason = reason

    def rest(self, request_id: str) -> tuple[str, int | None] | None:
        return self.reason


def request(name: str = "r", **params: Any) -> Any:
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=100, kv_transfer_params=params or None, trace_headers={"traceparent": "x"}
    )


def explained(reason: tuple[str, int | None] | None, option: str, loaded: int = 0, **params: Any) -> Any:
    explanations = Explanations(Session(reason), option)  # type: ignore[arg-type]
    one = request(**params)
    for local in (32, 48):
        explanations.asked(one, local)
    explanations.admitted(one, loaded)
    # The load has ended, or the request was preempted.
    explanations.asked(one, 96)
    explanations.admitted(one, 0)
    told = explanations.finished("r")
    assert explanations._asked == {} and explanations._admitted == {}
    return told


@pytest.mark.parametrize(
    ("option", "reason", "lines"),
    [
        ("off", ("evicted_disk", 5), 0),
        ("misses", ("evicted_disk", 5), 1),
        ("misses", ("complete", None), 0),
        ("all", ("complete", None), 1),
        ("all", None, 1),
    ],
)
def test_the_log_has_a_line_for_each_request_or_for_misses(
    option: str, reason: tuple[str, int | None] | None, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.undercroft"):
        assert explained(reason, option) is None
    assert len(caplog.records) == lines
    if reason == ("evicted_disk", 5) and lines:
        assert "100 prompt tokens, 48 on the device, 0 loaded" in caplog.text
        assert "evicted from disk (5 s before)" in caplog.text


def test_a_response_is_explained_if_its_request_asks() -> None:
    told = explained(("planned", None), "off", loaded=16, explain=True)["explain"]
    assert told.pop("waited_ms") >= 0
    assert told == {
        "prompt_tokens": 100,
        "device_tokens": 48,
        "loaded_tokens": 16,
        "reason": "planned",
        "reason_age_s": None,
    }
    assert explained(("planned", None), "off", explain=False) is None
    with pytest.raises(request_params.InvalidParameterError, match=r"explain = 'yes'.*Allowed: true or false"):
        request_params.check({"explain": "yes"})


def test_a_span_is_made_where_vllm_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = []
    monkeypatch.setattr(compat, "may_trace", lambda: True)
    monkeypatch.setattr(compat, "trace", lambda *span: spans.append(span))
    explained(("lost", 3), "off")
    assert spans == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    explained(("lost", 3), "off")
    ((name, since, headers, attributes),) = spans
    assert (name, headers) == ("undercroft.lookup", {"traceparent": "x"}) and since > 0
    assert attributes["undercroft.lookup.reason"] == "lost"

"""The picture of engines: what is read from a status and from a page of metrics, and the tables that come of it."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pictures
import pytest

from test_serve_cli import STATUS
from undercroft.view import page
from undercroft.view.readings import Reading, Times, from_page, from_status
from undercroft.view.tables import Alarm, Engine, Table, tables

U = "vllm:undercroft_"


def metrics(engine: str, factor: int = 1, model: str = "m") -> str:
    """What a vLLM with undercroft shows of one of its engines, with counters multiplied."""
    labels = f'model_name="{model}",engine="{engine}"'
    lines = [
        f'{U}build_info{{{labels},version="1.2.3"}} 1',
        f'{U}used_bytes{{{labels},tier="host"}} 1073741824',
        f'{U}capacity_bytes{{{labels},tier="host"}} 4294967296',
        f"{U}degraded_disks{{{labels}}} 0",
        f'{U}orders_total{{{labels},verb="clear"}} {factor}',
        f'{U}lookups_total{{{labels},outcome="disk"}} {10 * factor}',
        f'{U}lookups_total{{{labels},outcome="miss"}} {30 * factor}',
        f'{U}transfer_bytes_total{{{labels},tier="host",direction="load"}} {factor * 2**20}',
        f"{U}hook_errors_total{{{labels}}} {factor - 1}",
        f'{U}disk_info{{{labels},disk="0",path="/mnt/a"}} 1',
        f"{U}asked_tokens_total{{{labels}}} {1000 * factor}",
        f"{U}device_tokens_total{{{labels}}} {500 * factor}",
        f'{U}missed_tokens_total{{{labels},reason="other_connector"}} {20 * factor}',
        f'{U}missed_tokens_total{{{labels},reason="never_seen"}} {150 * factor}',
        *(
            f'{U}hit_tokens_total{{{labels},tier="{tier}"}} {tokens * factor}'
            for tier, tokens in {"host": 200, "disk": 100, "remote": 30}.items()
        ),
    ]
    for name, more in ((f"{U}disk_operation_seconds", ',disk="0",direction="load"'), (f"{U}wait_seconds", "")):
        for limit, count in (("0.001", 90), ("0.01", 99), ("+Inf", 100)):
            lines.append(f'{name}_bucket{{{labels}{more},le="{limit}"}} {count * factor}')
    return "\n".join(lines) + "\n"


def rows(shown: list[Table], title: str) -> list[dict[str, str]]:
    (table,) = [one for one in shown if one.title == title]
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_a_metrics_page_gives_the_figures_of_a_status_for_each_engine() -> None:
    first, second = from_page(metrics("0") + metrics("1", 2), 5.0)
    assert (first.name, second.name, first.version, first.at) == ("m 0", "m 1", "1.2.3", 5.0)
    assert first.stats["host_used_bytes"] == 1 << 30
    assert (first.stats["lookups_disk"], second.stats["lookups_disk"]) == (10, 20)
    assert first.stats["load_bytes"] == 1 << 20
    assert dict(first.tokens) == {
        "device": 500, "host": 200, "disk": 100, "remote": 30, "other": 20, "computed": 150,
    }  # fmt: skip
    (disk,) = first.disks
    assert (disk.path, disk.load.within(0.9), disk.load.within(0.99), disk.save.within(0.5)) == (
        "/mnt/a",
        "<= 1 ms",
        "<= 10 ms",
        "-",
    )
    (alone,) = from_page(metrics("0"), 0.0)
    assert alone.name == "", "one engine needs no name beside the address"


def test_a_page_without_undercroft_has_no_engine_and_other_text_is_refused() -> None:
    assert from_page('vllm:num_requests_running{engine="0"} 0\n', 0.0) == []
    with pytest.raises(ValueError):
        from_page("<html>hello</html>\n", 0.0)


def test_a_status_is_a_reading_with_faults_of_directories() -> None:
    found = from_status(STATUS, 7.0)
    assert (found.version, found.uptime_s, found.stats["server_lookups"]) == ("1.2.3", 100.0, 500)
    assert [(disk.path, disk.health, disk.fault) for disk in found.disks] == [
        ("/a", "good", ""),
        ("/b", "no_writes", "No space left on device"),
    ]


def test_times_of_a_while_are_those_of_the_operations_in_it() -> None:
    limits = (0.001, 0.01)
    before, now = Times(limits, (100, 100, 100)), Times(limits, (100, 110, 110))
    assert now.within(0.5) == "<= 1 ms"
    assert now.since(before).within(0.5) == "<= 10 ms", "only the ten that came since"
    assert before.since(before) == before, "none came: those since the start"
    assert Times(limits, (1, 1, 1)).since(before) == Times(limits, (1, 1, 1)), "the process counts anew"
    assert Times(limits, (0, 0, 1)).within(0.5) == "> 0.01 s"


def test_rates_and_shares_are_those_since_the_earlier_reading() -> None:
    (before,), (now,) = from_page(metrics("0"), 10.0), from_page(metrics("0", 3), 20.0)
    shown = tables([Engine("h", now, before)])
    (tokens,) = rows(shown, "Prompt tokens by source")
    assert tokens == {
        "engine": "h",
        "tokens/s": "200",
        "device": "50 %",
        "host": "20 %",
        "disk": "10 %",
        "remote": "3 %",
        "other": "2 %",
        "computed": "15 %",
    }
    (waits,) = rows(shown, "Waits")
    assert (waits["lookups/s"], waits["waited p50"], waits["waited p99"]) == ("8.0", "<= 1 ms", "<= 10 ms")
    (engine,) = rows(shown, "Engines")
    assert (engine["host memory"], engine["loads"]) == ("1 GiB of 4 GiB", "204.8 KiB/s")
    assert rows(shown, "Orders") == [{"engine": "h", "since the start": "clear 3 (+2 now)"}]
    assert rows(shown, "Trouble") == [{"engine": "h", "what": "2 hook errors"}]
    (later,) = from_page(metrics("0", 3), 30.0)
    (idle,) = rows(tables([Engine("h", later, now)]), "Prompt tokens by source")
    assert (idle["tokens/s"], idle["device"]) == ("0", "50 %"), "without a token in between: shares since the start"
    once = tables([Engine("h", now)])
    assert rows(once, "Prompt tokens by source")[0]["tokens/s"] == "-"
    assert rows(once, "Orders")[0]["since the start"] == "clear 3"


def test_trouble_stands_out_and_engines_that_do_not_answer_have_a_row() -> None:
    status = copy.deepcopy(STATUS)
    status["stats"] |= {"draining": 1, "remote_degraded": 1}
    status["info"]["remote"] = {"url": "s3://b", "health": "failed", "fault": "403", "advice": ""}
    shown = tables([Engine("a", from_status(status, 0.0)), Engine("b", trouble="Connection refused")])
    states = rows(shown, "Engines")
    assert [one["state"] for one in states] == ["draining", "Connection refused"]
    assert all(isinstance(one["state"], Alarm) for one in states)
    assert [type(one["health"]) for one in rows(shown, "Disks")] == [str, Alarm]
    (remote,) = rows(shown, "Remote store")
    assert (remote["store"], remote["state"], type(remote["state"])) == ("s3://b", "degraded", Alarm)
    assert [one["what"] for one in rows(shown, "Trouble")] == [
        "9 checksum failures",
        "/b: No space left on device",
        "s3://b: 403",
    ]
    assert [one.title for one in tables([Engine("b")])] == ["Engines"]


class Parsed(HTMLParser):
    """The tags of a page, and what it would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_the_page_runs_and_loads_nothing_with_any_text_in_it() -> None:
    bad = '<script>alert(1)</script>"\x1b'
    found = Parsed(page.html(bad, [Table(bad, (bad,), [(bad,), (Alarm(bad),)])]))
    assert "script" not in found.tags
    assert {name for name, _ in found.attributes} & {"src", "onload", "onclick"} == set()
    assert [value for name, value in found.attributes if name == "href"] == ["status", "metrics", "health"]
    assert ("class", "alarm") in found.attributes
    assert "\x1b" not in page.html(bad, [])


def test_a_reading_without_figures_has_a_row() -> None:
    (engine,) = rows(tables([Engine("h", Reading("", 0.0))]), "Engines")
    assert (engine["state"], engine["host memory"], engine["up"]) == ("answers", "-", "-")


def test_the_pictures_of_the_documents_match_the_output_of_the_code() -> None:
    page_now, top_now = pictures.page(), pictures.top()
    assert (pictures.IMAGES / "page.svg").read_text() == page_now, "run: python tools/pictures.py"
    shown = (pictures.IMAGES / "top.svg").read_text()
    # Another version of the library draws another frame around the same words.
    words = [re.findall(r">([^<>{}]+)</text>", drawn) for drawn in (shown, top_now)]
    assert words[0] == words[1], "run: python tools/pictures.py"
    for drawn in (shown, page_now, top_now):
        ElementTree.fromstring(drawn)
        assert "@font-face" not in drawn and "url(http" not in drawn, "it would load something"

"""The arithmetic and the table of `make compare`."""

from __future__ import annotations

from pathlib import Path

import compare as tool
import pytest
from compare import BENCHES, PROGRAMS, CompareError, command_of, compare, figures, parser, result_of, table

from undercroft.cli.main import build_parser


def test_figures_are_the_numbers_of_any_depth() -> None:
    result = {
        "mode": "served",
        "keys": 8,
        "fast": True,
        "p50": 1.5,
        "cases": [{"read": 2.0}, {"read": 3.0}],
        "bare": None,
    }
    assert dict(figures(result)) == {"keys": 8, "p50": 1.5, "cases[0].read": 2.0, "cases[1].read": 3.0}


def test_ratios_are_those_of_each_round() -> None:
    base = [{"us": 2.0}, {"us": 4.0}, {"us": 1.0}]
    new = [{"us": 1.0}, {"us": 6.0}, {"us": 1.0}]
    [row] = compare(base, new).rows
    assert (row.figure, row.base, row.new, row.ratios) == ("us", 2.0, 1.0, (0.5, 1.5, 1.0))


def test_settings_are_no_figures_unless_they_differ() -> None:
    found = compare([{"keys": 8, "hits": 3}, {"keys": 8, "hits": 3}], [{"keys": 8, "hits": 3}, {"keys": 8, "hits": 4}])
    assert found.equal == {"keys": 8}
    assert [(row.figure, row.ratios) for row in found.rows] == [("hits", (1.0, 4 / 3))]


def test_a_figure_of_one_side_is_named() -> None:
    found = compare([{"poll": 1.0, "p50": 1.0}], [{"p50": 1.0, "p99": 1.0}])
    assert (found.only_base, found.only_new) == (["poll"], ["p99"])
    assert table(found)[-2:] == ["only in base: poll", "only in new: p99"]


def test_no_ratio_over_nothing() -> None:
    [row] = compare([{"failures": 0.0}], [{"failures": 2.0}]).rows
    assert row.ratios == ()
    assert table(compare([{"failures": 0.0}], [{"failures": 2.0}]))[1].split() == ["failures", "0", "2", "-", "-", "-"]


def test_results_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="2 results of the base and 1 of the new"):
        compare([{}, {}], [{}])


def test_the_table_says_where_every_round_agrees() -> None:
    base = [{"up": 1.0, "down": 2.0, "both": 1.0}] * 5
    new = [{"up": 1.2, "down": 1.0, "both": 0.9}, *[{"up": 1.1, "down": 1.5, "both": 1.1}] * 4]
    header, *lines = table(compare(base, new))
    assert header.split() == ["figure", "base", "new", "new/base:", "min", "median", "max"]
    assert [line.split() for line in lines] == [
        ["up", "1", "1.1", "1.100", "1.100", "1.200", "every", "round", "higher"],
        ["down", "2", "1.5", "0.500", "0.750", "0.750", "every", "round", "lower"],
        ["both", "1", "1.1", "0.900", "1.100", "1.100"],
    ]


def test_a_few_rounds_are_not_enough_to_agree() -> None:
    assert "every" not in "".join(table(compare([{"us": 1.0}] * 4, [{"us": 2.0}] * 4)))


def test_each_version_is_first_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Path] = []
    monkeypatch.setattr(tool, "run", lambda tree, name: order.append(tree) or {"us": float(len(order))})
    [(name, found)] = tool.measure(Path("base"), ["lookup"], 2)
    assert (name, order) == ("lookup", [Path("base"), tool.ROOT, tool.ROOT, Path("base")])
    assert found.rows[0].ratios == (2 / 1, 3 / 4)


@pytest.mark.parametrize("name", BENCHES)
def test_the_command_knows_each_benchmark(name: str) -> None:
    args = build_parser("bench").parse_args(["bench", *BENCHES[name], "--json"])
    assert args.json


def test_a_program_of_this_checkout_runs_with_the_python_of_each_version() -> None:
    tree = Path("/base")
    assert command_of(tree, "hooks")[:2] == ["/base/.venv/bin/python", str(tool.ROOT / "benches/hooks.py")]
    assert Path(command_of(tree, "hooks")[1]).is_file()
    assert command_of(tree, "copy") == ["/base/.venv/bin/undercroft", "bench", "copy", "--json"]
    assert "{" not in "".join(part for name in BENCHES | PROGRAMS for part in command_of(tree, name))


def test_output_is_json_or_the_table_of_entries() -> None:
    assert result_of('a line\n{"us": 1.5}') == {"us": 1.5}
    assert result_of('INFO options {"mode": 0}\n{\n "us": 1.5\n}\nINFO {}') == {"us": 1.5}
    with pytest.raises(CompareError, match="no JSON object: INFO"):
        result_of('INFO options {"mode": 0}')
    table = (
        "1048576 blocks; an insertion into a map of as many keys takes 98 ns\n"
        "  loads of 64 blocks 8192 entries: median 3.1 us, 99.9 % 9.0, longest 21.5; at 100 ns an insertion 21.9\n"
    )
    assert result_of(table) == {"loads of 64 blocks": {"median_us": 3.1, "longest_scaled_us": 21.9}}


def test_arguments() -> None:
    args = parser().parse_args(["--rounds", "2", "--benches", "", "--", "main"])
    assert (args.base, args.rounds, args.benches) == ("main", 2, list(BENCHES))
    assert parser().parse_args(["--benches", "disk lookup", "main"]).benches == ["disk", "lookup"]


@pytest.mark.parametrize("bad", [["--rounds", "0"], ["--benches", "looky"]])
def test_bad_arguments_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([*bad, "main"])
    assert bad[1] in (message := capsys.readouterr().err)
    assert "allowed" in message

"""Writes the pages of docs/ that come from the code: `python tools/reference.py`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undercroft.metrics import Metric

PAGES = Path(__file__).resolve().parent.parent / "docs"
GENERATED = "<!-- Written by `python tools/reference.py`. Change the code, then run it again. -->\n\n"


CHANGES = """# Changes to vLLM

{generated}\
undercroft uses vLLM's connector interface. Where that interface is not enough, undercroft changes vLLM at run
time, in `python/undercroft/vllm_patches/` and nowhere else. `vllm_patches/table.py` holds the same table.
Each change is guarded: if vLLM lacks a name or has another signature, or if an exception occurs, vLLM
continues unchanged, and one log line names the feature that is lost. A test removes each name of vLLM that a
change needs. Attributes whose names begin with `_undercroft` are private notes on vLLM's objects.

{table}"""


def pages() -> dict[str, str]:
    """Each page, by its path in docs/ -> its text, as the code has it now."""
    return {
        "reference/options.md": _options(),
        "reference/metrics.md": _metrics(),
        "reference/cli.md": _commands(),
        "internals/vllm-changes.md": _changes(),
    }


def _changes() -> str:
    from undercroft.vllm_patches import patch_table

    return CHANGES.format(generated=GENERATED, table=patch_table())


def _options() -> str:
    from undercroft.config import option_table

    return f"""# Options

{GENERATED}In `kv_connector_extra_config`, or as environment variables `UNDERCROFT_<NAME>`. The extra config wins
over the environment. An unknown key or an impossible value stops the start, and the message says what is allowed.
`undercroft check-config` tells the same without vLLM.

{option_table()}
`lookup`, `lookup_timeout_ms` and `promotion_wait` can also be lowered for one request, in its `kv_transfer_params`:
`{{"kv_transfer_params": {{"lookup": "async", "promotion_wait": "best_effort"}}}}`. A value above the configured one has
no effect, and is counted. An impossible value is answered with HTTP 400.
[Hit threshold](../hit-threshold.md) describes `cache_hit_threshold` and its answer for one request, and
[security](../security.md#clients-of-the-http-api) the fields that need `client_fields`.
"""


def _metrics() -> str:
    from undercroft.metrics import INFO_METRICS, METRICS, SERVER_METRICS

    return f"""# Metrics

{GENERATED}These metrics are on vLLM's own `/metrics` page, with its labels `model_name` and `engine` before the labels
named here. vLLM's own `vllm:prompt_tokens_cached_by_source_total` splits hits by tier (`device`, `host`, `disk`;
the remote store is its `external_unspecified`).
All series exist from the start, so that an alert sees the first error. Those of a directory exist as soon as the engine
has reported it.

{_metric_table((*METRICS, *INFO_METRICS))}
`undercroft serve --metrics` exports those of them that the engine counts, without vLLM's labels, and these. Series of a
tenant exist while it has a share and a vLLM:

{_metric_table(SERVER_METRICS)}"""


def _metric_table(metrics: tuple[Metric, ...]) -> str:
    from undercroft.metrics import PREFIX

    lines = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        suffix = "_total" if metric.kind == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{PREFIX}{metric.name}{suffix}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def _commands() -> str:
    from undercroft.cli.main import build_parser

    parser = build_parser("bench")
    text = f"""# Command line

{GENERATED}`undercroft --version` prints the version. Exit codes: 0 success; 1 a check failed, or something failed
while the command ran; 2 the operator must change something: an argument, an option, or a directory that cannot be used.
[JSON output](json.md) describes the fields that `--json` prints.
"""
    return text + "".join(_sections(parser, "undercroft"))


def _sections(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """A section for each command below a parser, commands below it included."""
    found = []
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help for choice in action._choices_actions}
        for below, one in action.choices.items():
            found.append(_section(one, f"{name} {below}", helps.get(below) or ""))
            found += _sections(one, f"{name} {below}")
    return found


def _section(parser: argparse.ArgumentParser, name: str, meaning: str) -> str:
    about = parser.description or f"{meaning[:1].upper()}{meaning[1:]}."
    text = f"\n## {name}\n\n{_escaped(about)}\n"
    formatter = parser._get_formatter()
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
            continue
        meaning = _escaped(formatter._expand_help(action)) if action.help else ""
        rows.append(f"| `{_called(action)}` | {meaning} |")
    if rows:
        text += "\n| argument | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    if parser.epilog:
        example = parser.epilog.removeprefix("example: ")
        text += f"\n```\n{example}\n```\n" if example != parser.epilog else f"\n{_escaped(parser.epilog)}\n"
    return text


def _called(action: argparse.Action) -> str:
    """The flag with its value, or the name of a positional argument."""
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return (value or action.dest).replace("|", "\\|")
    flag = action.option_strings[-1]
    if action.nargs == 0:
        return flag
    value = value or action.dest.upper()
    count = action.nargs if isinstance(action.nargs, int) and " " not in value else 1
    return " ".join([flag, *[value] * count]).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Text for a table's cell, where names in angle brackets are no HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


if __name__ == "__main__":
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")

"""Runs steps one after the other: each within its limit, and each result written at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_day.steps import ROOT, Day, Step

TAIL = 400
"""Last characters of a step's output that the summary repeats."""

FAKE_IS_SLOWER = 2.0
"""How much longer a step may take on the fake CUDA, whatever its sizes."""

Environment = Mapping[str, str]


def run(day: Day, steps: Sequence[Step], environments: Mapping[bool, Environment], total_s: float) -> int:
    """0: all bytes are right. 1: some are wrong. 2: none are known to be wrong, but a step that shows bytes did not.

    ``environments``: of the processes, by `Step.kernels`. ``total_s``: the machine's time, of which later
    steps get the rest.
    """
    day.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    found: list[dict[str, Any]] = []
    for step in steps:
        left = total_s - (time.monotonic() - begin)
        limit_s = step.limit_s * (FAKE_IS_SLOWER if day.small else 1)
        found.append(_one(day, step, environments[step.kernels], min(limit_s, left)))
        summary = {"steps": found, "complete": len(found) == len(steps), "exit": exit_code(found)}
        Path(day.out, "day.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        last = found[-1]
        print(f"[{time.monotonic() - begin:5.0f} s] {step.name}: {last['ended']} {last['bytes']}".rstrip(), flush=True)
    return exit_code(found)


def exit_code(found: Sequence[Mapping[str, Any]]) -> int:
    """See `run`."""
    verdicts = {one["bytes"] for one in found}
    return 1 if "wrong" in verdicts else 2 if "not shown" in verdicts else 0


def _one(day: Day, step: Step, environment: Environment, limit_s: float) -> dict[str, Any]:
    result: dict[str, Any] = {"name": step.name, "seconds": 0.0, "ended": "no time was left"}
    status: int | None = None
    if step.report:
        # An earlier day's report shows nothing.
        Path(day.out, step.report).unlink(missing_ok=True)
    if limit_s > 0:
        begin = time.monotonic()
        with Path(day.out, "day.log").open("ab") as log:
            log.write(f"\n===== {step.name}, at most {limit_s:.0f} s\n".encode())
            log.flush()
            start = log.tell()
            status = _run(step.command(day), environment, log, limit_s)
        result["ended"] = f"status {status}" if status is not None else f"ended at its limit of {limit_s:.0f} s"
        result["seconds"] = round(time.monotonic() - begin, 1)
        with Path(day.out, "day.log").open("rb") as log:
            log.seek(start)
            result["tail"] = log.read().decode(errors="replace")[-TAIL:]
    return result | {"bytes": step.verdict(day.out, status)}


def _run(command: Sequence[str], environment: Environment, log: Any, limit_s: float) -> int | None:
    """The status; None if the process and all that it has started were ended at the limit."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        print(error, file=sys.stderr)
        return 127
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # A step's own processes may outlive it, and would disturb the next step.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

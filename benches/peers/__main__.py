"""undercroft beside vLLM alone, vLLM's own offloading and file tier, and LMCache, on one machine, in turn.

    make compare-peers
    .venv/bin/python benches/peers [--rounds 2] [--only files,embedded] [--minutes 3]

Real engines on vLLM's CPU platform, one system after the other in each round, with the same small model, prompts, host
memory and disk. Milliseconds to the first token of prompts of 2,049 tokens: computed, on the device, in host memory, on
disk, and on disk after a restart of the system. "New prompts": none is asked twice, several at once. "Turns": eight
conversations of four turns, of which the device holds half. Processor time is that of all processes.

Every answer must be equal in all systems and places; each of undercroft's hits must have nearly all tokens, and what is
claimed to be on disk must be read from there: otherwise the exit code is 1. A peer's missing hits are in its row, and a
peer that does not run is a row with the reason. Each round of a system is added to the file of results as it ends; the
same command goes on where an earlier one ended, and prints the table at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tools")]

from compare import machine  # noqa: E402  # the line above makes it importable
from peers.systems import ROOT, SYSTEMS, System, environment_of, last_line  # noqa: E402
from peers.table import OWN, Round, spread, table, wrong  # noqa: E402

PART_LIMIT_S = 180
USUAL_S = 60.0
"""Of a round of a system, before one has run."""
SPARE_GIB = 6


def main() -> int:
    """Exit code: 1 if an answer or a hit is wrong, or undercroft did not run."""
    options = parsed()
    where = options.directory or Path(tempfile.gettempdir())
    if (free := shutil.disk_usage(where).free >> 30) < SPARE_GIB:
        print(f"error: {where} has {free} GiB free, {SPARE_GIB} are needed: name another --directory", file=sys.stderr)
        return 2
    chosen = [system for system in SYSTEMS if not options.only or system.name in options.only]
    done = read(options.results, options.fresh)
    todo = [
        (number, system)
        for number in range(1, options.rounds + 1)
        # In the other order in every second round.
        for system in chosen[:: -1 if number % 2 == 0 else 1]
        if not any(one["round"] == number and one["system"] == system.name for one in done)
    ]
    if not run_all(todo, done, options):
        return 0
    rounds = [one for one in done if one["round"]]
    print(f"{done[0]['date']} · {done[0]['machine']} · commit {done[0]['commit']} · vLLM {vllm(rounds)}\n")
    print("\n".join(table(rounds)))
    print(f"\nrounds: {options.rounds}; in parentheses: computed; {spread(rounds)}")
    faults = wrong(rounds)
    for fault in faults:
        print(f"error: {fault.system}: {fault.what}", file=sys.stderr)
    own = [one for one in rounds if "failed" in one and one["system"] in OWN]
    for one in own:
        print(f"error: {one['system']}, round {one['round']}: {one['failed']}", file=sys.stderr)
    return 1 if faults or own else 0


def parsed() -> argparse.Namespace:
    """Command line."""
    names = [system.name for system in SYSTEMS]
    parser = argparse.ArgumentParser(
        prog="peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="of each system (%(default)s)")
    parser.add_argument("--only", help=f"these systems, separated by commas, of {','.join(names)} (all)")
    parser.add_argument("--minutes", type=float, help="begin no system that would end later; the next call goes on")
    parser.add_argument("--results", type=Path, default=ROOT / ".run/peers.jsonl", help="file (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget the earlier results in that file")
    parser.add_argument("--directory", type=Path, help="on the disk to measure (where temporary files are)")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else []
    if unknown := set(options.only) - set(names):
        parser.error(f"--only: {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


def commit() -> str:
    """Of this checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def read(path: Path, fresh: bool) -> list[Round]:
    """Earlier results of this commit; the first line says of which run. A new file, if there are none."""
    if path.exists() and not fresh:
        done = [json.loads(line) for line in path.read_text().splitlines()]
        if done and done[0]["commit"] != commit():
            sys.exit(f"error: {path} has results of commit {done[0]['commit']}, and this is {commit()}: add --fresh")
        if done:
            return done
    first = {"round": 0, "commit": commit(), "machine": machine(), "date": datetime.date.today().isoformat()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(first | {"system": ""}) + "\n")
    return [first | {"system": ""}]


def run_all(todo: Sequence[tuple[int, System]], done: list[Round], options: argparse.Namespace) -> bool:
    """Whether all have run within the time; each result is in the file before the next begins."""
    begin, longest = time.monotonic(), USUAL_S
    for index, (number, system) in enumerate(todo, 1):
        left = None if options.minutes is None else options.minutes * 60 - (time.monotonic() - begin)
        if left is not None and left < 0.8 * longest:
            print(f"{len(todo) - index + 1} are left: run the same command again, without --fresh", file=sys.stderr)
            return False
        print(f"[{index} of {len(todo)}] round {number}: {system.title}", end="", file=sys.stderr, flush=True)
        started = time.monotonic()
        found = {"system": system.name, "round": number} | one_round(system, options.directory)
        taken = time.monotonic() - started
        longest = max(longest, taken)
        print(f": {found.get('failed', 'done')} ({taken:.0f} s)", file=sys.stderr, flush=True)
        done.append(found)
        with options.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
    return True


def one_round(system: System, where: Path | None) -> dict[str, Any]:
    """Both parts of a round, or why it "failed"."""
    if not system.python.exists():
        return {"failed": f"not installed: {last_line(ROOT / '.venv-peers' / f'{system.environment}.log')}"}
    found: dict[str, Any] = {}
    shared = set(Path("/dev/shm").glob("lmcache*"))
    with tempfile.TemporaryDirectory(dir=where, prefix="peers-") as folder:
        directory = Path(folder) / "c"
        directory.mkdir()
        for part in ("before", "after"):
            log = Path(folder) / f"{part}.log"
            command = [str(system.python), str(Path(__file__).with_name("measure.py"))]
            command += [system.name, part, str(directory), str(ROOT / ".run" / "peers-model")]
            with log.open("wb") as errors:
                try:
                    ran = subprocess.run(
                        command,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=environment_of(system),
                        timeout=PART_LIMIT_S,
                        check=False,
                    )
                except subprocess.TimeoutExpired:
                    return {"failed": f"the part {part} the restart had not ended after {PART_LIMIT_S} s"}
            if ran.returncode:
                return {"failed": f"{part} the restart: {last_line(log)}"}
            found |= json.loads(ran.stdout.splitlines()[-1])
    # LMCache leaves its memory behind.
    for path in set(Path("/dev/shm").glob("lmcache*")) - shared:
        path.unlink(missing_ok=True)
    return found


def vllm(rounds: Sequence[Round]) -> str:
    """The versions of vLLM that ran; a row with another one is no comparison."""
    return ", ".join(sorted({one["versions"]["vLLM"] for one in rounds if "versions" in one})) or "did not run"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped; what has ended is in the file of results", file=sys.stderr)
        sys.exit(130)

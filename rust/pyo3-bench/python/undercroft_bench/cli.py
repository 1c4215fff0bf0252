"""``undercroft bench``: speeds of the machine and the engine, and of the bare device in the same run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from undercroft.cli import arguments, output, planning, vllm_http, waiting
from undercroft.device.layout import SUPPORTED_LAYOUTS
from undercroft.errors import ConfigError
from undercroft.option_values import remote_object
from undercroft.units import SIZE_FORMAT, format_size

_positive = arguments.whole(1, 1 << 40)
_not_negative = arguments.whole(0, 1 << 40)


def add_kinds(parser: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> None:
    """Add the kinds of measurements to the parser of ``undercroft bench``."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    lookup = _add(
        kinds, shared, "lookup", "lookups of a prefix that is wholly in host memory, as vLLM calls them", _lookup
    )
    lookup.epilog = "example: undercroft bench lookup --mode served --clients 4"
    lookup.add_argument(
        "--mode", choices=("embedded", "served"), default="embedded", help="where the engine runs (%(default)s)"
    )
    lookup.add_argument(
        "--clients",
        type=_positive,
        default=1,
        metavar="C",
        help="served: client processes; more than one measures lookups a second (%(default)s)",
    )
    lookup.add_argument(
        "--keys", type=_positive, default=8192, metavar="N", help="block hashes of the prompt (%(default)s)"
    )
    lookup.add_argument("--rounds", type=_positive, default=2000, metavar="R", help="lookups measured (%(default)s)")
    lookup.add_argument(
        "--pending",
        type=_positive,
        metavar="N",
        help="measure steps that ask for N requests waiting for the disk",
    )

    disk = _add(kinds, shared, "disk", "the disk tier through the whole engine, against a bare O_DIRECT loop", _disk)
    disk.epilog = "example: undercroft bench disk --path /mnt/nvme0 --block-bytes 2MiB"
    disk.add_argument("--path", metavar="DIR", help="directory on the device to measure (default: a temporary one)")
    disk.add_argument("--block-bytes", type=arguments.size, default=2 << 20, metavar="B", help="payload size (2MiB)")
    disk.add_argument(
        "--blocks", type=_positive, metavar="K", help="payloads written and read (as many as 2 GiB hold, at least 1024)"
    )

    disk.add_argument("--depth", type=_positive, default=32, metavar="D", help="operations in flight (%(default)s)")
    disk.add_argument(
        "--io-engine", choices=("auto", "io_uring", "thread_pool"), default="auto", help="as the option (%(default)s)"
    )
    disk.add_argument("--key-file", metavar="FILE", default="", help="encrypt, as the option (default: plain)")

    copy = _add(kinds, shared, "copy", "copies between device blocks and the arena, against one plain copy", _copy)
    copy.epilog = "example: undercroft bench copy --device cuda --json"
    copy.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the KV cache is (%(default)s)")
    copy.add_argument(
        "--block-bytes",
        type=arguments.size,
        metavar="B",
        help="bytes of a block (cpu: 2MiB, cuda: 32KiB to 4MiB in turn)",
    )
    copy.add_argument(
        "--layers", type=_positive, metavar="L", help="layers of a block (cpu: 32, cuda: 4 to 80 in turn)"
    )
    copy.add_argument(
        "--layout", choices=SUPPORTED_LAYOUTS, help="KV cache layout (cpu: LBHNC, cuda: BLHNC and LBHNC in turn)"
    )
    copy.add_argument("--blocks", type=_positive, metavar="K", help="cpu: blocks of a job (256; on cuda always 64)")
    copy.add_argument(
        "--ranks", type=_positive, metavar="N", help="cpu: copy as the first of N ranks, which share each payload (1)"
    )
    copy.add_argument(
        "--strategy",
        choices=("auto", "direct", "gather"),
        help="cuda: copy pages straight, or gather them on the device (auto: as their size suggests)",
    )

    recover = _add(kinds, shared, "recover", "how long opening a full directory takes", _recover)
    recover.epilog = "example: undercroft bench recover --path /mnt/nvme0 --blocks 1000000"
    recover.add_argument("--path", metavar="DIR", help="directory to make the store in (default: a temporary one)")
    recover.add_argument("--blocks", type=_positive, default=1_000_000, metavar="K", help="blocks in it (%(default)s)")

    replay = _add(
        kinds, shared, "replay", "hit rates and insert rates of a trace on the engine's own policies", _replay
    )
    replay.epilog = "example: undercroft bench replay --trace requests.jsonl --host-blocks 1000 --disk-blocks 8000"
    replay.add_argument("--trace", required=True, metavar="FILE", help="JSON lines with input_length and hash_ids")
    replay.add_argument(
        "--host-blocks", required=True, type=_positive, metavar="N", help="blocks that host memory holds"
    )
    replay.add_argument(
        "--disk-blocks", type=_not_negative, default=0, metavar="M", help="blocks that the disk holds (0: no disk)"
    )
    replay.add_argument(
        "--policy", choices=("leafhd", "lru"), default="leafhd", help="eviction policy of both tiers (%(default)s)"
    )
    replay.add_argument("--second-touch", action="store_true", help="write blocks to disk from their second use on")

    remote = _add(kinds, shared, "remote", "a remote store: writes, reads and probes, by size of the objects", _remote)
    remote.epilog = "example: undercroft bench remote s3://bucket/undercroft --sizes 4MiB,16MiB"
    remote.add_argument("url", metavar="URL", help="as the option remote; nothing stays there")
    arguments.add_owner(remote)
    remote.add_argument(
        "--sizes",
        type=_object_sizes,
        default="1MiB,4MiB,16MiB,64MiB",
        metavar="SIZE,...",
        help="of objects, each as the option remote_object (%(default)s)",
    )
    remote.add_argument(
        "--total", type=arguments.size, default=1 << 30, metavar="SIZE", help="bytes of each size (1GiB)"
    )

    serve = _add(
        kinds, shared, "serve", "time to first token of a running vLLM: cold, and again from the cache", _serve
    )
    serve.epilog = "example: undercroft bench serve --url http://localhost:8000 --prompts 16 --prompt-tokens 8192"
    serve.add_argument(
        "--url", required=True, type=arguments.url, help="where vLLM listens, such as http://localhost:8000"
    )
    vllm_http.add_api_key(serve)
    serve.add_argument(
        "--prompts",
        type=_positive,
        metavar="N",
        help="number of prompts (8), of conversations with --turns (8), or of requests of the trace (100)",
    )
    serve.add_argument(
        "--prompt-tokens",
        type=_positive,
        default=4096,
        metavar="T",
        help="tokens of each prompt, or of the last one of a conversation (%(default)s)",
    )
    shared_prefixes = serve.add_mutually_exclusive_group()
    shared_prefixes.add_argument(
        "--turns",
        type=arguments.whole(1, 1000),
        metavar="N",
        help="measure conversations of this many turns instead, the prompts of which grow; nothing is displaced",
    )
    shared_prefixes.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="measure the requests of a trace instead, in their order: one of the option record, or Mooncake's format",
    )
    serve.add_argument(
        "--max-tokens", type=_positive, default=8, metavar="T", help="length of each answer (%(default)s)"
    )
    serve.add_argument(
        "--fill-tokens",
        type=_positive,
        metavar="T",
        help="tokens of other prompts that displace the device's blocks, where vLLM has no endpoint to empty its "
        "cache (VLLM_SERVER_DEV_MODE=1); default: as many as the device holds",
    )


def _add(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    shared: argparse.ArgumentParser,
    name: str,
    help_text: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, parents=[shared], help=help_text, description=f"Measures {help_text}.")

    def run(args: argparse.Namespace) -> int:
        result = measure(args)
        if args.json:
            output.print_json(result)
        else:
            output.print_fields(result)
            _print_cases(result.get("cases", []) or result.get("cold", []))
            if plan := result.get("plan"):
                output.say("\nLoad or compute, as the running engine has measured its tiers and its model:")
                _print_cases(plan)
        return 0

    parser.set_defaults(run=run)
    return parser


def _print_cases(cases: list[dict[str, Any]]) -> None:
    """Print a table of the figures that were measured for several cases."""
    if cases:
        output.print_table(list(cases[0]), ([*case.values()] for case in cases))


def _lookup(args: argparse.Namespace) -> dict[str, Any]:
    if args.pending is not None:
        if args.mode != "embedded":
            raise ConfigError("--pending is for --mode embedded")
        from undercroft_bench import pending

        return pending.measure(args.pending)
    if args.mode == "served":
        from undercroft_bench import served

        return served.measure(args.keys, args.rounds, args.clients)
    if args.clients > 1:
        raise ConfigError("--clients is for --mode served: an embedded engine has one scheduler")
    from undercroft_bench import lookup

    return lookup.measure(args.keys, args.rounds)


def _copy(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name in ("block_bytes", "layers", "layout") if (value := getattr(args, name)) is not None}
    try:
        return _copy_on_cuda(args, given) if args.device == "cuda" else _copy_on_cpu(args, given)
    except (RuntimeError, ValueError) as error:
        raise output.CommandError(str(error)) from error


def _copy_on_cpu(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    if args.strategy is not None:
        raise ConfigError("--strategy is for --device cuda: in host memory there is one way to copy")
    from undercroft_bench.copy_cpu import run_copy_bench

    given |= {name: value for name in ("blocks", "ranks") if (value := getattr(args, name)) is not None}
    return run_copy_bench(**given)


def _copy_on_cuda(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    if args.blocks is not None:
        raise ConfigError("--blocks is for --device cpu: on cuda a job has 64 blocks")
    if args.ranks is not None:
        raise ConfigError("--ranks is for --device cpu")
    from undercroft_bench.copy_cuda import GRID, run_cuda_copy_bench

    cases = list(dict.fromkeys(case._replace(**given) for case in GRID))
    return run_cuda_copy_bench(cases, strategy=args.strategy or "auto")


def _disk(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft_bench import _bench

    with _directory(args.path) as path:
        # Small blocks are soon moved: a round that takes less than some tenths of a second measures its ends.
        blocks = args.blocks or max(1024, (2 << 30) // args.block_bytes)
        result = waiting.until_interrupted(
            lambda: _bench.disk(path, args.block_bytes, blocks, args.depth, args.io_engine, args.key_file)
        )
    # The plan compares the disk's speed with the model of a vLLM that runs here.
    return result | {"plan": planning.of_running(1e9 * result["read_gbps"])}


def _recover(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft_bench import _bench

    with _directory(args.path) as path:
        return waiting.until_interrupted(lambda: _bench.recover(path, args.blocks))


def _replay(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft_bench import _bench

    return waiting.until_interrupted(
        lambda: _bench.replay(args.trace, args.host_blocks, args.disk_blocks, args.policy, args.second_touch)
    )


def _object_sizes(text: str) -> list[int]:
    """Sizes of objects, each a value of remote_object: one of them is advised."""
    found = arguments.sizes(text)
    for part in text.split(","):
        try:
            remote_object(part)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"{part}: {error}. Allowed: {SIZE_FORMAT}; 1MiB to 64MiB, as for remote_object"
            ) from None
    return found


def _remote(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft import _core

    shows = not args.json and sys.stderr.isatty()
    with tqdm(desc="sizes", total=len(args.sizes), leave=False, disable=not shows) as bar:
        found = _core.remote_measure(
            args.url, args.sizes, args.total, lambda _: bar.update(), any_owner=args.remote_any_owner
        )
    cases = [
        {
            "object": format_size(one["object_bytes"]),
            "put_gbps": round(one["put_bytes_per_s"] / 1e9, 3),
            "get_gbps": round(one["get_bytes_per_s"] / 1e9, 3),
            "bare_get_gbps": round(one["bare_get_bytes_per_s"] / 1e9, 3),
            "put_cpu_s_per_gb": round(one["put_cpu_s_per_gb"], 2),
            "get_cpu_s_per_gb": round(one["get_cpu_s_per_gb"], 2),
            "bare_get_cpu_s_per_gb": round(one["bare_get_cpu_s_per_gb"], 2),
        }
        for one in found["sizes"]
    ]
    return {
        "probe_ms": round(found["probe_ms"], 3),
        "probe_32_ms": round(found["probe_32_ms"], 3),
        "advised_remote_object": format_size(found["advised_bytes"]).replace(" ", ""),
        "cases": cases,
    }


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft_bench import serve
    from undercroft_bench.vllm_client import VllmClient

    client = VllmClient(args.url, args.api_key)
    prompts = args.prompts or 8
    if args.turns or args.trace:
        if args.fill_tokens:
            raise ConfigError("--fill-tokens: with --turns or --trace nothing displaces the device's blocks")
        from undercroft.estimate import trace
        from undercroft_bench import conversations

        if args.trace:
            requests, limit = trace.read(args.trace), args.prompts or 100
        else:
            requests, limit = conversations.of_turns(prompts, args.prompt_tokens, args.turns), prompts * args.turns
        result = conversations.measure(client, requests, limit, args.max_tokens)
    else:
        plan = serve.Plan(prompts, args.prompt_tokens, args.max_tokens, args.fill_tokens)
        result = serve.measure(client, plan)
    if not args.json:
        print("\n".join(serve.chart(result["cases"])) + "\n")
    return result | {"plan": planning.of_running()}


def _directory(base: str | None) -> tempfile.TemporaryDirectory[str]:
    """A directory of the benchmark's own below ``base``, removed at the end: an existing cache is never touched."""
    if base is not None:
        Path(base).mkdir(parents=True, exist_ok=True)
    # Files that an interrupted measurement still makes there must not be an error.
    return tempfile.TemporaryDirectory(dir=base, prefix="undercroft-bench-", ignore_cleanup_errors=True)

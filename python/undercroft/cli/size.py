"""``undercroft size MODEL``: how large a model's KV cache is, and how many tokens memory and disks hold."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from undercroft import capacity
from undercroft.cli import arguments, output
from undercroft.cli.output import say
from undercroft.errors import ConfigError
from undercroft.model.groups import BLOCK_TOKENS, KVGroup, groups_of
from undercroft.model.layers import Precision, layers_of, model_dtype, read_config
from undercroft.units import format_size


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and vLLM's KV cache of it."""

    model_type: str
    dtype: str
    groups: list[KVGroup]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "size",
        parents=[shared],
        help="say how many tokens of a model memory and disks hold",
        description="Computes the size of a model's KV cache from its config.json, without loading vLLM or weights.",
        epilog="example: undercroft size Qwen/Qwen3-8B --host-memory 64GiB,128GiB --disk 1TiB",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a config.json, a model's directory, its name in Hugging Face's cache, or fields of its config.json as a "
        "JSON object",
    )
    parser.add_argument(
        "--host-memory", type=arguments.sizes, default=[], metavar="SIZE[,SIZE]", help="sizes of the host tier"
    )
    parser.add_argument(
        "--disk", type=arguments.sizes, default=[], metavar="SIZE[,SIZE]", help="sizes of a directory of the disk tier"
    )
    arguments.add_model(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the sizes."""
    model = read_model(args.model, args)
    found = report(model, args.host_memory or [64 << 30], args.disk or [1 << 40])
    if args.json:
        output.print_json(found)
    else:
        _print(args.model, found)
    return 0


def read_model(name: str, args: argparse.Namespace) -> Model:
    """The model with the arguments of `arguments.add_model`. Raises ConfigError."""
    config = read_config(name)
    precision = Precision(args.dtype, args.kv_cache_dtype, args.mamba_ssm_cache_dtype)
    ranks = args.tensor_parallel_size
    layers = layers_of(config, precision, ranks)
    groups = groups_of(layers, args.block_size or BLOCK_TOKENS, ranks)
    return Model(str(config.get("model_type", "unknown")), model_dtype(config, precision), groups)


def report(model: Model, host: list[int], disk: list[int]) -> dict[str, Any]:
    """The sizes as one object. Raises ConfigError if a block fits no slot."""
    return {
        "model_type": model.model_type,
        "dtype": model.dtype,
        "groups": [asdict(group) for group in model.groups],
        "token_bytes": capacity.token_bytes(model.groups),
        "boundary_bytes": capacity.boundary_bytes(model.groups),
        "boundary_tokens": capacity.BOUNDARY_TOKENS,
        "tiers": [_tier(model, tier, size) for tier, sizes in (("host", host), ("disk", disk)) for size in sizes],
    }


def _tier(model: Model, tier: str, size: int) -> dict[str, Any]:
    tokens = capacity.tokens_in(size, model.groups)
    if not tokens:
        raise ConfigError(f"{format_size(size)} for the {tier} tier is too small for a block of this model; give more")
    return {
        "tier": tier,
        "bytes": size,
        "tokens": tokens,
        "index_bytes": capacity.index_bytes(tokens, model.groups),
    }


def _print(name: str, found: dict[str, Any]) -> None:
    layers = sum(group["layers"] for group in found["groups"])
    if name.lstrip().startswith("{"):
        name = "model"
    say(f"{name} ({found['model_type']}): {layers} layers, {found['dtype']}")
    say()
    output.print_table(
        ("group", "kind", "layers", "window", "block tokens", "block bytes"),
        [
            (
                index,
                group["kind"],
                group["layers"],
                group["window_tokens"] or "-",
                group["block_tokens"],
                format_size(group["payload_bytes"]),
            )
            for index, group in enumerate(found["groups"])
        ],
    )
    say()
    say(f"each token: {format_size(found['token_bytes'])} of full attention")
    if found["boundary_bytes"]:
        say(
            f"each place where a hit may end: {format_size(found['boundary_bytes'])} of windows and states; below, "
            f"one every {found['boundary_tokens']:,} tokens"
        )
    say()
    output.print_table(
        ("tier", "size", "tokens", "memory of the index"),
        [
            (tier["tier"], format_size(tier["bytes"]), f"{tier['tokens']:,}", format_size(tier["index_bytes"]))
            for tier in found["tiers"]
        ],
    )

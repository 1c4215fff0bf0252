"""Configuration: one table of options, parsed from ``kv_connector_extra_config`` and the environment.

Every option may also be given as ``UNDERCROFT_<NAME>``; the extra config wins. Nothing here looks at the machine:
shares such as "25%" become bytes in `undercroft.sizing`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_type_hints

from undercroft.errors import ConfigError
from undercroft.key_file import check_key_file
from undercroft.option_values import (
    SHADOWS_MAX,
    PromotionWait,
    boolean,
    choice,
    client_fields,
    did_you_mean,
    directory,
    duration,
    integer,
    number,
    or_none,
    paths,
    plain_text,
    positive_amount,
    promotion_wait,
    remote_object,
    server,
    sizes,
    text_bool,
    text_number,
    text_object,
    text_paths,
    text_sizes,
    text_words,
)
from undercroft.remote_url import REMOTE_FORMAT, check_remote, is_credential, without_credentials
from undercroft.units import DURATION_FORMAT, SIZE_FORMAT, Amount, parse_amount, parse_size

ENV_PREFIX = "UNDERCROFT_"
EXTRA_CONFIG = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its description for people and its value's parser. It annotates a field of `UndercroftConfig`."""

    type: str
    default: Any
    """The default in the form in which a user would write it."""
    allowed: str
    help: str
    parse: Callable[[Any], Any]
    """Makes the field of `UndercroftConfig` from a JSON value. Raises ValueError with the reason."""
    from_text: Callable[[str], Any]
    """Makes the JSON value from an environment variable's text. Raises ValueError with the reason."""
    scope: str = "connector"
    """The part that uses the option: "engine" (the engine; also a flag of `undercroft serve`), "session" (a vLLM's
    connection to its engine) or "connector" (Python alone)."""
    name: str = ""
    """Name of the field."""

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Name of the flag of a command that takes the option."""
        return "--" + self.name.replace("_", "-")


_SHARE_FORMAT = f"{SIZE_FORMAT}, or a percentage"


@dataclass(frozen=True, slots=True)
class UndercroftConfig:
    """The options, each with the type of its checked value and its `Option`."""

    # fmt: off
    host_memory: Annotated[Amount, Option(
        "size or share", "25%", _SHARE_FORMAT + " above 0%",
        "Size of the host tier of one vLLM, all of its ranks on this machine together. Data-parallel ranks take equal "
        "parts, or share the whole if there is a disk_path. A percentage is taken of the memory available at start.",
        positive_amount, str, "engine",
    )]
    disk_path: Annotated[tuple[str, ...], Option(
        "path or list of paths", [], "directories on local disks",
        "Directories of the disk tier, one per device. Without one there is no disk tier. In the environment, they are "
        "separated by colons.",
        paths, text_paths, "engine",
    )]
    disk_capacity: Annotated[Amount, Option(
        "size or share", "50%", _SHARE_FORMAT + " above 0%",
        "Maximum size of each directory, up to 16 TiB, allocated at start. A percentage is taken of the free space and "
        "the tier's own. With a percentage, an existing directory shrinks only if space is short.",
        positive_amount, str, "engine",
    )]
    on_disk_error: Annotated[str, Option(
        "text", "degrade", '"degrade" or "refuse"',
        "Reaction to a directory that cannot be opened (failing, hanging, read-only, full, damaged): start without it "
        "and retry later, or do not start. A directory with other files or a wrong configuration is always refused.",
        choice("degrade", "refuse"), str, "engine",
    )]
    disk_on_other_version: Annotated[str, Option(
        "text", "discard", '"discard", "set_aside" or "refuse"',
        "Reaction to a directory of another disk format: delete its blocks, move them into a subdirectory (where they "
        "continue to take space), or treat the directory as one that cannot be opened.",
        choice("discard", "set_aside", "refuse"), str, "engine",
    )]
    save: Annotated[str, Option(
        "text", "all", '"all" or "prompt"',
        "Blocks that are saved: those of prompt and generated tokens, or only those of the prompt.",
        choice("all", "prompt"), str,
    )]
    unique_media_uuids: Annotated[bool, Option(
        "true or false", False, "true or false",
        "Whether the names that clients give to images, audio and videos (uuid, multi_modal_uuids) stand for the same "
        "content for all time and in every vLLM. Without it, requests with such names are cached up to the first "
        "medium. vLLM itself names media by their content.",
        boolean, text_bool,
    )]
    state_interval_tokens: Annotated[int, Option(
        "number", 8192, "0 to 10000000",
        "Save a sliding window every N tokens, besides the ends of prompts and answers and the places where prefixes "
        "differ. 0 disables the periodic saves. States are saved wherever vLLM keeps them.",
        integer(0, 10_000_000), text_number,
    )]
    min_load_tokens: Annotated[int | None, Option(
        "number", None, "0 to 1000000",
        "Minimum number of tokens that a load must add to those on the device. By default the planner decides by "
        "measured times, and by 64 tokens until it has measured.",
        or_none(integer(0, 1_000_000)), text_number, "session",
    )]
    load_margin: Annotated[float, Option(
        "number", 0.25, "0 to 10",
        "Share of the computing time that a planned wait may take before a proportional part of the tokens has "
        "arrived. A smaller value bounds the cost of a wrong plan more tightly.",
        number(0, 10), text_number, "engine",
    )]
    lookup: Annotated[str, Option(
        "text", "async", '"async" or "blocking"',
        "Behaviour while blocks are read from disk: the scheduler continues and asks again, or blocks for up to "
        "lookup_timeout_ms. A request may choose async where this is blocking, and not the reverse.",
        choice("async", "blocking"), str,
    )]
    lookup_timeout_ms: Annotated[float, Option(
        "number", 50, "0 to 60000",
        "Longest wait of a blocking lookup, and of all those of one pass of the scheduler together, in milliseconds. "
        "Afterwards the hit ends with the part in host memory. A request may ask for less.",
        number(0, 60_000), text_number,
    )]
    promotion_wait: Annotated[PromotionWait, Option(
        "text or object", "planned",
        '"planned", "complete", "best_effort", or {"base_ms": 20, "per_1k_tokens_ms": 5}',
        "How long a lookup waits for blocks on disk: as long as loading takes less time than computing, until all "
        "blocks are read, not at all, or for a time that grows with the prompt. A request may ask for less.",
        promotion_wait, text_object,
    )]
    promotion_memory: Annotated[Amount, Option(
        "size or share", "50%", _SHARE_FORMAT + " above 0%",
        "Maximum host memory that reads from disk may hold at once. A percentage is taken of host_memory.",
        positive_amount, str, "engine",
    )]
    pin_memory: Annotated[Amount, Option(
        "size or share", "30%", _SHARE_FORMAT + " above 0%; 0 pins nothing",
        "Maximum host memory of the blocks that hints of requests have pinned. A percentage is taken of "
        "host_memory.",
        parse_amount, str, "engine",
    )]
    client_fields: Annotated[tuple[str, ...], Option(
        "word or list of words", "none", '"none", or a list of "threshold", "explain" and "hints"',
        "Fields that requests may use: a cache_hit_threshold of their own, explanations and figures about the cache in "
        "their answers, hints. Each lets a client learn how much of a guessed prompt others have used, so allow them "
        "where all clients trust each other, or behind a gateway (docs/security.md). In the environment, separated by "
        "commas.",
        client_fields, text_words,
    )]
    early_prefetch: Annotated[bool, Option(
        "true or false", True, "true or false",
        "Start lookup and reads from disk when a request arrives, instead of when the scheduler first considers it.",
        boolean, text_bool,
    )]
    cache_hit_threshold: Annotated[float, Option(
        "number", 0.0, "0 to 1",
        "Reject requests with a smaller share of cached tokens. 0 serves all.",
        number(0, 1), text_number,
    )]
    cache_hit_threshold_answer: Annotated[str, Option(
        "text", "finish_reason", '"finish_reason" or "error"',
        'Answer of the HTTP server to a rejected request: a success with the finish reason "cache_threshold" and no '
        "text, for a router that reads it, or HTTP 412 with an error object, for gateways and clients that read "
        "only the status (docs/hit-threshold.md). A request may choose its own.",
        choice("finish_reason", "error"), str,
    )]
    disk_admission: Annotated[str, Option(
        "text", "all", '"all" or "second_touch"',
        "Blocks that are written to disk: all, or those used a second time (reduces SSD wear).",
        choice("all", "second_touch"), str, "engine",
    )]
    disk_write_rate: Annotated[int, Option(
        "size", 0, SIZE_FORMAT + "; 0 is unlimited",
        "Maximum bytes per second written to disk. Blocks beyond it stay in host memory only.",
        parse_size, str, "engine",
    )]
    disk_ttl: Annotated[int, Option(
        "time", 0, DURATION_FORMAT + "; 0 to 36525d, 0 keeps them",
        "Time to live on disk: blocks that no request has used for this time are evicted from the directories.",
        duration(0), str, "engine",
    )]
    key_file: Annotated[str, Option(
        "path", "", "a file that only this user can read, with 32 bytes or lines of 64 hexadecimal digits",
        "Encrypt blocks on disk and in the remote store (AES-256-GCM) with the first key of this file, and decrypt "
        "them with each of its keys. `openssl rand -hex 32` makes a key. Without it blocks are stored as they are.",
        check_key_file, str, "engine",
    )]
    remote: Annotated[str, Option(
        "URL", "", REMOTE_FORMAT,
        "Store that many hosts share, below the disk: a directory of a shared file system, an object store, Redis, or "
        "Mooncake. "
        "Credentials come from the environment, from files, or from the machine's role. Needs block hashes that are "
        "equal everywhere.",
        check_remote, str, "engine",
    )]
    remote_object: Annotated[int, Option(
        "size", "16MiB", SIZE_FORMAT + "; 1MiB to 64MiB",
        "Minimum size of an object in the remote store. A prefix is shared in whole objects. Larger ones transfer "
        "with fewer requests.",
        remote_object, str, "engine",
    )]
    remote_write: Annotated[str, Option(
        "text", "all", '"all", "second_touch" or "none"',
        "Blocks that are written to the remote store: all, those used a second time, or none (this host only reads).",
        choice("all", "second_touch", "none"), str, "engine",
    )]
    remote_write_rate: Annotated[int, Option(
        "size", "500MB", SIZE_FORMAT + "; 0 is unlimited",
        "Maximum bytes per second written to the remote store. Further blocks wait, and are left out if too many wait.",
        parse_size, str, "engine",
    )]
    remote_ttl: Annotated[int, Option(
        "time", "3d", DURATION_FORMAT + "; 1m to 36525d",
        "Time that an object is kept after its last use. Redis removes it then. In other stores, reading an object "
        "renews it when half of this time has passed; `undercroft remote gc` removes the old ones.",
        duration(60), str, "engine",
    )]
    remote_any_owner: Annotated[bool, Option(
        "true or false", False, "true or false",
        "Use a directory as the remote store although it, or objects in it, belong to other users, or group and others "
        "may write there. For file systems that change owners, such as NFS that squashes ids: whoever may write there "
        "chooses the bytes of hits.",
        boolean, text_bool, "engine",
    )]
    verify_host: Annotated[bool, Option(
        "true or false", False, "true or false",
        "Compare the checksums of blocks in host memory before each hit, besides the checks of what is on disk.",
        boolean, text_bool, "engine",
    )]
    io_engine: Annotated[str, Option(
        "text", "auto", '"auto", "io_uring" or "thread_pool"',
        "Interface for disk reads and writes. auto takes io_uring where the machine allows it.",
        choice("auto", "io_uring", "thread_pool"), str, "engine",
    )]
    io_depth: Annotated[int, Option(
        "number", 32, "1 to 1024",
        "Queue depth of each disk, for reads and writes each.",
        integer(1, 1024), text_number, "engine",
    )]
    kv_layout: Annotated[str, Option(
        "text", "auto", '"auto" or "cross_layer"',
        "Layout of the device's KV cache: vLLM's own choice, or all layers of a block side by side where possible.",
        choice("auto", "cross_layer"), str,
    )]
    gather_below: Annotated[int, Option(
        "size", "32KiB", "bytes as a number, or with a unit (KiB, MiB, KB, MB); 0 gathers nothing",
        "On CUDA, smaller pages of the device's KV cache are gathered on the device before they are copied. "
        "`undercroft bench copy --device cuda` measures both ways.",
        parse_size, str,
    )]
    namespace_salt: Annotated[str, Option(
        "text", "", "any text",
        "Any text. Caches with different salts are separate, for instance after weights were changed in place.",
        plain_text, str,
    )]
    reset_with_prefix_cache: Annotated[bool, Option(
        "true or false", False, "true or false",
        "Empty the cache at each reset of vLLM's prefix cache, even if vLLM asks for its own only, and at each sleep. "
        "If false, only after a call that may have updated weights.",
        boolean, text_bool,
    )]
    share_weight_versions: Annotated[bool, Option(
        "true or false", False, "true or false",
        "After a weight update, share blocks under vLLM's weight_version. You vouch that no two weights have the same "
        "version, with the same weights or model_id at the start. Resets then keep the cache.",
        boolean, text_bool,
    )]
    weights: Annotated[str, Option(
        "text", "sampled", '"sampled" or "full"',
        "How the model's weights are identified: by headers and samples of each file, or by every byte, read once.",
        choice("sampled", "full"), str,
    )]
    model_id: Annotated[str, Option(
        "text", "", "any text",
        "Identifies the weights instead of their content, which is not read then. You vouch that it changes with them.",
        plain_text, str,
    )]
    log_requests: Annotated[str, Option(
        "text", "off", '"off", "misses" or "all"',
        "Log a line for each request when it is admitted: tokens on the device, tokens loaded, and why no more; "
        "for those with something missing, or for all. `undercroft explain` shows the last ones in any case.",
        choice("off", "misses", "all"), str,
    )]
    record: Annotated[str, Option(
        "path", "", "a file, which is appended to up to 1 GiB",
        "Write a line for each request (time, numbers of tokens, renumbered block hashes, no text), for "
        "`undercroft estimate`. Each data-parallel rank appends its number to the name.",
        directory, str,
    )]
    shadow: Annotated[tuple[int, ...], Option(
        "size or list of sizes", [], SIZE_FORMAT + f" above 0; at most {SHADOWS_MAX} sizes",
        "Count the hits that a cache of each of these sizes would have had, without storing anything "
        "(metrics shadow_hit_tokens, shadow_prompt_tokens). In the environment, separated by commas.",
        sizes, text_sizes,
    )]
    server: Annotated[str, Option(
        "text", "", '"unix:///path" of a running `undercroft serve`',
        "Use the engine of a server on this host, shared with other vLLMs, instead of one in this process.",
        server, str, "session",
    )]
    server_timeout_ms: Annotated[float, Option(
        "number", 5, "0.1 to 60000",
        "Reply timeout, in milliseconds. After it, the server or the directory's owner counts as unavailable "
        "until it replies.",
        number(0.1, 60_000), text_number, "session",
    )]
    lookup_spin_us: Annotated[float, Option(
        "number", 200, "0 to 100000",
        "Longest wait in the scheduler for a server's reply that is about to arrive, in microseconds.",
        number(0, 100_000), text_number, "session",
    )]
    tenant_share: Annotated[float, Option(
        "number", 0.0, "0 to 1",
        "Share of host memory, and of each directory, that this engine's blocks keep when other models on the same "
        "server or directories need room. Blocks beyond it are evicted like all others.",
        number(0, 1), text_number, "session",
    )]
    socket_dir: Annotated[str, Option(
        "path", "", "a directory only this user can enter",
        "Directory of the engine's socket. By default $XDG_RUNTIME_DIR/undercroft or /tmp/undercroft-<uid>.",
        directory, str, "session",
    )]
    # fmt: on

    @classmethod
    def parse(
        cls,
        extra_config: Mapping[str, Any],
        environ: Mapping[str, str] | None = None,
        *,
        flags: Mapping[str, Any] | None = None,
        place: str = EXTRA_CONFIG,
        allowed: Collection[str] | None = None,
        refused: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> UndercroftConfig:
        """Read all options; ``environ`` defaults to the process environment. Raises ConfigError.

        ``flags``: texts, or lists of texts, from a command's flags, which win over the other two; ``extra_config`` wins
        over the environment. ``place``: the origin of ``extra_config`` in messages. ``allowed``: the options that have
        an effect here (default: all). ``refused``: for some of the others the reason, for people; these are refused in
        the environment, too. ``defaults``: those that differ here.
        """
        flags, refused, defaults = flags or {}, refused or {}, defaults or {}
        environ = os.environ if environ is None else environ
        known = [option.name for option in OPTIONS if allowed is None or option.name in allowed]
        _refuse(extra_config, environ, place, known, refused)
        for key, value in extra_config.items():
            if is_credential(str(key)) and key not in known:
                raise ConfigError(
                    f"undercroft: unknown option {key!r} in {place}, which is logged. Credentials of a remote "
                    "store come from the environment, from files or from the machine's role: set AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, REDIS_PASSWORD, or what doctor --remote names. "
                    f"Allowed: {', '.join(known)}."
                )
            if key not in known:
                raise ConfigError(
                    f"undercroft: unknown option {key!r} = {without_credentials(value)!r} in {place}"
                    f"{_hint(str(key), known)}. Allowed: {', '.join(known)}."
                )
        values: dict[str, Any] = {}
        given: set[str] = set()
        for option in OPTIONS:
            if option.name not in known:
                # The environment may have it for another command.
                values[option.name] = option.parse(option.default)
                continue
            found = _given(option, flags, extra_config, environ, place)
            if found is None:
                values[option.name] = option.parse(defaults.get(option.name, option.default))
                continue
            value, is_text, where = found
            given.add(option.name)
            try:
                if is_text:
                    value = option.from_text(value)
                values[option.name] = option.parse(value)
            except ValueError as error:
                raise ConfigError(f"undercroft: {where}: {error}. Allowed: {option.allowed}.") from None
        if "disk_capacity" in given and not values["disk_path"]:
            raise ConfigError(
                f"undercroft: disk_capacity = {values['disk_capacity']} without a disk_path. "
                "Set disk_path to a directory on a local disk, or leave disk_capacity out."
            )
        own = [option.name for option in OPTIONS if option.scope == "engine" and option.name in given]
        if values["server"] and own:
            raise ConfigError(
                f"undercroft: {own[0]} = {values[own[0]]} has no effect with server = {values['server']!r}: an "
                f"option of the server's engine. Give it to `undercroft serve`, and leave out {' and '.join(own)}, "
                "or server."
            )
        return cls(**values)


def _given(
    option: Option, flags: Mapping[str, Any], extra_config: Mapping[str, Any], environ: Mapping[str, str], place: str
) -> tuple[Any, bool, str] | None:
    """The value of an option, whether it is text, and its origin for messages; None if it is not given."""
    if option.name in flags:
        value = flags[option.name]
        return value, isinstance(value, str), f"{option.flag} {without_credentials(value)}"
    if option.name in extra_config:
        value = extra_config[option.name]
        return value, False, f"{option.name} = {without_credentials(value)!r} in {place}"
    if environ.get(option.env, "") != "":
        value = environ[option.env]
        return value, True, f"environment variable {option.env} = {without_credentials(value)!r}"
    return None


def _refuse(
    extra_config: Mapping[str, Any],
    environ: Mapping[str, str],
    place: str,
    known: Collection[str],
    refused: Mapping[str, str],
) -> None:
    """Raise ConfigError for an option that has no effect here."""
    for option in OPTIONS:
        if option.name in known:
            continue
        reason = refused.get(option.name)
        if option.name in extra_config:
            raise ConfigError(
                f"undercroft: {option.name} = {extra_config[option.name]!r} in {place} has no effect there"
                f"{f': {reason}' if reason else ''}. Leave it out. Allowed: {', '.join(known)}."
            )
        if reason and environ.get(option.env, "") != "":
            raise ConfigError(
                f"undercroft: environment variable {option.env} = {environ[option.env]!r} has no effect with {place}: "
                f"{reason}. Unset it."
            )


OPTIONS = tuple(
    replace(hint.__metadata__[0], name=name)
    for name, hint in get_type_hints(UndercroftConfig, include_extras=True).items()
)
"""The options in the order of the fields."""


def unknown_environment(environ: Mapping[str, str] | None = None) -> list[str]:
    """Messages about variables that look like options but are none.

    Such variables are no errors: orchestrators set variables named after services (UNDERCROFT_SERVICE_HOST).
    """
    environ = os.environ if environ is None else environ
    known = [option.env for option in OPTIONS]
    return [
        f"undercroft: environment variable {name} is not an option{did_you_mean(name, known)}"
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in known
    ]


def option_table() -> str:
    """The options as a Markdown table, for the documents."""
    lines = ["| option | default | meaning | allowed |", "| --- | --- | --- | --- |"]
    for option in OPTIONS:
        default = "none" if option.default in ("", [], None) else json.dumps(option.default)
        lines.append(f"| `{option.name}` | `{default}` | {option.help} | {option.allowed} |")
    return "\n".join(lines) + "\n"


_FOREIGN = {
    "global_cache_hit_threshold": 'is "cache_hit_threshold" here',
    "lookup_async": 'is "lookup": "async" (the default) or "blocking" here',
    "sync_lookup": 'is "lookup": "blocking" here',
    "lookup_timeout": 'is "lookup_timeout_ms" here, in milliseconds',
    "poll_interval": "is not needed here: a pending lookup is asked for in each step of the scheduler",
    "eager_prefetch": 'is "early_prefetch" here',
    "cpu_bytes_to_use": 'is "host_memory" here',
    "max_local_cpu_size": 'is "host_memory" here, with a unit such as "16GiB"',
    "swap_space": 'is "host_memory" here, with a unit such as "16GiB"',
    "local_disk": 'is "disk_path" here',
    "shared_storage_path": 'is "disk_path" here, which several vLLMs of a host may share',
    "max_local_disk_size": 'is "disk_capacity" here, with a unit such as "500GiB"',
    "secondary_tiers": 'is "disk_path" here',
    "offload_prompt_only": 'is "save": "prompt" here',
    "save_decode_cache": 'is "save": "all" (the default) or "prompt" here',
    "store_threshold": 'is "disk_admission": "second_touch" here',
    "chunk_size": "is not needed here: the blocks are those of vLLM",
    "kv_load_failure_policy": "is a field of the KV transfer config; undercroft sets it to recompute",
}
"""Other connectors' names of undercroft's options, without a prefix such as ``lmcache.mp.``."""


def _hint(key: str, known: list[str]) -> str:
    """A hint about an unknown name: undercroft's option if another connector uses the name, else a similar name."""
    plain = key.rpartition(".")[2].lower().replace("-", "_").strip("_")
    if plain in known and plain != key:
        return f" (it is {plain!r} here)"
    return f" (it {meant})" if (meant := _FOREIGN.get(plain)) else did_you_mean(key, known)

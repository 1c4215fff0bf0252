"""Configuration: one table of options, parsed from ``kv_connector_extra_config`` and the environment.

Every option may also be given as ``UNDERCROFT_<NAME>``; the extra config wins. Nothing here looks at the machine:
shares such as "25%" become bytes in `undercroft.sizing`.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from undercroft.errors import ConfigError
from undercroft.units import SIZE_FORMAT, Amount, parse_amount, parse_size

ENV_PREFIX = "UNDERCROFT_"
EXTRA_CONFIG = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class PromotionWait:
    """How long a lookup waits for blocks that are on disk only.

    ``planned``: as long as loading takes less time than computing, by measurement. Otherwise ``base_ms`` None means
    until all are in host memory, else the wait ends after ``base_ms`` +
    ``per_1k_tokens_ms`` for each 1,000 tokens that are looked up; (0, 0) takes only what host memory holds at once.
    """

    base_ms: float | None = None
    per_1k_tokens_ms: float = 0.0
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how people are told about it, and how its value is read. A field of `UndercroftConfig` carries it."""

    type: str
    default: Any
    """As a user would write it."""
    allowed: str
    help: str
    parse: Callable[[Any], Any]
    """From a JSON value to the field of `UndercroftConfig`; raises ValueError with the reason."""
    from_text: Callable[[str], Any]
    """From an environment variable's text to the JSON value; raises ValueError with the reason."""
    scope: str = "connector"
    """Who takes it: "engine" (the engine, also of `undercroft serve`, whose flag it is), "session" (the way of a vLLM
    to its engine) or "connector" (Python alone)."""
    name: str = ""
    """That of the field."""

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Name of the flag of a command that takes the option."""
        return "--" + self.name.replace("_", "-")


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{type(value).__name__} instead of text")
        if value not in allowed:
            raise ValueError(f"not one of the allowed words{_did_you_mean(value, allowed)}")
        return value

    return parse


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{type(value).__name__} instead of a whole number")
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def _number(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{type(value).__name__} instead of a number")
        # Comparing first: a huge integer has no float.
        if not low <= value <= high:
            raise ValueError("out of range")
        return float(value)

    return parse


def _or_none(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else parse(value)


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{type(value).__name__} instead of true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of text")
    return value


def _directory(value: Any) -> str:
    """Absolute, since other processes read it; empty if it is."""
    text = _text(value)
    return str(Path(text).expanduser().absolute()) if text else ""


def _positive_amount(value: Any) -> Amount:
    amount = parse_amount(value)
    if amount.size == 0:
        raise ValueError("zero")
    return amount


def _paths(value: Any) -> tuple[str, ...]:
    paths = (value,) if isinstance(value, str) else value
    if not isinstance(paths, (list, tuple)):
        raise ValueError(f"{type(value).__name__} instead of a path or a list of paths")
    for path in paths:
        if not isinstance(path, str):
            raise ValueError(f"the list holds {type(path).__name__} instead of a path")
        if not path.strip() or "\0" in path:
            raise ValueError("an empty or impossible path")
    expanded = tuple(str(Path(path).expanduser().absolute()) for path in paths)
    if len(set(expanded)) != len(expanded):
        raise ValueError("the same directory twice")
    return expanded


def _server(value: Any) -> str:
    text = _text(value)
    path = text.removeprefix("unix://")
    if text and (path == text or not path.startswith("/")):
        raise ValueError("no address of a Unix socket")
    return text


def _promotion_wait(value: Any) -> PromotionWait:
    if value == "planned":
        return PromotionWait(planned=True)
    if value == "complete":
        return PromotionWait()
    if value == "best_effort":
        return PromotionWait(0.0, 0.0)
    if not isinstance(value, dict):
        raise ValueError("neither of the words nor an object")
    known = ("base_ms", "per_1k_tokens_ms")
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {key!r}{_did_you_mean(str(key), known)}")
    numbers = {}
    for key in known:
        try:
            numbers[key] = _number(0, 3_600_000)(value.get(key, 0))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return PromotionWait(numbers["base_ms"], numbers["per_1k_tokens_ms"])


def _text_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("neither true nor false")


def _text_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def _text_paths(text: str) -> Any:
    return json.loads(text) if text.lstrip().startswith("[") else [path for path in text.split(os.pathsep) if path]


def _text_object(text: str) -> Any:
    return json.loads(text) if text.lstrip().startswith("{") else text


_SHARE_FORMAT = f"{SIZE_FORMAT}, or a percentage"


@dataclass(frozen=True, slots=True)
class UndercroftConfig:
    """The options, each with the type of its checked value and how it is read."""

    # fmt: off
    host_memory: Annotated[Amount, Option(
        "size or share", "25%", _SHARE_FORMAT + " above 0%",
        "Size of the host tier of one vLLM, all of its ranks on this machine together: data-parallel ranks take equal "
        "parts, or share the whole if there is a disk_path. A percentage is taken of the memory available at start.",
        _positive_amount, str, "engine",
    )]
    disk_path: Annotated[tuple[str, ...], Option(
        "path or list of paths", [], "directories on local disks",
        "Directories of the disk tier, one per device; none: no disk tier. In the environment, separated by colons.",
        _paths, _text_paths, "engine",
    )]
    disk_capacity: Annotated[Amount, Option(
        "size or share", "50%", _SHARE_FORMAT + " above 0%",
        "Most that each directory may hold, of which 16 TiB are used; allocated at start. A percentage is taken of the "
        "space that is free there or the tier's own; a directory that was used before keeps its size under it unless "
        "space is short.",
        _positive_amount, str, "engine",
    )]
    on_disk_error: Annotated[str, Option(
        "text", "degrade", '"degrade" or "refuse"',
        "When a directory cannot be opened (failing, read-only, full, damaged): start without it and try it again "
        "later, or do not start. A directory that holds other files or is configured wrongly is refused in any case.",
        _choice("degrade", "refuse"), str, "engine",
    )]
    disk_on_other_version: Annotated[str, Option(
        "text", "discard", '"discard", "set_aside" or "refuse"',
        "When a directory was written by an undercroft of another disk format: delete its blocks, move them into a "
        "directory in it (where they go on taking space), or treat it as one that cannot be opened.",
        _choice("discard", "set_aside", "refuse"), str, "engine",
    )]
    save: Annotated[str, Option(
        "text", "all", '"all" or "prompt"',
        "Which full blocks are saved: prompt and generated tokens, or the prompt's only.",
        _choice("all", "prompt"), str,
    )]
    state_interval_tokens: Annotated[int, Option(
        "number", 8192, "0 to 10000000",
        "Sliding windows are saved where prompts and answers end and where prefixes part, and, so that a hit can end "
        "between, every so many tokens; 0: not between. States are saved wherever vLLM keeps them.",
        _integer(0, 10_000_000), _text_number,
    )]
    min_load_tokens: Annotated[int | None, Option(
        "number", None, "0 to 1000000",
        "A hit that gains fewer tokens over what the device holds is not loaded. By default the planner decides by "
        "what it has measured, and by 64 tokens before that.",
        _or_none(_integer(0, 1_000_000)), _text_number, "session",
    )]
    load_margin: Annotated[float, Option(
        "number", 0.25, "0 to 10",
        "Part of the time of computing that a planned wait may take although less than a proportional part has come.",
        _number(0, 10), _text_number, "engine",
    )]
    lookup: Annotated[str, Option(
        "text", "async", '"async" or "blocking"',
        "While the disk owes blocks, let the scheduler go on and ask again, or wait for them (lookup_timeout_ms).",
        _choice("async", "blocking"), str,
    )]
    lookup_timeout_ms: Annotated[float, Option(
        "number", 50, "0 to 60000",
        "Longest wait of a blocking lookup, in milliseconds; afterwards the hit ends with the part in host memory.",
        _number(0, 60_000), _text_number,
    )]
    promotion_wait: Annotated[PromotionWait, Option(
        "text or object", "planned",
        '"planned", "complete", "best_effort", or {"base_ms": 20, "per_1k_tokens_ms": 5}',
        "How long a lookup waits for blocks on disk: as long as loading takes less time than computing, for all, not "
        "at all, or a time that grows with the prompt.",
        _promotion_wait, _text_object,
    )]
    promotion_memory: Annotated[Amount, Option(
        "size or share", "50%", _SHARE_FORMAT + " above 0%",
        "Most host memory that reads from disk may hold at once. A percentage is taken of host_memory.",
        _positive_amount, str, "engine",
    )]
    early_prefetch: Annotated[bool, Option(
        "true or false", True, "true or false",
        "Start lookup and reads from disk when a request arrives, not when the scheduler comes to it.",
        _bool, _text_bool,
    )]
    cache_hit_threshold: Annotated[float, Option(
        "number", 0.0, "0 to 1",
        "Requests with a smaller share of their tokens cached are given back unserved; 0 serves all.",
        _number(0, 1), _text_number,
    )]
    eviction_policy: Annotated[str, Option(
        "text", "lru", '"lru" or "leafhd"',
        "What is evicted first: the least recently used leaf, or the leaf with the least learned hit density.",
        _choice("lru", "leafhd"), str, "engine",
    )]
    disk_admission: Annotated[str, Option(
        "text", "all", '"all" or "second_touch"',
        "What is written to disk: every block, or blocks from their second use on (spares the flash).",
        _choice("all", "second_touch"), str, "engine",
    )]
    disk_write_rate: Annotated[int, Option(
        "size", 0, SIZE_FORMAT + "; 0 is unlimited",
        "Most bytes per second written to disk. What exceeds it stays in host memory only.",
        parse_size, str, "engine",
    )]
    verify_host: Annotated[bool, Option(
        "true or false", False, "true or false",
        "Compare the checksums of blocks in host memory before each hit, too, not only on their way to disk.",
        _bool, _text_bool, "engine",
    )]
    io_engine: Annotated[str, Option(
        "text", "auto", '"auto", "io_uring" or "thread_pool"',
        "How disks are read and written; auto takes io_uring where the machine allows it.",
        _choice("auto", "io_uring", "thread_pool"), str, "engine",
    )]
    io_depth: Annotated[int, Option(
        "number", 32, "1 to 1024",
        "Reads, or writes, that each disk has at once.",
        _integer(1, 1024), _text_number, "engine",
    )]
    kv_layout: Annotated[str, Option(
        "text", "auto", '"auto" or "cross_layer"',
        "Layout of the device's KV cache: vLLM's own choice, or all layers of a block side by side, if they can be.",
        _choice("auto", "cross_layer"), str,
    )]
    namespace_salt: Annotated[str, Option(
        "text", "", "any text",
        "Keeps caches apart that look the same, e.g. of weights changed in place.",
        _text, str,
    )]
    reset_with_prefix_cache: Annotated[bool, Option(
        "true or false", False, "true or false",
        "Empty the cache with each reset of vLLM's prefix cache, also where vLLM asks for its own only, and at each "
        "sleep. If false, only after collective_rpc, which updates weights.",
        _bool, _text_bool,
    )]
    weights: Annotated[str, Option(
        "text", "sampled", '"sampled" or "full"',
        "How the model's weights are known: by headers and samples of each file, or by every byte, read once.",
        _choice("sampled", "full"), str,
    )]
    model_id: Annotated[str, Option(
        "text", "", "any text",
        "Stands for the weights, which are not looked at then: you vouch that it changes when they do.",
        _text, str,
    )]
    log_requests: Annotated[str, Option(
        "text", "off", '"off", "misses" or "all"',
        "Log a line for each request when it is admitted: what was on the device, what is loaded, and why no more; "
        "for those with something missing, or for all. `undercroft explain` shows the last ones in any case.",
        _choice("off", "misses", "all"), str,
    )]
    record: Annotated[str, Option(
        "path", "", "a file, which is appended to up to 1 GiB",
        "Write a line for each request (time, numbers of tokens, renumbered block hashes, no text), for "
        "`undercroft estimate`. Of several data-parallel ranks each appends its number to the name.",
        _directory, str,
    )]
    server: Annotated[str, Option(
        "text", "", '"unix:///path" of a running `undercroft serve`',
        "Use the engine of a server on this host, shared with other vLLMs, instead of one in this process.",
        _server, str, "session",
    )]
    server_timeout_ms: Annotated[float, Option(
        "number", 5, "0.1 to 60000",
        "A server or owner of the directory that owes a reply for longer counts as gone until it answers again.",
        _number(0.1, 60_000), _text_number, "session",
    )]
    lookup_spin_us: Annotated[float, Option(
        "number", 200, "0 to 100000",
        "Longest wait in the scheduler for a server's reply that is on its way.",
        _number(0, 100_000), _text_number, "session",
    )]
    socket_dir: Annotated[str, Option(
        "path", "", "a directory only this user can enter",
        "Where the engine's socket is made; by default $XDG_RUNTIME_DIR/undercroft or /tmp/undercroft-<uid>.",
        _directory, str, "session",
    )]
    # fmt: on

    @classmethod
    def parse(
        cls, extra_config: Mapping[str, Any], environ: Mapping[str, str] | None = None, *, flags: bool = False
    ) -> UndercroftConfig:
        """Read all options; ``environ`` defaults to the process environment. Raises ConfigError.

        ``flags``: the values are texts, or lists of texts, of a command's flags, and are called so in messages.
        """
        environ = os.environ if environ is None else environ
        known = [option.name for option in OPTIONS]
        for key, value in extra_config.items():
            if key not in known:
                raise ConfigError(
                    f"undercroft: unknown option {key!r} = {value!r} in {EXTRA_CONFIG}"
                    f"{_hint(str(key), known)}. Allowed: {', '.join(known)}."
                )
        values: dict[str, Any] = {}
        given: set[str] = set()
        for option in OPTIONS:
            if option.name in extra_config:
                value = extra_config[option.name]
                is_text = flags and isinstance(value, str)
                where = f"{option.flag} {value}" if flags else f"{option.name} = {value!r} in {EXTRA_CONFIG}"
            elif environ.get(option.env, "") != "":
                value = environ[option.env]
                is_text = True
                where = f"environment variable {option.env} = {value!r}"
            else:
                values[option.name] = option.parse(option.default)
                continue
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


OPTIONS = tuple(
    replace(hint.__metadata__[0], name=name)
    for name, hint in get_type_hints(UndercroftConfig, include_extras=True).items()
)
"""The options in the order of the fields."""


def unknown_environment(environ: Mapping[str, str] | None = None) -> list[str]:
    """Messages about variables that look like options but are none.

    Not errors: orchestrators inject variables named after services (UNDERCROFT_SERVICE_HOST).
    """
    environ = os.environ if environ is None else environ
    known = [option.env for option in OPTIONS]
    return [
        f"undercroft: environment variable {name} is not an option{_did_you_mean(name, known)}"
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in known
    ]


def option_table() -> str:
    """The options as a Markdown table, for the README."""
    lines = ["| option | type | default | allowed | meaning |", "| --- | --- | --- | --- | --- |"]
    for option in OPTIONS:
        default = "none" if option.default in ("", [], None) else json.dumps(option.default)
        lines.append(f"| `{option.name}` | {option.type} | `{default}` | {option.allowed} | {option.help} |")
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
"""Names that other connectors have for what an option here does, without a prefix such as ``lmcache.mp.``."""


def _hint(key: str, known: list[str]) -> str:
    """A hint after an unknown name: the option for it, if another connector calls it so, or one with a similar name."""
    plain = key.rpartition(".")[2].lower().replace("-", "_").strip("_")
    if plain in known and plain != key:
        return f" (it is {plain!r} here)"
    return f" (it {meant})" if (meant := _FOREIGN.get(plain)) else _did_you_mean(key, known)


def _did_you_mean(key: str, known: list[str] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""

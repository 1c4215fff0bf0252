from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from undercroft import _core, config
from undercroft.config import OPTIONS, ConfigError, UndercroftConfig, option_table, unknown_environment
from undercroft.engine import disks
from undercroft.option_values import PromotionWait
from undercroft.remote_url import without_credentials
from undercroft.sizing import resolve_sizes
from undercroft.units import Amount, format_size, parse_amount, parse_size


def parse(extra=None, **environ):
    return UndercroftConfig.parse(extra or {}, environ)


def test_defaults():
    config = parse()
    assert config.host_memory == Amount(share=0.25)
    assert config.disk_path == ()
    assert config.early_prefetch is True
    assert config.cache_hit_threshold == 0.0
    assert config.promotion_wait == PromotionWait(planned=True)
    assert config.min_load_tokens is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 << 30),
        ("1.5 GiB", 3 << 29),
        ("0.5TiB", 1 << 39),
        ("2tb", 2 * 10**12),
        ("10 KB", 10_000),
        ("1KiB", 1024),
        ("7 mib", 7 << 20),
        ("512", 512),
        (".5KiB", 512),
        (4096, 4096),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "bad", ["", "GiB", "-1GiB", "1 GiBs", "1,5GiB", "1e9", "0x10", True, None, 1.5, -1, float("nan"), []]
)
def test_bad_sizes(bad):
    with pytest.raises(ValueError):
        parse_size(bad)


def test_shares():
    assert parse_amount("25%").of(1000) == 250
    assert parse_amount("0.5 %").of(1000) == 5
    for bad in ("0%", "100.1%", "%"):
        with pytest.raises(ValueError):
            parse_amount(bad)
    with pytest.raises(ValueError):
        parse_size("25%")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (12.5, "12 B"),
        (1536, "1.5 KiB"),
        (240 << 10, "240 KiB"),
        ((1 << 20) - 1, "1024 KiB"),
        (16 << 30, "16 GiB"),
        (64_488_000, "61.5 MiB"),
        (1 << 54, "16384 TiB"),
    ],
)
def test_format_size(size, shown):
    assert format_size(size) == shown


def test_unknown_key_names_everything():
    with pytest.raises(ConfigError) as error:
        parse({"host_memmory": "1GiB"})
    message = str(error.value)
    assert "'host_memmory' = '1GiB'" in message
    assert "did you mean 'host_memory'?" in message
    assert all(option.name in message for option in OPTIONS)


BAD = {
    "client_fields": ["hint", ["hints", "explian"], ["none"], True, 1, None],
    "host_memory": ["lots", "0", 0, "0%", "101%", None, True, ["1GiB"], {}],
    "disk_path": ["", 3, [1], ["/a", ""], ["/a", "/a"], {"a": 1}, "a\0b"],
    "disk_capacity": ["x", 0, False],
    "save": ["al", "", None, True, 1],
    "state_interval_tokens": [-1, 1.5, "8k", True, 10**9],
    "load_margin": [-0.1, 11, "0.25", True],
    "min_load_tokens": [-1, 1.0, "64", True, 10**9],
    "lookup": ["sync", None],
    "lookup_timeout_ms": [-1, "5", True, float("inf"), float("nan"), 10**400, 60_001],
    "promotion_wait": ["never", 5, None, {"base": 1}, {"base_ms": -1}, {"base_ms": "1"}, {"per_1k_tokens_ms": True}],
    "promotion_memory": ["some", 0],
    "pin_memory": ["some", -1, "0%", "101%"],
    "early_prefetch": [1, "true", None],
    "unique_media_uuids": [1, "true", None],
    "cache_hit_threshold": [-0.1, 1.1, float("nan"), "0.5", True],
    "cache_hit_threshold_answer": ["eror", "412", 412, True, None],
    "disk_admission": ["none", 1],
    "on_disk_error": ["ignore", False],
    "disk_on_other_version": ["delete", 2],
    "disk_write_rate": ["fast", -1, "10%"],
    "disk_ttl": [-1, "7w", "1.5h", "36526d", 0.5, True, None],
    "key_file": [1, ["/etc/key"], None],
    "remote": [
        1,
        "/mnt/shared",
        "ftp://host/dir",
        "file://mnt",
        "file:///",
        "s3://",
        "s3:///prefix",
    ],
    "remote_object": ["1KiB", "65MiB", 0, "big", True],
    "remote_write": ["some", None, 1],
    "remote_write_rate": ["fast", -1, "10%"],
    "remote_ttl": ["59s", 0, "3w", "36526d", -1, "", None, True],
    "remote_any_owner": [1, "yes", None],
    "reset_with_prefix_cache": [1, "no", None],
    "share_weight_versions": [1, "no", None],
    "shadow": ["lots", 0, ["1GiB", "0"], ["1GiB"] * 5, None],
    "log_requests": ["yes", True, 1, None],
    "verify_host": [1, "yes", None],
    "io_engine": ["uring", None],
    "io_depth": [0, 1025, 3.0, "32", True],
    "kv_layout": ["LBHNC", None],
    "gather_below": ["3 pages", -1, "10%"],
    "namespace_salt": [1, None],
    "weights": ["none", 1],
    "model_id": [1, None],
    "server": [1, "/run/undercroft.sock", "unix://run/x.sock", "tcp://localhost:1"],
    "server_timeout_ms": [0, -1, "5", True, 60_001],
    "lookup_spin_us": [-1, "200", True, 100_001],
    "tenant_share": [-0.1, 1.1, "30%", True, None],
    "record": [1, ["/tmp"]],
    "socket_dir": [1, ["/tmp"]],
}


def test_every_option_has_bad_values():
    assert set(BAD) == {option.name for option in OPTIONS}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused(name, value):
    with pytest.raises(ConfigError) as error:
        parse({name: value})
    message = str(error.value)
    assert name in message
    assert repr(value) in message
    assert "Allowed: " in message


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host/0",
        "redis://user:1/0/hunter2@host",
        "s3://key:hunter2@bucket",
        "s3://AKIA:hun/hunter2@bucket/p",
        "s3://AKIA:hunter2/bucket",
        "s3://AKIA:hunter2%40bucket/p",
        "gs://hunter2+x=/bucket",
        "az://container/p?sig=hunter2",
        "mooncake://host/p?metadata=http://hunter2@other",
        "file://user:hunter2@host/path",
        "user:hunter2@host",
        "x://hunter2@y",
        "x://hunter2\n@y",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url):
    # Also under a name that is no option, and from a command's flag.
    for given in ({"remote": url}, {}, {"remote_url": url}, {"remotes": [url]}):
        with pytest.raises(ConfigError, match=r"(?i)remote") as error:
            parse(given, **({} if given else {"UNDERCROFT_REMOTE": url}))
        assert "hunter2" not in str(error.value)
    with pytest.raises(ConfigError, match="--remote") as error:
        UndercroftConfig.parse({}, {}, flags={"remote": url})
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["aws_secret_access_key", "AWS_ACCESS_KEY_ID", "remote_password", "azure_storage_account_key", "session_token"],
)
def test_credentials_in_options_of_their_own_are_refused_and_not_shown(name):
    with pytest.raises(ConfigError, match=f"unknown option '{name}'.*from the environment, from files") as error:
        parse({"remote": "s3://bucket", name: "hunter2"})
    assert "hunter2" not in str(error.value)


def test_credentials_within_a_value_are_not_shown():
    with pytest.raises(ConfigError, match=r"remote = .*password.*dict instead of a URL") as error:
        parse({"remote": {"url": "redis://host", "password": "hunter2"}})
    assert "hunter2" not in str(error.value)


def test_a_misspelt_option_is_no_credential():
    with pytest.raises(ConfigError, match=r"unknown option 'min_load_token' = 5 .*did you mean 'min_load_tokens'"):
        parse({"min_load_token": 5})
    with pytest.raises(ConfigError, match=r"unknown option 'keyfile' = '/a' .*did you mean 'key_file'"):
        parse({"keyfile": "/a"})


@pytest.mark.parametrize(
    "value", ["/mnt/a@b", "file:///mnt/a@b?c", "s3://bucket/prefix", "redis://[::1]:7000,b:6379/0/team", 5, [1]]
)
def test_values_without_credentials_are_shown_as_they_are(value):
    assert without_credentials(value) == value


def test_a_key_in_place_of_its_file_is_refused_and_not_shown():
    key = "0aF3" * 16
    for given in ({"key_file": key}, {}):
        with pytest.raises(ConfigError, match=r"(?i)key_file.*a key instead of the path") as error:
            parse(given, **({} if given else {"UNDERCROFT_KEY_FILE": key}))
        assert key not in str(error.value)


def test_a_key_file_is_an_absolute_path():
    assert parse({"key_file": "~/keys"}).key_file == str(Path("~/keys").expanduser())
    assert parse({}).key_file == ""


def test_options_of_the_remote_store_are_read():
    config = parse(
        {"remote": "s3://bucket/prefix", "remote_object": "4MiB", "remote_write_rate": 0}, UNDERCROFT_REMOTE_TTL="12h"
    )
    assert (config.remote, config.remote_object, config.remote_write_rate) == ("s3://bucket/prefix", 4 << 20, 0)
    assert (config.remote_ttl, config.remote_write) == (12 * 3600, "all")
    assert parse({}).remote_ttl == 3 * 86_400


def test_only_a_mooncake_store_has_parameters():
    url = "mooncake://host:50051/prefix?metadata=http://other:8080/metadata&segment=16GiB"
    assert parse({"remote": url}).remote == url
    for bad in ("s3://bucket/prefix?region=x", "mooncake://host?metadata=http://user:secret@host"):
        with pytest.raises(ConfigError, match="remote") as error:
            parse({"remote": bad})
        assert "secret" not in str(error.value)


@pytest.mark.parametrize("name", ["disk_ttl", "remote_ttl"])
def test_times_have_units_and_plain_numbers_are_seconds(name):
    values = [getattr(parse({name: given}), name) for given in (90, 90.0, "90", "90s", "3m", "12h", "7d", "36525d")]
    assert values == [90, 90, 90, 90, 180, 43_200, 604_800, 3_155_760_000]
    assert getattr(parse({}, **{"UNDERCROFT_" + name.upper(): "2d"}), name) == 172_800
    with pytest.raises(ConfigError, match=r"with a unit \(s, m, h, d\)"):
        parse({name: "7 weeks"})


def test_names_of_other_connectors_get_the_option_that_does_the_same():
    hints = {
        "lookup_async": '"lookup": "async"',
        "global_cache_hit_threshold": '"cache_hit_threshold"',
        "--global-cache-hit-threshold": '"cache_hit_threshold"',
        "lmcache.mp.sync_lookup": '"lookup": "blocking"',
        "sync_lookup": '"lookup": "blocking"',
        "poll_interval": "not needed",
        "lmcache.mp.poll_interval": "not needed",
        "lmcache.mp.early_prefetch": "'early_prefetch'",
        "eager_prefetch": '"early_prefetch"',
        "lookup_timeout": "milliseconds",
        "cpu_bytes_to_use": '"host_memory"',
        "lmcache.max_local_disk_size": '"disk_capacity"',
    }
    for name, hint in hints.items():
        with pytest.raises(ConfigError) as error:
            parse({name: 1})
        assert hint in str(error.value).partition(" Allowed: ")[0], name


def test_the_options_in_hints_exist():
    names = {option.name for option in OPTIONS}
    for hint in config._FOREIGN.values():
        assert set(re.findall(r'is "(\w+)"', hint)) <= names, hint


@pytest.mark.parametrize("name", [option.name for option in OPTIONS if option.scope == "engine"])
def test_an_option_of_the_engine_is_refused_beside_a_server(name):
    given = {
        "host_memory": "1GiB",
        "promotion_memory": "1GiB",
        "pin_memory": "1GiB",
        "disk_path": ["/c"],
        "disk_capacity": "1GiB",
    }
    option = next(option for option in OPTIONS if option.name == name)
    extra = {"server": "unix:///run/x.sock", name: given.get(name, option.default)}
    if name == "disk_capacity":
        extra["disk_path"] = "/c"
    with pytest.raises(ConfigError, match=f"{name}.* no effect with server|leave out .*{name}"):
        parse(extra)


def test_near_word_is_suggested():
    with pytest.raises(ConfigError, match="did you mean 'prompt'"):
        parse({"save": "promt"})
    with pytest.raises(ConfigError, match="did you mean 'base_ms'"):
        parse({"promotion_wait": {"base": 1}})


def test_environment_is_read_and_extra_config_wins():
    config = parse(
        {"save": "all"},
        UNDERCROFT_SAVE="prompt",
        UNDERCROFT_HOST_MEMORY="2GiB",
        UNDERCROFT_DISK_PATH="/a:/b",
        UNDERCROFT_EARLY_PREFETCH="off",
        UNDERCROFT_IO_DEPTH="64",
        UNDERCROFT_CACHE_HIT_THRESHOLD="0.5",
        UNDERCROFT_PROMOTION_WAIT='{"base_ms": 5}',
        UNDERCROFT_DISK_WRITE_RATE="1GB",
        UNDERCROFT_NAMESPACE_SALT="",
    )
    assert config.save == "all"
    assert config.host_memory == Amount(size=2 << 30)
    assert config.disk_path == ("/a", "/b")
    assert config.early_prefetch is False
    assert config.io_depth == 64
    assert config.cache_hit_threshold == 0.5
    assert config.promotion_wait == PromotionWait(5.0, 0.0)
    assert config.disk_write_rate == 10**9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("UNDERCROFT_HOST_MEMORY", "lots"),
        ("UNDERCROFT_EARLY_PREFETCH", "maybe"),
        ("UNDERCROFT_IO_DEPTH", "many"),
        ("UNDERCROFT_CACHE_HIT_THRESHOLD", "nan"),
        ("UNDERCROFT_PROMOTION_WAIT", "{oops"),
        ("UNDERCROFT_DISK_PATH", "[1]"),
    ],
)
def test_messages_name_the_variable(name, text):
    with pytest.raises(ConfigError) as error:
        parse(**{name: text})
    assert f"environment variable {name} = {text!r}" in str(error.value)


def test_unknown_environment_is_reported_not_refused():
    environ = {"UNDERCROFT_HOST_MEMROY": "1GiB", "PATH": "/bin", "UNDERCROFT_SAVE": "all"}
    (message,) = unknown_environment(environ)
    assert "UNDERCROFT_HOST_MEMROY" in message
    assert "'UNDERCROFT_HOST_MEMORY'" in message


def test_capacity_without_a_directory_is_refused():
    with pytest.raises(ConfigError, match="without a disk_path"):
        parse({"disk_capacity": "1GiB"})


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().save = "prompt"


def test_option_table_lists_every_option_with_a_valid_default():
    table = option_table()
    for option in OPTIONS:
        assert f"| `{option.name}` |" in table
        option.parse(json.loads(json.dumps(option.default)))
    assert len(table.splitlines()) == len(OPTIONS) + 2


def test_data_parallel_ranks_have_one_host_memory(tmp_path: Path):
    config = parse({"host_memory": "64MiB", "promotion_memory": "32MiB"})
    for ranks in (1, 2, 4):
        sizes = resolve_sizes(config, ranks)
        assert (sizes.host_memory * ranks, sizes.promotion_memory * ranks) == (64 << 20, 32 << 20)
    assert resolve_sizes(parse({"host_memory": "64MiB"}), 2).promotion_memory == 16 << 20
    with pytest.raises(ConfigError, match="8 MiB for each of 8 data-parallel ranks"):
        resolve_sizes(config, 8)
    # They share one engine.
    shared = parse({"host_memory": "64MiB", "disk_path": str(tmp_path)})
    assert resolve_sizes(shared, 8).host_memory == 64 << 20


def test_resolve_sizes(tmp_path: Path):
    config = parse({"host_memory": "64MiB", "disk_path": str(tmp_path / "new" / "er"), "disk_capacity": "1MiB"})
    sizes = resolve_sizes(config)
    assert sizes.host_memory == 64 << 20
    assert sizes.promotion_memory == 32 << 20
    assert disks(config) == [{"path": str(tmp_path / "new" / "er"), "capacity": 1 << 20}]
    assert not (tmp_path / "new").exists()
    config = parse({"disk_path": str(tmp_path)})
    assert disks(config) == [{"path": str(tmp_path), "capacity": {"share": 0.5}}]


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="host_memory = 1024 TiB is more than"):
        resolve_sizes(parse({"host_memory": "1024TiB"}))
    with pytest.raises(ConfigError, match="at least"):
        resolve_sizes(parse({"host_memory": "1MiB"}))
    with pytest.raises(ConfigError, match="promotion_memory"):
        resolve_sizes(parse({"host_memory": "64MiB", "promotion_memory": "65MiB"}))


def test_shares_are_of_the_memory_that_the_core_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_core, "available_memory", lambda: 1 << 30)
    assert resolve_sizes(parse({"host_memory": "25%"})).host_memory == 256 << 20
    with pytest.raises(ConfigError, match="more than the 1 GiB of memory"):
        resolve_sizes(parse({"host_memory": "2GiB"}))


def test_directories_are_absolute_since_other_processes_read_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = parse({"socket_dir": "run", "disk_path": "~/cache"})
    assert (config.socket_dir, config.disk_path) == (str(tmp_path / "run"), ("/home/somebody/cache",))
    assert parse({}).socket_dir == ""

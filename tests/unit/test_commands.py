"""Every subcommand: help with an example, bad input in a line that names it, pipes, and no colours there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from undercroft.cli import main

PROGRAM = [sys.executable, "-m", "undercroft.cli.main"]

BAD: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # arguments, the option that the message names, the values that it allows
    (("explain", "--last", "0"), "--last", "from 1 to 4096"),
    (("explain", "--last", "many"), "--last", "whole number"),
    (("explain", "--socket", "/a", "--disk-path", "/b"), "--disk-path", "not allowed with argument --socket"),
    (("status", "--watch", "soon"), "--watch", "from 0.1 to 86400"),
    (("status", "--watch", "0"), "--watch", "from 0.1 to 86400"),
    (("doctor", "--role", "nurse"), "--role", "vllm"),
    (("doctor", "--host-memory", "lots"), "--host-memory", "GiB"),
    (("serve", "--host-memory", "lots"), "--host-memory", "GiB"),
    (("serve", "--metrics", "70000000"), "--metrics", "PORT"),
    (("serve", "--io-depth", "0"), "--io-depth", "1 to 1024"),
    (("size", "none/config.json"), "none/config.json", "config.json"),
    (("size",), "MODEL", "required"),
    (("estimate", "--model", "m"), "--trace", "required"),
    (("estimate", "--disk", "0,lots"), "--disk", "GiB"),
    (("estimate", "--write-rate", "0"), "--write-rate", "above 0"),
    (("estimate", "--read-rate", "3GB/h"), "--read-rate", "GB"),
    (("estimate", "--copy-rate", "0/s"), "--copy-rate", "above 0"),
    (("estimate", "--disk-writes-per-day", "0"), "--disk-writes-per-day", "from 0.01 to 1000"),
    (("estimate", "--disk-writes-per-day", "nan"), "--disk-writes-per-day", "from 0.01 to 1000"),
    (("estimate", "--hosts", "0"), "--hosts", "from 1 to 10000"),
    (("estimate", "--router", "nearest"), "--router", "sticky"),
    (("estimate", "--remote", "0"), "--remote", "above 0"),
    (("estimate", "--remote-object", "1GiB"), "--remote-object", "1MiB to 64MiB"),
    (("estimate", "--remote-write", "most"), "--remote-write", "second_touch"),
    (("estimate", "--remote-latency", "soon"), "--remote-latency", "from 0 to 60000"),
    (("estimate", "--store-requests", "-1"), "--store-requests", "whole number"),
    (("check-config",), "check-config", "--env"),
    (("check-config", '{"host_memroy": 1}'), "host_memroy", "host_memory"),
    (("inspect",), "DIR", "required"),
    (("clear",), "--all", "required"),
    (("clear", "--older-than", "soon"), "--older-than", "s, m, h, d"),
    (("clear", "--namespace", "12"), "--namespace", "eight"),
    (("clear", "--all", "--older-than", "2h"), "--older-than", "not allowed with argument --all"),
    (("export", "3f9a1c02"), "FILE", "required"),
    (("import",), "FILE", "required"),
    (("explain", "--disk-path", "none"), "--disk-path none", "no such directory"),
    (("inspect", "none"), "none", "disk_path of an engine"),
    (("import", "none"), "none", "undercroft export"),
    (("warm", "none"), "none", "No such file"),
    (("warm", "none", "--url", "localhost:8000"), "--url", "http://host:port"),
    (("pin", "none", "--url", "http://"), "--url", "http://host:port"),
    (("pin", "none", "--url", "http://u:secret@host"), "http://...@host", "credentials"),
    (("bench", "serve", "--url", "nope"), "--url", "http://host:port"),
    (("bench", "serve", "--url", "http://127.0.0.1:1", "--turns", "0"), "--turns", "from 1 to 1000"),
    (("bench", "lookup", "--keys", "100000000"), "--keys 100000000", "give fewer keys"),
    (("bench", "disk", "--block-bytes", "0"), "--block-bytes", "above 0"),
    (("drain", "--all"), "usage: undercroft drain", "--timeout"),
    (("drain", "--timeout", "never"), "--timeout", "from 0.1 to 86400"),
    (("resize", "--host-memory", "lots"), "--host-memory", "GiB"),
    (("resize", "--disk-capacity", "0"), "--disk-capacity", "above 0"),
    (("nonsense",), "nonsense", "serve"),
    (("statsu",), "'statsu'", "(did you mean 'status'?)"),
    (("pin", "none", "--namespace", "00", "--hashes"), "none: the file cannot be read (No such file or directory)", ""),
)


KINDS = tuple(f"bench {kind}" for kind in ("lookup", "disk", "copy", "recover", "replay", "remote", "serve"))


@pytest.mark.parametrize("command", main.COMMANDS + KINDS)
def test_help_has_an_example_that_the_parser_takes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert (ended.value.code == 0 and "--json" in text) or command == "serve"
    example = re.search(rf"undercroft {command} ([^\n]*(?:\n  +[^\n]+)*)", text[text.index("example") :])
    assert example is not None, text
    words = [word.strip("'\"") for word in example[1].split()]
    flags = [word for word in words if word.startswith("--")]
    known = text[: text.index("example")]
    assert all(flag in known for flag in flags), flags


@pytest.mark.parametrize(("arguments", "named", "allowed"), BAD, ids=[" ".join(row[0])[:40] for row in BAD])
def test_bad_input_is_exit_code_2_with_the_allowed_values(
    arguments: tuple[str, ...],
    named: str,
    allowed: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main.main(list(arguments))
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2, captured
    assert named in captured.err and allowed in captured.err
    assert "Traceback" not in captured.err and captured.out == ""


def test_no_command_writes_colours_into_a_pipe_or_dies_of_its_end(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "torch_dtype": "bfloat16", '
        '"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4}'
    )
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "80"}
    for arguments in (["doctor", "--role", "serve"], ["size", str(config)], ["explain"]):
        ran = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, env=environment, timeout=60)
        assert "\033[" not in ran.stdout + ran.stderr and "Traceback" not in ran.stderr
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [*PROGRAM, "size", str(config)], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_an_interrupt_in_the_first_moment_is_no_traceback() -> None:
    program = (
        "import sys, importlib\n"
        "from undercroft.cli import main\n"
        "def stop(*_): raise KeyboardInterrupt\n"
        "importlib.import_module = stop\n"
        "sys.exit(main.main(['status']))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (130, "")

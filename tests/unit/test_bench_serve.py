"""`undercroft bench serve` against a stand-in for a vLLM server: its requests, and its result from the answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from socket import create_server
from threading import Thread

import pytest

from measured_vllm import COLD_S, DEVICE_S, WARM_S, FakeVllm, bench, server_of
from undercroft.cli import main
from undercroft.cli.output import CommandError
from undercroft_bench.vllm_client import VllmClient

SIZE = ["--prompts", "4", "--prompt-tokens", "200"]
server = server_of(FakeVllm)


@pytest.mark.parametrize("has_reset", [True, False])
def test_cold_and_warm_requests_are_timed_apart(
    has_reset: bool, server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    fake.has_reset = has_reset
    found = bench(capsys, url, *SIZE)
    cases = {case["case"]: case for case in found["cases"]}
    times = [cases[name]["ttft_p50_ms"] for name in ("cold", "warm", "device")]
    assert times == pytest.approx([1e3 * COLD_S, 1e3 * WARM_S, 1e3 * DEVICE_S])
    assert found["speedup"] == pytest.approx(COLD_S / WARM_S)
    assert (cases["cold"]["cached_percent"], cases["device"]["cached_percent"]) == (0, 100)
    assert 99 < cases["warm"]["cached_percent"] < 100
    assert found["prompt_tokens"] == pytest.approx(200, abs=4)
    if has_reset:
        assert (found["device_cache"], found["fill_tokens"]) == ("emptied", None)
        assert len(fake.prompts) == 1 + 4 + 1 + 4
    else:
        assert found["device_cache"] == "displaced by other prompts"
        assert 1600 <= found["fill_tokens"] < 1900
    # No prompt is that of an earlier run.
    bench(capsys, url, *SIZE)
    assert len(set(fake.prompts)) >= 2 * 5


def test_figures_that_the_server_lacks_are_required_or_left_out(
    server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    fake.has_reset = fake.says_sizes = fake.says_cached = False
    arguments = ["bench", "serve", "--url", url, *SIZE]
    assert main.main(arguments) == 1
    assert "give --fill-tokens" in capsys.readouterr().err
    found = bench(capsys, url, *SIZE, "--fill-tokens", "1600")
    assert {case["cached_percent"] for case in found["cases"]} == {None}


def test_text_has_a_bar_for_each_case(server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]) -> None:
    _, url = server
    assert main.main(["bench", "serve", "--url", url, "--prompts", "2", "--prompt-tokens", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["cold", "device", "warm"]
    bars = [line.count("#") for line in lines[:3]]
    assert bars[0] > bars[2] > bars[1] > 0


def test_a_server_that_refuses_or_is_not_there_is_one_line(
    server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = server
    fake.key = "secret"
    assert main.main(["bench", "serve", "--url", url]) == 1
    assert "HTTP 401" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main.main(["bench", "serve", "--url", f"{url}/v1/", "--prompts", "1", "--prompt-tokens", "50"]) == 0
    capsys.readouterr()
    assert main.main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "does not answer" in error
    assert error.count("\n") == 1


@contextmanager
def saying(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes to whoever connects, whatever is asked; its URL."""
    with create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = Thread(target=run)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(2)
        thread.join()


def with_body(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "does not answer"),
        (with_body(b"data: {", length=99), "does not answer"),
        (with_body(b"<html>"), "is it a vLLM server"),
        (with_body(b"{}"), "is it a vLLM server"),
        (with_body(b"[]"), "is it a vLLM server"),
        (with_body(b"data: [1]\n\n"), "is it a vLLM server"),
        (with_body(b'data: {"choices": [1], "usage": {"tokens": 1}}\n\n'), "is it a vLLM server"),
    ],
)
def test_the_client_reports_a_server_that_is_no_vllm(answer: bytes, said: str) -> None:
    with saying(answer) as url:
        client = VllmClient(url, None)
        for ask in (
            client.model,
            lambda: client.count_tokens("m", "text"),
            lambda: client.token_ids("m", "text"),
            lambda: client.complete("m", "text", 1),
        ):
            with pytest.raises(CommandError, match=r"does not answer|is it a vLLM server|held no tokens") as raised:
                ask()
            if ask is client.model and b"data" not in answer:
                assert said in str(raised.value)
        if said == "does not answer":
            for request in (client.device_tokens, client.reset_device_cache):
                with pytest.raises(CommandError, match=said):
                    request()


def test_an_invalid_address_is_reported() -> None:
    with pytest.raises(CommandError, match="does not answer"):
        VllmClient("http://a b", None).model()

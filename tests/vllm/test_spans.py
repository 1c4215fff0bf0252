"""vLLM's trace of a request has undercroft's spans: a collector of OpenTelemetry receives them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine_checks import finish, nothing_left
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it has received."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    received.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        server.server_close()


def run(one: Engine, name: str, ids: list[int], headers: dict[str, str] | None) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    one.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling, trace_headers=headers)
    finish(one)
    nothing_left(one)


def test_a_request_with_trace_headers_has_spans_in_its_trace(
    engine: Callable[..., Engine], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry import trace

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    # vLLM sets it for its processes, this one among them.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    options = {
        "host_memory": "64MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "64MiB", "early_prefetch": False,
    }  # fmt: skip
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with collector() as (address, received):
        one = engine(llama, options, blocks=64, otlp_traces_endpoint=address)
        run(one, "a", prompt(897), headers)
        run(one, "b", prompt(897), headers)
        run(one, "c", prompt(897, 1), None)
        one.close()
        two = engine(llama, options, blocks=64, otlp_traces_endpoint=address)
        run(two, "d", prompt(897), headers)
        trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]
        ours = [span for span in received if span.name.startswith("undercroft.")]
        assert {span.trace_id.hex() for span in ours} == {TRACE}
        assert sorted(span.name.removeprefix("undercroft.") for span in ours) == [
            *("load", "load"), *("lookup", "lookup", "lookup"), "promotion", "save",
        ]  # fmt: skip
        assert all(0 <= span.end_time_unix_nano - span.start_time_unix_nano < 60e9 for span in ours)
        blocks = {a.key: a.value.int_value for span in ours for a in span.attributes if a.key.endswith("blocks")}
        assert blocks == {"undercroft.load.blocks": 7, "undercroft.save.blocks": 7}

"""SGLang on one rank without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed
from sglang.srt.mem_cache import utils
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs

from host_pools import page_hashes
from undercroft.sglang_hicache import backend


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of one rank. SGLang has arguments meanwhile, which are a part of the identity of pages: tests of other
    modules compare theirs with those of processes without arguments."""
    place = tmp_path_factory.mktemp("gloo") / "group"
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    with (
        get_context().override_server_args(),
        get_parallel().override(
            tp_rank=0, pp_rank=0, attn_cp_rank=0, attn_dcp_rank=0, attn_dcp_size=1, attn_tp_rank=0, attn_tp_size=1
        ),
    ):
        yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was started with the back end, and hashes pages as SGLang does.

    SGLang compiles its hash of pages at its first use, which takes a compiler.
    """
    arguments = ServerArgs(model_path="tiny", hicache_storage_backend="dynamic")
    monkeypatch.setattr(backend, "_arguments", lambda: arguments)
    monkeypatch.setattr(utils, "get_native_hash", page_hashes)

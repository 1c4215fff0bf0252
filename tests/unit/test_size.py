"""`undercroft size`: the size of a model's KV cache, from its config.json alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core_values import Group
from undercroft import _core, capacity
from undercroft.cli import main
from undercroft.errors import ConfigError
from undercroft.model.groups import groups_of
from undercroft.model.layers import Precision, layers_of

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def groups(
    config: dict[str, Any], block: int = 16, ranks: int = 1, **precision: str
) -> list[tuple[str, int, int, int]]:
    found = groups_of(layers_of(config, Precision(**precision), ranks), block, ranks)
    return [(group.kind, group.layers, group.window_tokens, group.payload_bytes) for group in found]


def test_full_attention_is_one_group() -> None:
    # Llama 3 8B: 128 KiB for each token.
    assert groups(LLAMA) == [("full", 32, 0, 16 * 128 << 10)]
    assert groups(LLAMA, kv_cache="fp8") == [("full", 32, 0, 16 * 64 << 10)]
    assert groups(LLAMA | {"torch_dtype": "float32"}) == groups(LLAMA), "vLLM halves it"
    assert groups(LLAMA, dtype="float32") == [("full", 32, 0, 16 * 256 << 10)]
    # More ranks than heads: each has one.
    assert groups(LLAMA, ranks=16) == [("full", 32, 0, 16 * 256 << 10)]
    assert groups(LLAMA, ranks=8) == groups(LLAMA)


def test_latent_attention_is_kept_once_for_all_ranks() -> None:
    deepseek = LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    assert groups(deepseek) == [("full", 61, 0, 61 * 576 * 2 * 16)]
    assert groups(deepseek, ranks=8) == [("full", 61, 0, 61 * 576 * 2 * 16)]


def test_windows_are_grouped_as_vllm_groups_them() -> None:
    gemma3 = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window": 1024}
    found = groups(gemma3)
    # 10 full and 52 with a window, the most in groups of ten.
    assert [(kind, count) for kind, count, _, _ in found] == [
        ("sliding_window", 9), ("sliding_window", 9), ("sliding_window", 9), ("sliding_window", 9),
        ("sliding_window", 8), ("sliding_window", 8), ("full", 10),
    ]  # fmt: skip
    # Twice as many are split.
    double = gemma3 | {"num_hidden_layers": 30, "layer_types": ["sliding_attention", "sliding_attention"] * 10}
    double["layer_types"] = [*double["layer_types"], *["full_attention"] * 10]
    assert [count for _, count, _, _ in groups(double)] == [10, 10, 10]
    # 12 and 13 are not.
    uneven = gemma3 | {"num_hidden_layers": 25, "layer_types": ["sliding_attention", "full_attention"] * 12}
    uneven["layer_types"] = [*uneven["layer_types"], "full_attention"]
    assert [(kind, count) for kind, count, _, _ in groups(uneven)] == [("sliding_window", 12), ("full", 13)]
    assert groups(LLAMA | {"model_type": "mistral", "sliding_window": 4096})[0][:3] == ("sliding_window", 32, 4096)
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}
    assert groups(qwen | {"use_sliding_window": False})[0][:2] == ("full", 32)
    assert [group[:2] for group in groups(qwen | {"use_sliding_window": True})] == [
        *[("full", 4)] * 7, ("sliding_window", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"index_topk": 2048}, "index_topk"),
        ({"mamba_d_state": 128}, "Mamba"),
        ({"sliding_window": 4096, "model_type": "new"}, "layer_types"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers = 'many'"),
        ({"layer_types": ["linear_attention"] * 32}, "linear attention"),
        ({"layer_types": ["strange"] * 32}, "strange"),
    ],
)
def test_a_model_that_is_not_known_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        groups(LLAMA | more)


def test_a_tier_holds_as_many_blocks_as_a_full_engine(tmp_path: Path) -> None:
    for payload in (8192, 24 << 10, 100_000):
        engine = _core.Engine({"host_memory": 24 << 20, "socket_dir": str(tmp_path / "run")})
        group = Group("full", 16, payload)
        session = engine.register("{}", [group], 16)
        for block in range(24 * (1 << 20) // payload + 50):
            hashes = [block.to_bytes(4, "little") * 8]
            grant = session.begin_save(str(block), hashes, 16)
            assert grant is not None
            session.end_transfer(grant.transfer_id, True)
            session.finish_request(str(block))
        stats = engine.stats()
        assert stats["host_evictions"] > 0
        assert capacity.tokens_in(24 << 20, [group]) == stats["host_blocks"] * 16
        engine.close()


def test_a_boundary_takes_part_of_the_room() -> None:
    full, window = Group("full", 16, 16384), Group("sliding_window", 16, 16384, 257)
    assert capacity.boundary_blocks(window) == 16
    alone, both = (capacity.tokens_in(1 << 30, chosen) for chosen in ([full], [full, window]))
    assert both == pytest.approx(alone / (1 + 16 * 16 / 8192), rel=1e-3)
    assert capacity.tokens_in(1 << 30, [full, window], 64) == pytest.approx(alone / 2, rel=1e-3)
    assert capacity.boundary_bytes([full, window]) == 16 * 16384
    assert capacity.tokens_in(1 << 20, [Group("full", 16, 1 << 26)]) == 0


def test_the_index_takes_the_estimated_memory(tmp_path: Path) -> None:
    # A process of its own: memory that this one has freed would be used again, and not be counted.
    command = [sys.executable, "-m", "undercroft.cli.main", "bench", "recover", "--path", str(tmp_path), "--json"]
    done = subprocess.run([*command, "--blocks", "400000"], check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout)["bytes_per_block"]
    assert 0.6 < measured / capacity.INDEX_BYTES_PER_NODE < 1.15


def test_size_prints_tokens_without_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    code = (
        "import sys; from undercroft.cli import main; code = main.main(sys.argv[1:]); "
        "assert not {'vllm', 'torch'} & set(sys.modules); sys.exit(code)"
    )
    arguments = ["size", str(tmp_path), "--host-memory", "32GiB,64GiB", "--disk", "1TiB", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["token_bytes"] == 128 << 10
    assert [tier["tokens"] for tier in found["tiers"]] == [(32 << 30) >> 17, (64 << 30) >> 17, (1 << 40) >> 17]


def test_size_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    windows = {"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 16}
    path.write_text(json.dumps(LLAMA | windows))
    assert main.main(["size", str(path), "--host-memory", "64GiB"]) == 0
    said = capsys.readouterr().out
    assert "each token: 64 KiB of full attention" in said
    assert "each place where a hit may end: 64 MiB of windows and states" in said
    assert main.main(["size", str(path), "--host-memory", "1MiB"]) == 2
    assert "too small" in capsys.readouterr().err
    assert main.main(["size", str(tmp_path / "none")]) == 2
    with pytest.raises(SystemExit):
        main.main(["size", str(path), "--disk", "1XB"])
    assert "unknown unit 'XB'. Allowed: bytes" in capsys.readouterr().err


def test_a_model_that_is_not_here_is_sized_by_three_fields(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}
    assert main.main(["size", json.dumps(fields), "--host-memory", "64GiB"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("model (unknown): 36 layers, bfloat16\n")
    assert "each token: 144 KiB of full attention" in said
    assert main.main(["size", '{"num_hidden_layers": 36']) == 2
    assert "cannot be read as a model's config.json" in capsys.readouterr().err
    assert main.main(["size", "Some/Name"]) == 2
    assert "fields of one as JSON" in capsys.readouterr().err

"""The copy benchmark's figures are right, at a size that takes no time."""

from __future__ import annotations

import pytest

from undercroft.errors import ConfigError
from undercroft_bench.copy_cpu import run_copy_bench


@pytest.mark.parametrize(("layout", "ranks"), [("LBHNC", 1), ("BLHNC", 1), ("LBHNC", 4)])
def test_fields(layout: str, ranks: int) -> None:
    result = run_copy_bench(block_bytes=10_000, blocks=5, layers=3, rounds=2, layout=layout, ranks=ranks)
    assert (result["block_bytes"], result["blocks"], result["layers"], result["ranks"]) == (9_999, 5, 3, ranks)
    assert result["routine"] in ("streaming", "streaming, 1 KiB ahead", "streaming, 4 KiB ahead", "memcpy")
    for field in ("save_gbps", "load_gbps", "raw_gbps", "save_share", "load_share", "checksum_gbps"):
        assert result[field] > 0


def test_a_block_smaller_than_its_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than a byte for each of 8 layers"):
        run_copy_bench(block_bytes=4, layers=8)

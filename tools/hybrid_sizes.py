"""Sizes of hybrid models in the cache, from the numbers of their public configurations.

    python tools/hybrid_sizes.py

Prints the table in docs/hybrid-models.md. Keys and values in bfloat16, states in the types named below, blocks of 16
tokens, all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 16
INTERVAL = 8192
"""Default of `state_interval_tokens`."""
MB = 1e6


@dataclass(frozen=True)
class Model:
    """Layers by kind, and bytes of one layer."""

    name: str
    full_layers: int
    other_layers: int
    kind: str
    width: int
    """Tokens of the window or chunk; 0 for a state."""
    kv_heads: int
    head_size: int
    state_bytes: int = 0
    """Bytes of one layer's state."""

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_size * 2

    @property
    def full_per_1000(self) -> float:
        """Bytes of full attention per 1,000 tokens."""
        return 1000 * self.full_layers * self.token_bytes

    @property
    def boundary(self) -> float:
        """Bytes that one more boundary costs where a hit can end; of a chunk, the most."""
        if self.state_bytes:
            return self.other_layers * self.state_bytes
        tokens = self.width if self.kind == "chunk" else -(-(self.width - 1) // BLOCK) * BLOCK
        return tokens * self.other_layers * self.token_bytes

    @property
    def between_per_1000(self) -> float | None:
        """Bytes per 1,000 tokens of the boundaries kept every `INTERVAL` tokens; None where vLLM decides."""
        if self.state_bytes:
            return None
        # A boundary that is a multiple of the chunk needs nothing of it.
        return 0.0 if self.kind == "chunk" and INTERVAL % self.width == 0 else self.boundary * 1000 / INTERVAL

    @property
    def all_full_per_1000(self) -> float:
        """Bytes per 1,000 tokens if every layer were full attention."""
        return 1000 * (self.full_layers + self.other_layers) * self.token_bytes


def gated_delta_state(key_heads: int, value_heads: int, size: int, kernel: int) -> int:
    """Bytes of a Gated DeltaNet layer's state: the convolution's last inputs (bfloat16) and the matrix (float32)."""
    channels = 2 * key_heads * size + value_heads * size
    return channels * (kernel - 1) * 2 + value_heads * size * size * 4


MODELS = (
    Model("Gemma 2 9B", 21, 21, "window", 4096, 8, 256),
    Model("Gemma 3 27B", 10, 52, "window", 1024, 16, 128),
    Model("gpt-oss-20b", 12, 12, "window", 128, 8, 64),
    Model("Llama 4 Scout", 12, 36, "chunk", 8192, 8, 128),
    Model("Qwen3-Next 80B-A3B", 12, 36, "state", 0, 2, 256, gated_delta_state(16, 32, 128, 4)),
)


def table() -> str:
    """The table in Markdown."""
    rows = [
        "| model | layers | full attention, MB per 1,000 tokens | one boundary, MB | every 8,192 tokens, MB per 1,000 "
        "tokens | if all layers were full attention, MB per 1,000 tokens |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model in MODELS:
        width = f" of {model.width}" if model.width else ""
        between = model.between_per_1000
        cells = (
            model.name,
            f"{model.full_layers} full, {model.other_layers} {model.kind}{width}",
            f"{model.full_per_1000 / MB:.1f}",
            f"{'up to ' if model.kind == 'chunk' else ''}{model.boundary / MB:.1f}",
            "where vLLM keeps states" if between is None else f"{between / MB:.1f}",
            f"{model.all_full_per_1000 / MB:.1f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())

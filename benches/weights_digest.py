"""The digest of a large model's weights: 25 sparse files of 4 GB, first and again.

Run: `python benches/weights_digest.py`.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from undercroft.identity.weights import SAMPLED, Digests, weights_digest

FILES, TENSORS, TENSOR = 25, 40, 100_000_000


def write(path: Path) -> None:
    places = ((index, [index * TENSOR, (index + 1) * TENSOR]) for index in range(TENSORS))
    tensors = {f"layers.{index}": {"dtype": "U8", "shape": [TENSOR], "data_offsets": at} for index, at in places}
    header = json.dumps(tensors).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + TENSORS * TENSOR)


def measured(model: Path, kept: Path) -> float:
    digests = Digests(kept)
    begin = time.perf_counter()
    weights_digest(model, digests, SAMPLED)
    seconds = time.perf_counter() - begin
    digests.save()
    return seconds


def main() -> None:
    """Print the times."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        model.mkdir()
        for index in range(FILES):
            write(model / f"model-{index:05}.safetensors")
        for what in ("first", "again", "again"):
            print(f"{what}: {1000 * measured(model, Path(directory, 'weights.json')):.1f} ms")


if __name__ == "__main__":
    main()

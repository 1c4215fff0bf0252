"""Time of the model runner's thread for a step's copies on the fake CUDA, whose driver costs nothing.

Run it as ``python benches/gpu_step.py`` on a quiet machine. The copies themselves move nothing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("gpu", "unit", "fake_cuda")]

import fake_cuda  # noqa: E402


def main() -> None:
    """Print a line for each model."""
    import numpy as np
    import torch

    import worker_rank as counts

    fake_cuda.Fake().copies_at(-1)
    for name, model in counts.MODELS.items():
        blocks = (128 << 10) // model.tokens
        rank = counts.Rank(model, torch.device("cuda", 0), blocks)
        rank.warm_up()
        figures = []
        for what, direction, shape, rounds in (
            ("step of 16", "saves", (16, 1), 60),
            ("load", "loads", (1, blocks), 20),
        ):
            took = []
            for _ in range(rounds):
                jobs = rank.jobs(*shape)
                begin = time.perf_counter()
                rank.step(**{direction: jobs})
                took.append((time.perf_counter() - begin) * 1e3)
                rank.finish()
            figures.append(f"{what}: median {np.median(took):.2f} ms, least {min(took):.2f} ms")
        print(f"{name}: {'; '.join(figures)}", flush=True)
        rank.worker.shutdown()


if __name__ == "__main__":
    if not fake_cuda.is_loaded():
        os.execve(sys.executable, [sys.executable, *sys.argv], fake_cuda.environment())
    main()

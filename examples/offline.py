"""Two questions about one long text with vLLM's offline API: the second loads the text's KV cache.

    .venv/bin/python examples/offline.py MODEL

Between the questions the device's own prefix cache is emptied, as it would be by other requests. On vLLM's CPU build,
set VLLM_CPU_KVCACHE_SPACE=1 (GiB): vLLM asks for most of the machine's memory otherwise. The first start compiles the
model, which takes minutes on a small machine.
"""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main(model: str) -> None:
    llm = LLM(
        model=model,
        kv_transfer_config=KVTransferConfig(
            kv_connector="UndercroftConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"host_memory": "2GiB"},
        ),
    )
    text = " ".join(f"Line {number} of the ledger names {number * 37 % 101} barrels." for number in range(300))
    for question in ("How many barrels are in line 12?", "Which line names the most barrels?"):
        start = time.perf_counter()
        [answer] = llm.generate(text[:6000] + "\n" + question, SamplingParams(max_tokens=1), use_tqdm=False)
        elapsed = time.perf_counter() - start
        cached = answer.num_cached_tokens
        print(f"{len(answer.prompt_token_ids)} tokens, {cached} of them cached, first token after {elapsed:.3f} s")
        # The prompt's last blocks are saved during the steps of other requests. A reset before would drop them.
        llm.generate("A short pause.", SamplingParams(max_tokens=8), use_tqdm=False)
        # For the example alone. After a change of weights undercroft's cache would have to be dropped as well.
        print("The device's cache is emptied now. undercroft keeps its own on purpose, and warns of that:", flush=True)
        llm.reset_prefix_cache()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])

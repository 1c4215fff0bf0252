"""What LiteLLM makes of a rejected request: `python litellm_client.py http://HOST:PORT/v1`; prints one JSON object.

A program of its own, because LiteLLM is not in the environment of the tests.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "never seen before " + "x y z " * 100}]


def model(name: str, url: str, **extra: Any) -> dict[str, Any]:
    params = {"model": "hosted_vllm/m", "api_base": url, "api_key": "none", "extra_body": extra}
    return {"model_name": name, "litellm_params": params}


def raised(url: str, stream: bool, **extra: Any) -> list[Any]:
    """The status and the message of the error, or the finish reason and the text of the answer."""
    given = model("m", url, **extra)["litellm_params"]
    try:
        answer = litellm.completion(**given, messages=MESSAGES, max_tokens=4, stream=stream)
        if not stream:
            return [200, answer.choices[0].finish_reason, answer.choices[0].message.content]
        chunks = list(answer)
        return [200, chunks[-1].choices[0].finish_reason, "".join(c.choices[0].delta.content or "" for c in chunks)]
    except litellm.exceptions.APIError as error:
        return [error.status_code, str(error)]


def main(url: str) -> None:
    """Ask with both answers, with and without a stream, and then through a router with a second model."""
    found = {
        f"{answer} {stream}": raised(url, stream, cache_hit_threshold=0.9, cache_hit_threshold_answer=answer)
        for answer in ("finish_reason", "error")
        for stream in (False, True)
    }
    models = [model("decode", url, cache_hit_threshold=0.9), model("prefill", url, cache_hit_threshold=0)]
    router = litellm.Router(model_list=models, fallbacks=[{"decode": ["prefill"]}])
    for stream in (False, True):
        answer = router.completion("decode", MESSAGES, max_tokens=4, stream=stream)
        last = list(answer)[-1] if stream else answer
        found[f"router {stream}"] = [200, last.choices[0].finish_reason]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

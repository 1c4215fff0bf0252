"""Asks a server through openai-python, LiteLLM or LangChain: `python sdk.py CLIENT URL`; prints one JSON object.

A program of its own, because the clients are in environments of their own. Each answer is its text, its tokens of
prompt and answer, and how many of the prompt's were cached.
"""

from __future__ import annotations

import json
import sys
from typing import Any

LEDGER = "In the ledger, line 7 names a debt of 300 crowns that nobody ever came to collect. " * 9
PROMPTS = [f"Page {number}. {LEDGER}" for number in range(3)]
MESSAGES = [{"role": "system", "content": LEDGER}, {"role": "user", "content": "How many crowns?"}]
ASKED = {"temperature": 0, "max_tokens": 12}


def answer(text: str | None, usage: Any) -> dict[str, Any]:
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details else None) or 0
    return {"text": text, "usage": [usage.prompt_tokens, usage.completion_tokens], "cached": cached}


def streamed(chunks: Any, text_of: Any) -> dict[str, Any]:
    text, usage = "", None
    for chunk in chunks:
        text += "".join(text_of(choice) or "" for choice in chunk.choices)
        usage = getattr(chunk, "usage", None) or usage
    return answer(text, usage)


def ask_openai(url: str) -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    complete, chat = client.completions.create, client.chat.completions.create
    single = complete(model="m", prompt=PROMPTS[0], **ASKED)
    several = complete(model="m", prompt=PROMPTS, **ASKED)
    plain = chat(model="m", messages=MESSAGES, **ASKED)
    odds = complete(model="m", prompt=PROMPTS[1], logprobs=1, **ASKED)
    return {
        "completion": answer(single.choices[0].text, single.usage),
        "streamed completion": streamed(complete(model="m", prompt=PROMPTS[0], **ASKED, **usage), lambda one: one.text),
        "several prompts": answer("|".join(choice.text for choice in several.choices), several.usage),
        "chat": answer(plain.choices[0].message.content, plain.usage),
        "streamed chat": streamed(chat(model="m", messages=MESSAGES, **ASKED, **usage), lambda one: one.delta.content),
        "logprobs": answer("|".join(odds.choices[0].logprobs.tokens), odds.usage),
    }


def ask_litellm(url: str) -> dict[str, Any]:
    import litellm

    given = {"model": "hosted_vllm/m", "api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES, **ASKED}
    plain = litellm.completion(**given, num_retries=0)
    stream = litellm.completion(**given, num_retries=0, stream=True, stream_options={"include_usage": True})
    return {
        "chat": answer(plain.choices[0].message.content, plain.usage),
        "streamed chat": streamed(stream, lambda one: one.delta.content),
    }


def ask_langchain(url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="none", max_retries=0, stream_usage=True, **ASKED)
    talk = [(one["role"], one["content"]) for one in MESSAGES]

    def said(message: Any) -> dict[str, Any]:
        usage = message.usage_metadata
        cached = usage.get("input_token_details", {}).get("cache_read", 0)
        return {"text": message.content, "usage": [usage["input_tokens"], usage["output_tokens"]], "cached": cached}

    parts = list(model.stream(talk))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    batch = model.batch([[("user", prompt)] for prompt in PROMPTS])
    return {
        "invoke": said(model.invoke(talk)),
        "stream": said(whole),
        **{f"batch {number}": said(one) for number, one in enumerate(batch)},
    }


if __name__ == "__main__":
    clients = {"openai": ask_openai, "litellm": ask_litellm, "langchain": ask_langchain}
    print(json.dumps(clients[sys.argv[1]](sys.argv[2])))

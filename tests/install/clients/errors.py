"""What clients make of errors: for each case the names of the exceptions that they raise, as JSON.

The argument is JSON: the address of a server with the key "k", whose context is short, and that of one that is full.
"""

import json
import sys

import anthropic
import litellm
import openai
from langchain_openai import ChatOpenAI

litellm.suppress_debug_info = True
asked = json.loads(sys.argv[1])
HI, LONG = ([{"role": "user", "content": text}] for text in ("Hi", "word " * 4000))
CASES = {
    "overflow": {"messages": LONG},
    "max_tokens": {"max_tokens": 9999},
    "model": {"model": "nope"},
    "key": {"api_key": "wrong"},
    "full": {},
}


def by_litellm(prefix, url, *, model="tiny", **more):
    base = url if prefix == "anthropic" else f"{url}/v1"
    litellm.completion(model=f"{prefix}/{model}", api_base=base, max_retries=0, **more)


def by_openai(url, *, api_key, **more):
    openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0).chat.completions.create(**more)


def by_anthropic(url, *, api_key, **more):
    anthropic.Anthropic(base_url=url, api_key=api_key, max_retries=0).messages.create(**more)


def by_langchain(url, *, messages, **more):
    ChatOpenAI(base_url=f"{url}/v1", max_retries=0, **more).invoke([(m["role"], m["content"]) for m in messages])


def raised(call, *args, **more):
    try:
        call(*args, **{"messages": HI, "max_tokens": 5, "api_key": "k", "model": "tiny", **more})
    except Exception as e:
        return type(e).__name__
    return "none"


def by_router():
    small = {"model": "openai/tiny", "api_base": f"{asked['url']}/v1", "api_key": "k"}
    big = {"model": "openai/big", "mock_response": "from the larger one"}
    models = [{"model_name": n, "litellm_params": p} for n, p in (("small", small), ("big", big))]
    router = litellm.Router(model_list=models, context_window_fallbacks=[{"small": ["big"]}], num_retries=0)
    return router.completion(model="small", messages=LONG).choices[0].message.content


found = {}
for case, more in CASES.items():
    url = asked["full" if case == "full" else "url"]
    lite = [raised(by_litellm, prefix, url, **more) for prefix in ("openai", "hosted_vllm", "anthropic")]
    found[case] = [*lite, *(raised(by, url, **more) for by in (by_openai, by_anthropic, by_langchain))]
print(json.dumps({**found, "router": by_router()}))

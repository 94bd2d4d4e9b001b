"""The language model that ships with hibachi, with asyncio: three texts at once, one of them dropped as it runs.

A path instead of "tiny" takes any Llama in Hugging Face layout. Needs the extra `text`.
"""

import asyncio
import sys

import hibachi


async def tell(llm, prompt, params):
    """The whole text, a piece at a time."""
    text = prompt
    async for piece in llm.stream(prompt, params):  # the other texts go on while this one waits
        text += piece.text
    print(f"* {' '.join(text.split())}\n")


async def interrupt(llm, prompt, params):
    """Leaving the loop cancels the request; its place in the batch is free from the next step on."""
    stream = llm.stream(prompt, params)
    async for _ in stream:
        break
    print(f"* {prompt} ... {stream.finish_reason}\n")


async def main():
    params = hibachi.SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=48)
    async with hibachi.LLM(sys.argv[1] if len(sys.argv) > 1 else "tiny") as llm:
        await asyncio.gather(
            tell(llm, "It is a truth universally acknowledged, that", params),
            tell(llm, "As soon as breakfast was over, they", params.with_(seed=2)),
            interrupt(llm, "The evening passed off in", params),
        )
        [answer] = await llm.agenerate("She was perfectly convinced that he", params.with_(temperature=0, logprobs=1))
        print(f"* greedy: {answer.text.strip()!r}, ended by {answer.finish_reason}")
        print(f"  log-probability of the first token: {answer.logprobs[0][answer.token_ids[0]]:.2f}")


if __name__ == "__main__":
    asyncio.run(main())

"""Texts in TGI's API."""

from __future__ import annotations

from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.steps import Steps
from hibachi.llm.dialects.textmodel import TextModel
from hibachi.llm.dialects.tgi.bodies import GenerateBody
from hibachi.llm.dialects.tgi.limits import TgiLimits
from hibachi.llm.dialects.tgi.parse import fit, generation
from hibachi.llm.dialects.tgi.writing import GenerateWriter, TgiTokens


def generate(
    model: TextModel, name: str, words: TgiTokens, limits: TgiLimits, body: GenerateBody, *, stream: bool, root: bool
) -> Steps[tuple[GenerateWriter, list[list[int]]]]:
    """name: of the model. stream: whether the route streams. root: as POST / does it."""
    if body.stream not in (None, stream):
        raise Refused(
            f"`stream` is {str(body.stream).lower()}: POST / goes by it, /generate never streams, and /generate_stream "
            f"always does.",
            param="stream",
            code="invalid_value",
        )
    prompts = model.reading.prompts
    given = generation(body, limits, model.bounds, prompts.context, stream=stream, full_text=root)
    (prompts.check_text if given.said.truncate is None else prompts.check_size)(given.inputs)
    [ids] = yield from model.reading.tokens([given.inputs], True)
    ids = fit(given, ids, limits, model.bounds, prompts.context)
    return GenerateWriter(given, name, words, listed=root), [ids]

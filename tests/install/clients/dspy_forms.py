"""dspy's JSONAdapter. It asks for a schema where it is told that the model takes one, and for any JSON object by its
other engine, litellm. Of a name that it does not know it asks for nothing.
"""

from typing import Literal

import dspy
from asked import greedy, say, talks, user


class Tell(dspy.Signature):
    question: str = dspy.InputField()
    name: str = dspy.OutputField()
    mood: Literal["good", "bad"] = dspy.OutputField()
    age: int = dspy.OutputField()


def found(model, **more):
    lm = dspy.LM(model, api_base=talks, api_key="none", cache=False, num_retries=0, **greedy, **more)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        return dict(dspy.Predict(Tell)(question=user))


access = dspy.lm15.AccessPolicy("hibachi", base_url=talks)
ours = dspy.lm15.ProviderDefinition.chat(access, compat=dspy.lm15.OpenAIChatCompat())
dspy.lm15.register_provider(ours, supports=dspy.lm15.ModelSupport(response_schema=True))
say(schema=found("hibachi/tiny"), object=found("openai/tiny", engine="litellm"))

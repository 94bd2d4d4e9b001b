// @ai-sdk/openai-compatible.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { tell } from "./ai_tools.mjs";
import { base, tiny } from "./weather.mjs";

const more = { name: "tiny", includeUsage: true, supportsStructuredOutputs: true };
const model = (baseURL) => createOpenAICompatible({ baseURL, ...more })("tiny");
console.log(JSON.stringify(await tell(model(base), model(tiny))));

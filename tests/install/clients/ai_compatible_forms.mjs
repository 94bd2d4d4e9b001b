// @ai-sdk/openai-compatible, told that the server takes schemas, and not told so.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { tell } from "./ai_forms.mjs";

const asked = JSON.parse(process.argv[2]);
const model = (url, more) => createOpenAICompatible({ name: "tiny", baseURL: url + "/v1", ...more })("tiny");
await tell(asked, model(asked.url, { supportsStructuredOutputs: true }), model(asked.talks), model(asked.talks));

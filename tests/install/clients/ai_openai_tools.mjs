// @ai-sdk/openai, by its default, which speaks to /v1/responses. Of reasoning it shows summaries only.
import { createOpenAI } from "@ai-sdk/openai";
import { tell } from "./ai_tools.mjs";
import { base, tiny } from "./weather.mjs";

const model = (baseURL) => createOpenAI({ baseURL, apiKey: "none" })("tiny");
await tell(model(base), model(tiny), { shown: false });

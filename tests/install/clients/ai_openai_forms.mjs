// @ai-sdk/openai, by its default, which speaks to /v1/responses: it takes every server to take schemas.
import { createOpenAI } from "@ai-sdk/openai";
import { tell } from "./ai_forms.mjs";

const asked = JSON.parse(process.argv[2]);
const model = (url) => createOpenAI({ baseURL: url + "/v1", apiKey: "none" })("tiny");
await tell(asked, model(asked.url), undefined, model(asked.talks));

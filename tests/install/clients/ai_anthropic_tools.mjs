// @ai-sdk/anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { tell } from "./ai_tools.mjs";
import { base, tiny } from "./weather.mjs";

const model = (baseURL) => createAnthropic({ baseURL, apiKey: "none" })("tiny");
const thinking = { providerOptions: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } } };
console.log(JSON.stringify(await tell(model(base), model(tiny), { thinking })));

// @ai-sdk/openai, by its default, which speaks to /v1/responses, and by .chat(). Of reasoning it shows summaries only, if
// they are asked for and it takes the model for one that reasons.
import { createOpenAI } from "@ai-sdk/openai";
import { tell } from "./ai_tools.mjs";
import { base, tiny } from "./weather.mjs";

const [ours, other] = [base, tiny].map((baseURL) => createOpenAI({ baseURL, apiKey: "none" }));
const thinking = { providerOptions: { openai: { reasoningSummary: "auto", forceReasoning: true } } };
const said = await tell(ours("tiny"), other("tiny"), { thinking });
const chats = await tell(ours.chat("tiny"), other.chat("tiny"), { shown: false });
for (const [name, found] of Object.entries(chats)) said[name.replace(/(_streamed)?$/, " chat$1")] = found;
console.log(JSON.stringify(said));

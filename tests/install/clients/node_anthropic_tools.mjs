// @anthropic-ai/sdk: tools, whole and streamed, by hand and by its own loop; a type; counting; models.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
import * as w from "./weather.mjs";

const root = (url) => url.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL: root(w.base), apiKey: "none", maxRetries: 0 });
const other = new Anthropic({ baseURL: root(w.tiny), apiKey: "none", maxRetries: 0 });
const common = { model: "tiny", max_tokens: 1000, temperature: 0 };
const tools = [{ name: "get_weather", description: w.description, input_schema: w.parameters }];
const said = {};
const text = (found) => found.content.filter((block) => block.type === "text").map((block) => block.text).join("");

async function run(ask, question, messages = [], more = {}) {
  messages.push(...w.user(question));
  for (let reasoning = ""; ; ) {
    const found = await ask({ ...common, system: w.SYSTEM, messages, tools, ...more });
    messages.push({ role: "assistant", content: found.content });
    for (const block of found.content) if (block.type === "thinking") reasoning ||= block.thinking;
    const calls = found.content.filter((block) => block.type === "tool_use");
    if (!calls.length) return w.done(text(found), reasoning ? { reasoning } : {});
    const content = calls.map((c) => ({ type: "tool_result", tool_use_id: c.id, content: w.getWeather(c.input) }));
    messages.push({ role: "user", content });
  }
}

const whole = (asking) => client.messages.create(asking);
const streamed = (asking) => client.messages.stream(asking).finalMessage();
for (const [name, ask] of [["", whole], ["_streamed", streamed]]) {
  const talk = [];
  said["tool" + name] = await run(ask, w.ONE, talk);
  said["turn" + name] = await run(ask, w.NEXT, talk);
  said["parallel" + name] = await run(ask, w.TWO);
  said["think" + name] = await run(ask, w.THINK, [], { thinking: { type: "enabled", budget_tokens: 1024 } });
  said["unshown" + name] = await run(ask, w.THINK);
}

const inputSchema = z.object({ city: z.string() });
const weather = betaZodTool({ name: "get_weather", description: w.description, inputSchema, run: w.getWeather });
const asking = { ...common, messages: w.user(w.TWO), tools: [weather] };
said["parallel runner"] = w.done(text(await client.beta.messages.toolRunner(asking).runUntilDone()));
let last;
for await (const stream of client.beta.messages.toolRunner({ ...asking, stream: true })) last = await stream.finalMessage();
said["parallel runner_streamed"] = w.done(text(last));

// Demanded of a model that knows nothing of tools: what comes is what the schema says.
const input_schema = z.toJSONSchema((await import("./person.mjs")).Person);
const demanded = {
  ...common,
  max_tokens: w.asked.max_tokens,
  messages: w.asked.messages.slice(1),
  tools: [{ name: "Person", input_schema }],
};
for (const [name, tool_choice] of [["any", { type: "any" }], ["named", { type: "tool", name: "Person" }]]) {
  said["demanded " + name] = (await other.messages.create({ ...demanded, tool_choice })).content[0].input;
  const final = await other.messages.stream({ ...demanded, tool_choice }).finalMessage();
  said[`demanded ${name}_streamed`] = final.content[0].input;
}
const counted = await client.messages.countTokens({ model: "tiny", messages: w.user(w.WHO) });
const { usage } = await client.messages.create({ ...common, messages: w.user(w.WHO) });
if (counted.input_tokens !== usage.input_tokens) throw new Error("counted otherwise");
for await (const model of client.models.list()) if (model.id !== "tiny") throw new Error(model.id);
console.log(JSON.stringify(said));

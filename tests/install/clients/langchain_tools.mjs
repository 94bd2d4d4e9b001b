// langchain and @langchain/openai: agents, whole and streamed, by chats and by /v1/responses; bindTools;
// withStructuredOutput as a call. @langchain/anthropic likewise.
import { ChatAnthropic } from "@langchain/anthropic";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";
import { Person } from "./person.mjs";
import * as w from "./weather.mjs";

const schema = z.object({ city: z.string().max(12) });
const weather = tool(w.getWeather, { name: "get_weather", description: w.description, schema });
const openai = (baseURL, more) =>
  new ChatOpenAI({ model: "tiny", apiKey: "none", maxRetries: 0, temperature: 0, configuration: { baseURL }, ...more });
const anthropic = (url) =>
  new ChatAnthropic({ model: "tiny", apiKey: "none", maxRetries: 0, temperature: 0, maxTokens: 1000, anthropicApiUrl: url });
const said = {};

async function tell(way, model) {
  const agent = createAgent({ model, tools: [weather], systemPrompt: w.SYSTEM });
  const whole = async (messages) => (await agent.invoke({ messages })).messages;
  const streamed = async (messages) => {
    let last;
    for await (const [mode, part] of await agent.stream({ messages }, { streamMode: ["values", "messages"] }))
      if (mode === "values") last = part;
    return last.messages;
  };
  for (const [name, ask] of [["", whole], ["_streamed", streamed]]) {
    const run = async (messages) => {
      const after = await ask(messages);
      return [w.done(after.at(-1).text), after];
    };
    const [first, messages] = await run(w.user(w.ONE));
    said["tool" + way + name] = first;
    said["turn" + way + name] = (await run([...messages, ...w.user(w.NEXT)]))[0];
    said["parallel" + way + name] = (await run(w.user(w.TWO)))[0];
  }
  const bound = model.bindTools([weather]);
  let pieces;
  for await (const piece of await bound.stream(w.user(w.TWO))) pieces = pieces ? pieces.concat(piece) : piece;
  said["calls" + way + "_streamed"] = pieces.tool_calls.map(({ name, args }) => ({ name, args }));
}

await tell("", openai(w.base));
await tell(" responses", openai(w.base, { useResponsesApi: true }));
await tell(" anthropic", anthropic(w.base.replace(/\/v1$/, "")));

// Demanded of a model that knows nothing of tools: what comes is what the schema says.
const method = { name: "person", method: "functionCalling" };
const typed = openai(w.tiny, { maxTokens: w.asked.max_tokens }).withStructuredOutput(Person, method);
said["demanded named"] = await typed.invoke(w.asked.messages);
for await (const piece of await typed.stream(w.asked.messages)) said["demanded named_streamed"] = piece;
const bound = openai(w.tiny, { maxTokens: w.asked.max_tokens }).bindTools([weather], { tool_choice: "any" });
said["city"] = typeof (await bound.invoke(w.asked.messages)).tool_calls[0].args.city;
console.log(JSON.stringify(said));

// The official client for Node: runTools, whole and streamed; a call that is demanded; /v1/responses.
import OpenAI from "openai";
import { zodFunction, zodTextFormat } from "openai/helpers/zod";
import { Person } from "./person.mjs";
import * as w from "./weather.mjs";

const client = new OpenAI({ baseURL: w.base, apiKey: "none", maxRetries: 0 });
const other = new OpenAI({ baseURL: w.tiny, apiKey: "none", maxRetries: 0 });
const common = { model: "tiny", temperature: 0 };
const said = {};

// ---- chats
const runnable = { function: w.getWeather, parse: JSON.parse, name: "get_weather", description: w.description };
const tools = [{ type: "function", function: { ...runnable, parameters: w.parameters } }];
for (const [name, stream] of [["", false], ["_streamed", true]]) {
  const run = async (messages) => {
    const runner = client.chat.completions.runTools({ ...common, messages, tools, stream });
    const text = await runner.finalContent();
    return [w.done(text), runner.messages];
  };
  const [tool, messages] = await run(w.user(w.ONE));
  said["tool" + name] = tool;
  said["turn" + name] = (await run([...messages, ...w.user(w.NEXT)]))[0];
  said["parallel" + name] = (await run(w.user(w.TWO)))[0];
}

// Demanded of a model that knows nothing of tools: what comes is what the schema says.
const person = zodFunction({ name: "Person", parameters: Person });
const named = { type: "function", function: { name: "Person" } };
const asking = { ...common, messages: w.asked.messages, max_tokens: w.asked.max_tokens, tools: [person] };
for (const [name, tool_choice] of [["required", "required"], ["named", named]]) {
  const parsed = await other.chat.completions.parse({ ...asking, tool_choice });
  said["demanded " + name] = parsed.choices[0].message.tool_calls[0].function.parsed_arguments;
  const final = await other.chat.completions.stream({ ...asking, tool_choice }).finalChatCompletion();
  said[`demanded ${name}_streamed`] = final.choices[0].message.tool_calls[0].function.parsed_arguments;
}

// ---- /v1/responses
const flat = [{ type: "function", name: "get_weather", description: w.description, parameters: w.parameters, strict: true }];
const whole = (asking) => client.responses.create(asking);
const streamed = (asking) => client.responses.stream(asking).finalResponse();

async function run(ask, question, stored, before) {
  let input = [...(stored ? [] : (before ?? [])), ...w.user(question)];
  let more = stored ? { previous_response_id: before } : { store: false };
  for (let reasoning = ""; ; ) {
    const found = await ask({ ...common, instructions: w.SYSTEM, tools: flat, input, ...more });
    const thoughts = found.output.filter((item) => item.type === "reasoning");
    for (const item of thoughts) for (const part of [...(item.content ?? []), ...item.summary]) reasoning ||= part.text;
    const calls = found.output.filter((item) => item.type === "function_call");
    const results = calls.map((call) => {
      const output = w.getWeather(JSON.parse(call.arguments));
      return { type: "function_call_output", call_id: call.call_id, output };
    });
    if (stored) [more, input] = [{ previous_response_id: found.id }, results];
    else input = [...input, ...found.output, ...results];
    if (!calls.length) return [w.done(found.output_text, reasoning ? { reasoning } : {}), stored ? found.id : input];
  }
}

for (const [name, ask] of [["", whole], ["_streamed", streamed]])
  for (const stored of [true, false]) {
    const way = " responses" + (stored ? " stored" : "") + name;
    const [tool, before] = await run(ask, w.ONE, stored);
    said["tool" + way] = tool;
    said["turn" + way] = (await run(ask, w.NEXT, stored, before))[0];
    said["parallel" + way] = (await run(ask, w.TWO, stored))[0];
    said["think" + way] = (await run(ask, w.THINK, stored))[0];
  }
const typed = { ...common, input: w.WHO, text: { format: zodTextFormat(Person, "person") } };
said["typed responses"] = (await client.responses.parse(typed)).output_parsed;
said["typed responses_streamed"] = (await client.responses.stream(typed).finalResponse()).output_parsed;
console.log(JSON.stringify(said));

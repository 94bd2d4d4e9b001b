// Vercel's ai: generateText and streamText with tools until there are no more calls, generateObject, and a call that is
// demanded. model: of plans.py; tiny: of a model that knows no tools; shown: does the client show
// the reasoning? thinking: how it is asked for.
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { Person } from "./person.mjs";
import * as w from "./weather.mjs";

const inputSchema = z.object({ city: z.string().max(12) });
const tools = { get_weather: tool({ description: w.description, inputSchema, execute: w.getWeather }) };

export async function tell(model, tiny, { shown = true, thinking = {} } = {}) {
  const common = { model, temperature: 0, maxRetries: 0, system: w.SYSTEM };
  const agent = { ...common, tools, stopWhen: stepCountIs(5) };
  const said = {};
  const whole = async (asking) => {
    const found = await generateText(asking);
    return [found.text, found.steps[0].reasoningText, found.response.messages];
  };
  const streamed = async (asking) => {
    const stream = streamText({ ...asking, onError: ({ error }) => { throw error; } });
    for await (const part of stream.fullStream) if (part.type === "error") throw part.error;
    return [await stream.text, (await stream.steps)[0].reasoningText, (await stream.response).messages];
  };
  for (const [name, ask] of [["", whole], ["_streamed", streamed]]) {
    const run = async (messages, how = {}) => {
      const [text, reasoning, more] = await ask({ ...agent, messages, ...how });
      return [w.done(text, reasoning ? { reasoning } : {}), [...messages, ...more]];
    };
    const [first, messages] = await run(w.user(w.ONE));
    said["tool" + name] = first;
    said["turn" + name] = (await run([...messages, ...w.user(w.NEXT)]))[0];
    said["parallel" + name] = (await run(w.user(w.TWO)))[0];
    said[(shown ? "think" : "unshown") + name] = (await run(w.user(w.THINK), thinking))[0];
    const output = Output.object({ schema: Person });
    const make = name ? streamText : generateText;
    said["typed after a tool" + name] = await (await make({ ...agent, output, prompt: w.ONE })).output;
    w.done("");
  }
  const person = { ...common, schema: Person, prompt: w.WHO };
  said.typed = (await generateObject(person)).object;
  const stream = streamObject(person);
  for await (const _ of stream.partialObjectStream);
  said.typed_streamed = await stream.object;
  const told = tool({ description: "Say who you are.", inputSchema: Person });
  const demand = { maxRetries: 0, temperature: 0, model: tiny, maxOutputTokens: w.asked.max_tokens, tools: { told } };
  for (const [name, toolChoice] of [["required", "required"], ["named", { type: "tool", toolName: "told" }]]) {
    const asking = { ...demand, prompt: w.asked.messages[1].content, toolChoice };
    said["demanded " + name] = (await generateText(asking)).toolCalls[0].input;
    said[`demanded ${name}_streamed`] = (await streamText(asking).toolCalls)[0].input;
  }
  return said;
}

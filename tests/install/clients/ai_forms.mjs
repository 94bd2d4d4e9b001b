// Vercel's ai: generateObject, streamObject, and Output.object with generateText and streamText, of a type by zod; a JSON
// schema, a choice, an array; and any JSON object. `typed`, `untyped`: models that are said to take schemas, and not to;
// `any`: one that says JSON.
import { generateObject, generateText, jsonSchema, Output, streamObject, streamText } from "ai";
import { Person } from "./person.mjs";

const schema = jsonSchema({
  type: "object",
  properties: { yes: { type: "boolean" }, times: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["yes", "times"],
  additionalProperties: false,
});

export async function tell(asked, typed, untyped, any) {
  const common = { temperature: 0, maxOutputTokens: asked.max_tokens, maxRetries: 0, allowSystemInMessages: true };
  const chat = { ...common, messages: asked.messages };
  const said = {};
  said.schema = (await generateObject({ ...chat, model: typed, schema: Person })).object;
  const stream = streamObject({ ...chat, model: typed, schema: Person });
  for await (const _ of stream.partialObjectStream);
  said.schema_streamed = await stream.object;
  said.schema_json = (await generateObject({ ...chat, model: typed, schema })).object;
  const output = Output.object({ schema: Person });
  said.schema_output = (await generateText({ ...chat, model: typed, output })).output;
  const text = streamText({ ...chat, model: typed, output });
  for await (const _ of text.partialOutputStream);
  said.schema_output_streamed = await text.output;
  const choices = { output: "enum", enum: ["sunny", "rainy"] };
  said.schema_enum = { result: (await generateObject({ ...chat, model: typed, ...choices })).object };
  said.schema_array = { elements: (await generateObject({ ...chat, model: typed, output: "array", schema })).object };
  if (untyped) {
    said.object = (await generateObject({ ...chat, model: untyped, schema: Person })).object;
    said.object_output = (await generateText({ ...chat, model: untyped, output })).output;
  }
  said.object_any = (await generateObject({ ...chat, model: any, output: "no-schema" })).object;
  console.log(JSON.stringify(said));
}

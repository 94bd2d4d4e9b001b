// The official client for Node: a type by zod, whole and streamed, and any JSON object.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { Person } from "./person.mjs";

const asked = JSON.parse(process.argv[2]);
const client = (url) => new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 }).chat.completions;
const chat = { model: "tiny", temperature: 0, max_tokens: asked.max_tokens, messages: asked.messages };
const typed = { ...chat, response_format: zodResponseFormat(Person, "person") };

const said = { schema: (await client(asked.url).parse(typed)).choices[0].message.parsed };
const stream = client(asked.url).stream(typed);
let pieces = "";
for await (const chunk of stream) pieces += chunk.choices[0]?.delta.content ?? "";
said.schema_streamed = (await stream.finalChatCompletion()).choices[0].message.parsed;
if (JSON.stringify(JSON.parse(pieces)) !== JSON.stringify(said.schema_streamed)) throw new Error(pieces);
const object = { ...chat, response_format: { type: "json_object" } };
said.object = JSON.parse((await client(asked.talks).create(object)).choices[0].message.content);
console.log(JSON.stringify(said));

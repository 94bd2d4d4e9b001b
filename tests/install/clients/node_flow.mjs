// The official client for Node.
import OpenAI from "openai";

const asked = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: asked.url + "/v1", apiKey: "none", maxRetries: 0 });
const greedy = { model: "tiny", temperature: 0, max_tokens: asked.max_tokens };
const chat = { ...greedy, messages: asked.messages };
const text = { ...greedy, prompt: asked.prompt };
const said = { models: [], chat_streamed: "", text_streamed: "" };

for await (const model of client.models.list()) said.models.push(model.id);
said.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
const asking = { ...chat, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(asking)) {
  said.chat_streamed += chunk.choices[0]?.delta.content ?? "";
  if (chunk.usage) said.chat_tokens = chunk.usage.completion_tokens;
}
said.text = (await client.completions.create(text)).choices[0].text;
for await (const chunk of await client.completions.create({ ...text, stream: true })) {
  said.text_streamed += chunk.choices[0].text;
}
said.embedding = (await client.embeddings.create({ model: "tiny", input: asked.prompt })).data[0].embedding;
try {
  await client.completions.create({ ...text, model: "other" });
} catch (e) {
  if (!(e instanceof OpenAI.NotFoundError)) throw e;
  said.unknown_model = e.message;
}
console.log(JSON.stringify(said));

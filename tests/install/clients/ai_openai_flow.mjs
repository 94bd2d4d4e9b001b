// Vercel's ai with @ai-sdk/openai, by its default, which speaks to /v1/responses.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const asked = JSON.parse(process.argv[2]);
const model = createOpenAI({ baseURL: asked.url + "/v1", apiKey: "none" })("tiny");
const common = { temperature: 0, maxOutputTokens: asked.max_tokens, maxRetries: 0, allowSystemInMessages: true };
const chat = { ...common, model, messages: asked.messages };

const said = { chat: (await generateText(chat)).text, chat_streamed: "" };
const stream = streamText(chat);
for await (const piece of stream.textStream) said.chat_streamed += piece;
said.chat_tokens = (await stream.usage).outputTokens;
console.log(JSON.stringify(said));

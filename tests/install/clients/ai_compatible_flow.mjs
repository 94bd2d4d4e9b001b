// Vercel's ai with @ai-sdk/openai-compatible.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, streamText } from "ai";

const asked = JSON.parse(process.argv[2]);
const tiny = createOpenAICompatible({ name: "tiny", baseURL: asked.url + "/v1", includeUsage: true });
const common = { temperature: 0, maxOutputTokens: asked.max_tokens, maxRetries: 0, allowSystemInMessages: true };
const chat = { ...common, model: tiny("tiny"), messages: asked.messages };
const text = { ...common, model: tiny.completionModel("tiny"), prompt: asked.prompt };

const said = { chat: (await generateText(chat)).text, chat_streamed: "" };
const stream = streamText(chat);
for await (const piece of stream.textStream) said.chat_streamed += piece;
said.chat_tokens = (await stream.usage).outputTokens;
said.embedding = (await embed({ model: tiny.textEmbeddingModel("tiny"), value: asked.prompt })).embedding;
// Its own frame is put around the prompt, so the text is another than that of the bare prompt; it must only be there.
if ((await generateText(text)).usage.outputTokens !== asked.max_tokens) throw new Error("no text came");
console.log(JSON.stringify(said));

// @langchain/openai: ChatOpenAI, OpenAI, OpenAIEmbeddings.
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";

const asked = JSON.parse(process.argv[2]);
const common = { model: "tiny", apiKey: "none", maxRetries: 0, configuration: { baseURL: asked.url + "/v1" } };
const greedy = { ...common, temperature: 0, maxTokens: asked.max_tokens };
const chat = new ChatOpenAI({ ...greedy, streamUsage: true });
const text = new OpenAI(greedy);

const said = { chat: (await chat.invoke(asked.messages)).content, chat_streamed: "", text_streamed: "", chat_tokens: 0 };
for await (const piece of await chat.stream(asked.messages)) {
  said.chat_streamed += piece.content;
  said.chat_tokens += piece.usage_metadata?.output_tokens ?? 0;
}
said.text = await text.invoke(asked.prompt);
for await (const piece of await text.stream(asked.prompt)) said.text_streamed += piece;
said.embedding = await new OpenAIEmbeddings({ ...common, encodingFormat: "float" }).embedQuery(asked.prompt);
console.log(JSON.stringify(said));

// @langchain/openai: withStructuredOutput, in its methods jsonSchema (whole and streamed) and jsonMode.
import { ChatOpenAI } from "@langchain/openai";
import { Person } from "./person.mjs";

const asked = JSON.parse(process.argv[2]);
const model = (url, method) => {
  const common = { model: "tiny", apiKey: "none", maxRetries: 0, temperature: 0, maxTokens: asked.max_tokens };
  const chat = new ChatOpenAI({ ...common, configuration: { baseURL: url + "/v1" } });
  return chat.withStructuredOutput(Person, { name: "person", method });
};
const typed = model(asked.url, "jsonSchema");

const said = { schema: await typed.invoke(asked.messages) };
for await (const piece of await typed.stream(asked.messages)) said.schema_streamed = piece;
said.object = await model(asked.talks, "jsonMode").invoke(asked.messages);
console.log(JSON.stringify(said));

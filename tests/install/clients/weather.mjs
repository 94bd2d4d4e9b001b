// What agents are asked, and the tool that they have, as in weather.py.
export const asked = JSON.parse(process.argv[2]);
export const base = asked.url + "/v1", tiny = asked.tiny + "/v1"; // tiny: of a model that knows no tools
export const SYSTEM = "Be brief.", WHO = "Who are you?";
export const ONE = "What is the weather in Paris?", TWO = "What is the weather in Paris and Oslo?";
export const NEXT = "And in Lima?", THINK = "Please think: what is the weather in Paris?";
export const description = "The weather in a city.";
const WEATHER = { Paris: "sunny in Paris", Oslo: "rainy in Oslo", Lima: "windy in Lima" };
export const parameters = {
  type: "object",
  properties: { city: { type: "string", description: "Its name", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
let called = [];

export function getWeather({ city }) {
  called.push(city);
  return WEATHER[city];
}

// What has come of a question: which places were asked for since the last one, and what was said in the end.
export function done(text, more = {}) {
  const found = { called: called.sort(), text, ...more };
  called = [];
  return found;
}

export const user = (content) => [{ role: "user", content }];

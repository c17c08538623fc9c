// Shared by the checks of all clients in JavaScript: the servers' addresses, prompts with known answers, and tools.

import assert from "node:assert/strict";

export const URL = process.env.TGI_URL; // answers QUESTION, and grammars
export const GUARDED_URL = process.env.TGI_GUARDED_URL; // a server that requires a key
export const KEY = process.env.TGI_KEY;
export const ANSWER = /Paris/;
export const QUESTION = "What is the capital of France?";
export const SYSTEM = "You answer questions on geography.";
export const MESSAGES = [
  { role: "system", content: SYSTEM },
  { role: "user", content: QUESTION },
];
export const PROMPT = `<|im_start|>user\n${QUESTION}<|im_end|>\n<|im_start|>assistant\n`;

// Arguments are enumerations: their values are known without a model.
export const CITIES = ["Paris", "London", "Berlin"];
export const UNITS = ["celsius", "fahrenheit"];
export const WEATHER = {
  name: "get_weather",
  description: "The weather in a city now",
  parameters: {
    type: "object",
    properties: { city: { enum: CITIES }, unit: { enum: UNITS } },
    required: ["city", "unit"],
    additionalProperties: false,
  },
};
export const ASKED = "What is the weather in Paris, in celsius?";

// Asserts that these are arguments of get_weather.
export function checkWeather(given) {
  assert.deepEqual(Object.keys(given).sort(), ["city", "unit"]);
  assert.ok(CITIES.includes(given.city));
  assert.ok(UNITS.includes(given.unit));
}

export async function all(iterable) {
  const found = [];
  for await (const each of iterable) found.push(each);
  return found;
}

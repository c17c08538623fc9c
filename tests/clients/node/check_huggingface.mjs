// Hugging Face's InferenceClient: chats and native text generation, whole and streamed.

import assert from "node:assert/strict";
import { test } from "node:test";
import { InferenceClient } from "@huggingface/inference";
import { all, ANSWER, ASKED, checkWeather, GUARDED_URL, KEY, MESSAGES, PROMPT, URL, WEATHER } from "./served.mjs";

const client = new InferenceClient("none", { endpointUrl: URL });
const CHAT = { model: "tgi", messages: MESSAGES, temperature: 0, max_tokens: 24 };
const TEXT = { inputs: PROMPT, parameters: { max_new_tokens: 12, return_full_text: false } };

test("chats", async () => {
  const whole = await client.chatCompletion(CHAT);
  assert.match(whole.choices[0].message.content, ANSWER);
  const chunks = await all(client.chatCompletionStream(CHAT));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), whole.choices[0].message.content);
  const called = await client.chatCompletion({
    ...CHAT, max_tokens: 60, messages: [{ role: "user", content: ASKED }], tool_choice: "required",
    tools: [{ type: "function", function: WEATHER }],
  });
  checkWeather(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));
});

test("text generation", async () => {
  const whole = await client.textGeneration(TEXT);
  assert.match(whole.generated_text, ANSWER);
  // With an `endpointUrl` the client streams from /v1/completions, and passes its chunks on.
  const chunks = await all(client.textGenerationStream(TEXT));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.generated_text);
});

test("keys", async () => {
  const asked = { inputs: "a", parameters: { max_new_tokens: 2 } };
  await assert.rejects(new InferenceClient("wrong", { endpointUrl: GUARDED_URL }).textGeneration(asked), (error) => error.httpResponse.status === 401);
  assert.ok((await new InferenceClient(KEY, { endpointUrl: GUARDED_URL }).textGeneration(asked)).generated_text);
});

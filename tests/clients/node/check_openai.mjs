// OpenAI's SDK: chats, completions, responses, structured outputs with zod, tools and runTools, streams, errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { all, ANSWER, ASKED, checkWeather, CITIES, GUARDED_URL, KEY, MESSAGES, QUESTION, SYSTEM, UNITS, URL, WEATHER } from "./served.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const CHAT = { model: "any", messages: MESSAGES, temperature: 0, max_tokens: 24 };
const RESPONSE = { model: "any", input: QUESTION, instructions: SYSTEM, temperature: 0, max_output_tokens: 24 };
const Weather = z.object({ city: z.enum(CITIES), unit: z.enum(UNITS) });
const Place = z.object({ capital: z.boolean() });
const CALL = {
  ...CHAT, max_tokens: 60, messages: [{ role: "user", content: ASKED }],
  tools: [{ type: "function", function: WEATHER }], tool_choice: "required", parallel_tool_calls: false,
};

test("models", async () => {
  const [model] = (await client.models.list()).data;
  assert.equal((await client.models.retrieve(model.id)).id, model.id);
});

test("chats, whole and streamed", async () => {
  const whole = await client.chat.completions.create(CHAT);
  const text = whole.choices[0].message.content;
  assert.match(text, ANSWER);
  const counted = { ...CHAT, stream_options: { include_usage: true } };
  const chunks = await all(await client.chat.completions.create({ ...counted, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), text);
  assert.deepEqual(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
  const stream = client.chat.completions.stream(counted);
  assert.equal(await stream.finalContent(), text);
  assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
});

test("a stream that is given up", async () => {
  const stream = await client.chat.completions.create({ ...CHAT, max_tokens: 500, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("completions", async () => {
  const asked = { model: "any", prompt: ["The capital of France is", "One, two,"], temperature: 0, max_tokens: 5 };
  const { choices } = await client.completions.create(asked);
  assert.match(choices[0].text, ANSWER);
  const chunks = await all(await client.completions.create({ ...asked, stream: true }));
  const joined = ["", ""];
  for (const chunk of chunks) for (const choice of chunk.choices) joined[choice.index] += choice.text;
  assert.deepEqual(joined, choices.map((choice) => choice.text));
});

test("structured outputs of a chat", async () => {
  const asked = { ...CHAT, response_format: zodResponseFormat(Place, "place") };
  const { parsed } = (await client.chat.completions.parse(asked)).choices[0].message;
  assert.equal(typeof parsed.capital, "boolean");
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, parsed);
});

test("calls of tools", async () => {
  const message = (await client.chat.completions.create(CALL)).choices[0].message;
  checkWeather(JSON.parse(message.tool_calls[0].function.arguments));
  const streamed = await client.chat.completions.stream(CALL).finalFunctionToolCall();
  assert.equal(streamed.arguments, message.tool_calls[0].function.arguments);
  const typed = { ...CALL, tools: [zodFunction({ name: "get_weather", parameters: Weather })] };
  checkWeather((await client.chat.completions.parse(typed)).choices[0].message.tool_calls[0].function.parsed_arguments);
});

test("runTools", async () => {
  for (const stream of [false, true]) {
    const given = [];
    const tool = { ...WEATHER, parse: JSON.parse, function: (city) => { given.push(city); return "18 degrees, sunny"; } };
    // The second answer comes after the result; tool_choice is the same, so the limit ends the run.
    const runner = client.chat.completions.runTools({ ...CALL, tools: [{ type: "function", function: tool }], stream }, { maxChatCompletions: 2 });
    await runner.done();
    assert.equal(given.length, 2);
    given.forEach(checkWeather);
    assert.deepEqual(runner.messages.slice(1, 4).map((message) => message.role), ["assistant", "tool", "assistant"]);
  }
});

test("responses, whole and with every event of the stream", async () => {
  const whole = await client.responses.create(RESPONSE);
  assert.match(whole.output_text, ANSWER);
  assert.equal((await client.responses.retrieve(whole.id)).output_text, whole.output_text);
  const next = await client.responses.create({ ...RESPONSE, input: "And of Spain?", previous_response_id: whole.id });
  assert.ok(next.usage.input_tokens > whole.usage.input_tokens);
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
  const events = await all(await client.responses.create({ ...RESPONSE, stream: true }));
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  const kinds = events.map((event) => event.type);
  assert.deepEqual(kinds.filter((kind) => kind !== "response.output_text.delta").slice(0, -1), [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
  ]);
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  const stream = client.responses.stream(RESPONSE);
  let told = "";
  stream.on("response.output_text.delta", (event) => { told = event.snapshot; });
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
  assert.equal(told, whole.output_text);
});

test("structured outputs and calls of responses", async () => {
  const place = await client.responses.parse({ ...RESPONSE, text: { format: zodTextFormat(Place, "place") } });
  assert.equal(typeof place.output_parsed.capital, "boolean");
  const asked = {
    ...RESPONSE, input: ASKED, max_output_tokens: 60, tool_choice: "required", parallel_tool_calls: false,
    tools: [zodResponsesFunction({ name: "get_weather", parameters: Weather })],
  };
  const parsed = await client.responses.parse(asked);
  const call = parsed.output.find((item) => item.type === "function_call");
  checkWeather(call.parsed_arguments);
  const events = await all(client.responses.stream(asked));
  const done = events.find((event) => event.type === "response.function_call_arguments.done");
  assert.equal(done.arguments, call.arguments);
  const result = { type: "function_call_output", call_id: call.call_id, output: "18 degrees" };
  const items = parsed.output.map(({ parsed_arguments, ...item }) => item);
  const answer = await client.responses.create({
    ...asked, input: [{ role: "user", content: ASKED }, ...items, result], tool_choice: "none",
  });
  assert.equal(answer.output[0].type, "message");
});

test("functions in a namespace", async () => {
  const group = { type: "namespace", name: "weather", description: "Weather", tools: [{ type: "function", strict: false, ...WEATHER }] };
  const asked = { ...RESPONSE, input: ASKED, max_output_tokens: 60, tools: [group], tool_choice: "required" };
  const call = (await client.responses.create(asked)).output.find((item) => item.type === "function_call");
  assert.deepEqual([call.namespace, call.name], ["weather", "get_weather"]);
  checkWeather(JSON.parse(call.arguments));
});

test("errors", async () => {
  await assert.rejects(client.embeddings.create({ model: "any", input: "a" }), (error) =>
    error instanceof OpenAI.NotFoundError && /does not serve this route/.test(error.message));
  await assert.rejects(client.chat.completions.create({ ...CHAT, temperature: -1 }), (error) =>
    error instanceof OpenAI.UnprocessableEntityError && error.param === "temperature");
  const guarded = (apiKey) => new OpenAI({ baseURL: `${GUARDED_URL}/v1`, apiKey, maxRetries: 0 });
  await assert.rejects(guarded("wrong").responses.create({ model: "any", input: "a" }), OpenAI.AuthenticationError);
  assert.ok((await guarded(KEY).responses.create({ model: "any", input: "a", max_output_tokens: 2 })).id);
});

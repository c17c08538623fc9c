// Anthropic's SDK: messages, stream helpers, tools and the tool runner, structured outputs, count_tokens, errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { all, ANSWER, ASKED, checkWeather, CITIES, GUARDED_URL, KEY, QUESTION, SYSTEM, UNITS, URL, WEATHER } from "./served.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const ASK = { model: "any", system: SYSTEM, messages: [{ role: "user", content: QUESTION }], max_tokens: 24, temperature: 0 };
const TOOL = { name: WEATHER.name, description: WEATHER.description, input_schema: WEATHER.parameters };
const CALL = {
  ...ASK, messages: [{ role: "user", content: ASKED }], max_tokens: 60, tools: [TOOL],
  tool_choice: { type: "any", disable_parallel_tool_use: true },
};

test("messages, whole and streamed", async () => {
  const whole = await client.messages.create(ASK);
  assert.match(whole.content[0].text, ANSWER);
  const events = await all(await client.messages.create({ ...ASK, stream: true }));
  assert.deepEqual([events[0].type, events.at(-1).type], ["message_start", "message_stop"]);
  const stream = client.messages.stream(ASK);
  const seen = { text: "", blocks: 0 };
  stream.on("text", (delta) => { seen.text += delta; }).on("contentBlock", () => { seen.blocks += 1; });
  const final = await stream.finalMessage();
  assert.equal(await stream.finalText(), whole.content[0].text);
  assert.deepEqual(seen, { text: whole.content[0].text, blocks: 1 });
  assert.equal(final.stop_reason, whole.stop_reason);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

test("count_tokens", async () => {
  const { max_tokens, temperature, ...asked } = ASK;
  const { usage } = await client.messages.create(ASK);
  const counted = await client.messages.countTokens(asked);
  assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  assert.equal((await client.beta.messages.countTokens(asked)).input_tokens, counted.input_tokens);
});

test("calls of tools and their results", async () => {
  const whole = await client.messages.create(CALL);
  assert.equal(whole.stop_reason, "tool_use");
  const [call] = whole.content.filter((block) => block.type === "tool_use");
  checkWeather(call.input);
  const streamed = await client.messages.stream(CALL).finalMessage();
  assert.deepEqual(streamed.content.at(-1).input, call.input);
  const result = { type: "tool_result", tool_use_id: call.id, content: [{ type: "text", text: "18 degrees" }] };
  const messages = [...CALL.messages, { role: "assistant", content: whole.content }, { role: "user", content: [result] }];
  const answer = await client.messages.create({ ...CALL, messages, tool_choice: { type: "none" } });
  assert.equal(answer.content[0].type, "text");
});

test("the tool runner", async () => {
  const given = [];
  const tool = betaZodTool({
    name: WEATHER.name, description: WEATHER.description, inputSchema: z.object({ city: z.enum(CITIES), unit: z.enum(UNITS) }),
    run: (input) => { given.push(input); return "18 degrees"; },
  });
  for (const stream of [false, true]) {
    const runner = client.beta.messages.toolRunner({ ...CALL, tools: [tool], max_iterations: 2, stream });
    for await (const turn of runner) if (stream) await turn.finalMessage();
  }
  assert.ok(given.length >= 2);
  given.forEach(checkWeather);
});

test("a tool that a message loads", async () => {
  const messages = [
    { role: "user", content: ASKED },
    { role: "assistant", content: [{ type: "tool_use", id: "toolu_1", name: "find", input: {} }] },
    { role: "user", content: [{ type: "tool_result", tool_use_id: "toolu_1", content: [{ type: "tool_reference", tool_name: TOOL.name }] }] },
  ];
  const tools = [{ name: "find", input_schema: { type: "object", properties: {} } }, { ...TOOL, defer_loading: true }];
  const asked = { ...CALL, messages, tools, tool_choice: { type: "tool", name: TOOL.name } };
  checkWeather((await client.beta.messages.create(asked)).content.at(-1).input);
  await assert.rejects(client.messages.create({ ...asked, messages: CALL.messages }), Anthropic.BadRequestError);
});

test("structured outputs", async () => {
  const format = zodOutputFormat(z.object({ capital: z.boolean() }));
  const answer = await client.messages.parse({ ...ASK, output_config: { format } });
  assert.equal(typeof answer.parsed_output.capital, "boolean");
});

test("what Claude Code sends besides", async () => {
  const answer = await client.beta.messages.create({
    ...ASK, betas: ["claude-code-20250219", "context-management-2025-06-27"], metadata: { user_id: "u" },
    system: [{ type: "text", text: SYSTEM, cache_control: { type: "ephemeral" } }], thinking: { type: "adaptive", display: "omitted" },
    context_management: { edits: [{ type: "clear_thinking_20251015", keep: "all" }] }, output_config: { effort: "high" },
  });
  assert.match(answer.content.at(-1).text, ANSWER);
});

test("errors and keys", async () => {
  await assert.rejects(client.messages.create({ ...ASK, max_tokens: 0 }), Anthropic.BadRequestError);
  const ask = (options) => new Anthropic({ baseURL: GUARDED_URL, maxRetries: 0, ...options }).messages.create({ ...ASK, max_tokens: 2 });
  await assert.rejects(ask({ apiKey: "wrong" }), Anthropic.AuthenticationError);
  for (const options of [{ apiKey: KEY }, { apiKey: null, authToken: KEY }]) assert.ok((await ask(options)).id);
});

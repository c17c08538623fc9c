// Vercel's AI SDK with its providers for all three protocols: text, streams, tools in steps, structured outputs.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, ASKED, checkWeather, CITIES, GUARDED_URL, QUESTION, SYSTEM, UNITS, URL } from "./served.mjs";

const baseURL = `${URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = { name: "tgi", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true };
const MODELS = {
  responses: openai.responses("local"),
  chat: openai.chat("local"),
  compatible: createOpenAICompatible(compatible).chatModel("local"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" }).messages("local"),
};

for (const [name, model] of Object.entries(MODELS)) {
  const ask = { model, instructions: SYSTEM, prompt: QUESTION, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

  test(`${name}: text`, async () => {
    const whole = await generateText(ask);
    assert.match(whole.text, ANSWER);
    const stream = streamText(ask);
    assert.equal(await stream.text, whole.text);
    assert.equal(await stream.finishReason, whole.finishReason);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`${name}: tools in steps`, async () => {
    const given = [];
    const weather = tool({
      description: "The weather in a city now", inputSchema: z.object({ city: z.enum(CITIES), unit: z.enum(UNITS) }),
      execute: async (input) => { given.push(input); return { degrees: 18 }; },
    });
    const asked = {
      ...ask, prompt: ASKED, maxOutputTokens: 60, tools: { get_weather: weather }, stopWhen: isStepCount(2),
      // The first step calls, the second answers.
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    };
    const whole = await generateText(asked);
    const stream = streamText(asked);
    for (const steps of [whole.steps, await stream.steps]) {
      assert.equal(steps.length, 2);
      assert.equal(steps[0].finishReason, "tool-calls");
      assert.deepEqual(steps[0].toolResults[0].output, { degrees: 18 });
      assert.ok(steps[1].text);
    }
    assert.ok(given.length >= 2);
    given.forEach(checkWeather);
  });

  test(`${name}: structured output`, async () => {
    const asked = { ...ask, output: Output.object({ schema: z.object({ capital: z.boolean() }) }) };
    const { output } = await generateText(asked);
    assert.equal(typeof output.capital, "boolean");
    const stream = streamText(asked);
    assert.deepEqual(await stream.output, output);
  });
}

test("a wrong key", async () => {
  const model = createOpenAI({ baseURL: `${GUARDED_URL}/v1`, apiKey: "wrong" }).responses("local");
  await assert.rejects(generateText({ model, prompt: QUESTION, maxRetries: 0 }), (error) => APICallError.isInstance(error) && error.statusCode === 401);
});

// LangChain's ChatOpenAI over chats and over responses: text, streams, tools, structured outputs.

import assert from "node:assert/strict";
import { test } from "node:test";
import { HumanMessage, SystemMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAI } from "@langchain/openai";
import { z } from "zod";
import { all, ANSWER, ASKED, checkWeather, CITIES, QUESTION, SYSTEM, UNITS, URL } from "./served.mjs";

const OPTIONS = { model: "local", apiKey: "none", configuration: { baseURL: `${URL}/v1` }, temperature: 0, maxRetries: 0 };
const MESSAGES = [new SystemMessage(SYSTEM), new HumanMessage(QUESTION)];
const weather = tool(async () => "18 degrees", {
  name: "get_weather", description: "The weather in a city now", schema: z.object({ city: z.enum(CITIES), unit: z.enum(UNITS) }),
});

for (const useResponsesApi of [false, true]) {
  const name = useResponsesApi ? "responses" : "chat";
  const model = (maxTokens) => new ChatOpenAI({ ...OPTIONS, useResponsesApi, maxTokens });

  test(`${name}: text`, async () => {
    const whole = await model(24).invoke(MESSAGES);
    assert.match(whole.text, ANSWER);
    assert.ok(whole.usage_metadata.total_tokens > 0);
    const chunks = await all(await model(24).stream(MESSAGES));
    assert.equal(chunks.map((chunk) => chunk.text).join(""), whole.text);
  });

  test(`${name}: tools`, async () => {
    const asked = [new HumanMessage(ASKED)];
    // Over responses the client drops "required".
    const answer = await model(60).bindTools([weather], { tool_choice: "get_weather" }).invoke(asked);
    const [call] = answer.tool_calls;
    checkWeather(call.args);
    const result = await weather.invoke(call);
    assert.ok(result instanceof ToolMessage);
    const next = await model(9).bindTools([weather], { tool_choice: "none" }).invoke([...asked, answer, result]);
    assert.ok(next.text);
  });

  test(`${name}: structured output`, async () => {
    const typed = model(24).withStructuredOutput(z.object({ capital: z.boolean() }), { name: "place", method: "jsonSchema" });
    assert.equal(typeof (await typed.invoke(MESSAGES)).capital, "boolean");
  });
}

test("completions", async () => {
  assert.match(await new OpenAI({ ...OPTIONS, maxTokens: 5 }).invoke("The capital of France is"), ANSWER);
});

// Uses the page as a person does. Prints "kill" while an answer streams, and then what it has seen, as JSON.
//
// node page.mjs URL KEY SCRIPT DIRECTORY: SCRIPT is a message that the model answers with known texts.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [url, key, script, directory] = process.argv.slice(2);
const seen = { problems: [], violations: {} };
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const program = { executablePath: await chromium.executablePath(), args: chromium.args };
const browser = await puppeteer.launch({ ...program, headless: "shell", timeout: 120_000 });
const page = await browser.newPage();
page.setDefaultTimeout(60_000);
await page.setViewport({ width: 1200, height: 800 });
page.on("console", (message) => {
  const address = message.location().url ?? "";
  // The browser reports these answers: before there is a key, and while the worker is replaced.
  const expected = message.text().includes("401") || (message.text().includes("503") && address.endsWith("/health"));
  if (["error", "warning"].includes(message.type()) && !expected) seen.problems.push(`${message.text()} ${address}`);
});
page.on("pageerror", (error) => seen.problems.push(String(error)));
page.on("requestfailed", (request) => {
  const failed = `${request.url()} ${request.failure()?.errorText}`;
  if (failed.endsWith("/chat/completions net::ERR_ABORTED")) seen.aborted = (seen.aborted ?? 0) + 1;
  else seen.problems.push(failed);
});
page.on("request", (request) => {
  if (!request.url().startsWith(url)) seen.problems.push(`a request to ${request.url()}`);
});

const texts = (selector) => page.$$eval(selector, (found) => found.map((one) => one.textContent));
const look = async (name) => {
  await page.evaluate(axe);
  seen.violations[name] = await page.evaluate(async () => (await axe.run()).violations.map((one) => `${one.id}: ${one.nodes[0].html}`));
  await page.screenshot({ path: `${directory}/${name}.png` });
};
const ask = async (text) => {
  await page.evaluate((value) => (document.getElementById("input").value = value), text);
  await page.focus("#input");
  await page.keyboard.press("Enter");
};
const answered = (count) => page.waitForFunction((wanted) => document.querySelectorAll(".message.assistant .actions").length === wanted, {}, count);
const action = (name) => page.evaluate((text) => [...document.querySelectorAll(".actions button")].findLast((one) => one.textContent === text).click(), name);

await page.goto(url);
await page.waitForFunction(() => document.getElementById("health").textContent === "ready");
await page.waitForFunction(() => document.title !== "Text Generation Inference");
await ask(script);
await page.waitForSelector("dialog[aria-label] input");
await page.type("dialog[aria-label] input", key);
await page.keyboard.press("Enter");
await answered(1);
seen.cells = await texts(".message.assistant .body td");
seen.code = await texts(".message.assistant .body pre code");
seen.reasoning = await texts(".message.assistant details p");
seen.folded = !(await page.$eval(".message.assistant details", (one) => one.open));
seen.links = await page.$$eval(".message.assistant .body a", (found) => found.map((one) => one.href));
seen.foreign = await page.$$eval(".message.assistant .body img, .message.assistant .body script", (found) => found.length);
await look("chat");

await page.click("#code");
seen.programs = await texts("#dialog h3");
await look("code");
await page.click("#dialog button");

await page.click("#clear");
await page.type("[name=max_tokens]", "4000");  // more than there is time for
await ask("Hello");
await page.waitForFunction(() => (document.querySelectorAll(".message.assistant .body")[0]?.textContent.length ?? 0) > 20);
await page.click("#stop");
await answered(1);
seen.stopped = (await texts(".message.assistant .actions"))[0];

await action("Retry");
await page.waitForFunction(() => (document.querySelectorAll(".message.assistant .body")[0]?.textContent.length ?? 0) > 20);
await page.click("#tab-live");
await page.waitForFunction(() => document.querySelectorAll("#processes tbody tr").length > 5);
// The request that was stopped leaves the table when the server has seen its connection close.
await page.waitForFunction(() => document.querySelectorAll("#requests tbody tr").length === 1);
seen.waits = await texts("#requests tbody td:nth-child(3)");
console.log("kill");
await page.waitForFunction(() => document.getElementById("events").textContent.includes("worker-0"));
seen.events = await texts("#events li");
await page.click("#tab-chat");
const shown = (await texts(".message.assistant .body"))[0];
await page.waitForFunction((before) => document.querySelectorAll(".message.assistant .body")[0].textContent.length > before + 100, {}, shown.length);
await page.click("#stop");
await answered(1);
// Letters alone: signs may turn into markup when their other half arrives.
const letters = (text) => text.replace(/[^\p{L}]/gu, "");
seen.gone_on = letters((await texts(".message.assistant .body"))[0]).startsWith(letters(shown));

await page.click("[name=logprobs]");
await page.$eval("[name=max_tokens]", (one) => (one.value = "8"));
await action("Edit");
seen.edited = await page.$eval("#input", (one) => one.value);
await page.keyboard.press("Enter");
await answered(1);
seen.tokens = await page.$$eval(".token", (found) => found.map((one) => one.title.split("\n").length));
await look("logprobs");

await action("Why this long?");
await page.waitForSelector(".phase");
seen.phases = await texts(".phase > span:first-child");
seen.numbers = await texts("#numbers dt");
await look("live");
await page.click("#theme");
await look("live-other-colours");
await page.setViewport({ width: 390, height: 800 });
await page.click("#tab-chat");
await look("phone");
seen.wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
console.log(JSON.stringify(seen));
await browser.close();

// The chat: messages, the streamed answer, and the request that each answer comes from.

import { programs } from "./code.js";
import { $, make } from "./dom.js";
import { markdown } from "./markdown.js";
import { events, key, request, root } from "./server.js";

const TOP_LOGPROBS = 5;

let model = "tgi";
let conversation = []; // {role, content, reasoning, calls, tokens, node, …}; what is sent is derived from it
let running = null; // the AbortController of the answer that streams

export function use(served) {
  model = served;
}

export function begin() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("input").value.trim();
    if (!text || running) return;
    $("input").value = "";
    add({ role: "user", content: text });
    answer();
  });
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => truncate(0));
  $("code").addEventListener("click", showCode);
  $("settings").addEventListener("submit", (event) => event.preventDefault());
}

// The body of the request for the next answer. Throws SyntaxError if the tools are no JSON.
function body() {
  const settings = new FormData($("settings"));
  const text = (name) => String(settings.get(name) ?? "").trim();
  const messages = conversation.filter((one) => !one.failed).map(({ role, content }) => ({ role, content }));
  const made = { model, messages: text("system") ? [{ role: "system", content: text("system") }, ...messages] : messages, stream: true };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) if (text(name)) made[name] = Number(text(name));
  if (text("stop")) made.stop = [text("stop")];
  if (text("tools")) made.tools = JSON.parse(text("tools"));
  if (settings.get("logprobs")) Object.assign(made, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return made;
}

function add(message) {
  message.node = make("article", { className: `message ${message.role}` });
  conversation.push(message);
  $("messages").append(message.node);
  show(message);
  return message;
}

function truncate(length) {
  running?.abort();
  for (const message of conversation.splice(length)) message.node.remove();
  $("input").focus();
}

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], streams: true };
  const begun = performance.now();
  let first = null;
  let count = 0;
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const sent = body();
    add(message);
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...sent, stream_options: { include_usage: true } }),
      signal: running.signal,
    });
    message.id = response.headers.get("x-request-id");
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message ?? String(event.error));
      if (event.usage) count = event.usage.completion_tokens;
      const choice = event.choices?.[0];
      if (!choice) continue;
      first ??= performance.now();
      const { content, reasoning_content: reasoning, reasoning: other, tool_calls: calls } = choice.delta ?? {};
      message.content += content ?? "";
      message.reasoning += reasoning ?? other ?? "";
      for (const call of calls ?? []) {
        const known = (message.calls[call.index] ??= { name: "", arguments: "" });
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      message.tokens.push(...(choice.logprobs?.content ?? []));
      message.ended = choice.finish_reason ?? message.ended;
      show(message, true);
    }
  } catch (error) {
    if (error.name === "AbortError") message.ended = "stopped";
    else {
      if (!message.node) add(message);
      message.failed = true;
      message.content = error instanceof SyntaxError ? `The tools are no JSON: ${error.message}` : error.message;
    }
  } finally {
    running = null;
    message.streams = false;
    $("send").hidden = false;
    $("stop").hidden = true;
    const seconds = (performance.now() - (first ?? begun)) / 1000;
    if (first !== null) {
      const rate = count > 1 && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
      message.facts = `${count || ""}${count ? " tokens, " : ""}first after ${(first - begun).toFixed(0)} ms${rate}${message.ended ? `, ${message.ended}` : ""}`;
    }
    show(message);
  }
}

// Draws a message. While it streams, at most once a frame.
function show(message, later = false) {
  if (later) {
    message.frame ??= requestAnimationFrame(() => {
      message.frame = null;
      if (message.streams) show(message);
    });
    return;
  }
  const log = $("messages");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  message.node.classList.toggle("failed", Boolean(message.failed));
  message.node.ariaBusy = String(Boolean(message.streams));
  const folded = message.node.querySelector("details");
  const parts = [make("div", { className: "role", textContent: message.role === "user" ? "You" : model })];
  if (message.reasoning) {
    const reasoning = make("details", { open: folded?.open ?? false }, make("summary", { textContent: "Reasoning" }), markdown(message.reasoning));
    parts.push(reasoning);
  }
  const content = make("div", { className: "body" });
  if (message.role === "user" || message.failed) content.textContent = message.content;
  else if (message.tokens?.length) content.append(coloured(shown(message)));
  else content.append(markdown(message.content));
  parts.push(content);
  for (const call of message.calls ?? [])
    if (call) parts.push(make("pre", { tabIndex: 0 }, make("code", { textContent: `${call.name}(${call.arguments})` })));
  if (!message.streams) parts.push(actions(message));
  message.node.replaceChildren(...parts);
  if (follows || message.role === "user") log.scrollTop = log.scrollHeight;
}

function actions(message) {
  const place = () => conversation.indexOf(message);
  const button = (textContent, click) => {
    const made = make("button", { type: "button", textContent });
    made.addEventListener("click", click);
    return made;
  };
  const made = make("div", { className: "actions" });
  if (message.role === "user")
    made.append(button("Edit", () => { truncate(place()); $("input").value = message.content; $("input").focus(); }));
  else {
    made.append(
      button("Retry", () => { truncate(place()); answer(); }),
      button("Copy", () => navigator.clipboard?.writeText(message.content)),
    );
    if (message.id) made.append(button("Why this long?", () => dispatchEvent(new CustomEvent("why", { detail: message.id }))));
  }
  made.append(message.facts ?? "");
  return made;
}

// The tokens of an answer without the one that has ended it, which is not part of its text.
function shown({ tokens, content }) {
  const before = tokens.slice(0, -1);
  return before.map(({ token }) => token).join("") === content ? before : tokens;
}

// Tokens, coloured by their probability, with the alternatives of each.
function coloured(tokens) {
  const made = make("div", { className: "tokens" });
  for (const { token, logprob, top_logprobs: top } of tokens) {
    const share = Math.exp(logprob);
    const level = [0.1, 0.3, 0.6, 0.9].filter((limit) => share >= limit).length;
    const span = make("span", { className: `token p${level}`, textContent: token });
    const lines = [[token, logprob], ...(top ?? []).filter((one) => one.token !== token).map((one) => [one.token, one.logprob])];
    const text = lines.map(([one, value]) => `${(100 * Math.exp(value)).toFixed(1).padStart(5)} %  ${JSON.stringify(one)}`).join("\n");
    span.title = text;
    made.append(span);
  }
  return made;
}

function showCode() {
  let sent;
  try {
    sent = body();
  } catch (error) {
    sent = { error: `The tools are no JSON: ${error.message}` };
  }
  if (!sent.messages?.length) sent.messages = [{ role: "user", content: $("input").value || "Hello" }];
  const made = programs(new URL("v1", root).href, sent, Boolean(key()));
  $("dialog-title").textContent = "This request as a program";
  $("dialog-body").replaceChildren(
    ...Object.entries(made).flatMap(([language, text]) => [make("h3", { textContent: language }), make("pre", { tabIndex: 0 }, make("code", { textContent: text }))]),
  );
  $("dialog").showModal();
}

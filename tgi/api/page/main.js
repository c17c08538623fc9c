// The frame of the page: its two views, the colours, the model, and whether the server is ready.

import * as chat from "./chat.js";
import { $, make } from "./dom.js";
import * as live from "./live.js";
import { request, root } from "./server.js";

const THEME = "tgi-theme";
const tabs = [...document.querySelectorAll('[role="tab"]')];

function select(tab) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.ariaSelected = String(chosen);
    one.tabIndex = chosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  live.show(tab.id === "tab-live");
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
    select(other);
    other.focus();
  });
}

addEventListener("why", (event) => {
  select($("tab-live"));
  live.explain(event.detail);
  $("why").scrollIntoView();
});

$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem(THEME, (document.documentElement.dataset.theme = dark ? "light" : "dark"));
});
if (localStorage.getItem(THEME)) document.documentElement.dataset.theme = localStorage.getItem(THEME);

if (matchMedia("(max-width: 45rem)").matches) document.querySelector("#settings details").open = false;

// Looks until the server is ready, and then more rarely.
async function watch() {
  let ready = false;
  try {
    const response = await fetch(new URL("health", root));
    ready = response.ok;
    await response.text();
    $("health").textContent = ready ? "ready" : response.headers.get("x-startup-stage") || "starting";
  } catch {
    $("health").textContent = "does not answer";
  }
  setTimeout(watch, ready ? 5000 : 1000);
}

// The JSON at a path, as soon as the server has it.
async function asked(path) {
  for (;;) {
    try {
      return await (await request(path)).json();
    } catch (error) {
      if (error.status !== 503) $("health").textContent = error.message;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

function useModel(name) {
  document.title = name;
  chat.use(name);
}

async function start() {
  live.begin();
  watch();
  const several = (await asked("v1/models")).data.filter((one) => one.status).map((one) => one.id);
  if (several.length) {
    // Each is loaded when it is asked, so none has to be ready.
    const choice = make("select", { ariaLabel: "Model" }, ...several.map((id) => new Option(id)));
    choice.addEventListener("change", () => useModel(choice.value));
    $("model").replaceChildren(choice);
    useModel(several[0]);
  } else {
    const { model_id: id } = await asked("info");
    const name = id.startsWith("/") ? id.split("/").findLast(Boolean) : id;
    $("model").textContent = name;
    useModel(name);
  }
  chat.begin();
  if (location.hash === "#live") select($("tab-live"));
  else $("input").focus();
}

start();

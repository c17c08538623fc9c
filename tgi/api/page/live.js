// The live view: numbers, charts, processes and their events, and the time line of a request.

import { $, make } from "./dom.js";
import { request } from "./server.js";

const PERIOD = 1000; // ms between two looks
const KEPT = 120; // samples in a chart

let samples = [];
let known = null; // the boot id of each process at the latest look
let timer = null;
let looking = false;

export function begin() {
  $("why").addEventListener("submit", (event) => {
    event.preventDefault();
    explain(String(new FormData($("why")).get("id")).trim());
  });
}

export function show(visible) {
  clearInterval(timer);
  timer = visible ? setInterval(look, PERIOD) : null;
  if (visible) look();
}

async function look() {
  if (looking || document.hidden) return;
  looking = true;
  try {
    const state = await (await request("ui/state")).json();
    samples = [...samples, state.load].slice(-KEPT);
    numbers(state);
    lines("rate", [["tokens per second", samples.map((one) => one.tokens_per_second)]]);
    lines("load", [["running", samples.map((one) => one.running)], ["waiting", samples.map((one) => one.queued)]]);
    bars("ttft", state.first_token);
    bars("itl", state.inter_token);
    processes(state.processes);
    requests((await (await request("ui/requests")).json()).in_flight);
  } catch (error) {
    note(`The server does not answer: ${error.message}`);
  } finally {
    looking = false;
  }
}

const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);

function numbers({ load }) {
  const shown = {
    "Tokens per second": load.tokens_per_second.toFixed(1),
    Running: load.running,
    Waiting: load.queued,
    "First token": load.first_token_ms === null ? "–" : `${load.first_token_ms.toFixed(0)} ms`,
    "KV cache in use": share(load.kv_cache_used),
    "Prompt tokens from cache": share(load.prefix_hit_rate),
  };
  $("numbers").replaceChildren(
    ...Object.entries(shown).map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))),
  );
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Values over the latest time. The greatest one is the height of the chart.
function lines(id, series) {
  const most = Math.max(1, ...series.flatMap(([, values]) => values));
  const paths = series.map(([, values], number) => {
    const points = values.map((value, at) => `${((KEPT - values.length + at) * 300) / (KEPT - 1)},${100 - (98 * value) / most}`);
    return svg("polyline", { points: points.join(" "), class: number ? "second" : "first" });
  });
  const latest = series.map(([name, values]) => `${name}: ${Math.round(values.at(-1) ?? 0)}`).join(", ");
  const label = `${latest}; highest ${Math.round(most)}`;
  $(id).replaceChildren(
    svg("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...paths),
    make("p", {}, make("span", { textContent: `${(KEPT * PERIOD) / 1000} s ago` }), make("span", { textContent: label }), make("span", { textContent: "now" })),
  );
}

const duration = (seconds) => (seconds >= 1 ? `${+seconds.toPrecision(2)} s` : `${+(1000 * seconds).toPrecision(2)} ms`);

// A histogram since the start: [upper bound in seconds or null, count] of each bucket. Empty ends are left out.
function bars(id, buckets) {
  const first = buckets.findIndex(([, count]) => count > 0);
  if (first < 0) {
    $(id).replaceChildren(make("p", { textContent: "No token has been sent yet." }));
    return;
  }
  const last = buckets.findLastIndex(([, count]) => count > 0);
  const shown = buckets.slice(first, last + 1);
  const most = Math.max(...shown.map(([, count]) => count));
  const total = shown.reduce((sum, [, count]) => sum + count, 0);
  const width = 300 / shown.length;
  const name = ([bound]) => (bound === null ? "more" : `≤ ${duration(bound)}`);
  const drawn = shown.map((bucket, at) => {
    const height = (96 * bucket[1]) / most;
    const bar = svg("rect", { x: at * width + 0.5, width: Math.max(1, width - 1), y: 100 - height, height });
    bar.append(svg("title", {}, `${name(bucket)}: ${bucket[1]}`));
    return bar;
  });
  const label = `${total} measured, most of them ${name(shown.find(([, count]) => count === most))}`;
  $(id).replaceChildren(
    svg("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...drawn),
    make("p", {}, make("span", { textContent: name(shown[0]) }), make("span", { textContent: label }), make("span", { textContent: name(shown.at(-1)) })),
  );
}

function processes(rows) {
  const columns = { name: "Process", pid: "Process id", state: "State", cpu: "CPU %", memory_mb: "Memory MB", beat_age: "Beat, s ago", work: "Works on" };
  const head = make("tr", {}, ...Object.values(columns).map((textContent) => make("th", { scope: "col", textContent })));
  const body = rows.map((row) =>
    make("tr", {}, ...Object.keys(columns).map((name) => {
      const text = name === "state" && row.state !== "ready" && row.stage && row.stage !== row.state ? `${row.state}: ${row.stage}` : row[name];
      return make("td", { textContent: text ?? "", className: name === "state" && row.state === "ready" ? "ready" : "" });
    })),
  );
  $("processes").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  const now = new Map(rows.filter((row) => row.boot).map((row) => [row.name, row.boot]));
  for (const [name, boot] of now) {
    if (known && !known.has(name)) note(`${name} is new`);
    else if (known && known.get(name) !== boot) note(`${name} has ended, and a new process has taken its place`);
  }
  for (const name of known?.keys() ?? []) if (!now.has(name)) note(`${name} is gone`);
  known = now;
}

function requests(rows) {
  if (!rows.length) {
    $("requests").replaceChildren(make("caption", { textContent: "none" }));
    return;
  }
  const head = make("tr", {}, ...["Request", "Client", "Waits for", "Seconds"].map((textContent) => make("th", { scope: "col", textContent })));
  const body = rows.map(({ id, client, phase, seconds }) => {
    const button = make("button", { type: "button", textContent: id });
    button.addEventListener("click", () => explain(id));
    return make("tr", {}, make("td", {}, button), ...[client, phase, seconds.toFixed(1)].map((textContent) => make("td", { textContent })));
  });
  $("requests").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

function note(text) {
  const list = $("events");
  const said = `${new Date().toLocaleTimeString()} ${text}`;
  if (list.firstElementChild?.textContent === said) return;
  if (!list.dataset.used) list.replaceChildren();
  list.dataset.used = "1";
  list.prepend(make("li", { textContent: said }));
  while (list.children.length > 100) list.lastElementChild.remove();
}

// Shows the phases of a request as bars of their share of its time.
export async function explain(id) {
  $("why").elements.id.value = id;
  const target = $("timeline");
  try {
    const { generations } = await (await request(`ui/requests/${encodeURIComponent(id)}`)).json();
    target.replaceChildren(
      ...generations.flatMap(({ seconds, lines: told }) => {
        const total = Object.values(seconds).reduce((sum, one) => sum + one, 0);
        const phases = Object.entries(seconds).map(([phase, spent]) =>
          make("div", { className: "phase" },
            make("span", { textContent: phase }),
            make("meter", { min: 0, max: total || 1, value: spent, ariaLabel: phase }),
            make("span", { className: "time", textContent: `${(1000 * spent).toFixed(1)} ms` })),
        );
        return [...phases, make("details", {}, make("summary", { textContent: "All of it" }), make("pre", { tabIndex: 0 }, make("code", { textContent: told.join("\n") })))];
      }),
    );
  } catch (error) {
    target.replaceChildren(make("p", { className: "lost", textContent: error.message }));
  }
}

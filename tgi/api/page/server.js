// Requests to the server: its address, the API key, JSON, and streams of events.

const KEY = "tgi-key";
export const root = new URL(document.body.dataset.root || "./", location.href);

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";

function headers() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}

// fetch with the key. After a 401 it asks for the key, and tries again. Throws Failure with the server's own words.
export async function request(path, options = {}) {
  for (;;) {
    const response = await fetch(new URL(path, root), { ...options, headers: { ...options.headers, ...headers() } });
    if (response.ok) return response;
    const text = await response.text();
    let message = text || response.statusText;
    try {
      const error = JSON.parse(text).error;
      message = error?.message ?? error ?? message;
    } catch { /* an answer of a proxy, which is no JSON */ }
    if (response.status !== 401) throw new Failure(response.status, String(message));
    const given = await askForKey();
    if (given === null) throw new Failure(401, String(message));
    sessionStorage.setItem(KEY, given);
  }
}

let asking = null;

// One dialog, however many requests lack a key.
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.createElement("dialog");
    const form = Object.assign(document.createElement("form"), { method: "dialog" });
    const label = Object.assign(document.createElement("label"), { textContent: "API key of this server " });
    const input = Object.assign(document.createElement("input"), { type: "password", name: "key", autocomplete: "off" });
    label.append(input);
    form.append(label, " ", Object.assign(document.createElement("button"), { textContent: "Use", value: "use" }));
    dialog.append(form);
    dialog.setAttribute("aria-label", "API key");
    dialog.addEventListener("close", () => {
      asking = null;
      dialog.remove();
      resolve(dialog.returnValue === "use" ? input.value : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

// The JSON of each event of a stream, until its end or [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Markdown as DOM nodes. Text only ever becomes text nodes, so an answer cannot bring in markup, scripts or requests.

const node = (tag, ...children) => {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
};

// Code, bold, italic, struck, links; in this order where they begin at the same place.
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s](?:.*?[^*\s])?)\*|~~(.+?)~~|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/s;

function inline(text) {
  const nodes = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    const [, , code, bold, strong, italic, struck, label, address] = found;
    nodes.push(text.slice(0, found.index));
    if (code !== undefined) nodes.push(node("code", code));
    else if (bold ?? strong) nodes.push(node("strong", ...inline(bold ?? strong)));
    else if (italic !== undefined) nodes.push(node("em", ...inline(italic)));
    else if (struck !== undefined) nodes.push(node("del", ...inline(struck)));
    else {
      const link = node("a", ...inline(label));
      Object.assign(link, { href: address, target: "_blank", rel: "noopener noreferrer" });
      nodes.push(link);
    }
  }
  return [...nodes, text].filter((one) => one !== "");
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// A list from `lines`, whose first is an item. Returns the list and the number of its lines.
function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const made = node(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) made.start = parseInt(mark, 10);
  let used = 0;
  while (used < lines.length) {
    const item = ITEM.exec(lines[used]);
    if (!item || item[1].length < indent.length || item[1].length > indent.length + 1) break;
    const content = [item[3]];
    const depth = indent.length + 2;
    for (used++; used < lines.length; used++) {
      const line = lines[used];
      const own = ITEM.exec(line);
      if (own && own[1].length < depth) break;
      if (!own && line.trim() && !line.startsWith(" ")) break;
      if (!line.trim() && !(lines[used + 1] ?? "").startsWith(" ".repeat(depth))) { used++; break; }
      content.push(line.startsWith(" ".repeat(depth)) ? line.slice(depth) : line.trimStart());
    }
    const inner = [...markdown(content.join("\n")).childNodes];
    made.append(node("li", ...(inner.length && inner[0].tagName === "P" ? [...inner[0].childNodes, ...inner.slice(1)] : inner)));
  }
  return [made, Math.max(used, 1)];
}

// A fragment with the blocks of a text. A block that is not closed yet counts as closed: texts are shown while they grow.
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) fragment.append(node("p", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = /^ {0,3}(#{1,6}) +(.*?)#* *$/.exec(line);
    if (fence) {
      flush();
      const code = [];
      for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]); at++) code.push(lines[at]);
      const block = node("pre", node("code", code.join("\n")));
      block.tabIndex = 0;
      fragment.append(block);
    } else if (heading) {
      flush();
      fragment.append(node(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
    } else if (RULE.test(line)) {
      flush();
      fragment.append(node("hr"));
    } else if (line.startsWith(">")) {
      flush();
      const quoted = [];
      for (; at < lines.length && lines[at].startsWith(">"); at++) quoted.push(lines[at].replace(/^> ?/, ""));
      at--;
      fragment.append(node("blockquote", markdown(quoted.join("\n"))));
    } else if (ITEM.test(line)) {
      flush();
      const [made, used] = list(lines.slice(at));
      fragment.append(made);
      at += used - 1;
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      flush();
      const head = node("tr", ...cells(line).map((cell) => node("th", ...inline(cell))));
      const body = node("tbody");
      for (at += 2; at < lines.length && lines[at].includes("|"); at++)
        body.append(node("tr", ...cells(lines[at]).map((cell) => node("td", ...inline(cell)))));
      at--;
      fragment.append(node("table", node("thead", head), body));
    } else if (line.trim()) paragraph.push(line);
    else flush();
  }
  flush();
  return fragment;
}

// A request as a program: curl, Python and JavaScript.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// JSON as a Python literal.
function python(value, indent = "") {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => inner + python(one, inner)).join(",\n")},\n${indent}]` : "[]";
  if (typeof value === "object")
    return `{\n${Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${python(one, inner)}`).join(",\n")},\n${indent}}`;
  return JSON.stringify(value);
}

// Programs by language. `base` is the address of /v1; fields that OpenAI's Python library does not know go into its extra_body.
export function programs(base, body, withKey) {
  const apiKey = withKey ? "KEY" : "-";
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${python(value, "    ")},`).join("\n");
  const authorization = withKey ? ` \\\n  -H 'authorization: Bearer KEY'` : "";
  return {
    curl: `curl -N ${base}/chat/completions${authorization} \\\n  -H 'content-type: application/json' \\\n  -d ${quoted(JSON.stringify(body, null, 2))}`,
    Python: `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key="${apiKey}")\nstream = client.chat.completions.create(\n${fields}\n)\nfor chunk in stream:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)`,
    JavaScript: `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${base}", apiKey: "${apiKey}" });\nconst stream = await client.chat.completions.create(${JSON.stringify(body, null, 2)});\nfor await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");`,
  };
}

// The embedded agent as a program of its own: one process for each conversation, nothing but Node.
import { readFileSync } from "node:fs";

const row = JSON.parse(readFileSync(0, "utf8"));
const TOOL = {
  type: "function",
  function: {
    name: "search",
    description: "Search the corpus.",
    parameters: { type: "object", properties: { query: { type: "string" } }, required: ["query"] },
  },
};

async function ask(messages) {
  const answer = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" },
    body: JSON.stringify({ model: "policy", messages, tools: [TOOL] }),
  });
  if (!answer.ok) throw new Error(await answer.text());
  return (await answer.json()).choices[0].message;
}

async function search(called) {
  const { query } = JSON.parse(called.arguments);
  if (called.name !== "search" || typeof query !== "string")
    return "Error: the only tool is search, and its query is text.";
  return (await fetch(`${process.env.SEARCH_URL}?${encodeURIComponent(query)}`)).text();
}

async function solve() {
  const messages = [{ role: "system", content: "Search, then answer." }, ...row.prompt];
  for (let turn = 0; turn < 5; turn++) {
    const message = await ask(messages);
    messages.push(message);
    const calls = message.tool_calls ?? [];
    const found = (message.content ?? "").match(/<answer>([^]*?)<\/answer>/);
    if (found && !calls.length) return { answer: found[1].trim() };
    for (const call of calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: await search(call.function) });
    if (!calls.length)
      messages.push({ role: "user", content: "<result>Error: there is no call and no answer.</result>" });
  }
  return {};
}

console.log(JSON.stringify(await solve()));

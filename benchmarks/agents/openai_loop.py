"""The embedded agent as a plain loop over an OpenAI client."""

import json
import re

from mt_grpo.data.embedded.tool import search

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the corpus.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


async def solve(row, client):
    openai = client.openai()
    messages = [{"role": "system", "content": "Search, then answer."}, *row["prompt"]]
    for _ in range(5):
        answer = await openai.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        found = re.search(r"<answer>(.*?)</answer>", message.content or "", re.DOTALL)
        if found and not message.tool_calls:
            return found[1].strip()
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": _result(call.function)})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "<result>Error: there is no call and no answer.</result>"})
    return None


def _result(function):
    query = json.loads(function.arguments).get("query")
    if function.name != TOOL["function"]["name"] or not isinstance(query, str):
        return "Error: the only tool is search, and its query is text."
    return search(query)

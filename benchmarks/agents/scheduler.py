"""The embedded agent as a scheduler: it calls a search in tags, reads the results, and answers."""

import json
import re

from mt_grpo.data.embedded.tool import search
from mt_grpo.integrations.swift import MultiTurnScheduler, multi_turns
from mt_grpo.trajectory import ToolCall


class Searcher(MultiTurnScheduler):
    """Runs the searches of a response; the conversation is over with an answer."""

    stop = ("</tool>", "</answer>")

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        words = response_choice.message.content
        found = re.search(r"<answer>(.*?)</answer>", words, re.DOTALL)
        if found and "<tool>" not in words:
            return {"done": True, "answer": found[1].strip()}

    def step(self, infer_request, response_choice, current_turn):
        calls = [self._search(text) for text in re.findall(r"<tool>(.*?)</tool>", response_choice.message.content)]
        calls = calls or [_failed("there is neither a tool call nor an answer.")]
        results = "\n".join(f"<result>{call.result}</result>" for call in calls)
        infer_request.messages.append({"role": "user", "content": results})
        return {"infer_request": infer_request, "tool_calls": calls}

    def _search(self, text):
        try:
            call = json.loads(text)
            name, arguments = call["name"], call["args"]
            query = arguments["query"]
        except (ValueError, KeyError, TypeError) as error:
            return _failed(f"the tool call cannot be read: {error}.")
        if name != "search" or not isinstance(query, str):
            return _failed("the only tool is search, and its query is text.")
        return ToolCall(name, arguments, search(query), executed=True)


def _failed(problem):
    return ToolCall("", result=f"Error: {problem}", error=problem)


multi_turns["searcher"] = Searcher

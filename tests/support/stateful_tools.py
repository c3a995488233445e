"""Stateful tools, as people write them for verl: only the import line is ours."""

import json

from mt_grpo.tools import BaseTool, MCPBaseTool, OpenAIFunctionToolSchema, ToolResponse


class Guess(BaseTool):
    """Scores guesses of a number; a guess that is no better than the last costs 0.05."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        state = self._instance_dict[instance_id]
        distance = abs(state["ground_truth"] - parameters["number"])
        reward = 1.0 / (1 + distance)
        step = 0.0 if reward > state["reward"] else -0.05
        state["reward"] = reward
        return (ToolResponse(text=f"{reward=:.2f}"), step, {"distance": distance})

    async def calc_reward(self, instance_id, **kwargs):
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id, **kwargs):
        del self._instance_dict[instance_id]


class Upper(MCPBaseTool):
    """Reads results in capitals."""

    def _parse_tool_result(self, content):
        text = " ".join(part.text for part in content if part.type == "text")
        return text.upper(), {"characters": len(text)}


SCHEMA = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "The guess", "minimum": 0}},
            "required": ["number"],
        },
    },
}


def schema(name: str = "guess") -> OpenAIFunctionToolSchema:
    named = json.loads(json.dumps(SCHEMA))
    named["function"]["name"] = name
    return OpenAIFunctionToolSchema.model_validate(named)

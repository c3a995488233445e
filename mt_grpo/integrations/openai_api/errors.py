"""What a request is refused with, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from mt_grpo.trajectory import StopReason


class ApiError(Exception):
    """
    A request that gets no turn.

    Args:
        status (`int`): Of HTTP. Clients try 408, 409, 429 and 500 and above again.
        message (`str`): One sentence.
        code (`str`, *optional*): OpenAI's name of the error.
        param (`str`, *optional*): The field that is wrong.
        again (`bool`, *optional*, defaults to `False`): Whether the client may try again, for a status that says so.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, again: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.again = status, message, code, param, again

    @property
    def body(self) -> dict[str, Any]:
        """What the client gets."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": error}  # the first of them is Anthropic's

    @property
    def headers(self) -> dict[str, str]:
        """What tells the client whether to try again."""
        return {"x-should-retry": str(self.again).lower()} | ({"retry-after": "1"} if self.again else {})


def refused(reason: StopReason) -> ApiError:
    """The error of a request that a limit leaves no token for, or that comes after the end."""
    if reason is StopReason.CONTEXT_FULL:
        message = "This model's maximum context length leaves no room for a turn after these messages."
    elif reason is StopReason.TOKEN_BUDGET:
        message = "The tokens that `max_completion_length` gives to the whole conversation are used up."
    else:
        return ApiError(404, f"The conversation is over: {reason.value}.", "conversation_ended")
    return ApiError(400, message, "context_length_exceeded", "messages")

"""The filter language: `stop=timeout reward<0.5 mismatch>.1 "text"`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mt_grpo.errors import UserError

_TERM = re.compile(
    r"""\s*(?:
        (?P<name>[A-Za-z_][\w./-]*)(?P<sign><=|>=|!=|=|<|>)(?:"(?P<quoted>[^"]*)"|(?P<value>[^\s"]+))
      | "(?P<text>[^"]*)"
      | (?P<word>[^\s"<>=!]+)
    )(?=\s|$)""",
    re.VERBOSE,
)


class FilterError(UserError, ValueError):
    """A filter that cannot be read. The message is one sentence fit for the user."""


@dataclass(frozen=True)
class Condition:
    """
    One term of a filter; all terms of a filter must hold.

    Args:
        name (`str`): The column; empty for text that prompt or answer contains.
        sign (`str`): `=`, `!=`, `<`, `<=`, `>` or `>=`; empty for text.
        value (`str`): What stands behind the sign. With `=` and `!=`, commas separate values of which one must match.
    """

    name: str
    sign: str
    value: str

    @property
    def written(self) -> str:
        """As it may be written again."""
        value = f'"{self.value}"' if not self.sign or re.search(r"\s", self.value) or not self.value else self.value
        return f"{self.name}{self.sign}{value}"


def parse_filter(text: str) -> list[Condition]:
    """
    Reads a filter: terms between spaces. A term is a comparison, or text that prompt or answer contains, in quotes
    where it has spaces.

    Raises:
        FilterError: Says which term cannot be read.
    """
    conditions, at = [], 0
    text = text.strip()
    while at < len(text):
        found = _TERM.match(text, at)
        if found is None:
            rest = text[at:].strip()
            if rest.count('"') % 2:
                raise FilterError(f"The filter has a quote that is not closed: `{rest}`.")
            raise FilterError(
                f"The filter cannot be read from `{rest}` on: write terms such as `stop=timeout`, `reward<0.5` or "
                '`"text"`, with a space between two.'
            )
        at = found.end()
        if found["name"]:
            value = found["value"] if found["quoted"] is None else found["quoted"]
            conditions.append(Condition(found["name"], found["sign"], value))
        else:
            conditions.append(Condition("", "", found["word"] if found["text"] is None else found["text"]))
    return conditions

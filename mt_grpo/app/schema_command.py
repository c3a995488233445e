"""`mt-grpo schema`."""

from __future__ import annotations

import json

from mt_grpo.errors import ConfigError

HELP = """usage: mt-grpo schema

Print the JSON schema of a recipe, with the options of the TRL and transformers that are installed. An editor completes
and checks a recipe by it where the recipe's first line names a file that holds it:

  mt-grpo schema > recipe.schema.json

  # yaml-language-server: $schema=recipe.schema.json
"""


def main(arguments: list[str]) -> int:
    """Prints the schema of the installed libraries."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if arguments:
        raise ConfigError(f"`mt-grpo schema` takes no arguments, and {arguments[0]!r} is given.")
    from mt_grpo.app.make_schema import build_schema

    print(json.dumps(build_schema(), indent=1))
    return 0

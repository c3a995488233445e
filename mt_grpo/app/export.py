"""`mt-grpo export`: a run's conversations in the forms that other programs read."""

from __future__ import annotations

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog.export import FORMS, export

OPTIONS = ("--to", "--output")

USAGE = """usage: mt-grpo export RUN --to FORM [--output PATH]

writes the conversations of the run in the folder RUN (its `output_dir`) as FORM:

  jsonl          a line per conversation, with its messages, token tree, log-probs and rewards
  dataset        a folder for `datasets.load_dataset`
  trackio        metrics and tables of conversations, for `trackio show`
  openinference  a trace per conversation in OTLP's JSON, with OpenInference's attributes

PATH is a file (jsonl, openinference) or a folder; where none is given, it is a place in RUN, and trackio's own folder
"""


def run(arguments: list[str]) -> int:
    """
    `mt-grpo export RUN --to FORM [--output PATH]`.

    Raises:
        UserError: If the arguments are wrong, or as `mt_grpo.runlog.export.export`.
    """
    if {"-h", "--help"}.intersection(arguments):
        print(USAGE, end="")
        return 0
    folders, options = [], {}
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            folders.append(word)
        elif name not in OPTIONS:
            raise ConfigError(f"`mt-grpo export` has no option {name}{did_you_mean(name, OPTIONS)}.")
        else:
            options[name] = value if equals else next(rest, None)
            if not options[name]:
                raise ConfigError(f"`mt-grpo export` needs a value after `{name}`.")
    if len(folders) != 1 or "--to" not in options:
        raise ConfigError(f"Write `mt-grpo export RUN --to FORM`, where FORM is one of {', '.join(FORMS)}.")
    print(export(folders[0], options["--to"], options.get("--output")))
    return 0

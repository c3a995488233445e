"""Writes what is made from the table of options: the JSON schema of recipes, and the tables in `docs/`."""

import json
from pathlib import Path

from mt_grpo.app.help import fill_tables
from mt_grpo.app.recipe import build_schema
from mt_grpo.app.schema import SHIPPED

if __name__ == "__main__":
    SHIPPED.write_text(json.dumps(build_schema(), indent=1) + "\n", encoding="utf-8")
    for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md")):
        page.write_text(fill_tables(page.read_text(encoding="utf-8")), encoding="utf-8")

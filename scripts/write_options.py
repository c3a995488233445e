"""Writes what is made from tables: the JSON schema of recipes, and in `docs/` options and numbers to start from."""

import json
from pathlib import Path

from mt_grpo.app.build import build_schema
from mt_grpo.app.commands import fill_tables
from mt_grpo.app.recipe_file import SHIPPED
from mt_grpo.doctor.suggest import fill_numbers

if __name__ == "__main__":
    SHIPPED.write_text(json.dumps(build_schema(), indent=1) + "\n", encoding="utf-8")
    for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md")):
        page.write_text(fill_numbers(fill_tables(page.read_text(encoding="utf-8"))), encoding="utf-8")

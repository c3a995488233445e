"""`notes.json` in a run's folder: stars and notes that people put on conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mt_grpo.errors import UserError
from mt_grpo.runlog.files import check_target, to_json, whole, written_whole
from mt_grpo.runlog.shapes import read_shaped

FILE = "notes.json"
LONGEST = 4000
"""Characters of a note."""


def read_notes(folder: Path) -> dict[str, dict[str, Any]]:
    """By session `star` (`bool`) and `note` (`str`), of conversations that have one of them."""
    mend = "bring it back, or remove it to go on without notes"
    return read_shaped(folder, FILE, "notes", mend) or {}


def write_note(folder: Path, session: str, star: bool, note: str) -> dict[str, dict[str, Any]]:
    """Puts a star and a note on a conversation, or takes them off. Returns all notes of the run."""
    if len(note) > LONGEST:
        raise UserError(f"The note has {len(note)} characters, and may have {LONGEST}: shorten it.")
    notes = read_notes(folder)
    notes.pop(session, None)
    if star or note.strip():
        notes[session] = {"star": star, "note": whole(note.strip())}
    path = folder / FILE
    check_target(path)
    try:
        with written_whole(path) as partial:
            partial.write_text(to_json(notes, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    return notes

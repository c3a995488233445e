"""What the model saw at a turn, in a real browser, of conversations that a real chat template rendered."""

from __future__ import annotations

import pytest
from support.browser import missing, open_browser, serving, watched
from support.conversations import converse, template_tokenizer

from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.training.step_log.records import run_line
from mt_grpo.viewer.queries import Queries

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

PROMPT = [{"role": "system", "content": "Search, then answer."}, {"role": "user", "content": "Which city?"}]
THINKING = "<think>\nVoltaire was a French writer, so it is in France.\n</think>\n\n"
LONG = "A long result. " * 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two conversations: one whose thinking is stripped, and one that goes straight on after a long reply."""
    tokenizer = template_tokenizer("qwen3")
    stripped, *_ = converse(tokenizer, [THINKING + "In France.", "Paris"], ["And?"], "strip_thinking", prompt=PROMPT)
    stripped.turns[0].mask = [1] * (stripped.turns[0].num_tokens - 4) + [0] * 4
    kept, *_ = converse(tokenizer, ["In France.", "Paris"], [LONG], "keep", prompt=PROMPT)
    folder = tmp_path_factory.mktemp("context")
    writer, batch = RunWriter(folder), Batch("train", 0, 0, 2, [0, 1], [stripped, kept])
    about = {"group_size": 2, "group_size_eval": 1, "processes": 1, "estimator": "gtpo", "model": "qwen3"}
    writer.append([*writer.save_tokenizer(tokenizer.save_pretrained), run_line(about, []), *writer.write(batch)])
    writer.append(writer.write_credit(batch, [[0.5, -0.5]] * 2))
    return folder


@pytest.fixture(scope="module")
def window(folder):
    with open_browser() as browser, serving(Queries(open_run(folder))) as server:
        with watched(browser, viewport={"width": 1280, "height": 900}) as page:
            page.address = server.url
            yield page


def go(page, where):
    page.evaluate("performance.clearMarks()")
    page.goto(f"{page.address}#/{where}")
    page.wait_for_function("name => performance.getEntriesByName('shown ' + name).length", arg=where.split("?")[0])


def test_a_turn_leads_to_the_whole_context_that_it_saw(window, folder):
    go(window, "trajectory?session=train-000000-000000-000001")
    window.click("#turn-2 .saw")
    window.wait_for_selector(".seen")
    whole = open_run(folder).trajectory("train-000000-000000-000001")
    path = [node for node in whole["nodes"] if node["end"] <= whole["nodes"][-1]["begin"]]
    text = "".join(text for node in path for text in whole["tokens"]["texts"][node["begin"] : node["end"]])
    shown = "".join(window.locator(".seen .text > :not(.caret):not(.on)").all_text_contents())
    assert shown == text and "<|im_start|>" in shown
    assert window.locator(".seen .own").first.text_content().startswith("In France.")
    roles = [role.split("\n")[0] for role in window.locator(".seen .role").all_inner_texts()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert window.locator(".seen .sign.new").count() == 2  # the reply, and the header of the turn
    fold = window.locator(".fold .unfold")
    assert fold.get_attribute("aria-expanded") == "false"
    fold.click()
    assert fold.get_attribute("aria-expanded") == "true"
    assert "are computed once" in window.inner_text("aside")
    window.keyboard.press("ArrowLeft")
    window.wait_for_selector("h2:has-text('turn 1')")
    window.keyboard.press("Escape")
    window.wait_for_selector("#turn-1")


def test_what_history_took_out_is_marked_with_its_cost(window, folder):
    go(window, "context?session=train-000000-000000-000000&turn=2")
    (gone,) = window.locator(".block:has(.sign.gone)").all()
    taken = "".join(gone.locator("del").all_text_contents())
    assert taken.strip() == THINKING.strip() and "turn 1, thinking" in gone.inner_text()
    whole = open_run(folder).trajectory("train-000000-000000-000000")
    second = whole["turns"][1]
    shared = whole["nodes"][0]["end"]
    words = window.inner_text("aside")
    assert "a sequence of its own" in words and "history: strip_thinking" in words
    assert f"forks after {shared} tokens" in words and f"The {second['context_length'] - shared} behind" in words
    window.click("button:has-text('what changed')")
    assert window.locator(".block").count() < 5 and "show=changed" in window.url


def test_tokens_that_are_not_trained_look_so(window, folder):
    go(window, "trajectory?session=train-000000-000000-000000")
    assert window.locator("#turn-1 [data-masked]").count() == 4
    assert window.locator("#turn-2 [data-masked]").count() == 0
    assert not window.wrong

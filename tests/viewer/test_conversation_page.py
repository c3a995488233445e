"""Conversations in a real browser: their tokens, messages, contexts, credit, notes, and the way through a list."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import runs
from support.browser import address_has, count, go, opened, texts
from support.conversations import converse, template_tokenizer
from support.credited_runs import EXAMPLE, OTHER, Member, write_credited
from support.runs import HOSTILE, TOKENIZER, queries_of, talk, write_conversations, write_run

from mt_grpo.runlog import open_run
from mt_grpo.runlog.files import read_notes

FIRST = "train-000000-000000-000000"
SECOND = "train-000000-000000-000001"

COPIED = """selector => {
  getSelection().selectAllChildren(document.querySelector(selector))
  return getSelection().toString()
}"""


def first(queries, holds):
    return next(row for row in queries.run.rows if holds(row))


def of_turn(whole, turn):
    """Where a turn begins, and its tokens."""
    tokens = whole["tokens"]
    return tokens["turn"].index(turn), [tokens["ids"][i] for i, own in enumerate(tokens["turn"]) if own == turn]


def test_a_token_is_pointed_at_kept_and_left(page, queries):
    row = first(queries, lambda row: (row["mismatch"] or 0) > 0.3)
    tokens = queries.answer("trajectory", {"session": row["session"]})["tokens"]
    go(page, f"trajectory?session={row['session']}")
    spans, at = page.locator(".tokens span"), page.locator(".tokens .at")
    written = [text for text, turn in zip(tokens["texts"], tokens["turn"], strict=True) if turn >= 0]
    assert spans.count() == sum(row["tokens"])
    assert "".join(spans.all_text_contents()).replace("⏎", "") == "".join(written)
    page.keyboard.press("ArrowRight")
    assert at.count() == 1 and "at" in spans.first.get_attribute("class").split()
    page.keyboard.press("Escape")
    spans.nth(1).hover()
    page.wait_for_selector("aside td:has-text('turn 1'), aside th:has-text('id · position')")
    page.click("button:has-text('engine − trainer')")
    page.keyboard.press("n")
    difference = page.inner_text("tr:has(th:text-is('engine − trainer')) td")
    assert abs(float(difference.replace("−", "-"))) == pytest.approx(row["mismatch"], abs=2e-3)
    assert at.count() == 1 and at.get_attribute("class") != "at"  # it is shaded
    page.keyboard.press("ArrowRight")
    assert page.inner_text("tr:has(th:text-is('engine − trainer')) td") != difference
    page.keyboard.press("Escape")
    assert at.count() == 0


def test_tokens_are_shaded_by_each_number(page, queries):
    row = first(queries, lambda row: row["turns"] == 3 and row["mode"] == "train")
    for shade in ("log-prob", "engine − trainer", "ratio", "entropy", "advantage"):
        go(page, f"trajectory?session={row['session']}&shade={shade}")
        assert page.get_attribute(f".choice button:text-is('{shade}')", "aria-pressed") == "true"
        classes = page.evaluate("[...document.querySelectorAll('.tokens span')].map(span => span.className)")
        assert any(classes) and all(re.fullmatch(r"[pmvtg]\d|", each) for each in classes)


def test_forks_have_lanes_and_results_stay_text(page, queries):
    row = first(queries, lambda row: row["forks"])
    go(page, f"trajectory?session={row['session']}")
    assert count(page, ".tree .fork") == row["forks"]
    page.locator(".tree .of-turn").last.click()
    assert page.locator(".turn").last.is_visible()
    assert HOSTILE in page.inner_text(".said:not(.prompt)") and count(page, "main script, main img") == 0


def test_what_is_copied_has_none_of_the_pages_signs(browser, tmp_path):
    ids = [*TOKENIZER.encode("one\n\ntwo\n").ids, *range(300, 720, 7)]
    made = talk(([5, 6], ids, "one"), answer="Lima", rewards={"outcome": {"exact_match": 1.0}})
    with opened(browser, queries_of(write_conversations(tmp_path, [made])), "trajectory") as page:
        page.wait_for_selector(".tokens i")
        assert page.evaluate(COPIED, ".tokens").startswith("one\n\ntwo\n")
        assert page.evaluate("getComputedStyle(document.querySelector('.tokens i'), '::before').content") == '"⏎"'
        go(page, "context?turn=1")
        page.wait_for_selector(".seen .block")
        assert "+" not in page.evaluate(COPIED, ".seen")
        go(page, "find")
        page.wait_for_selector(".rows .col-answer")
        assert page.inner_text(".rows .col-answer") == "✓ Lima"
        assert page.evaluate(COPIED, ".rows .col-answer").strip() == "Lima"


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WRITTEN = f"""<think>
What is *asked*?
</think>
## The answer

It is **Lima**, see `search` and [here](https://example.org/x). {HOSTILE}

1. one
2. two

```python
print("hello")
```

| city | people |
| --- | --- |
| Lima | 10 |

مرحبا بالعالم 日本語 👩‍🚀
"""
FOUND = {"cities": ["Lima", "Cusco"], "found": 2}
REPLIES = [
    {"role": "tool", "content": json.dumps(FOUND)},
    {"role": "tool", "content": "\u001b[31mred\u001b[0m and \u001b[1mbold\u001b[0m" + " again" * 300},
]
IMAGES = [f"data:image/png;base64,{PIXEL}", "https://example.org/a.png"]
ASKED = [
    {"type": "text", "text": "Which city is this?"},
    *({"type": "image_url", "image_url": {"url": url}} for url in IMAGES),
]


def test_messages_are_read_as_they_are_meant(browser, tmp_path):
    made = talk(([1, 2, 3], TOKENIZER.encode(WRITTEN).ids, WRITTEN), prompt=[{"role": "user", "content": ASKED}])
    made.turns[0].replies = REPLIES
    with opened(browser, queries_of(write_conversations(tmp_path, [made])), "trajectory") as page:
        page.wait_for_selector(".tokens")
        tokens = "".join(page.locator(".tokens span").all_text_contents()).replace("⏎", "")
        assert tokens == WRITTEN  # the bytes of a character are joined
        page.click("button:text-is('reading')")
        page.wait_for_selector(".to-read")
        address_has(page, "read=1")
        assert count(page, ".tokens") == 0
        assert texts(page, ".thinking summary, .read .heading, .ansi1") == ["thinking · 3 words", "The answer", "red"]
        assert (texts(page, ".read strong")[0], texts(page, ".bold")[0]) == ("Lima", "bold")
        assert count(page, ".read ol li") == 2 and count(page, ".read .written td") == 2
        assert page.locator(".read .written").evaluate("table => getComputedStyle(table).display") == "table"
        code = [text.strip() for text in texts(page, ".code")]
        assert code[:2] == ['print("hello")', json.dumps(FOUND, indent=2)]
        assert count(page, ".said .unfold") == 1  # the long result
        assert HOSTILE in page.inner_text(".to-read") and count(page, ".to-read img, main script") == 0
        assert count(page, ".prompt img") == 1 and IMAGES[1] in page.inner_text(".prompt")
        assert count(page, ".read a") == 0 and "مرحبا بالعالم 日本語 👩‍🚀" in page.inner_text(".to-read")
        page.keyboard.press("r")
        page.wait_for_selector(".tokens")


def test_no_message_makes_the_page_hang_or_fail(browser, tmp_path):
    odd = f"- Cusco\r\n- Lima\r\n\r\n1. a\u2028b\n\n{'>' * 6000}\n\n{'[' * 6000}\n\n## The end\r\n"
    folder = write_conversations(tmp_path, [talk(([1, 2, 3], [5, 6], odd))])
    with opened(browser, queries_of(folder), "trajectory?read=1") as page:
        assert texts(page, ".to-read li") == ["Cusco", "Lima", "a\u2028b"]
        assert texts(page, ".to-read .heading") == ["The end"]


def test_a_list_is_read_one_after_the_other_and_kept(browser, tmp_path):
    queries = queries_of(write_run(tmp_path, steps=40))
    asked = {"q": "mode=train", "sort": "-reward", "limit": "200"}
    order = [row["session"] for row in queries.answer("find", asked)["rows"]]
    listed = "find?q=mode%3Dtrain&sort=-reward"
    with opened(browser, queries, listed, viewport={"width": 1200, "height": 700}) as page:
        page.wait_for_selector(".rows .tr")
        page.evaluate("document.querySelector('.table').scrollTop = 3000")
        page.wait_for_function("() => history.state?.table === 3000")
        page.click(".rows .tr[aria-rowindex='105']")
        for key, place in ((None, 103), ("j", 104), ("j", 105), ("k", 104)):
            if key:
                page.keyboard.press(key)
            page.wait_for_selector(f"p:has-text('{order[place]}')")
        page.go_back()
        page.wait_for_selector(".rows .tr[aria-rowindex='105']")
        assert page.evaluate("document.querySelector('.table').scrollTop") == 3000
        assert page.input_value("#filter") == "mode=train" and count(page, "[aria-sort=descending]") == 1


PROMPT = [{"role": "system", "content": "Search, then answer."}, {"role": "user", "content": "Which city?"}]
THINKING = "<think>\nVoltaire was a French writer, so it is in France.\n</think>\n\n"


@pytest.fixture(scope="module")
def contexts(tmp_path_factory):
    """Two conversations: one whose thinking is stripped, and one that goes straight on after a long reply."""
    tokenizer = template_tokenizer("qwen3")
    with ThreadPoolExecutor() as threads:  # a loop runs in this one: that of the browser
        stripped, kept = threads.map(
            lambda said, reply, history: converse(tokenizer, [said, "Paris"], [reply], history, prompt=PROMPT)[0],
            (THINKING + "In France.", "In France."),
            ("And?", "A long result. " * 400),
            ("strip_thinking", "keep"),
        )
    stripped.turns[0].mask = [1] * (stripped.turns[0].num_tokens - 4) + [0] * 4
    folder = tmp_path_factory.mktemp("context")
    return queries_of(write_conversations(folder, [stripped, kept], tokenizer.save_pretrained))


def test_a_turn_leads_to_the_whole_context_that_it_saw(browser, contexts):
    whole = contexts.run.trajectory(SECOND)
    path = [node for node in whole["nodes"] if node["end"] <= whole["nodes"][-1]["begin"]]
    text = "".join(text for node in path for text in whole["tokens"]["texts"][node["begin"] : node["end"]])
    with opened(browser, contexts, f"trajectory?session={SECOND}") as page:
        page.click("#turn-2 .saw")
        page.wait_for_selector(".seen")
        seen = "".join(page.locator(".seen .text > :not(.caret):not(.on)").all_text_contents())
        assert seen == text and "<|im_start|>" in seen
        assert page.locator(".seen .own").first.text_content().startswith("In France.")
        roles = [role.split("\n")[0] for role in texts(page, ".seen .role")]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        assert count(page, ".seen .sign.new") == 2  # the reply, and the header of the turn
        fold = page.locator(".fold .unfold")
        before = fold.get_attribute("aria-expanded")
        fold.click()
        assert (before, fold.get_attribute("aria-expanded")) == ("false", "true")
        assert "are computed once" in page.inner_text("aside")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("h2:has-text('turn 1')")
        page.keyboard.press("Escape")
        page.wait_for_selector("#turn-1")


def test_what_history_took_out_is_marked_with_its_cost(browser, contexts):
    whole = contexts.run.trajectory(FIRST)
    shared = whole["nodes"][0]["end"]
    with opened(browser, contexts, f"trajectory?session={FIRST}") as page:
        masked = [count(page, f"#turn-{turn} [data-masked]") for turn in (1, 2)]  # tokens that are not trained
        assert masked == [4, 0]
        go(page, f"context?session={FIRST}&turn=2")
        (gone,) = page.locator(".block:has(.sign.gone)").all()
        taken = "".join(gone.locator("del").all_text_contents())
        assert taken.strip() == THINKING.strip() and "turn 1, thinking" in gone.inner_text()
        text = page.inner_text("aside")
        for words in (
            "a sequence of its own",
            "history: strip_thinking",
            f"forks after {shared} tokens",
            f"The {whole['turns'][1]['context_length'] - shared} behind",
        ):
            assert words in text
        page.click("button:has-text('what changed')")
        address_has(page, "show=changed")
        assert count(page, ".block") < 5


def test_the_first_difference_is_marked_and_turns_aligned(browser, tmp_path):
    turns = [[0.2, 0.0], [0.2, 0.0], [None, None]]
    group = [
        Member([1.0, 0.9], turns),
        Member([0.0, 0.9], [*turns[:2], turns[0], turns[2]], branch_of=0, shared=2),
        Member([0.0, 0.4], turns),
        Member([0.0, 0.4], turns, branch_of=2, shared=3),
    ]
    queries = queries_of(write_credited(tmp_path, [group], "gtpo"))
    wholes = [queries.run.trajectory(session) for session in (FIRST, SECOND)]
    (left, ours), (right, theirs) = (of_turn(whole, 2) for whole in wholes)
    place = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    with opened(browser, queries, f"trajectory?session={FIRST}") as page:
        page.wait_for_selector(".tokens")
        page.keyboard.press("d")
        page.wait_for_selector(".pairs")
        counts = [count(page, f".{what}") for what in ("pairs article", "no-turn", "pairs .chip:text-is('the same')")]
        assert counts == [7, 1, 4]
        text = page.inner_text("main")
        assert "The first 2 turns are the same." in text and f"First difference: turn 3, token {place + 1}" in text
        marked = [whole["tokens"]["texts"][begin + place] for whole, begin in zip(wholes, (left, right), strict=True)]
        assert page.locator(".tokens .first").all_text_contents() == marked
        page.fill("input[aria-label='The other conversation']", "train-000000-000000-000002")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=First difference: turn 1")
        go(page, "apart?a=train-000000-000000-000002&b=train-000000-000000-000003")
        page.wait_for_selector("text=Both sampled the same tokens.")


def number(text):
    return float(re.sub(r"[^\d.−-]", "", text).replace("−", "-"))


def test_a_click_on_an_advantage_opens_its_parts(browser, tmp_path):
    queries = queries_of(write_credited(tmp_path, [EXAMPLE, OTHER], "mt_grpo"))
    with opened(browser, queries, f"trajectory?session={FIRST}") as page:
        page.click("#turn-1 .open")
        panel = page.locator("#why-1")
        panel.wait_for()
        address_has(page, "why=1")
        assert page.get_attribute("#turn-1 .open", "aria-expanded") == "true"
        assert [number(text) for text in texts(page, "#why-1 .part h5 > b")] == [-0.4734, -0.3738, -0.8472]
        text = panel.inner_text()
        for words in (
            "(0.40 − 0.7406) / (0.7194 + 0.0001)",
            "shown as −0.85",
            "mt_grpo",
            "turn_coef 1",
            "none is masked",
            "members 3, 4 and 7 earned 0.50 at turn 2, and mt_grpo gives it to their turn 1",
        ):
            assert words in text
        assert panel.locator(".strip").first.locator("circle").count() == 8
        panel.locator("a:text-is('3')").click()
        page.wait_for_selector("#why-1:has-text('Turn 2’s reward counts here')")
        assert "mt_grpo gives turn 2’s 0.50 to turn 1" in panel.inner_text()
        page.keyboard.press("w")
        page.wait_for_selector(".why", state="detached")
        page.keyboard.press("w")
        page.wait_for_selector("#why-1")


def test_names_of_rewards_stay_whole_beside_many_turns(browser, tmp_path):
    members = [Member([float(number % 2), 0.2], [[0.1 * number, 0.3]] * 12) for number in range(4)]
    queries = queries_of(write_credited(tmp_path, [members], "reward_to_go"))
    with opened(browser, queries, f"trajectory?session={FIRST}&why=1") as page:
        heads = page.locator("#why-1 .terms tbody th")
        heads.first.wait_for()
        lines = heads.evaluate_all("all => all.map(each => each.getBoundingClientRect().height / 15)")
        assert lines and max(lines) <= 7  # of at most one word each


COMMAND = "grep -c '<b>' /var/log/*; false"


@pytest.fixture
def of_changed(browser, tmp_path, monkeypatch):
    """The page of a conversation of several turns, in a run whose conversations were changed."""

    def opens(change):
        written = runs._conversation
        monkeypatch.setattr(runs, "_conversation", lambda *arguments: change(written(*arguments)))
        queries = queries_of(write_run(tmp_path, steps=1, groups=1))
        session = first(queries, lambda row: row["mode"] == "train" and row["turns"] > 1)["session"]
        return opened(browser, queries, f"trajectory?session={session}")

    return opens


def test_a_command_is_shown_as_a_terminal_shows_it(of_changed):
    def in_a_shell(made):
        for call in (call for turn in made.turns for call in turn.tool_calls):
            call.name, call.arguments, call.result = "bash", {"command": COMMAND}, "3\n<script>\n[exit code 1]"
            call.data, call.error = {"exit_code": 1, "seconds": 0.25, "bytes": 2}, None
        made.info = {"verifier_log": "=== 2 failed ===\nassert <i>", "tests": 2}
        return made

    with of_changed(in_a_shell) as page:
        page.wait_for_selector(".terminal")
        terminal = page.locator(".terminal").first
        assert terminal.locator("pre").all_inner_texts() == [f"$ {COMMAND}", "3\n<script>\n[exit code 1]"]
        assert terminal.locator("small.problem").inner_text() == "exit code 1 · 250 ms"
        log = page.locator("aside details", has_text="verifier log")  # what the environment kept
        log.locator("summary").click()
        assert log.locator("pre").inner_text() == "=== 2 failed ===\nassert <i>"
        assert page.locator("aside", has_text="tests 2").count() == 1


def test_what_a_teacher_says_stands_by_the_turn(of_changed):
    def taught(made):
        made.teacher_log_ratios, made.teacher_hint = [-0.25, *[None] * len(made.turns)][: len(made.turns)], "<i>\nLima"
        return made

    with of_changed(taught) as page:
        page.wait_for_selector("#turn-1")
        assert "teacher −0.25" in page.inner_text("#turn-1 h4") and "teacher" not in page.inner_text("#turn-2 h4")
        hint = page.locator("aside details", has_text="hint")
        hint.locator("summary").click()
        assert hint.locator("pre").inner_text() == "<i>\nLima"


def test_a_star_and_a_note_are_put_on_the_page(browser, run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    session = open_run(folder).rows[5]["session"]
    with opened(browser, queries_of(folder), f"trajectory?session={session}") as page:
        page.click(".star")
        page.wait_for_selector(".star[aria-pressed=true]")
        page.fill(".noted input", "why <b>this</b>?")
        page.press(".noted input", "Tab")
        go(page, "find?q=note%3Dthis")
        page.wait_for_selector(".starred")
        assert read_notes(folder) == {session: {"star": True, "note": "why <b>this</b>?"}}
        page.reload()
        go(page, f"trajectory?session={session}")
        page.wait_for_function("() => document.querySelector('.noted input')?.value === 'why <b>this</b>?'")

"""Conversations as they are meant to be read, and the way through a list of them."""

from __future__ import annotations

import json

import pytest
from support.browser import missing, open_browser, serving, watched
from support.runs import EMBEDDED, HOSTILE, _copy_tokenizer, write_run
from tokenizers import Tokenizer

from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.trajectory import StopReason, Trajectory, Turn
from mt_grpo.viewer.queries import Queries

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

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
REPLIES = [
    {"role": "tool", "content": json.dumps({"cities": ["Lima", "Cusco"], "found": 2})},
    {"role": "tool", "content": "\u001b[31mred\u001b[0m and \u001b[1mbold\u001b[0m" + " again" * 300},
]
PROMPT = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Which city is this?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        ],
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = Tokenizer.from_file(str(EMBEDDED))
    made = Trajectory(PROMPT, stop_reason=StopReason.ANSWERED, start=0.0)
    ids = tokenizer.encode(WRITTEN).ids
    made.tree.add_turn([1, 2, 3], ids, [-0.5] * len(ids))
    turn = Turn(0, {"role": "assistant", "content": WRITTEN}, replies=REPLIES, num_tokens=len(ids), context_length=3)
    made.turns.append(turn)
    folder = tmp_path_factory.mktemp("reading")
    writer, batch = RunWriter(folder), Batch("train", 0, 0, 1, [0], [made])
    writer.append([*writer.save_tokenizer(_copy_tokenizer), *writer.write(batch)])
    writer.append(writer.write_credit(batch, [[0.5]]))
    return folder


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


def test_messages_are_read_as_they_are_meant(browser, folder):
    with serving(Queries(open_run(folder))) as server, watched(browser) as page:
        page.goto(f"{server.url}#/trajectory")
        page.wait_for_selector(".tokens")
        shown = "".join(page.locator(".tokens span").all_text_contents()).replace("⏎", "")
        assert shown == WRITTEN  # the bytes of a character are joined
        page.click("button:text-is('reading')")
        page.wait_for_selector(".to-read")
        assert "read=1" in page.url and page.locator(".tokens").count() == 0
        assert page.inner_text(".thinking summary") == "thinking · 3 words"
        assert page.locator(".read .heading").inner_text() == "The answer"
        assert page.locator(".read strong").first.inner_text() == "Lima"
        assert page.locator(".read ol li").count() == 2 and page.locator(".read .written td").count() == 2
        assert page.locator(".read .written").evaluate("table => getComputedStyle(table).display") == "table"
        assert [text.strip() for text in page.locator(".code").all_inner_texts()][:2] == [
            'print("hello")',
            json.dumps(json.loads(REPLIES[0]["content"]), indent=2),
        ]
        assert page.locator(".ansi1").inner_text() == "red" and page.locator(".bold").first.inner_text() == "bold"
        assert page.locator(".said .unfold").count() == 1  # the long result
        assert HOSTILE in page.inner_text(".to-read") and page.locator(".to-read img, main script").count() == 0
        assert page.locator(".prompt img").count() == 1 and "https://example.org/a.png" in page.inner_text(".prompt")
        assert page.locator(".read a").count() == 0 and "مرحبا بالعالم 日本語 👩‍🚀" in page.inner_text(".to-read")
        page.keyboard.press("r")
        page.wait_for_selector(".tokens")


def test_a_list_is_read_one_after_the_other_and_kept(browser, tmp_path):
    queries = Queries(open_run(write_run(tmp_path / "run", steps=40)))
    with serving(queries) as server, watched(browser, viewport={"width": 1200, "height": 700}) as page:
        page.goto(f"{server.url}#/find?q=mode%3Dtrain&sort=-reward")
        page.wait_for_selector(".rows .tr")
        page.evaluate("document.querySelector('.table').scrollTop = 3000")
        page.wait_for_function("() => history.state?.table === 3000")
        page.wait_for_selector(".rows .tr[aria-rowindex='105']")
        page.click(".rows .tr[aria-rowindex='105']")
        asked = {"q": "mode=train", "sort": "-reward", "limit": "200"}
        order = [row["session"] for row in queries.answer("find", asked)["rows"]]
        for key, place in (("", 103), ("j", 104), ("j", 105), ("k", 104)):
            page.keyboard.press(key) if key else None
            page.wait_for_selector(f"p:has-text('{order[place]}')")
        page.go_back()
        page.wait_for_selector(".rows .tr[aria-rowindex='105']")
        assert page.evaluate("document.querySelector('.table').scrollTop") == 3000
        assert page.input_value("#filter") == "mode=train" and page.locator("[aria-sort=descending]").count() == 1

"""The page of `view` in a real headless Chromium: a real run, and a run with 10,000 samples."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMEDRIVER, CHROMIUM, open_browser, start_problem
from PIL import Image
from view_runs import HOSTILE, agent_run, conversation, large_run, write_run

from jaxrl_llm import train
from jaxrl_llm.__main__ import main

TABS = ("curves", "evaluation", "samples", "config")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    argv = "--config grpo_tiny.py --steps 2 --warm_start.steps 3 --eval.prompts 16 --devices 0:1"
    runs, out = [str(folder / "large"), str(folder / "real")], str(folder / "page.html")
    large_run(folder / "large")
    assert train.main([*argv.split(), "--run_dir", runs[1]]) == 0
    assert main(["view", *runs, "--out", out, "--max_samples", "20000"]) == 0
    return Path(out)


@pytest.fixture(scope="module")
def browser():
    if problem := start_problem():
        pytest.skip(problem)
    with open_browser() as driver:
        driver.size(1280, 900)
        yield driver


@pytest.fixture(autouse=True)
def no_error(browser):
    """Neither an error of a script, nor a request or a style that the policy refuses."""
    browser.console()
    yield
    assert browser.console() == []
    assert browser.run("return window.hacked ?? null") is None
    assert browser.run("return document.querySelectorAll('img, b b, script script').length") == 0


def texts(browser, selector: str) -> list[str]:
    return browser.run(f"return [...document.querySelectorAll({selector!r})].map((e) => e.textContent)")


def expect(browser, selector: str, expected: list[str]) -> None:
    """Assert the texts of the elements, of which some follow an event after the call that causes it."""
    end = time.monotonic() + 10
    while texts(browser, selector) != expected and time.monotonic() < end:
        time.sleep(0.05)
    assert texts(browser, selector) == expected


def fill(browser, name: str, value: str) -> None:
    """Type into a filter, and wait until the list follows."""
    control = f"document.getElementById({name!r})"
    kind = "change" if browser.run(f"return {control}.tagName") == "SELECT" else "input"
    browser.run(f"{control}.value = {value!r}; {control}.dispatchEvent(new Event({kind!r}))")
    browser.run("await new Promise((r) => setTimeout(r, 250))")


def test_curves_of_both_runs_and_values_at_the_pointer(browser, page):
    browser.open(page)
    expect(browser, "#legend button", ["large", "real"])
    assert {"eval/pass@1", "reward/mean", "loss", "entropy"} <= set(texts(browser, ".card h3"))
    browser.wait("document.querySelectorAll('.plot path.main').length > 3")
    at = "[...document.querySelectorAll('.card')].find((c) => c.querySelector('h3').textContent === 'loss')"
    browser.run(f"{at}.querySelector('.plot').focus()")
    browser.press("\ue010")  # End
    browser.wait(f"{at}.querySelector('.tip').textContent")
    tip = browser.run(f"return {at}.querySelector('.tip').textContent")
    assert tip.startswith("step 900 after the SFT warm-uplarge")  # of 1,000: the warm-ups differ
    assert re.search(r"large0.0010\d* \(0.001\)real", tip), tip  # smoothed, and as it is
    assert browser.run("return document.getElementById('live').textContent").startswith("step 900")
    browser.run("document.querySelector('#legend button').click()")
    browser.wait(f"{at}.querySelectorAll('path.main').length === 1")


def test_evaluation_by_data_source(browser, page):
    browser.open(page, "#evaluation")
    expect(browser, ".source h2", ["All held-out data", "gsm8k"])
    scores = ["0.05 step 100", "0.5 step 1,000", "0.5 step 1,000"]
    expect(browser, ".source:nth-child(2) td.number", scores)
    browser.size(390, 900)  # a name stays beside its colour: each row is one line
    heights = browser.run(
        "return [...document.querySelectorAll('.eval tbody tr')].map((r) => r.offsetHeight)"
    )
    browser.size(1280, 900)
    assert len(heights) > 2 and max(heights) < 50, heights


def test_ten_thousand_samples_are_filtered_and_few_rows_exist(browser, page):
    browser.open(page, "#samples")
    browser.wait("/samples$/.test(document.getElementById('count').textContent)")
    expect(browser, "#count", ["10,040 of 10,040 samples"])
    assert 5 < browser.run("return document.querySelectorAll('.row').length") < 60
    browser.run("const l = document.getElementById('list'); l.scrollTop = l.scrollHeight")
    browser.wait("[...document.querySelectorAll('.row')].some((r) => r.ariaPosInSet === '10040')")
    assert browser.run("return document.querySelectorAll('.row').length") < 60
    fill(browser, "f-outcome", "correct")
    fill(browser, "f-from", "500")
    fill(browser, "f-to", "509")
    expect(browser, "#count", ["50 of 10,040 samples"])
    fill(browser, "f-query", "/answer 50[3-5] 7/")
    expect(browser, "#count", ["3 of 10,040 samples"])
    fill(browser, "f-query", "")
    fill(browser, "f-low", "1.5")
    expect(browser, "#count", ["0 of 10,040 samples"])
    fill(browser, "f-low", "")
    fill(browser, "f-query", "/(/")
    browser.wait("document.getElementById('f-query').ariaInvalid === 'true'")


def test_a_sample_shows_roles_tokens_and_their_values(browser, page):
    browser.open(page, "#samples/0/5")
    browser.wait("document.querySelector('.token')")
    roles = ["system", "user", "assistant", "environment (not trained on)", "assistant"]
    expect(browser, ".detail .role", roles)
    assert texts(browser, "[aria-pressed=true]")[-1] == "advantage"
    colour = "return getComputedStyle(document.querySelectorAll('.token')[{}]).backgroundColor"
    blue = browser.run(colour.format(0))
    assert blue != browser.run(colour.format(1)) == "rgba(0, 0, 0, 0)"
    browser.run("document.getElementById('by-mismatch').click(); document.querySelector('.tokens').focus()")
    browser.press("\ue014", "\ue014", "\ue014")  # right arrow
    values = "advantage 0.5   log-prob -1.25   of the rollout -1.5   mismatch 0.25"
    expect(browser, ".readout", [f'3: "answer 1 5"   {values}'])


def test_a_hostile_sample_is_text(browser, page):
    browser.open(page, "#samples/0/0")
    browser.wait("document.querySelector('.token')")
    browser.run("document.getElementById('by-text').click()")
    browser.wait("document.querySelector('.turn .content')")
    assert HOSTILE in texts(browser, ".turn .content")
    browser.run("document.getElementById('tab-config').click()")
    browser.wait("document.querySelector('.config th')")
    assert any(HOSTILE in text for text in texts(browser, ".config th"))


def test_a_conversation_is_a_tree_with_calls_rewards_and_trained_turns(browser, tmp_path):
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 0.5}], [agent_run(), conversation(1, 1.0)])
    assert main(["view", str(run)]) == 0
    browser.size(1280, 900)
    browser.open(run / "view.html")
    browser.run("localStorage.clear()")  # of the other pages
    browser.open(run / "view.html", "#samples/0/0")
    browser.wait("document.querySelector('.tree')")
    turns = [
        "Turn 1\u2713 trained: 2 of 2 tokens2 tokens after 4reward 0.25",
        "Turn 2\u2713 trained: 1 of 1 token1 token after 3",
        "Turn 5\u2713 trained: 1 of 1 tokencontinues turn 11 token after 8",
        "Turn 3\u2713 trained: 2 of 2 tokenscontinues turn 12 tokens after 5",
        "Turn 4\u2717 not trained on1 token after 6history rewritten",
    ]
    expect(browser, ".tree li > details > summary", turns)
    branches = [
        "Another conversation begins (a sub-agent, an edited history)",
        "Branch: turn 1 is continued in another way",
    ]
    expect(browser, ".branch > .role", branches)
    expect(browser, ".call", [
        "tool callweathercityParisdays2tool12 mm", "invalid tool call{the JSON is broken"
    ])  # fmt: skip
    assert [text for text in texts(browser, ".tree .role") if text.startswith("assistant")] == [
        *["assistant (trained)"] * 4, "assistant (not trained on)"
    ]  # fmt: skip
    expect(browser, ".masked .content", [HOSTILE])
    # Keys move between turns, and close them; a context is what was read.
    browser.run("document.querySelector('.tree summary').focus()")
    browser.press("\ue015", "\ue015")  # arrow down: over the line of tools
    browser.wait("document.activeElement.textContent.endsWith('before this turn')")
    browser.press("\ue007")
    browser.wait("document.activeElement.parentNode.open")
    expect(browser, ".tree details[open].other > .content", ["\u27e84 tokens of the prompt\u27e9"])
    browser.run("[...document.querySelectorAll('.other summary')].pop().click()")
    browser.wait("document.querySelectorAll('.other[open] > .content')[1]?.textContent")
    assert texts(browser, ".other[open] > .content")[1] == "\u27e84 tokens of the prompt\u27e9t15 t16 "
    # An older row is as it was.
    browser.open(run / "view.html", "#samples/0/1")
    browser.wait("document.querySelector('.token')")
    assert browser.run("return document.querySelector('.tree')") is None


def test_what_cannot_be_seen_is_marked_and_directions_do_not_mix(browser, tmp_path):
    """Controls, characters without width, a turn of the direction, right-to-left text, and no text at all."""
    texts_ = [
        "a\x00\x1b[0m\u202egnp.exe\u200b",
        "\u05e9\u05dc\u05d5\u05dd, abc",
        "",
        " \n",
        "\U0001f468\u200d\U0001f469",
    ]
    rows = [{"step": 1, "prompt": "p", "response": text, "reward": 0.0} for text in texts_]
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 0.5}], rows)
    assert main(["view", str(run)]) == 0
    browser.size(1280, 900)
    browser.open(run / "view.html")
    assert "loss" in texts(browser, ".card h3")  # a curve of one point
    browser.open(run / "view.html", "#samples/0/0")
    browser.wait("document.querySelector('.detail .content')")
    shown = "a\u27e8U+0000\u27e9\u27e8U+001B\u27e9[0m\u27e8U+202E\u27e9gnp.exe\u27e8U+200B\u27e9"
    assert texts(browser, ".detail .content")[-1] == shown
    answers = [line.split(" \u2192 ")[1] for line in texts(browser, ".snippet")]
    assert answers == [shown, texts_[1], "(empty)", "(blank)", texts_[4]]
    browser.open(run / "view.html", "#samples/0/1")
    browser.wait("document.querySelectorAll('.detail .content').length === 2")
    places = "const r = document.createRange(); const t = document.querySelectorAll('.detail .content')[1]"
    right = browser.run(f"{places}.firstChild; r.selectNode(t); return r.getBoundingClientRect().right")
    assert right > 1000  # the text begins at the right edge


def test_ten_runs_are_told_apart_and_keys_of_the_config_stay(browser, tmp_path):
    settings = [{"config": {"algo": {"name": "grpo"}, "run_dir": f"runs/{'x' * 40}/{i}"}} for i in range(10)]
    steps = [{"step": 1, "loss": 1, "kl": 1e-9}, {"step": 2, "loss": 0, "kl": 1e-9}]
    runs = [write_run(tmp_path / f"r{i}", steps, [], config) for i, config in enumerate(settings)]
    assert main(["view", *map(str, runs), "--out", str(tmp_path / "page.html")]) == 0
    browser.size(1280, 900)
    browser.open(tmp_path / "page.html")
    looks = "[...document.querySelectorAll('#legend .swatch')].map((e) => getComputedStyle(e).background)"
    assert len(set(browser.run(f"return {looks}"))) == 10
    browser.wait("document.querySelector('.plot .x')")
    assert {text for text in texts(browser, ".plot .x") if "." in text} == set()  # no half steps
    assert {"1e-9", "9e-10"} <= set(texts(browser, ".plot .y"))
    browser.open(tmp_path / "page.html", "#config")
    browser.run("document.querySelector('.scroll').scrollLeft = 9999")
    key = "document.querySelector('.config tbody th').getBoundingClientRect()"
    assert browser.run(f"return {key}.left") >= 0


def test_keys_reach_everything(browser, page):
    browser.open(page)
    browser.press("3")
    browser.wait("document.activeElement.id === 'tab-samples'")
    browser.wait("document.getElementById('f-query')")
    browser.press("/")
    browser.wait("document.activeElement.id === 'f-query'")
    browser.run("document.getElementById('list').focus()")
    before = browser.run("return location.hash")
    browser.press("j", "j")
    browser.wait(f"location.hash !== {before!r}")
    browser.run("document.getElementById('tab-samples').focus()")
    browser.press("\ue014")
    browser.wait("document.activeElement.id === 'tab-config'")


def test_differences_of_the_configs_come_first(browser, page):
    browser.open(page, "#config")
    assert texts(browser, "h2")[0].startswith("Differences")
    rows = texts(browser, ".scroll:first-of-type tbody tr")
    assert "steps10002" in rows
    fill(browser, "find-key", "learning_rate")
    rows = "[...document.querySelectorAll('.config tbody tr')]"
    browser.wait(f"{rows}.length && {rows}.every((row) => row.textContent.includes('learning_rate'))")


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False), (390, True)])
def test_contrast_and_width(browser, page, width, dark):
    """Texts have a contrast of 4.5 at least (WCAG AA), and nothing is wider than a phone."""
    browser.size(width, 800, dark)
    contrast = Path(__file__).with_name("contrast.js").read_text()
    for tab in TABS:
        browser.open(page, f"#{tab}")
        browser.run("await new Promise((r) => setTimeout(r, 300))")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(contrast) == []


@pytest.mark.parametrize("dark", [False, True])
def test_pictures_of_every_tab(browser, page, tmp_path, dark):
    """Each is drawn, on a background of the colours that are asked for."""
    browser.size(1280, 900, dark)
    for tab in TABS:
        browser.open(page, f"#{tab}")
        browser.run("await new Promise((r) => setTimeout(r, 300))")
        file = tmp_path / f"{tab}_{'dark' if dark else 'light'}.png"
        file.write_bytes(browser.screenshot())
        with Image.open(file) as picture:
            assert (picture.format, picture.size) == ("PNG", (1280, 900))
            grey = np.asarray(picture.convert("L"))
        assert grey.mean() < 64 if dark else grey.mean() > 192, file.name
        assert len(np.unique(grey)) > 64  # letters and lines, with their smooth edges

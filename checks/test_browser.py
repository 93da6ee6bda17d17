"""The report in headless Chromium: hovering, clicking, switching, reading back; light, dark,
narrow; nothing is fetched, no complaint."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import lipbound as lb
from lipbound.reporting.page.render import contents, report

SHOTS = os.environ.get("LIPBOUND_SHOTS")
"""Folder for screenshots, to be looked at."""
CELL = """
const div = document.getElementById("maps"), s = arguments[0] ? String(arguments[0] + 1) : "";
const xa = div._fullLayout["xaxis" + s], ya = div._fullLayout["yaxis" + s], box = div.getBoundingClientRect();
return [box.left + xa._offset + xa.d2p(arguments[2]), box.top + ya._offset + ya.d2p(arguments[1])];
"""  # noqa: E501

WIDER = """
const wide = document.documentElement.clientWidth, beyond = (e) => e.getBoundingClientRect().right > wide + 1;
const scrolls = (e) => e && e !== document.body && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
return [...document.querySelectorAll("body *")].filter((e) => beyond(e) && !scrolls(e.parentElement)).map((e) => e.outerHTML.slice(0, 80));
"""  # noqa: E501
"""What reaches beyond the right edge and is in nothing that scrolls."""


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1300,1000",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(
    run: Path, hostile: xr.Dataset, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    vit = folder / "vit.zarr"
    lb.compare("builtin:vit", samples=1, bounds=["yudin", "lipbound"], progress=False, out=vit)
    layers = folder / "layers.zarr"
    lb.compare(
        "builtin:gpt2",
        samples=2,
        max_length=16,
        map="layer",
        bounds=["lipbound"],
        progress=False,
        out=layers,
    )
    assert report(run, folder / "one.html") == []
    assert report([run, vit], folder / "two.html") == []
    report(hostile, folder / "hostile.html", details=False)
    report(layers, folder / "layers.html")
    alone = lb.compare(
        "builtin:gpt2", samples=2, max_length=8, bounds="none", extras="frobenius", progress=False
    )
    alone["jacobian_frobenius"][:, 0, 0] = np.inf
    report([alone, run], folder / "alone.html", details=False)
    names = ("one", "two", "hostile", "layers", "alone")
    return {name: folder / f"{name}.html" for name in names}


@pytest.fixture
def opened(
    browser: webdriver.Chrome, pages: dict[str, Path]
) -> Iterator[Callable[[str], webdriver.Chrome]]:
    """Opens a page; afterwards, whatever the test did, nothing was fetched and the console is
    empty."""

    def open_page(name: str, *, scheme: str = "light") -> webdriver.Chrome:
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        browser.get_log("performance")
        browser.get(pages[name].as_uri())
        wait(lambda: browser.execute_script("return document.documentElement.dataset.ready"))
        return browser

    yield open_page
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            assert re.match(
                r"(file|blob|data|chrome|about):", message["params"]["request"]["url"]
            ), message["params"]["request"]["url"]
    browser.set_window_size(1300, 1000)


def wait(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """The condition's value as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def status(browser: webdriver.Chrome) -> dict[str, Any]:
    """What the status line says, as text and as numbers."""
    line = browser.find_element(By.ID, "status")
    data = {
        name: line.get_attribute(f"data-{name}")
        for name in ("bound", "layer", "column", "exact", "value", "ratio")
    }
    return {"text": line.text, "bound": data.pop("bound")} | {
        name: float(value) for name, value in data.items()
    }


def mouse(browser: webdriver.Chrome, panel: int, layer: int, head: int, *, click: bool) -> None:
    """Move the mouse onto a cell of a panel, and click it if asked to."""
    browser.execute_script("document.getElementById('maps').scrollIntoView({block: 'start'})")
    x, y = browser.execute_script(CELL, panel, layer, head)
    if y > browser.execute_script("return innerHeight") - 5:
        browser.execute_script("scrollBy(0, arguments[0])", y - 300)
        x, y = browser.execute_script(CELL, panel, layer, head)
    for kind in ("mouseMoved", "mouseMoved") + (("mousePressed", "mouseReleased") if click else ()):
        extra = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **extra})
        time.sleep(0.1)


def places(browser: webdriver.Chrome, ds: xr.Dataset) -> list[str]:
    """Names of the panels in the order in which they stand, from their titles."""
    titles = browser.execute_script(
        "return document.getElementById('maps').layout.annotations.map(a => a.text).filter(t => "
        "!t.endsWith('the scale'))"
    )
    names = {str(ds[name].attrs["label"]): name for name in lb.tables.panels(ds)}
    return [names[title.removesuffix(" \u2020").removesuffix(" \u2021")] for title in titles]


def geomean(values: xr.DataArray) -> float:
    return float(np.exp(np.log(values.values).mean()))


def test_hover_reads_the_dataset_back(opened: Any, ds: xr.Dataset) -> None:
    browser = opened("one")
    panels = places(browser, ds)
    assert set(panels) == set(lb.tables.panels(ds))
    for name, layer, head in (("yudin", 1, 3), ("lipbound", 5, 0), ("castin", 0, 2)):
        mouse(browser, panels.index(name), layer, head, click=False)
        found = wait(
            lambda name=name, layer=layer, head=head: (
                (s := status(browser))
                and (s["bound"], s["layer"], s["column"]) == (name, layer, head)
                and s
            )
        )
        here = ds.isel(layer=layer, head=head)
        assert found["exact"] == pytest.approx(geomean(here["exact"]), rel=1e-4)
        assert found["value"] == pytest.approx(geomean(here[name]), rel=1e-4)
        assert found["ratio"] == pytest.approx(geomean(here[name] / here["exact"]), rel=1e-4)
        # both ends, or one number where they print alike
        ends = re.search(r"\((?:between (\S+) and (\S+)|(\S+) to six digits)\)", found["text"])
        low, high = (float(end or ends[3]) for end in (ends[1], ends[2]))
        assert low == pytest.approx(geomean(here["exact"]), rel=1e-4)
        assert high == pytest.approx(geomean(here["exact_upper"]), rel=1e-4)
        hover = browser.find_element(By.CSS_SELECTOR, "#maps .hoverlayer").text
        assert f"layer {layer}, head {head}" in hover.replace("\n", " ")
    shoot(browser, "hover")


def test_click_selects_in_every_panel_and_shows_the_head(opened: Any, ds: xr.Dataset) -> None:
    browser = opened("one")
    panels = places(browser, ds)
    mouse(browser, panels.index("yudin"), 4, 2, click=True)
    wait(lambda: browser.find_element(By.ID, "detail-title").text == "layer 4, head 2")
    assert status(browser)["bound"] == "yudin"
    rectangles = browser.execute_script(
        "return document.getElementById('maps').layout.shapes.filter(s => "
        "s.xref.startsWith('x')).map(s => [s.x0, s.y0])"
    )
    assert rectangles == [[1.5, 3.5]] * len(panels)
    assert (
        Select(browser.find_element(By.ID, "bound")).first_selected_option.get_attribute("value")
        == "yudin"
    )
    shown = browser.execute_script("return document.getElementById('samples').data.map(t => t.y)")
    np.testing.assert_allclose(shown, [ds["exact"][:, 4, 2], ds["yudin"][:, 4, 2]], rtol=1e-5)
    z = np.array(browser.execute_script("return document.getElementById('attention').data[0].z"))
    assert z.shape == (32, 32)
    np.testing.assert_allclose((z**2).sum(1), 1, atol=0.1)
    moved, changes, softmax = browser.execute_script(
        "return document.getElementById('tokens').data.map(t => t.y)"
    )
    assert sum(moved) == pytest.approx(1, abs=0.02)
    alone, reached = browser.execute_script(
        "return document.getElementById('profile').data.map(t => t.y)"
    )
    assert len(alone) == len(reached) == len(moved)
    assert max(alone) <= float(status(browser)["exact"]) * (1 + 1e-3)
    # by their text
    assert browser.execute_script("return document.querySelectorAll('#profile .xtick').length") > 5
    assert sum(changes) == pytest.approx(1, abs=0.02)
    assert 0 < max(softmax) <= 0.5 + 1e-6
    terms = browser.execute_script(
        "return document.getElementById('terms').data.map(t => [t.name, t.x])"
    )
    np.testing.assert_allclose(np.sum([x for _, x in terms], 0), 1, atol=1e-4)
    assert (
        browser.execute_script(
            "return document.getElementById('attention').data[0].colorbar.ticktext"
        )[-1]
        == "1"
    )
    formulas = browser.find_elements(By.CSS_SELECTOR, "dd math")
    assert len(formulas) >= len(ds.attrs["bounds"])
    assert min(formula.size["height"] for formula in formulas) > 0
    shoot(browser, "detail")


def test_switching_the_bound_and_the_quantity(opened: Any, ds: xr.Dataset) -> None:
    browser = opened("one")
    for name in ("yudin_sqrt_n", "kim"):
        Select(browser.find_element(By.ID, "bound")).select_by_value(name)
        wait(lambda name=name: status(browser)["bound"] == name)
        exact = ds["exact_l2" if name == "kim" else "exact"]
        found = status(browser)
        here = {"layer": int(found["layer"]), "head": int(found["column"])}
        assert found["ratio"] == pytest.approx(geomean((ds[name] / exact).sel(here)), rel=1e-4)
        counts = browser.execute_script("return document.getElementById('histogram').data[0].y")
        assert sum(counts) == exact.size
        assert ds[name].attrs["label"] in browser.find_element(By.ID, "h-histogram").text
    Select(browser.find_element(By.ID, "quantity")).select_by_value("ratio")
    wait(
        lambda: (
            browser.execute_script("return document.getElementById('maps').data.length")
            == len(ds.attrs["bounds"])
        )
    )
    k = ds.attrs["bounds"].index("lipbound")
    z = browser.execute_script("return document.getElementById('maps').data[arguments[0]].z", k)
    np.testing.assert_allclose(
        z, np.log(ds["lipbound"] / ds["exact"]).mean("sample") / np.log(10), atol=1e-4
    )
    bar = browser.execute_script("return document.getElementById('maps').layout.coloraxis.colorbar")
    assert "1" in bar["ticktext"]  # a ratio, not its logarithm
    assert bar["tickvals"][bar["ticktext"].index("1")] == pytest.approx(0, abs=1e-9)
    axis = browser.execute_script("return document.getElementById('histogram').layout.xaxis")
    assert axis["title"]["text"] == "bound / exact"
    for at, text in zip(axis["tickvals"], axis["ticktext"], strict=True):
        assert "<sup>" in text or 10**at == pytest.approx(float(text.replace(",", "")), rel=1e-3)
    shoot(browser, "ratio")


def test_keyboard(opened: Any) -> None:
    browser = opened("one")
    Select(browser.find_element(By.ID, "layer")).select_by_value("2")
    Select(browser.find_element(By.ID, "column")).select_by_value("1")
    maps = browser.find_element(By.ID, "maps")
    browser.execute_script("arguments[0].focus()", maps)
    for key, expected in (
        (Keys.ARROW_DOWN, (3, 1)),
        (Keys.ARROW_RIGHT, (3, 2)),
        (Keys.ARROW_UP, (2, 2)),
        (Keys.ARROW_LEFT, (2, 1)),
    ):
        browser.switch_to.active_element.send_keys(key)
        wait(
            lambda expected=expected: (
                (status(browser)["layer"], status(browser)["column"]) == expected
            )
        )
    before = status(browser)["bound"]
    browser.switch_to.active_element.send_keys("b")
    wait(lambda: status(browser)["bound"] != before)
    for _ in range(40):
        browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert status(browser)["layer"] == 5  # it stops at the edge


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_two_runs_side_by_side(opened: Any, scheme: str) -> None:
    browser = opened("two", scheme=scheme)
    table = browser.find_element(By.CSS_SELECTOR, "#h-compare ~ .scroll table").text
    assert "not computed" in table  # the second run has two bounds only
    # its assumptions do not hold on a GPT-2
    assert re.search(r"Castin 2024, 3.3 [\d,.]+ \u2020", table)
    assert (
        "Lengths in tokens differ: at most 32 in gpt2, 65 in vit"
        in browser.find_element(By.CSS_SELECTOR, "#h-compare ~ .notice").text
    )
    Select(browser.find_element(By.ID, "run")).select_by_value("1")
    wait(lambda: browser.execute_script("return document.getElementById('maps').data.length") == 3)
    assert [e.is_displayed() for e in browser.find_elements(By.CSS_SELECTOR, "section.run")] == [
        False,
        True,
        False,
        True,
    ]
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background)[:3])) > 384
    assert light == (scheme == "light")
    ink = browser.execute_script("return document.getElementById('maps')._fullLayout.font.color")
    assert (ink == "#1d2126") == (scheme == "light")
    shoot(browser, f"two-{scheme}")


def test_runs_without_bounds(opened: Any) -> None:
    browser = opened("alone")
    titles = browser.execute_script(
        "return document.getElementById('maps').layout.annotations.map(a => a.text)"
    )
    assert titles == ["Exact", "\u221e", "Frobenius norm"]
    mouse(browser, 1, 2, 1, click=True)
    wait(lambda: browser.find_element(By.ID, "detail-title").text == "layer 2, head 1")
    assert status(browser)["bound"] == "exact"
    mouse(browser, 1, 3, 0, click=False)
    wait(lambda: "layer 3, head 0; frobenius norm " in status(browser)["text"])
    assert not browser.find_element(By.ID, "quantity").is_displayed()
    assert not browser.find_element(By.ID, "histogram").is_displayed()
    assert browser.execute_script("return document.getElementById('samples').data.length") == 1
    shoot(browser, "alone")
    Select(browser.find_element(By.ID, "run")).select_by_value("1")
    wait(lambda: browser.find_element(By.ID, "histogram").is_displayed())
    assert browser.find_element(By.ID, "quantity").is_displayed()
    assert status(browser)["bound"] == "lipbound"


def test_hostile_names_are_text(opened: Any, hostile: xr.Dataset) -> None:
    browser = opened("hostile")
    assert not browser.execute_script("return window.hacked")
    assert not browser.find_elements(By.CSS_SELECTOR, "img")
    assert "<img src=x onerror=window.hacked=1>" in browser.find_element(By.TAG_NAME, "main").text
    # the panel's title
    assert "</script><img src=x onerror" in browser.find_element(By.ID, "maps").text
    Select(browser.find_element(By.ID, "bound")).select_by_value("yudin")
    page = contents(hostile, "x", "mean", 0, (None, [], ""))
    shown = [scale["names"] for scale in page["scales"]]
    mouse(browser, [name for names in shown for name in names].index("yudin"), 0, 0, click=True)
    wait(lambda: "<img" in status(browser)["text"])
    assert "left out" in browser.find_element(By.ID, "detail-reason").text
    assert not browser.execute_script("return window.hacked")
    shoot(browser, "hostile")


def test_whole_layers(opened: Any) -> None:
    browser = opened("layers")
    assert browser.find_element(By.CSS_SELECTOR, ".across-label").text == "Sample"
    assert "whole layers" in browser.find_element(By.ID, "detail-reason").text


def test_narrow_and_printed(opened: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    browser = opened("one")
    browser.set_window_size(500, 900)
    time.sleep(0.5)
    heights = browser.execute_script(
        "return ['maps', 'histogram', 'attention', 'terms'].map(id => "
        "document.getElementById(id).clientHeight)"
    )
    assert min(heights) > 150
    assert browser.execute_script(
        "return document.documentElement.scrollWidth"
    ) <= browser.execute_script("return innerWidth")
    hint = browser.execute_script(
        "return getComputedStyle(document.querySelector('.scroll'), '::after').content"
    )
    assert "scroll sideways" in hint
    shoot(browser, "narrow")
    browser.set_window_size(1300, 900)
    time.sleep(0.5)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 20_000
    if SHOTS:
        import base64

        (Path(SHOTS) / "printed.pdf").write_bytes(base64.b64decode(printed["data"]))
    assert pages["one"].stat().st_size < 6e6


@pytest.mark.parametrize("name", ["one", "two", "hostile", "layers"])
@pytest.mark.parametrize("width", [390, 320])
def test_nothing_overflows_on_a_telephone(
    opened: Any, browser: webdriver.Chrome, name: str, width: int
) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        opened(name)
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
        wider = browser.execute_script(WIDER)
        assert wider == []
        shoot(browser, f"{name}-{width}")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def shoot(browser: webdriver.Chrome, name: str) -> None:
    """A screenshot of the whole page, where somebody wants to look at it."""
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        size = browser.get_window_size()
        browser.set_window_size(
            size["width"],
            browser.execute_script("return document.documentElement.scrollHeight") + 140,
        )
        time.sleep(0.8)
        browser.save_screenshot(str(Path(SHOTS) / f"{name}.png"))
        browser.set_window_size(size["width"], size["height"])

"""Our keys are no keys of the page's own, nor of browsers as far as the page knows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from highwater.headless.server.page_files import WEB


def page_source(name: str) -> str:
    """Return one of the page's sources, which its package carries in its maps."""
    import comfyui_frontend_package

    folder = Path(comfyui_frontend_package.__file__).parent / "static" / "assets"
    for path in sorted(folder.glob("*.map")):
        text = path.read_text(encoding="utf-8")
        if name not in text[: text.find('"sourcesContent"')]:
            continue
        content = json.loads(text)
        for source, code in zip(content["sources"], content["sourcesContent"], strict=True):
            if source.endswith(name):
                return str(code)
    raise AssertionError(f"the page has no source {name}")


def combinations(code: str) -> set[str]:
    """Return the combinations that a script binds, such as "alt+shift+u"."""
    found = set()
    for words in re.findall(r"combo: \{([^}]*)\}", code):
        (key,) = re.findall(r"""key: ["'](.+?)["']""", words)
        held = [name for name in ("alt", "ctrl", "meta", "shift") if f"{name}: true" in words]
        found.add("+".join([*held, key.lower()]))
    return found


def test_no_key_is_taken() -> None:
    ours = combinations((WEB / "commands.js").read_text(encoding="utf-8"))
    assert ours == {"alt+shift+u", "alt+shift+l", "alt+shift+h"}
    theirs = combinations(page_source("keybindings/defaults.ts"))
    assert {"ctrl+enter", "alt+shift+m", "r"} <= theirs
    reserved = re.findall(r"'([^']+)',? *//|'([^']+ \+ [^']+)'", page_source("keybindings/reserved.ts"))
    browsers = {(one or other).replace(" ", "").lower() for one, other in reserved}
    assert "ctrl+t" in browsers
    assert ours & (theirs | browsers) == set()

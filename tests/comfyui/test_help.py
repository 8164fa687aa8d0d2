"""The help pages of our nodes as ComfyUI shows them: each with its picture, and nothing wider than the panel."""

from __future__ import annotations

from pathlib import Path

from highwater.headless.server.page_files import WEB
from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.comfyui.page_script import PageScript


def test_help_pages_are_whole_in_the_panel(
    host_files: HostFiles, frontend_arguments: list[str], in_page: PageScript, tmp_path: Path
) -> None:
    """About 20 s. Nothing runs: no device is needed."""
    (tmp_path / "no_models").mkdir()
    with HostProcess(host_files, models=tmp_path / "no_models", arguments=frontend_arguments) as host:
        ours = sorted(name for name in host.get("/object_info") if name.startswith("Highwater"))
        assert ours == sorted(path.stem for path in (WEB / "docs").glob("*.md"))
        in_page.run("help.mjs", host, ours)

"""The registry's archive: built as its client (comfy-cli) builds it, and read as its scan reads it. Knows no pytest."""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pathspec

__all__ = ["REPOSITORY", "RULES", "Finding", "archived_files", "scan", "write_archive"]

REPOSITORY = Path(__file__).parents[2]

# What the scan is known to match, by its findings (``GET /nodes/<id>/versions?include_status_reason=true``) as told in
# registry-backend #180, #183, #192, #197, #207, #208, #215, #229, #233, #245 and ComfyUI-Manager #3059, #3111. It reads
# text of every language, comments too; one finding of the lowest severity hides a version.
RULES = {
    "python_network_operations": (
        r"\.(connect|bind|listen|send(all|to)?|recv(from|_into)?)\s*\(",
        r"\b(socket\.\w|ClientSession\b|gethost|gettempdir|httpx|ftplib|smtplib|requests\.\w)",
        r"\b(urllib\.request|urlopen|urlretrieve|http\.client)",
    ),
    "python_command_injection_risk": (r"\bsubprocess\b", r"\bos\.(system|popen|exec|spawn)", r"shell\s*=\s*True"),
    "python_url_command_execution": (r"\b(curl|wget|ffmpeg|ffprobe|yt-dlp)\b", r"\bcmd\s*=\s*\["),
    "python_environment_manipulation": (r"\bos\.environ", r"\benviron\s*[\[.]", r"(get|put|unset)env\s*\("),
    "python_dynamic_execution": (
        r"\b(eval|exec)\s*\(",
        r"(?<![.\w])compile\s*\(",
        r"\bbase64\.\w",
        r"new\s+Function\s*\(",
    ),
    "python_bytecode_manipulation": (
        r"\bimportlib\.import_module",
        r"__import__\s*\(",
        r"\bmarshal\b",
        r"zlib\.decompress",
    ),
    "python_database_connections": (r"sqlite3\.connect",),
    "python_sensitive_file_access": (r"\.read_bytes\s*\(\)", r"/etc/(passwd|shadow)", r"\.ssh\b"),
    "python_privilege_escalation": (r"(?<![\w-])(sudo|doas|pkexec|runas)(?![\w-])", r"\bos\.set[ug]id"),
    "windows_process_manipulation": (r"\bkernel32\b", r"OpenProcess"),
    "calls into libraries": (r"\bctypes\b",),  # not known to be a finding, but near to them
    "contains_rm_rf": (r"\brm\s+-rf\b",),
    "SUSP_SVG_Onload_Onerror": (r"\bon(load|error)\s*=",),
    # Of the registry's standards, https://docs.comfy.org/registry/standards
    "installs at run time": (r"""["']pip["']""", r"-m\s+pip\b"),
    "unpickles": (r"\bpickle\.loads?\b",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    rule: str
    path: str
    line: int
    text: str


def archived_files(repository: Path = REPOSITORY) -> list[str]:
    """Return what the archive holds: the files that git tracks, without those that ``.comfyignore`` names."""
    assert "\nincludes" not in (repository / "pyproject.toml").read_text(encoding="utf-8"), "the client would add those"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, check=True, text=True)
    lines = (repository / ".comfyignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    ignored = pathspec.PathSpec.from_lines("gitwildmatch", patterns)
    names = [name for name in listed.stdout.split("\0") if name and (repository / name).exists()]
    return sorted(name for name in names if not ignored.match_file(name))


def write_archive(path: Path, repository: Path = REPOSITORY) -> Path:
    """Write the archive as a zip file; returns its path."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in archived_files(repository):
            archive.write(repository / name, name)
    return path


def scan(name: str, text: str) -> Iterator[Finding]:
    """Yield what the scan would find in a file."""
    for rule, patterns in RULES.items():
        for match in re.finditer("|".join(f"(?:{pattern})" for pattern in patterns), text):
            yield Finding(rule=rule, path=name, line=text.count("\n", 0, match.start()) + 1, text=match[0])

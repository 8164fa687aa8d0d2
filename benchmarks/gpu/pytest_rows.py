"""A plugin for pytest that tells of each test, as it ends, in one line for `setting.follow`."""

from __future__ import annotations

import json

import pytest

from highwater.benchmarks.gpu_worker import MARK


class Teller:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.phases: list[pytest.TestReport] = []

    def tell(self, **what: object) -> None:
        # On a line of its own: pytest's dots stand on the one before. The next test may end the process.
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write("\n" + MARK + json.dumps(what) + "\n", flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.phases = []
        self.tell(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcomes = [report.outcome for report in self.phases]
        outcome = next((word for word in ("failed", "skipped") if word in outcomes), "passed")
        reports = [report for report in self.phases if report.outcome == outcome != "passed"]
        self.tell(
            ended=nodeid,
            outcome=outcome,
            reason=reason_of(reports[0]) if reports else "",
            seconds=round(sum(report.duration for report in self.phases), 2),
            measured=dict(self.phases[-1].user_properties),
        )


def reason_of(report: pytest.TestReport) -> str:
    """Return in one line why a test failed or was skipped."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()
    return lines[0][:300] if lines else "no message"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Teller(config))

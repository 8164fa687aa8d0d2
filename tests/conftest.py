"""Fixtures that every part of the test suite shares."""

from __future__ import annotations

import os
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """`highwater.headless.simdevice`, installed as "sim" with four devices; compiles for about 20 s the first time.

    Without a C++ compiler the tests that need it are skipped, on CI they fail: nothing else would notice.
    """
    from highwater.headless import simdevice

    try:
        simdevice.install("sim", num_devices=4)
    except simdevice.CompilerMissing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(f"NOT TESTED: {error}")
    return simdevice

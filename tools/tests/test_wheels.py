"""Every distribution builds, and its wheel installs, imports and runs its README example alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_wheels import check
from monorepo import PUBLISHED, Distribution


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dist")


@pytest.mark.parametrize("distribution", PUBLISHED, ids=lambda d: d.name)
def test_wheel_alone(distribution: Distribution, built: Path) -> None:
    sdist, wheel = check(distribution, built)
    assert sdist.is_file() and wheel.is_file()

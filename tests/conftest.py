"""What several test files share: one finished run of the whole pipeline."""

from __future__ import annotations

import pytest

from tests import e2e


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> e2e.Finished:
    """`python -m scripts.pipeline` over a tiny target, once for all tests. Nobody writes into its folder."""
    place = e2e.new_place(tmp_path_factory.mktemp("finished"))
    output = e2e.call(place, "pipeline")
    assert output.returncode == 0, output.stderr
    return e2e.Finished(place, output)

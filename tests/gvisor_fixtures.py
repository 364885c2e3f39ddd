"""Fixtures of the gvisor rung by itself: a template whose boxes are restored, and one run to its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from lockgate.contract.bounds import Bounds
from lockgate.runtimes.gvisor import GvisorRuntime, GvisorTemplate
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import Outcome, run_once

GvisorRun = Callable[..., Outcome]
PATIENCE = 60.0  # seconds for one box on a busy machine

needs_gvisor = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs boxes that are restored and bounded by v1 groups: root's (CI is root)"
)


@pytest.fixture(scope="session")
def gvisor_template() -> Iterator[GvisorTemplate]:
    """A template of the gvisor rung, standard library only. As root it must be had: nothing is skipped."""
    template = GvisorRuntime().start(TemplateSpec())
    yield template
    template.close()


@pytest.fixture
def gvisor_run(gvisor_template: GvisorTemplate) -> GvisorRun:
    """Run source in a fresh box to its end: `gvisor_run("1+1", wall=5)`."""

    def run(source: str, **options: object) -> Outcome:
        extra = {name: options.pop(name) for name in ("broker", "meanwhile", "keep") if name in options}
        bounds = Bounds(**{"wall": 30.0, **options})  # type: ignore[arg-type]
        return run_once(gvisor_template, source.encode(), bounds, patience=PATIENCE, **extra)  # type: ignore[arg-type]

    return run

"""Fixtures of the container rung by itself: templates, one run to its end, every probe beside its controls."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from lockgate.contract.bounds import Bounds
from lockgate.runtimes import attack
from lockgate.runtimes.container import ContainerRuntime, ContainerTemplate
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import Outcome, run_once

ContainerRun = Callable[..., Outcome]


@pytest.fixture(scope="session")
def container_template() -> Iterator[ContainerTemplate]:
    """A warm template of the container rung, standard library only."""
    template = ContainerRuntime().start(TemplateSpec())
    yield template
    template.close()


@pytest.fixture(scope="session")
def container_open_template() -> Iterator[ContainerTemplate]:
    """The negative control: slots in the same namespaces, with steps S11 to S16 left out and a full procfs."""
    template = ContainerRuntime(("--open",)).start(TemplateSpec())
    yield template
    template.close()


@pytest.fixture
def container_run(container_template: ContainerTemplate) -> ContainerRun:
    """Run source in a fresh slot to its end: `container_run("1+1", wall=5)`."""

    def run(source: str | bytes, **options: object) -> Outcome:
        extra = {name: options.pop(name) for name in ("broker", "meanwhile", "keep") if name in options}
        code = source.encode() if isinstance(source, str) else source
        bounds = Bounds(**{"wall": 20.0, **options})  # type: ignore[arg-type]
        return run_once(container_template, code, bounds, **extra)  # type: ignore[arg-type]

    return run


@pytest.fixture
def container_open_run(container_open_template: ContainerTemplate) -> ContainerRun:
    """The same in an open slot."""

    def run(source: str, wall: float = 20.0) -> Outcome:
        return run_once(container_open_template, source.encode(), Bounds(wall=wall))

    return run


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A throwaway folder whose parents any user may cross: pytest's own is for its owner alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


class ContainerAttack(msgspec.Struct):
    """The answers of every probe, by id: in a slot, and in what stands beside it as controls."""

    slot: dict[str, attack.Row]
    controls: dict[str, dict[str, attack.Row]]

    def reached_by(self, ident: str) -> list[str]:
        """Names of the controls that reached the probe's primitive."""
        return [name for name, rows in self.controls.items() if rows[ident].reached]


def _answers(template: ContainerTemplate) -> dict[str, attack.Row]:
    outcome = run_once(template, attack.program().encode(), Bounds(wall=60))
    assert outcome.result is not None, outcome
    assert outcome.result.value is not None, outcome
    return {row.id: row for row in attack.rows(msgspec.json.decode(outcome.result.value))}


@pytest.fixture(scope="session")
def container_attack(
    container_template: ContainerTemplate, container_open_template: ContainerTemplate
) -> ContainerAttack:
    """Every probe in a slot, in an open slot, under a filter whose refusals no handler gives, and with no sandbox."""
    marker = ContainerRuntime(("--marker=133",)).start(TemplateSpec())
    try:
        marked = _answers(marker)
    finally:
        marker.close()
    return ContainerAttack(
        slot=_answers(container_template),
        controls={
            "open slot": _answers(container_open_template),
            "marker filter": marked,
            "no sandbox": {row.id: row for row in attack.control_none()},
        },
    )

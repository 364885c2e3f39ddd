"""The guest of the wasm rung by itself, without the worker around it: one instance in this process, one run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockgate.contract.errors import CannotIsolate
from lockgate.runtimes.wasm import artifacts, build, image_recipe

MiB = 1 << 20


class Seen(msgspec.Struct):
    """What came of one run: the claim in its result, how it ended, what it wrote and asked."""

    finished: Any
    value: Any = None
    text: str = ""
    error: dict[str, str] | None = None
    exit_code: int = 0
    truncated: dict[str, int] = {}
    stdout: str = ""
    stderr: str = ""
    asked: list[Any] = []


def built(name: str) -> artifacts.Artifacts:
    """The files of an image set; images are made here if the guest's own files changed, code never is."""
    code = artifacts.default_store() / artifacts.compiled_name(str(artifacts.engine_version()))
    if artifacts.lookup(code) is None:
        reason = "the guest was not compiled on this machine: run `lockgate wasm build`"
        if os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        return build.build((name,)).sets[0]
    except CannotIsolate as error:
        pytest.fail(str(error))


GuestRun = Callable[..., Seen]


def _runner(found: artifacts.Artifacts) -> Iterator[GuestRun]:
    from lockgate.runtimes.wasm import driver, image_unsafe

    image = image_unsafe.seal(found.image, found.image_sha256)
    stdlib = os.open(found.stdlib, os.O_RDONLY | os.O_CLOEXEC)

    def run(
        source: str | bytes,
        *,
        seconds: float | None = 60.0,
        cap: int = 256 * 1024,
        memory: int = 512 * MiB,
        disk: int = 4 * MiB,
        inodes: int = 256,
        relay: Callable[[bytes], bytes] | None = None,
        wait: Callable[[], None] = lambda: None,
        prepared: Callable[[Any], None] | None = None,
    ) -> Seen:
        written: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        asked: list[Any] = []

        def answer(body: bytes) -> bytes:
            asked.append(msgspec.json.decode(body))
            if relay is not None:
                return relay(body)
            return msgspec.json.encode({"id": asked[-1]["id"], "ok": asked[-1]["args"]})

        instance = driver.Instance(
            found.cwasm,
            stdlib,
            image,
            driver.Limits(memory=memory, disk=disk, inodes=inodes),
            output=lambda fd, data: written[fd].extend(data),
            relay=answer,
        )
        instance.prepare()
        instance.limit(driver.Limits(memory=memory, disk=disk, inodes=inodes))
        written[1].clear(), written[2].clear()
        if prepared is not None:
            prepared(instance)
        code = source.encode() if isinstance(source, str) else source
        finished = instance.run(code, cap, wait, seconds)
        claim = msgspec.json.decode(finished.result) if finished.result else {}
        return Seen(
            finished=finished,
            stdout=written[1].decode("utf-8", "replace"),
            stderr=written[2].decode("utf-8", "replace"),
            asked=asked,
            **claim,
        )

    yield run
    os.close(image)
    os.close(stdlib)


@pytest.fixture(scope="session")
def wasm_guest() -> Iterator[GuestRun]:
    """Run source in a fresh guest with the standard library's image: `wasm_guest("1+1").value`."""
    yield from _runner(built("stdlib"))


@pytest.fixture(scope="session")
def wasm_numbers() -> Iterator[GuestRun]:
    """The same with numpy and pandas imported ahead."""
    yield from _runner(built("numpy-pandas"))


TINY = """(module
  (import "host" "call" (func $door (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 2)
  (table 1 1 funcref)
  (global $sp (mut i32) (i32.const 65536))
  (func (export "run"))
  (func (export "shutdown"))
  (func (export "host_alloc") (param i32) (result i32) ALLOC)
  (func (export "turn") (param i32 i32) (result i32) TURN))"""


@pytest.fixture
def wasm_tiny(tmp_path: Path) -> Callable[..., Any]:
    """Make a core around a guest of a few instructions: `wasm_tiny("(i32.const 0)")`. Another guest, same driver."""

    def make(turn: str, alloc: str = "(i32.const 1024)", kind: Any = None, **more: Any) -> Any:
        import wasmtime

        from lockgate.runtimes.wasm import driver, engine_unsafe

        text = TINY.replace("TURN", turn).replace("ALLOC", alloc)
        source = tmp_path / "tiny.wasm"
        source.write_bytes(wasmtime.wat2wasm(text))
        compiled = tmp_path / f"tiny{len(list(tmp_path.iterdir()))}.cwasm"
        compiled.write_bytes(engine_unsafe.compile_module(engine_unsafe.new_engine(), source))
        archive = tmp_path / "library.zip"
        archive.write_bytes(b"PK\5\6" + bytes(18))
        fd = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return (kind or driver.Core)(
                str(compiled),
                fd,
                driver.Limits(memory=8 * MiB, disk=MiB, inodes=16),
                output=more.pop("output", lambda _fd, _data: None),
                clock=driver.real_clock(),
                entropy=os.urandom,
                **more,
            )
        finally:
            os.close(fd)

    return make


__all__ = ["GuestRun", "Seen", "built", "image_recipe", "wasm_guest", "wasm_numbers", "wasm_tiny"]

"""The contract a guest must keep: one name more, one global more, and it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

wasmtime = pytest.importorskip("wasmtime", reason="the wasm extra is not installed")

from lockgate.runtimes.wasm import guest_abi  # noqa: E402

GOOD = {
    "door": '(import "host" "call" (func (param i32 i32 i32 i32) (result i32)))',
    "wasi": '(import "wasi_snapshot_preview1" "fd_seek" (func (param i32 i64 i32 i32) (result i32)))',
    "memory": '(memory (export "memory") 2)',
    "table": "(table 3 3 funcref)",
    "globals": "(global (mut i32) (i32.const 65536)) (global i32 (i32.const 1))",
    "exports": '(func (export "run")) (func (export "shutdown")) (func (export "host_alloc") (param i32) (result i32) '
    '(i32.const 0)) (func (export "turn") (param i32 i32) (result i32) (i32.const 0))',
}


def module(tmp_path: Path, **changes: str) -> Path:
    text = "(module " + " ".join({**GOOD, **changes}.values()) + ")"
    path = tmp_path / "guest.wasm"
    path.write_bytes(wasmtime.wat2wasm(text))
    return path


def test_a_guest_that_keeps_the_contract_is_taken(tmp_path: Path) -> None:
    assert guest_abi.check(module(tmp_path)) == guest_abi.Shape(pages=2, table=3, mutable_globals=1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"door": ""}, "does not import"),
        ({"door": '(import "host" "call" (func (param i32) (result i32)))'}, "has the type"),
        (
            {"wasi": '(import "wasi_snapshot_preview1" "fd_seek" (func (param i32 i32 i32 i32) (result i32)))'},
            "has the type",
        ),
        ({"wasi": '(import "wasi_snapshot_preview1" "path_exec" (func))'}, "does not give"),
        ({"wasi": '(import "env" "system" (func))'}, "does not give"),
        ({"wasi": '(import "env" "memory" (memory 1))', "memory": '(export "memory" (memory 0))'}, "imported memory"),
        ({"wasi": '(import "env" "g" (global i32))'}, "imported global"),
        ({"table": "(table 3 funcref)"}, "can grow"),
        ({"table": "(table 3 4 funcref)"}, "can grow"),
        ({"table": ""}, "of table"),
        ({"globals": "(global (mut i32) (i32.const 1)) (global (mut i64) (i64.const 1))"}, "globals can change"),
        ({"memory": '(memory (export "memory") 1 2 shared)'}, "shared"),
        ({"memory": '(memory (export "memory") i64 1)'}, "64-bit"),
        ({"exports": '(func (export "run"))'}, "exports differ"),
        ({"exports": GOOD["exports"] + ' (func (export "backdoor"))'}, "exports differ"),
    ],
)
def test_whatever_differs_is_refused(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    with pytest.raises(guest_abi.NotTheContract, match=says):
        guest_abi.check(module(tmp_path, **changes))


def test_a_module_cut_anywhere_is_refused_or_keeps_the_contract(tmp_path: Path) -> None:
    """What is read of a file is checked against its end: there is no other error than the one that says so."""
    path = module(tmp_path)
    whole = path.read_bytes()
    shape, kept = guest_abi.check(path), 0
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        try:
            assert guest_abi.check(path) == shape  # only code is missing, which the engine refuses
            kept += 1
        except guest_abi.NotTheContract:
            pass
    assert 0 < kept < 5


def test_every_import_of_the_contract_is_a_function_of_ours() -> None:
    from lockgate.runtimes.wasm.wasi import Wasi

    assert [name for name in guest_abi.FUNCTIONS if not callable(getattr(Wasi, name, None))] == []

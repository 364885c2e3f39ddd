"""The wasm rung: CPython as WebAssembly, with the outer wall around the engine."""

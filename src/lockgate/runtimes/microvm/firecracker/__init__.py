"""Firecracker and its jailer: the binaries, their API, the cage, and machines cloned from a snapshot."""

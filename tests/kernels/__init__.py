"""Proofs of what runs on a GPU, without one: `make test-kernels`.

Those of Triton's kernels need `TRITON_INTERPRET=1` from the process's start, and triton.
"""

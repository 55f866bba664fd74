"""Measurements of time and memory, never part of the tests: `python -m benchmarks` from the repository's root.

Imports nothing: interpreters of other environments, without this project's libraries, run the peers in this package.
"""

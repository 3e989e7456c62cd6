"""A coverage-guided fuzzer of the borders: whatever reads what anybody may have written.

``python -m tests.fuzz --seconds 600`` fuzzes each target of ``targets`` in a process of its own.
``seeds`` are what it begins with; ``found`` holds inputs that have broken something once. The same
targets are run on both by an ordinary test.
"""

"""A record shop that reminds customers to review their order: real orders, Spark, a killed worker.

Started with ``make demo`` or ``python -m example_project``; see README.md in this folder.
"""

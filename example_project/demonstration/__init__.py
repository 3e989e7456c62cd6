"""Runs the shop as a demonstration and checks it; the shop itself imports nothing from here.

Read first ``scenario.py`` (the run from beginning to end), ``observed_shop.py`` and
``observed_spark_job.py`` (how the run observes the shop), then ``outcome.py`` (what it checks).
"""

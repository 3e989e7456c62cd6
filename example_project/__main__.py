"""Run the demonstration: ``python -m example_project``."""

from example_project.demonstration.command import main

raise SystemExit(main())

"""The code blocks of README and docs: ``page`` reads them, ``run`` does what they say.

``tests/whole/integration/test_documentation.py`` describes what a reader of a page does.
"""

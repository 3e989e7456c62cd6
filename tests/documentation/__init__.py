"""The code blocks of README and docs: ``page`` reads them, ``run`` runs them.

``shop.py`` is the application that pages import; ``tests/whole/integration/test_documentation.py``
says what is run and how a page marks what is not.
"""

"""A topology written in other formats: a file for each, all of them pure.

``definitions`` has everything that is declared; ``terraform`` writes the same as a module.
"""

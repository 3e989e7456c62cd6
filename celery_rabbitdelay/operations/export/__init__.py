"""A topology written in other formats, all of them pure.

``definitions`` has everything that is declared, and a diagram; ``terraform`` writes a module.
"""

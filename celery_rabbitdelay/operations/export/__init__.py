"""A topology written in other formats: Terraform, RabbitMQ's definitions, Mermaid, DOT and SVG.

All of it is pure. One file for each format; ``entities`` has what both Terraform and definitions
need, ``graph`` what the three drawings show, and ``formats`` all formats by their names.
"""

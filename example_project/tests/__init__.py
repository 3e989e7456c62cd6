"""Tests of the record shop; none needs a server or Java."""

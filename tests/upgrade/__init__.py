"""What former versions have left on brokers, as files, and the proof that this version takes it.

``recorded/VERSION/`` holds messages and definitions as that version has made them, byte by byte.
``python -m tests.upgrade.record`` writes them, once for each version that is released; they never
change afterwards. ``test_recorded.py`` replays all of them. ``python -m tests.upgrade.beside`` runs
the version before and this one on the same levels.
"""

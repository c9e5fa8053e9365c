"""Everything that a message carries arrives, by whatever path it goes: each test runs for each declared column.

A column that is declared in ``queueapp/sql/carried.py`` is tested here without a line being added.
"""

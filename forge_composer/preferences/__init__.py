"""Preference pairs on single steps of traces: what teachers agreed on against what the student did."""

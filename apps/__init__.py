"""Commands, run as `python -m apps.NAME` in a checkout: parse, build, run. Not part of the wheel."""

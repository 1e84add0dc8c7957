"""Losses over flat token batches: GRPO and its relatives.

The import name is `forge_composer.losses`; see docs/decisions/0001-package-names.md.
"""

if __name__ == "losses":  # found in the current folder under its bare name
    from forge_composer._layout import yield_name

    yield_name(__name__, __file__)

"""Monarch shells around the domain: trainer, generators, environments, buffer, meshes.

The import name is `forge_composer.actors`; see docs/decisions/0001-package-names.md.
"""

if __name__ == "actors":  # found in the current folder under its bare name
    from forge_composer._layout import yield_name

    yield_name(__name__, __file__)

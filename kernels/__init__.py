"""Numerical kernels: each with a plain PyTorch reference.

The import name is `forge_composer.kernels`; see docs/decisions/0001-package-names.md.
"""

if __name__ == "kernels":  # found in the current folder under its bare name
    from forge_composer._layout import yield_name

    yield_name(__name__, __file__)

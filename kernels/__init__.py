"""Numerical kernels: each with a plain PyTorch reference.

The import name is `forge_composer.kernels`; see docs/decisions/0001-package-names.md.
"""

if __name__ == "kernels":  # found in the current folder under its bare name
    from forge_composer._layout import yield_name

    yield_name(__name__, __file__)
else:
    from forge_composer.kernels.dispatch import generalized_jsd
    from forge_composer.kernels.linear_jsd import LinearJSD, linear_jsd
    from forge_composer.kernels.linear_logprobs import linear_token_logprobs
    from forge_composer.kernels.token_logprobs import token_logprobs
    from forge_composer.kernels.topk_jsd import topk_jsd

    __all__ = [
        "LinearJSD",
        "generalized_jsd",
        "linear_jsd",
        "linear_token_logprobs",
        "token_logprobs",
        "topk_jsd",
    ]

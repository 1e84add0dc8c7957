"""Reinforcement-learning post-training of coding agents on Monarch, torchtitan, vLLM and OpenEnv.

The domain lives here and imports neither Monarch nor the actors; `forge_composer.kernels`, `.losses` and
`.actors` are the folders of those names at the top of the repository. Importing this package costs
nothing: it loads no submodule.
"""

__version__ = "0.1.0"
